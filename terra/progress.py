"""Progress of a long task: a live bar on a terminal, a log line every few seconds elsewhere."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class ProgressLine:
    """Shows `done` of `total` with a text; use it as a context manager.

    Without a terminal, a line is logged when `every_seconds` have passed since the last one, and at the end.
    """

    def __init__(self, task: str, total: float, every_seconds: float = 10.0):
        self._task, self._total, self._every_seconds = task, total, every_seconds
        self._last_line = monotonic()
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

    def show(self, done: float, text: str) -> None:
        """Move to `done` (in the unit of `total`) and show `text`."""
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=done, text=text)
        elif monotonic() - self._last_line >= self._every_seconds or (done >= self._total and not self._ended):
            self._ended = done >= self._total
            self._last_line = monotonic()
            logger.info("%s: %.0f %%, %s", self._task, 100 * done / max(self._total, 1e-9), text)


@contextmanager
def frames_shown(task: str, num_frames: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a task over frames; call the yielded function with the number of frames done so far."""
    start = monotonic()
    with ProgressLine(task, num_frames) as line:

        def show(done: int) -> None:
            rate = done / max(monotonic() - start, 1e-9)
            left = f"{(num_frames - done) / rate / 60:.1f} min left" if done else "just begun"
            line.show(done, f"{done} of {num_frames} frames, {rate:.{0 if rate >= 10 else 1}f} a second, {left}")

        yield show
