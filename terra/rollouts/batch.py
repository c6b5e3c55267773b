"""What `terra-rollout` does: check all, have what the manifest asks for made, write the index."""

import functools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from terra.config import build_sampling, check_extra
from terra.errors import ConfigError, TerraError
from terra.models import Models
from terra.output import check_output
from terra.progress import ProgressLine
from terra.rollouts.best import Score, score_all, write_best
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.grid import write_grids
from terra.rollouts.manifest import count_rollouts, read_lines, rollout_names
from terra.rollouts.metrics import MetricsFile
from terra.rollouts.settings import RolloutSettings
from terra.rollouts.source import Tally, note_failure
from tokenizer import Frames, TokenGrid

logger = logging.getLogger(__name__)

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 128
_NEEDED_BYTES = 64 << 20


def run(config: DictConfig) -> int:
    """Make all rollouts that are not there yet, and return the exit code.

    0 all are done, 3 some failed, 128 + n interrupted by signal n after what was begun is written.

    Raises:
        TerraError: anything wrong with the configuration, the manifest as a whole, the engine or the output folder.
    """
    settings = read_settings(config)
    models = Models.check(config)
    check_extra(config.cluster)
    cluster = _build_cluster(config.cluster)
    score = None if settings.score is None else Score(settings.score)
    check_output(settings.output, overwrite=True, needed_bytes=_NEEDED_BYTES)
    tally = Tally(count_rollouts(settings))
    made_with = {"made_with": {**models.made_with(), "context_root": config.context_root}, **_defaults(settings)}
    folder = RolloutFolder(settings.output, made_with, settings.on_change)
    metrics = MetricsFile(settings.metrics, tally)
    with folder.open():
        started = time.monotonic()
        with ProgressLine("rollouts", tally.total) as line:

            def show() -> None:
                line.show(tally.ended, _progress(tally, time.monotonic() - started))
                metrics.update()

            interrupted = cluster.make_rollouts(models, folder, settings, tally, show)
            show()
        if interrupted is None:
            _finish(models, folder, settings, tally, score)
        counts = folder.write_index((name, line) for names, line in _lines(settings) for name in names)
        metrics.write()
    _report(settings, tally, counts)
    if interrupted is not None:
        return INTERRUPTED + interrupted
    return ALL_DONE if counts["done"] == tally.total else SOME_FAILED


def _finish(
    models: Models, folder: RolloutFolder, settings: RolloutSettings, tally: Tally, score: Score | None
) -> None:
    """What is derived from all futures of a line: which is the best, and their grid."""
    if score is not None:
        build = functools.cache(models.build_decoder)  # most runs have scored all when they made it

        def decode(tokens: TokenGrid) -> Frames:
            return build().decode(tokens)

        score_all(folder, _lines(settings), score, decode, functools.partial(note_failure, tally, folder))
        write_best(folder, _lines(settings), score)
    if settings.grid:
        write_grids(folder, _lines(settings))


def _build_cluster(node: DictConfig) -> Any:
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, TerraError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, TypeError):
            raise ConfigError(f"cluster: {error.__cause__}") from None
        raise


def read_settings(config: DictConfig) -> RolloutSettings:
    """The settings of conf/rollout.yaml. Raises ConfigError."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    values["sampling"] = build_sampling(config.sampling)
    if values["workers"] is None:
        values["workers"] = max(2, (os.cpu_count() or 1) // 2)
    return RolloutSettings.from_values(values)


def _defaults(settings: RolloutSettings) -> dict[str, Any]:
    names = ("num_frames", "num_context", "seed")
    return {"defaults": {name: getattr(settings, name) for name in names} | {"sampling": vars(settings.sampling)}}


def _lines(settings: RolloutSettings) -> Iterator[tuple[list[str], int]]:
    """The names of each line's rollouts, and the line's number."""
    for line in read_lines(settings.manifest):
        yield rollout_names(line, settings), line.number


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
