"""Progress of a long task: a live bar on a terminal, a line every few seconds elsewhere."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class ProgressLine:
    """Shows `done` of `total` with a text; use it as a context manager.

    Without a terminal, also in a notebook, a line is logged when `every_seconds` have passed since the last one, and at
    the end.

    Args:
        task: what is done, or the stage's name.
        total: how much there is to do, in any unit.
        every_seconds: least time between two logged lines.
        done: how much of it was done before.
        say: receives the lines.
    """

    def __init__(
        self,
        task: str,
        total: float,
        every_seconds: float = 10.0,
        done: float = 0.0,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._task, self._total, self._every_seconds, self._say = task, total, every_seconds, say
        self._last_line = monotonic()
        self._start = (monotonic(), done)
        self._ended = False
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar_task = self._bar.add_task(task, total=total, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float, text: str, task: str | None = None, seconds_left: float | None = None) -> None:
        """Move to `done` (in the unit of `total`) and show `text`, and `task` as the task's new name.

        A logged line also says how long the rest takes: `seconds_left`, or as long as what is done suggests.
        """
        self._task = task or self._task
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=done, text=text, description=self._task)
        elif monotonic() - self._last_line >= self._every_seconds or (done >= self._total and not self._ended):
            self._ended = done >= self._total
            self._last_line = monotonic()
            left = self._seconds_left(done) if seconds_left is None else seconds_left
            self._say(f"{self._task}: {100 * done / max(self._total, 1e-9):.0f} %, {text}{_left(left)}")

    def _seconds_left(self, done: float) -> float | None:
        """How long the rest takes at the mean speed since the start; None where nothing has been done since."""
        started, before = self._start
        if done <= before:
            return None
        return (monotonic() - started) / (done - before) * (self._total - done)


@contextmanager
def frames_shown(task: str, num_frames: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a task over frames; call the yielded function with the number of frames done so far."""
    start = monotonic()
    with ProgressLine(task, num_frames) as line:
        yield lambda done: line.show(done, _frames_text(done, num_frames, monotonic() - start))


@contextmanager
def rollouts_shown(num_generated: int, num_decoded: int) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of rollouts: "generating" while tokens are missing, then "decoding" while pixels are.

    Away from a terminal the lines are printed.

    Call the yielded function with the number of frames that were generated, and that were decoded, since the last
    call; any thread may call it.

    Args:
        num_generated: frames whose tokens are generated, of all rollouts.
        num_decoded: frames whose pixels are decoded; context frames are, too.
    """
    start, lock, counts = monotonic(), Lock(), [0, 0]
    with ProgressLine("generating", num_generated + num_decoded, say=print) as line:

        def show(generated: int, decoded: int) -> None:
            with lock:
                counts[0], counts[1] = counts[0] + generated, counts[1] + decoded
                made, shown = counts
                seconds = max(monotonic() - start, 1e-9)
                text = (
                    f"{made} of {num_generated} frames, {shown} of {num_decoded} decoded, {made / seconds:.1f} a second"
                )
                line.show(made + shown, text, "generating" if made < num_generated else "decoding")

        yield show


@contextmanager
def stage(name: str, console: Console) -> Iterator[None]:
    """Name a stage that has no frames to count while it lasts: a spinner on a terminal, else one line in the log."""
    if console.is_terminal:
        with console.status(name):
            yield
    else:
        logger.info("%s", name)
        yield


def _frames_text(done: int, num_frames: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-9)
    return f"{done} of {num_frames} frames, {rate:.{0 if rate >= 10 else 1}f} a second"


def _left(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f", {seconds / 60:.1f} min left" if seconds >= 100 else f", {seconds:.0f} s left"
