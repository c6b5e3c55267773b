"""Training of the tokenizer, or of its decoder alone, on single frames of recorded driving."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from torch._functorch import config as functorch_config

from terra.dataset import read_split
from terra.device import torch_dtype
from terra.reconstruction import write_expected
from terra.training.autoencoding import DecoderObjective, EightBit, TokenizerObjective
from terra.training.data import DrivingFrames, load_driving
from terra.training.loop import Objective, TrainingResult, train
from terra.training.processes import convolution_search, start_processes
from terra.training.reconstruction import (
    comparison,
    evaluate_tokenizer,
    evenly_spaced,
    packaged_network,
    write_picture,
)
from terra.training.settings import LoopConfig
from terra.training.terms import Terms, TermSettings
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig
from tokenizer.checkpoint import load_tensors, resolve_checkpoint
from tokenizer.files import write_json
from tokenizer.lineage import tokens_sha256
from tokenizer.model import load_config
from tokenizer.settings import Count, FilePath, Natural, Settings, Text

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
NUM_PICTURE_FRAMES = 6


class TokenizerSize(Settings):
    """The free choices of a tokenizer's architecture: `dim` bits a token; the others as in `EncoderDecoderConfig`."""

    ch: Count
    ch_mult: Annotated[tuple[Count, ...], Field(strict=False)]
    num_res_blocks: Count
    dim: Count


class TrainTokenizerSettings(TermSettings, LoopConfig):
    """The whole of conf/train_tokenizer.yaml.

    Attributes:
        data: folder of recorded driving.
        train_split, held_out_split: names of the two splits.
        max_frames: of the training split, kept by all processes together; None keeps all.
        device: where the tokenizer is trained; None takes a GPU if there is one.
        workers: videos decoded at once by each process.
        decoder_of: folder of a tokenizer whose decoder alone is trained further; None trains a new tokenizer.
        tokenizer: the architecture.
        dtype: of the stored weights.
        evaluation_frames: held-out frames that the stored weights are measured on.
    """

    data: FilePath
    train_split: Text
    held_out_split: Text
    max_frames: Count | None
    device: str | None
    workers: Natural
    decoder_of: FilePath | None
    tokenizer: TokenizerSize
    dtype: Literal["float32", "float16", "bfloat16"]
    evaluation_frames: Count


def small_config(
    *, image_size: tuple[int, int], ch: int, ch_mult: Sequence[int], num_res_blocks: int, dim: int
) -> LFQTokenizerConfig:
    """Build a tokenizer's configuration from its free numbers; raise CheckpointError if they don't fit one another."""
    return LFQTokenizerConfig(
        encoder_decoder_config=EncoderDecoderConfig(
            ch=ch, ch_mult=tuple(ch_mult), num_res_blocks=num_res_blocks, z_channels=dim
        ),
        quantizer_config=QuantizerConfig(dim=dim, codebook_size=2**dim),
        image_size=image_size,
    )


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

    With held-out frames `tokenizer/` also tells their PSNR, see `terra.reconstruction`.

    Metrics and picture come from the stored weights, read back from disk. A run that SIGTERM stops writes only its
    state. Only the first process uses `held_out`; if it is None, nothing is measured.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`; ConfigError also if the frames'
            size is not the model's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = LFQTokenizer(model)
        tokenizer.to(device=driving.frames.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        objective = TokenizerObjective(tokenizer, driving.frames, terms, _pictured(held_out))
    result = _train(objective, terms, config, accelerator)
    if _has_results(result, accelerator):
        tokenizer.to(dtype).save_pretrained(config.output / FOLDER)
        _evaluate(held_out, terms, config.output, result, evaluation_frames)
    return result


def train_decoder(
    driving: DrivingFrames,
    held_out: DrivingFrames | None,
    config: LoopConfig,
    source: Path,
    terms: Terms,
    accelerator: Accelerator,
    *,
    dtype: torch.dtype = torch.float16,
    evaluation_frames: int = 512,
) -> TrainingResult:
    """Train the decoder of the tokenizer in the folder `source` further; all else is as in `train_tokenizer`.

    The encoder is stored unchanged, bit for bit and in its own precision, so that the tokens stay the same; the new
    checkpoint's `same_tokens_as` records that. `dtype` is the data type of the stored decoder.

    Raises:
        ConfigError, CheckpointError, OutputError: as `train_tokenizer`; CheckpointError also if `source` holds no
            tokenizer.
    """
    stored = load_tensors(source)
    tokenizer = LFQTokenizer.from_pretrained(source)
    tokenizer.config = tokenizer.config.replace(same_tokens_as=tokens_sha256(source))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer.to(device=driving.frames.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        objective = DecoderObjective(tokenizer, driving.frames, terms, _pictured(held_out))
    if config.compile_model:
        tokenizer.encoder.compile()
    result = _train(objective, terms, config, accelerator)
    if _has_results(result, accelerator):
        tokenizer.decoder.to(dtype)
        encoder = {name: stored[f"encoder.{name}"] for name in tokenizer.encoder.state_dict()}
        tokenizer.encoder.load_state_dict(encoder, assign=True)
        tokenizer.save_pretrained(config.output / FOLDER)
        _evaluate(held_out, terms, config.output, result, evaluation_frames)
    return result


def _pictured(held_out: DrivingFrames | None) -> EightBit | None:
    return None if held_out is None else evenly_spaced(held_out.frames, NUM_PICTURE_FRAMES)


def _train(objective: Objective, terms: Terms, config: LoopConfig, accelerator: Accelerator) -> TrainingResult:
    """Train; unless SIGTERM stopped the run, leave the model with its averaged weights."""
    if terms.network is not None:
        terms.network.to(accelerator.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.compile_model:
            terms.network.compile()
    if terms.adversarial.weight and terms.adversarial.adaptive:
        # `adaptive_weight` runs the compiled backward pass twice, so its buffers must not be donated to the first run.
        functorch_config.donated_buffer = False
    with convolution_search(True):
        result = train(objective, config, accelerator)
    if _has_results(result, accelerator):
        result.ema.copy_to_model()
    return result


def _has_results(result: TrainingResult, accelerator: Accelerator) -> bool:
    """Whether this process writes and measures the result: it must be the first, and the run not stopped by SIGTERM."""
    return result.stopped_by != "sigterm" and accelerator.is_main_process


def _evaluate(
    held_out: DrivingFrames | None, terms: Terms, output: Path, result: TrainingResult, num_frames: int
) -> None:
    """Measure and picture the stored weights, without compiling them: there are too few batches to gain from it."""
    if held_out is None:
        return
    frames = evenly_spaced(held_out.frames, num_frames)
    network = terms.network or packaged_network()
    stored = LFQTokenizer.from_pretrained(output / FOLDER).to(frames.device)
    with torch.compiler.set_stance("force_eager"):
        metrics = evaluate_tokenizer(stored, frames, None if network is None else network.to(frames.device))
    write_expected(output / FOLDER, metrics["psnr"])
    write_json(output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    logger.info("held out: %s", " ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    write_picture(comparison(stored, evenly_spaced(frames, NUM_PICTURE_FRAMES)), output / "reconstruction.png")


def run(settings: TrainTokenizerSettings) -> None:
    """Train a tokenizer as conf/train_tokenizer.yaml says, in each process of a run.

    Raises:
        TerraError: see `Terms.load`, `load_driving`, `train_tokenizer` and `train_decoder`.
    """
    terms = Terms.load(settings)
    accelerator = start_processes(settings.device)
    folder, workers = settings.data, settings.workers
    source = None
    if settings.decoder_of is not None:
        source = resolve_checkpoint(settings.decoder_of)
        load_config(source)  # raises now, like the next line
    read_split(folder, settings.held_out_split)  # raises now in every process, not after decoding in the first
    driving = load_driving(
        folder,
        settings.train_split,
        device=accelerator.device,
        workers=workers,
        max_frames=settings.max_frames,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    held_out = None
    if accelerator.is_main_process:
        held_out = load_driving(
            folder,
            settings.held_out_split,
            device=accelerator.device,
            workers=workers,
            max_frames=max(settings.evaluation_frames, NUM_PICTURE_FRAMES),
        )
        write_json(settings.output / "settings.json", settings.model_dump(mode="json"))
    stored = {"dtype": torch_dtype(settings.dtype), "evaluation_frames": settings.evaluation_frames}
    if source is not None:
        train_decoder(driving, held_out, settings, source, terms, accelerator, **stored)
    else:
        height, width = driving.frames.shape[2:]
        model = small_config(image_size=(height, width), **vars(settings.tokenizer))
        train_tokenizer(driving, held_out, settings, model, terms, accelerator, **stored)
