"""Training of the tokenizer on single frames of recorded driving."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from jaxtyping import Int, UInt8
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import FlopCounterMode

from terra.dataset import read_split
from terra.device import torch_dtype
from terra.errors import ConfigError
from terra.features import FeatureNetwork, perceptual_distance
from terra.training.adversarial import (
    PatchDiscriminator,
    adaptive_weight,
    discriminator_loss,
    generator_loss,
    lecam_loss,
)
from terra.training.data import DrivingFrames, load_driving, to_unit_range
from terra.training.loop import Batch, TrainingResult, train
from terra.training.processes import convolution_search, start_processes, unwrapped
from terra.training.randomness import StepRandom, draw_indices
from terra.training.reconstruction import (
    comparison,
    evaluate_tokenizer,
    evenly_spaced,
    packaged_network,
    write_picture,
)
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from terra.training.terms import Terms
from tokenizer import (
    EncoderDecoderConfig,
    Frames,
    LFQTokenizer,
    LFQTokenizerConfig,
    QuantizerConfig,
    tokenizer_loss,
)
from tokenizer.files import write_json

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
NUM_PICTURE_FRAMES = 6
MIN_SIDE = 32  # that `FeatureNetwork` takes


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


class TokenizerObjective:
    """Random frames, each alone, never mirrored: left and right carry meaning in driving.

    With several processes the entropy of the mean distribution is that of each process's batch, not of all processes':
    a batch has thousands of vectors, each softly assigned to all ids, and exchanging distributions would cost a wait.

    Args:
        model: the tokenizer, for frames of its `image_size`.
        frames: that this process draws from, on the device where training runs.
        terms: of the loss.
        pictured: held-out frames for the previews; None if there are none.
    """

    samples = "frames"

    def __init__(
        self,
        model: LFQTokenizer,
        frames: UInt8[Tensor, "frames 3 height width"],
        terms: Terms,
        pictured: UInt8[Tensor, "frames 3 height width"] | None = None,
    ):
        if tuple(frames.shape[2:]) != tuple(model.image_size):
            raise ConfigError(
                f"image_size: expected the dataset's {tuple(frames.shape[2:])} (height, width), "
                f"got {tuple(model.image_size)}"
            )
        self.model: nn.Module = model
        self.rival: nn.Module | None = None
        if terms.adversarial.weight:
            rival = PatchDiscriminator(terms.adversarial.width)
            self.rival = rival.to(frames.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.tokens_per_sample: int | None = model.rows * model.cols
        self.flops_per_sample: float | None = flops_per_frame(model.config)
        self._frames, self._terms, self._pictured = frames, terms, pictured
        self._quantizer = model.config.quantizer_config
        # A whole stride of the network's layers but the last; small pictures are not cut below what it takes.
        self._margin = min(16, max(0, min(frames.shape[2:]) - MIN_SIDE))
        self._reconstruction: Tensor | None = None

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Frames in [-1, 1], drawn with replacement."""
        chosen = self._frames[draw_indices(random, len(self._frames), batch_size, self._frames.device)]
        corner = torch.randint(self._margin + 1, (2,), generator=random.host)  # stays on the CPU
        return {"frames": to_unit_range(chosen).to(memory_format=torch.channels_last), "corner": corner}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """`tokenizer_loss` with the annealed entropy weight, and the perceptual and adversarial terms that are on."""
        frames, terms = batch["frames"], self._terms
        reconstruction, z = self.model(frames)
        weights = replace(terms.weights, entropy=terms.weights.entropy * terms.anneal.factor(progress))
        parts = tokenizer_loss(reconstruction, z, frames, self._quantizer, weights)
        loss = parts.pop("total")
        if terms.network is not None:
            ours, theirs = (self._crop(pictures, batch["corner"]) for pictures in (reconstruction, frames))
            distance = perceptual_distance(terms.network, ours, theirs).mean()
            loss = loss + terms.perceptual * distance
            parts["perceptual"] = distance.detach()
        self._reconstruction = None
        if self.rival is not None and progress >= terms.adversarial.start:
            self._reconstruction = reconstruction.detach()
            adversarial = generator_loss(unwrapped(self.rival)(reconstruction))
            factor = adaptive_weight(loss, adversarial, reconstruction) if terms.adversarial.adaptive else 1.0
            loss = loss + terms.adversarial.weight * factor * adversarial
            parts["adversarial"] = adversarial.detach()
        return {"loss": loss, **parts}

    def _crop(self, frames: Frames, corner: Int[Tensor, " two"]) -> Frames:
        """All but `_margin` rows and columns, from `corner` on.

        The network's strided layers look harder at some rows and columns than at others, and the decoder would learn
        stripes for them; so the picture lies elsewhere at each step.
        """
        height, width = (side - self._margin for side in frames.shape[2:])
        top, left = corner.tolist()
        return frames[..., top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)

    def rival_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The discriminator's loss on the frames and what `loss` made of them; a constant before the term begins."""
        frames, terms = batch["frames"], self._terms.adversarial
        if self.rival is None or self._reconstruction is None:
            return {"rival_loss": torch.zeros((), device=frames.device, requires_grad=True)}
        # One forward pass for both: the wrapper that averages gradients over processes expects one.
        scores = self.rival(torch.cat([frames, self._reconstruction.to(frames.dtype)]))
        recorded, reconstructed = scores.chunk(2)
        loss = discriminator_loss(recorded, reconstructed)
        parts = {"recorded_score": recorded.detach().mean(), "reconstructed_score": reconstructed.detach().mean()}
        if terms.lecam:
            discriminator = cast(PatchDiscriminator, unwrapped(self.rival))
            loss = loss + terms.lecam * lecam_loss(discriminator, recorded, reconstructed, terms.lecam_decay)
        return {"rival_loss": loss, **parts}

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Held-out frames above their reconstruction by the averaged weights."""
        if self._pictured is None:
            return {}
        with ema.averaged() as model:
            return {"reconstruction": comparison(cast(LFQTokenizer, model), self._pictured)}


def flops_per_frame(config: LFQTokenizerConfig) -> float:
    """Floating-point operations of one frame forward (counted) and backward (twice that), convolutions only."""
    with torch.device("meta"):
        model, frame = LFQTokenizer(config), torch.empty(1, 3, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(frame)
    return 3.0 * counter.get_total_flops()


def train_tokenizer(
    driving: DrivingFrames,
    held_out: DrivingFrames | None,
    config: LoopConfig,
    model: LFQTokenizerConfig,
    terms: Terms,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype = torch.float16,
    evaluation_frames: int = 512,
) -> TrainingResult:
    """Train, then write `tokenizer/` (averaged weights in `dtype`), `metrics.json` and `reconstruction.png`.

    What is measured and pictured are the stored weights, read back. A run that SIGTERM stops writes only its state.
    `held_out` is needed in the first process only; without it nothing is measured.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`; ConfigError also if the frames'
            size is not the model's.
    """
    device = driving.frames.device
    pictured = None if held_out is None else evenly_spaced(held_out.frames, NUM_PICTURE_FRAMES)
    if terms.network is not None:
        terms.network.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.compile_model:
            terms.network.compile()
    if terms.adversarial.weight and terms.adversarial.adaptive:
        # `adaptive_weight` goes back through the compiled networks twice, so that their buffers must outlive the first.
        functorch_config.donated_buffer = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = LFQTokenizer(model)
        tokenizer = tokenizer.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        objective = TokenizerObjective(tokenizer, driving.frames, terms, pictured)
    with convolution_search(True):
        result = train(objective, config, accelerator)
    if result.stopped_by == "sigterm" or not accelerator.is_main_process:
        return result
    result.ema.copy_to_model()
    tokenizer.to(dtype).save_pretrained(config.output / FOLDER)
    if held_out is not None:
        network = terms.network or packaged_network()
        _evaluate(evenly_spaced(held_out.frames, evaluation_frames), network, config.output, result)
    return result


def _evaluate(
    frames: UInt8[Tensor, "frames 3 height width"],
    network: FeatureNetwork | None,
    output: Path,
    result: TrainingResult,
) -> None:
    """Measure and picture the stored weights. Not compiled: it would take longer than the few batches there are."""
    device = frames.device
    stored = LFQTokenizer.from_pretrained(output / FOLDER).to(device=device)
    with torch.compiler.set_stance("force_eager"):
        metrics = evaluate_tokenizer(stored, frames, None if network is None else network.to(device))
    write_json(output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    logger.info("held out: %s", " ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    write_picture(comparison(stored, evenly_spaced(frames, NUM_PICTURE_FRAMES)), output / "reconstruction.png")


def run(values: Mapping[str, Any]) -> None:
    """`terra-train-tokenizer` with the settings of conf/train_tokenizer.yaml, in each process of a run.

    Raises:
        TerraError: see `Terms.from_values`, `load_driving` and `train_tokenizer`.
    """
    loop, terms, dtype = LoopConfig.from_values(values), Terms.from_values(values), torch_dtype(values["dtype"])
    accelerator = start_processes(values["device"])
    folder, workers = Path(values["data"]), values["workers"]
    read_split(folder, values["held_out_split"])  # raises now in every process, not after decoding in the first
    driving = load_driving(
        folder,
        values["train_split"],
        device=accelerator.device,
        workers=workers,
        max_frames=values["max_frames"],
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    held_out = None
    if accelerator.is_main_process:
        held_out = load_driving(
            folder,
            values["held_out_split"],
            device=accelerator.device,
            workers=workers,
            max_frames=max(values["evaluation_frames"], NUM_PICTURE_FRAMES),
        )
        write_json(loop.output / "settings.json", values)
    height, width = driving.frames.shape[2:]
    model = small_config(image_size=(height, width), **values["tokenizer"])
    train_tokenizer(
        driving, held_out, loop, model, terms, accelerator, dtype=dtype, evaluation_frames=values["evaluation_frames"]
    )
