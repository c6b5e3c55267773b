"""Training of the tokenizer on single frames of recordings: of a new one, of one that exists, or of a decoder alone.

init_from=null                         random weights -> new tokens
init_from=demo                         a tokenizer's weights, all trained further -> new tokens
init_from=demo keep_tokens.weight=10   the same with a penalty on tokens that change -> nearly the same tokens
decoder_of=demo                        a tokenizer's decoder alone, trained further -> the same tokens
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch._functorch import config as functorch_config

from terra.dataset import read_split
from terra.device import torch_dtype
from terra.errors import ConfigError
from terra.metrics.networks import FeatureNetwork
from terra.reconstruction import write_expected
from terra.training.autoencoding import DecoderObjective, EightBit, FurtherTraining, OldDomain, TokenizerObjective
from terra.training.data import DrivingFrames, load_driving
from terra.training.loop import Objective, TrainingResult, train
from terra.training.processes import convolution_search, start_processes
from terra.training.reconstruction import (
    comparison,
    evaluate_tokenizer,
    evenly_spaced,
    packaged_network,
    tokens_kept,
    write_picture,
)
from terra.training.settings import LoopConfig
from terra.training.start import find_tokenizer, record_start
from terra.training.terms import Terms
from terra.training.tokenizer_settings import TrainTokenizerSettings
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig
from tokenizer.checkpoint import load_tensors
from tokenizer.files import write_json
from tokenizer.lineage import tokens_sha256
from tokenizer.model import load_config

logger = logging.getLogger(__name__)

FOLDER = "tokenizer"
NUM_PICTURE_FRAMES, NUM_PREVIEW_FRAMES = 6, 64


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


def train_further(
    driving: DrivingFrames,
    held_out: DrivingFrames | None,
    config: LoopConfig,
    source: Path,
    terms: Terms,
    accelerator: Accelerator,
    *,
    old: OldDomain | None = None,
    dtype: torch.dtype = torch.float16,
    evaluation_frames: int = 512,
) -> TrainingResult:
    """Train the tokenizer in the folder `source` further, encoder and decoder; all else is as in `train_tokenizer`.

    The result is another tokenizer, so that no world model of `source` takes it. If `terms.keep_tokens` has a weight,
    `tokens_like` in its config.json names the tokens of `source`.

    `metrics.json` also has the shares of tokens and bits that are as before ("tokens_kept", "bits_kept"), the figures
    of `source` ("start") and, with `old`, those on the old domain ("old"); `reconstruction.png` has the frames, their
    reconstruction by `source`, and that by the result.

    Raises:
        ConfigError, CheckpointError, OutputError: as `train_tokenizer`; CheckpointError also if `source` holds no
            tokenizer; ConfigError also if the run is resumed from another `source`.
    """
    record_start(config.output / "state", source, accelerator)
    tokenizer, before = LFQTokenizer.from_pretrained(source), LFQTokenizer.from_pretrained(source)
    kept = tokens_sha256(source) if terms.keep_tokens.weight else None
    tokenizer.config = tokenizer.config.replace(same_tokens_as=None, tokens_like=kept)
    measured = {}
    for prefix, frames in (("", held_out and held_out.frames), ("old_", old and old.held_out)):
        if frames is not None:
            measured[prefix] = evenly_spaced(frames, min(evaluation_frames, NUM_PREVIEW_FRAMES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for each in (tokenizer, before):
            each.to(device=driving.frames.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        objective = FurtherTraining(
            tokenizer, before, driving.frames, terms, _pictured(held_out), measured, old and old.frames
        )
    if config.compile_model:
        before.encoder.compile()
    result = _train(objective, terms, config, accelerator)
    if _has_results(result, accelerator):
        tokenizer.to(dtype).save_pretrained(config.output / FOLDER)
        _evaluate(held_out, terms, config.output, result, evaluation_frames, before, old and old.held_out)
    return result


def _pictured(held_out: DrivingFrames | None) -> EightBit | None:
    return None if held_out is None else evenly_spaced(held_out.frames, NUM_PICTURE_FRAMES)


def _train(objective: Objective, terms: Terms, config: LoopConfig, accelerator: Accelerator) -> TrainingResult:
    """Train; unless SIGTERM stopped the run, leave the model with its averaged weights."""
    if terms.network is not None:
        terms.network.to(accelerator.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.compile_model:
            # Pictures have two sizes with perceptual.scales=2, and a graph for each: compiling one for any size takes
            # more than 20 minutes (torch 2.13, a CPU).
            terms.network.compile(dynamic=False)
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
    held_out: DrivingFrames | None,
    terms: Terms,
    output: Path,
    result: TrainingResult,
    num_frames: int,
    before: LFQTokenizer | None = None,
    old: EightBit | None = None,
) -> None:
    """Measure and picture the stored weights, without compiling them: there are too few batches to gain from it.

    Args:
        held_out: frames to measure on; None measures nothing.
        terms: their network measures the perceptual distance.
        output: the run's folder.
        result: how the training ended.
        num_frames: at most so many frames of each domain are measured.
        before: the tokenizer that the training started from.
        old: held-out frames of the domain that `before` was trained on.
    """
    if held_out is None:
        return
    frames = evenly_spaced(held_out.frames, num_frames)
    old = None if old is None else evenly_spaced(old, num_frames)
    logger.info("measuring the stored weights on %d held-out frames", len(frames))
    network = terms.network or packaged_network()
    network = None if network is None else network.to(frames.device)
    stored = LFQTokenizer.from_pretrained(output / FOLDER).to(frames.device)
    tokenizers = [stored] if before is None else [before, stored]
    with torch.compiler.set_stance("force_eager"):
        metrics = _measured(stored, frames, network, before, old)
        if before is not None:
            metrics["start"] = _measured(before, frames, network, None, old)
        picture = comparison(evenly_spaced(frames, NUM_PICTURE_FRAMES), *tokenizers)
    write_expected(output / FOLDER, metrics["psnr"])
    write_json(output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    for name in ("held out", "old", "start"):
        figures = metrics if name == "held out" else metrics.get(name, {})
        numbers = [f"{key} {value:.4g}" for key, value in figures.items() if not isinstance(value, dict)]
        if numbers:
            logger.info("%s: %s", name, " ".join(numbers))
    write_picture(picture, output / "reconstruction.png")


def _measured(
    tokenizer: LFQTokenizer,
    frames: EightBit,
    network: FeatureNetwork | None,
    before: LFQTokenizer | None,
    old: EightBit | None,
) -> dict[str, Any]:
    """What `evaluate_tokenizer` and, with `before`, `tokens_kept` say of frames, and under "old" of the old domain."""
    metrics: dict[str, Any] = evaluate_tokenizer(tokenizer, frames, network)
    metrics |= {} if before is None else tokens_kept(tokenizer, before, frames)
    return metrics | ({} if old is None else {"old": _measured(tokenizer, old, network, before, None)})


def run(settings: TrainTokenizerSettings) -> None:
    """Train a tokenizer as conf/train_tokenizer.yaml says, in each process of a run.

    Raises:
        TerraError: see `Terms.load`, `load_driving`, `train_tokenizer`, `train_further` and `train_decoder`.
    """
    terms = Terms.load(settings)
    accelerator = start_processes(settings.device)
    source = None
    if settings.decoder_of is not None:
        source = find_tokenizer(settings.decoder_of)
    elif settings.init_from is not None:
        source = find_tokenizer(settings.init_from)
    _check_data(settings, source)  # raises now in every process, not after decoding in the first
    driving, held_out = _load_splits(settings, settings.data, accelerator)
    old = None
    if settings.old_data is not None:
        frames, old_held_out = _load_splits(settings, settings.old_data, accelerator)
        old = OldDomain(frames.frames, None if old_held_out is None else old_held_out.frames)
    if accelerator.is_main_process:
        write_json(settings.output / "settings.json", settings.model_dump(mode="json"))
    stored = {"dtype": torch_dtype(settings.dtype), "evaluation_frames": settings.evaluation_frames}
    if source is not None and settings.init_from is not None:
        train_further(driving, held_out, settings, source, terms, accelerator, old=old, **stored)
    elif source is not None:
        train_decoder(driving, held_out, settings, source, terms, accelerator, **stored)
    else:
        height, width = driving.frames.shape[2:]
        model = small_config(image_size=(height, width), **vars(settings.tokenizer))
        train_tokenizer(driving, held_out, settings, model, terms, accelerator, **stored)


def _check_data(settings: TrainTokenizerSettings, source: Path | None) -> None:
    """Refuse recordings without both splits, and frames that are not of the size that the tokenizer `source` takes."""
    expected = None if source is None else tuple(load_config(source).image_size)
    folders = {"data": settings.data} | ({} if settings.old_data is None else {"old_data": settings.old_data})
    for name, folder in folders.items():
        for split in (settings.train_split, settings.held_out_split):
            size = tuple(read_split(folder, split).episodes[0].image_size)
            if expected is not None and size != expected:
                raise ConfigError(f"{name}: expected frames of {expected} (height, width) as {source}, got {size}")


def _load_splits(
    settings: TrainTokenizerSettings, folder: Path, accelerator: Accelerator
) -> tuple[DrivingFrames, DrivingFrames | None]:
    """This process's training frames and, in the first process, the held-out frames."""
    driving = load_driving(
        folder,
        settings.train_split,
        device=accelerator.device,
        workers=settings.workers,
        max_frames=settings.max_frames,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    if not accelerator.is_main_process:
        return driving, None
    held_out = load_driving(
        folder,
        settings.held_out_split,
        device=accelerator.device,
        workers=settings.workers,
        max_frames=max(settings.evaluation_frames, NUM_PICTURE_FRAMES),
    )
    return driving, held_out
