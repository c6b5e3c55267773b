"""Training of the tokenizer on single frames of recorded driving, and what its reconstructions are worth."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from terra.errors import ConfigError
from terra.training.data import DrivingFrames, to_unit_range
from terra.training.loop import Batch, TrainingResult, train
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from tokenizer import (
    EncoderDecoderConfig,
    LFQTokenizer,
    LFQTokenizerConfig,
    LossWeights,
    QuantizerConfig,
    tokenizer_loss,
)
from tokenizer.checkpoint import write_json

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
NUM_PICTURE_FRAMES = 6
EVALUATION_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class EntropyAnneal:
    """The entropy weight falls linearly from `start` times its final value to it over the first `until` of a run.

    A high weight early spreads the vectors over all ids before the decoder has learnt to live with few of them
    (Open-MAGVIT2 anneals it likewise).
    """

    start: float = 5.0
    until: float = 0.2

    def __post_init__(self) -> None:
        if not self.start >= 0 or not 0 <= self.until <= 1:
            raise ConfigError(
                f"entropy_anneal: expected start of 0 or more and until in [0, 1], got {self.start} and {self.until}"
            )

    def factor(self, progress: float) -> float:
        """What to multiply the final weight by when `progress` in [0, 1] of the run is done."""
        if progress >= self.until:
            return 1.0
        return self.start + (1.0 - self.start) * progress / self.until


def small_config(
    *, image_size: tuple[int, int], ch: int, ch_mult: Sequence[int], num_res_blocks: int, dim: int
) -> LFQTokenizerConfig:
    """The tokenizer's configuration from the few numbers that one chooses. Raises CheckpointError if they don't fit."""
    return LFQTokenizerConfig(
        encoder_decoder_config=EncoderDecoderConfig(
            ch=ch, ch_mult=tuple(ch_mult), num_res_blocks=num_res_blocks, z_channels=dim
        ),
        quantizer_config=QuantizerConfig(dim=dim, codebook_size=2**dim),
        image_size=image_size,
    )


def loss_weights(values: Mapping[str, float]) -> LossWeights:
    """`LossWeights`, with ConfigError for a value that is not allowed."""
    try:
        return LossWeights(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {error}") from error


def stored_dtype(name: str) -> torch.dtype:
    """The element type that `name` means: float32, float16 or bfloat16. Raises ConfigError on another."""
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"dtype: expected one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


class TokenizerObjective:
    """Random frames, each alone, never mirrored: left and right carry meaning in driving."""

    samples = "frames"
    flops_per_sample = None

    def __init__(
        self,
        model: LFQTokenizer,
        frames: UInt8[Tensor, "frames 3 height width"],
        weights: LossWeights,
        anneal: EntropyAnneal,
    ):
        if tuple(frames.shape[2:]) != tuple(model.image_size):
            raise ConfigError(
                f"image_size: expected the dataset's {tuple(frames.shape[2:])} (height, width), "
                f"got {tuple(model.image_size)}"
            )
        self.model = model
        self._frames, self._weights, self._anneal = frames, weights, anneal

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Frames in [-1, 1], drawn with replacement."""
        chosen = self._frames[draw_indices(random, len(self._frames), batch_size, self._frames.device)]
        return {"frames": to_unit_range(chosen).to(memory_format=torch.channels_last)}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """`tokenizer_loss` with the annealed entropy weight."""
        entropy = self._weights.entropy * self._anneal.factor(progress)
        parts = tokenizer_loss(self.model, batch["frames"], replace(self._weights, entropy=entropy))
        return {"loss": parts.pop("total"), **parts}


def train_tokenizer(
    driving: DrivingFrames,
    held_out: DrivingFrames,
    config: LoopConfig,
    model: LFQTokenizerConfig,
    *,
    weights: LossWeights,
    anneal: EntropyAnneal,
    dtype: torch.dtype = torch.float16,
    evaluation_frames: int = 512,
) -> TrainingResult:
    """Train, then write `tokenizer/` (averaged weights in `dtype`), `metrics.json` and `reconstruction.png`.

    What is measured and pictured are the stored weights, read back. A run that SIGTERM stops writes only its state.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`; ConfigError also if the frames'
            size is not the model's.
    """
    device = driving.frames.device
    torch.backends.cudnn.benchmark = device.type == "cuda"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = LFQTokenizer(model)
    tokenizer = tokenizer.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    result = train(TokenizerObjective(tokenizer, driving.frames, weights, anneal), config)
    if result.stopped_by == "sigterm":
        return result
    result.ema.copy_to_model()
    tokenizer.to(dtype).save_pretrained(config.output / FOLDER)
    stored = LFQTokenizer.from_pretrained(config.output / FOLDER).to(device=device)
    metrics = evaluate_tokenizer(stored, evenly_spaced(held_out.frames, evaluation_frames))
    write_json(config.output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    _write_comparison(stored, evenly_spaced(held_out.frames, NUM_PICTURE_FRAMES), config.output / "reconstruction.png")
    logger.info("held out: %s", " ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    return result


def evenly_spaced(frames: UInt8[Tensor, "frames 3 height width"], count: int) -> UInt8[Tensor, "some 3 height width"]:
    """At most `count` frames, from the first to the last."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(np.int64))
    return frames[torch.from_numpy(chosen).to(frames.device)]


@torch.inference_mode()
def evaluate_tokenizer(
    tokenizer: LFQTokenizer, frames: UInt8[Tensor, "frames 3 height width"]
) -> dict[str, float | int]:
    """Encode and decode frames; means over them.

    Returns `psnr` (dB, of 8-bit pictures), `ssim` (only where torchmetrics is installed; Wang et al. 2004, its
    defaults), and of the ids used: `codebook_used` (distinct ids / codebook size), `codebook_perplexity`
    (exp of the ids' entropy) and `evaluated_frames`.
    """
    psnr: list[Tensor] = []
    ssim: list[Tensor] = []
    counts = torch.zeros(tokenizer.codebook_size, dtype=torch.long, device=frames.device)
    has_torchmetrics = importlib.util.find_spec("torchmetrics") is not None
    for truth in frames.split(EVALUATION_BATCH):
        tokens = tokenizer.encode(to_unit_range(truth))
        counts += torch.bincount(tokens.flatten(), minlength=tokenizer.codebook_size)
        decoded = _to_8_bit(tokenizer.decode(tokens))
        error = (decoded.float() - truth.float()).square().mean(dim=(1, 2, 3))
        # Half a grey level of one pixel in a million bounds the PSNR of a perfect picture to 114 dB.
        psnr.append(10 * torch.log10(255.0**2 / error.clamp_min(2.5e-7)))
        if has_torchmetrics:
            ssim.append(_ssim(decoded, truth))
    used = counts[counts > 0].double() / counts.sum()
    metrics: dict[str, float | int] = {"evaluated_frames": len(frames), "psnr": torch.cat(psnr).mean().item()}
    if ssim:
        metrics["ssim"] = torch.cat(ssim).mean().item()
    else:
        logger.info("ssim is left out: torchmetrics is not installed")
    metrics["codebook_used"] = len(used) / tokenizer.codebook_size
    metrics["codebook_perplexity"] = (-(used * used.log()).sum()).exp().item()
    return metrics


def _ssim(decoded: UInt8[Tensor, "frames 3 height width"], truth: UInt8[Tensor, "frames 3 height width"]) -> Tensor:
    from torchmetrics.functional.image import (  # pyright: ignore[reportMissingImports]
        structural_similarity_index_measure,
    )

    return structural_similarity_index_measure(decoded / 255.0, truth / 255.0, data_range=1.0, reduction="none")


def _to_8_bit(frames: Tensor) -> UInt8[Tensor, "frames 3 height width"]:
    return ((frames.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


@torch.inference_mode()
def _write_comparison(tokenizer: LFQTokenizer, frames: UInt8[Tensor, "frames 3 height width"], path: Path) -> None:
    """Held-out frames in the top row, their reconstructions below."""
    decoded = _to_8_bit(tokenizer.decode(tokenizer.encode(to_unit_range(frames))))
    picture = rearrange(torch.stack([frames, decoded]), "row f channel h w -> (row h) (f w) channel")
    temporary = path.with_name(f".{path.name}.tmp")
    Image.fromarray(picture.cpu().numpy()).save(temporary, format="PNG")
    temporary.replace(path)
