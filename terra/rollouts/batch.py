"""What `terra-rollout` does: check all, load the weights once, make what the manifest asks for, write the index."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.config import (
    build_decoder,
    build_engine,
    build_sampling,
    check_extra,
    check_pairing,
    checkpoint_folder,
)
from terra.device import torch_device, torch_dtype
from terra.output import check_output
from terra.pipeline import Pipeline
from terra.progress import ProgressLine
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.manifest import count_rollouts, read_lines, rollout_names
from terra.rollouts.runner import BatchRunner
from terra.rollouts.settings import RolloutSettings
from terra.rollouts.source import ClaimedJobs, Tally
from terra.windows import check_overlap
from terra.world_model import load_config
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256

logger = logging.getLogger(__name__)

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 128
# Of an engine: what decides how fast it is, and not which tokens it gives.
_SPEED = ("max_sessions", "cpu_kv_cache_gib", "gpu_memory_utilization", "tensor_parallel_size")
_NEEDED_BYTES = 64 << 20


def run(config: DictConfig) -> int:
    """Make all rollouts that are not there yet, and return the exit code.

    0 all are done, 3 some failed, 128 + n interrupted by signal n after what was begun is written.

    Raises:
        TerraError: anything wrong with the configuration, the manifest as a whole, the engine or the output folder.
    """
    settings = read_settings(config)
    tokenizer_folder, model_folder = checkpoint_folder(config.tokenizer), checkpoint_folder(config.world_model)
    model = load_config(model_folder)
    check_pairing(tokenizer_folder, model)
    check_overlap(settings.overlap, model.layout.max_frames)
    device = torch_device(config.tokenizer.device)
    for name, check in (("dtype", torch_dtype), ("device", torch_device)):
        if name in config.engine:
            check(config.engine[name])
    check_extra(config.engine)
    check_extra(config.decoder)
    check_output(settings.output, overwrite=True, needed_bytes=_NEEDED_BYTES)
    tally = Tally(count_rollouts(settings))
    made_with = _made_with(config, tokenizer_folder, model_folder)
    folder = RolloutFolder(settings.output, {"made_with": made_with, **_defaults(settings)}, settings.on_change)
    with folder.open():
        tokenizer = LFQTokenizer.from_pretrained(tokenizer_folder).to(device)
        decoder = build_decoder(config.decoder, tokenizer)
        engine = build_engine(config.engine, model_folder)
        with Pipeline(tokenizer, engine, decoder, overlap=settings.overlap) as pipeline:
            interrupted = make_rollouts(pipeline, folder, settings, tally)
        counts = folder.write_index(_names(settings))
    _report(settings, tally, counts)
    if interrupted is not None:
        return INTERRUPTED + interrupted
    return ALL_DONE if counts["done"] == tally.total else SOME_FAILED


def make_rollouts(pipeline: Pipeline, folder: RolloutFolder, settings: RolloutSettings, tally: Tally) -> int | None:
    """Make what is missing in an open folder; the signal that interrupted it, if one did.

    Raises:
        EngineError: the engine failed.
        OutputError: the output can't be written.
    """
    started = time.monotonic()
    with ProgressLine("rollouts", tally.total) as line:
        jobs = ClaimedJobs(settings, folder, tally)
        show = lambda: line.show(tally.ended, _progress(tally, time.monotonic() - started))  # noqa: E731
        runner = BatchRunner(pipeline, folder, settings, jobs, tally, show)
        runner.run()
        show()
    return runner.signal


def read_settings(config: DictConfig) -> RolloutSettings:
    """The settings of conf/rollout.yaml. Raises ConfigError."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    picked: dict[str, Any] = {name: values[name] for name in RolloutSettings.__annotations__}
    for name in ("manifest", "output", "context_root"):
        picked[name] = None if picked[name] is None else Path(str(picked[name]))
    picked["sampling"] = build_sampling(config.sampling)
    return RolloutSettings(**picked)


def _made_with(config: DictConfig, tokenizer: Path, world_model: Path) -> dict[str, Any]:
    """What all rollouts depend on, as JSON has it."""
    values: Any = OmegaConf.to_container(config, resolve=True)
    return {
        "tokenizer_sha256": checkpoint_sha256(tokenizer),
        "world_model_sha256": checkpoint_sha256(world_model),
        "engine": {key: value for key, value in values["engine"].items() if key not in _SPEED},
        "decoder": values["decoder"],
        "tokenizer_device": values["tokenizer"]["device"],
        "overlap": values["overlap"],
        "context_root": values["context_root"],
    }


def _defaults(settings: RolloutSettings) -> dict[str, Any]:
    names = ("num_frames", "num_context", "seed")
    return {"defaults": {name: getattr(settings, name) for name in names} | {"sampling": vars(settings.sampling)}}


def _names(settings: RolloutSettings) -> Iterator[tuple[str, int]]:
    for line in read_lines(settings.manifest):
        for name in rollout_names(line, settings):
            yield name, line.number


def _progress(tally: Tally, seconds: float) -> str:
    text = f"{tally.ended} of {tally.total} rollouts, {tally.failed} failed, {tally.frames / seconds:.1f} frames/s"
    if tally.frames:
        # In rollouts as long as those taken so far; what was there already took no time.
        per_rollout = tally.frames_due / tally.taken
        frames_left = (tally.total - tally.reused - tally.failed) * per_rollout - tally.frames
        text += f", {max(frames_left, 0) * seconds / tally.frames / 60:.1f} min left"
    return text


def _report(settings: RolloutSettings, tally: Tally, counts: dict[str, int]) -> None:
    for failure in tally.failures:
        logger.warning("failed: %s", failure)
    logger.info(
        "%d rollouts: %d made now, %d there before or made by another process, %d failed, %d to do; %s",
        *(tally.total, tally.done, tally.reused, counts["failed"], counts["pending"], settings.output / "index.jsonl"),
    )
