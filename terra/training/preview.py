"""Previews of a world model under training: its prediction of held-out driving, and short rollouts beside the truth."""

from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from decoder.video import to_8_bit
from terra.dataset.tokens import TokenizedDriving
from terra.errors import ConfigError
from terra.sampling import SamplingParams
from terra.training.prediction import evaluate_memory, evaluate_world_model
from terra.training.start import WorldModel
from terra.training.state import Ema
from terra.training.windows import MemoryWindows
from terra.world_model.window import FramePrefix, WindowReader, sample_frame
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256, resolve_checkpoint
from tokenizer.lineage import makes_tokens_of

NUM_CONTEXT = 3
NUM_ROLLOUTS = 2


@dataclass(frozen=True)
class HeldOutPreview:
    """Held-out windows, and what is needed to predict, roll out and decode them.

    Attributes:
        held_out: tokens on the CPU.
        window: frames of a predicted window.
        num_frames: frames that a rollout generates after its context; with 0, or without a tokenizer, there are no
            rollouts.
        tokenizer: decodes the rollouts' tokens; lies on the model's device.
        old: held-out windows of the domain that the training started from; None: there is none.
        num_windows: held-out windows that are predicted.
        memory: held-out windows with memory frames; None: the model has none.
    """

    held_out: TokenizedDriving
    window: int
    num_frames: int
    tokenizer: LFQTokenizer | None
    old: TokenizedDriving | None = None
    num_windows: int = 16
    memory: MemoryWindows | None = None

    def __post_init__(self) -> None:
        if self.num_frames < 0 or (self.num_frames and NUM_CONTEXT + self.num_frames > self.window):
            raise ConfigError(
                f"preview_frames: expected 0 to {max(self.window - NUM_CONTEXT, 0)} (a window of {self.window} holds "
                f"{NUM_CONTEXT} context frames too), got {self.num_frames}"
            )

    def show(self, ema: Ema) -> dict[str, Tensor]:
        """Cross-entropy and accuracy of the averaged weights, and a video with the truth left of each rollout."""
        # cuDNN's attention, though the fastest in training, takes tens of milliseconds for each new length.
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with ema.averaged() as model, sdpa_kernel(backends), parametrize.cached():
            assert isinstance(model, WorldModel)
            shown: dict[str, Tensor] = {}
            for prefix, driving in (("", self.held_out), ("old_", self.old)):
                if driving is not None:
                    metrics = evaluate_world_model(model, driving, self.window, self.num_windows)
                    names = ("cross_entropy", "accuracy")
                    shown |= {f"{prefix}held_out_{name}": torch.tensor(metrics[name]) for name in names}
            if self.memory is not None:
                metrics = evaluate_memory(model, self.memory, self.num_windows)
                shown["held_out_memory_cross_entropy"] = torch.tensor(metrics["with"]["cross_entropy"])
                shown["held_out_no_memory_cross_entropy"] = torch.tensor(metrics["without"]["cross_entropy"])
            if self.num_frames and self.tokenizer is not None:
                shown["rollout"] = self._video(model, self.tokenizer)
        return shown

    def _video(self, model: WorldModel, tokenizer: LFQTokenizer) -> UInt8[Tensor, "frames 3 height width"]:
        starts = self.held_out.window_starts(self.window)
        chosen = torch.linspace(0, len(starts) - 1, NUM_ROLLOUTS).round().long()
        tokens, actions = (tensor.to(model.device) for tensor in self.held_out.windows(starts[chosen], self.window))
        generated = roll_out(model, tokens[:, :NUM_CONTEXT], actions[:, : NUM_CONTEXT + self.num_frames - 1])
        both = torch.stack([tokens[:, : generated.shape[1]], generated])
        rows, columns = both.shape[-2:]
        pictures = to_8_bit(tokenizer.decode(both.reshape(-1, rows, columns)))
        return rearrange(
            pictures, "(side rollout f) c h w -> f c (rollout h) (side w)", side=2, f=generated.shape[1]
        ).cpu()


def roll_out(
    model: WorldModel,
    context: Int[Tensor, "batch context rows cols"],
    actions: Float[Tensor, "batch steps slots action_dim"],
) -> Int[Tensor, "batch frames rows cols"]:
    """Continue context frames, within one window, to one frame more than actions: action t leads to frame t + 1.

    Rollout i is sampled with seed i, as an engine would sample it.
    """
    batch, num_context, rows, columns = context.shape
    reader, seeds = WindowReader(model), torch.arange(batch, device=context.device)
    frames = list(context.unbind(1))
    for last in range(num_context - 1, actions.shape[1]):
        if reader.length:
            prefix = FramePrefix.after_frame(frames[-1][:, -1, -1], actions[:, last], last, reader.layout)
        else:
            prefix = FramePrefix.after_context(context, actions[:, :num_context])
        tokens = sample_frame(reader, prefix, SamplingParams(), seeds)
        frames.append(rearrange(tokens, "batch (rows cols) -> batch rows cols", rows=rows, cols=columns))
    return torch.stack(frames, dim=1)


def load_preview_tokenizer(checkpoint: Path, tokenized: TokenizedDriving, device: torch.device) -> LFQTokenizer:
    """Load, for decoding, the tokenizer that made the tokens or one with the same encoder.

    Raises:
        CheckpointError: no such checkpoint.
        ConfigError: the tokens are another tokenizer's.
    """
    folder = resolve_checkpoint(checkpoint)
    if not makes_tokens_of(folder, tokenized.tokenizer_sha256):
        raise ConfigError(
            f"tokenizer: expected {tokenized.tokenizer_sha256[:12]}, which made the tokens, "
            f"got {checkpoint_sha256(folder)[:12]} of {folder}"
        )
    return LFQTokenizer.from_pretrained(folder).to(device)
