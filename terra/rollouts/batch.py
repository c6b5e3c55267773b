"""The command `terra rollout`: checks everything, has the manifest's rollouts made, and writes the index."""

import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

from terra.config.groups import build_part
from terra.config.spec import PipelineSpec
from terra.errors import EngineError
from terra.output import check_output
from terra.progress import ProgressLine
from terra.rollouts.best import Score, score_all, write_best
from terra.rollouts.folder import RolloutFolder, recorded_settings
from terra.rollouts.grid import write_grids
from terra.rollouts.manifest import count_rollouts, read_lines, rollout_names
from terra.rollouts.metrics import MetricsFile
from terra.rollouts.settings import BatchSettings, RolloutSettings
from terra.rollouts.source import Tally, note_failure
from tokenizer import Frames, TokenGrid

logger = logging.getLogger(__name__)

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 128
_NEEDED_BYTES = 64 << 20


def run(settings: BatchSettings) -> int:
    """Make all missing rollouts, and return the exit code.

    Exit codes: 0 all are done, 3 some failed, 128 + n interrupted by signal n after begun rollouts are written.

    Raises:
        TerraError: anything wrong with the configuration, the manifest as a whole, the engine or the output folder.
    """
    recorded = recorded_settings(settings.output) or {}
    total = count_rollouts(settings)
    spec = PipelineSpec.from_settings(
        settings,
        sessions=settings.at_once,
        rollouts=min(total, settings.at_once),
        recorded=recorded.get("made_with"),
    )
    cluster = build_part("cluster", settings.cluster)
    score = None if settings.score is None else Score(settings.score)
    check_output(settings.output, needed_bytes=_NEEDED_BYTES, replaced=None)
    tally = Tally(total)
    spec.announce()
    made_with = {"made_with": spec.made_with(), **_defaults(settings)}
    metrics = MetricsFile(settings.metrics, tally)
    if settings.metrics is not None and not settings.metrics.absolute().is_relative_to(settings.output.absolute()):
        metrics.write()  # a file that can't be written is said before there is an output folder
    folder = RolloutFolder(
        settings.output,
        made_with,
        settings.on_change,
        verify=settings.verify,
        limits=settings.limits,
        views=spec.spec.views,
    )
    with folder.open():
        started = time.monotonic()
        with ProgressLine("rollouts", tally.total) as line:

            def show() -> None:
                seconds = time.monotonic() - started
                line.show(tally.ended, _progress(tally, seconds), seconds_left=_seconds_left(tally, seconds))
                metrics.update()

            try:
                interrupted = cluster.make_rollouts(spec, folder, settings, tally, show)
            except EngineError:
                _report(settings, tally, folder.write_index(_named(settings)))  # what is left to do
                raise
            show()
        if interrupted is None:
            _finish(spec, folder, settings, tally, score)
        counts = folder.write_index(_named(settings))
        metrics.write()
    _report(settings, tally, counts)
    if interrupted is not None:
        return INTERRUPTED + interrupted
    return ALL_DONE if counts["done"] == tally.total else SOME_FAILED


def _finish(
    spec: PipelineSpec, folder: RolloutFolder, settings: RolloutSettings, tally: Tally, score: Score | None
) -> None:
    """Write what follows from all futures of a line: which one is the best, and their grid."""
    if score is not None:
        build = functools.cache(spec.build_decoder)  # most runs have scored all when they made it

        def decode(tokens: TokenGrid, adapter: str | None) -> Frames:
            return build(adapter).decode(tokens)

        score_all(folder, _lines(settings), score, decode, functools.partial(note_failure, tally, folder))
        write_best(folder, _lines(settings), score)
    if settings.grid:
        write_grids(folder, _lines(settings), verify=settings.verify)


def _defaults(settings: RolloutSettings) -> dict[str, Any]:
    names = ("num_frames", "num_context", "seed")
    return {"defaults": {name: getattr(settings, name) for name in names} | {"sampling": vars(settings.sampling)}}


def _lines(settings: RolloutSettings) -> Iterator[tuple[list[str], int]]:
    """The rollouts' names and the number of each line of the manifest."""
    for line in read_lines(settings.manifest, settings.limits):
        yield rollout_names(line, settings), line.number


def _named(settings: RolloutSettings) -> Iterator[tuple[str, int]]:
    """The name and the line's number of each rollout."""
    return ((name, number) for names, number in _lines(settings) for name in names)


def _progress(tally: Tally, seconds: float) -> str:
    return f"{tally.ended} of {tally.total} rollouts, {tally.failed} failed, {tally.frames / seconds:.1f} frames/s"


def _seconds_left(tally: Tally, seconds: float) -> float | None:
    """In rollouts as long as those taken so far; what was there already took no time."""
    if not tally.frames:
        return None
    per_rollout = tally.frames_due / tally.taken
    frames_left = (tally.total - tally.reused - tally.failed) * per_rollout - tally.frames
    return max(frames_left, 0) * seconds / tally.frames


def _report(settings: RolloutSettings, tally: Tally, counts: dict[str, int]) -> None:
    for failure in tally.failures:
        logger.warning("failed: %s", failure)
    logger.info(
        "%d rollouts: %d made now, %d there before or made by another process, %d failed, %d to do; %s",
        *(tally.total, tally.done, tally.reused, counts["failed"], counts["pending"], settings.output / "index.jsonl"),
    )
