"""Handles SIGTERM and SIGINT of a run: after the first, begun rollouts are finished; the second stops at once."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Stopping:
    """Holds the signal that a run received, if any.

    Args:
        on_first: called in the event loop at the first signal.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.signal: int | None = None
        self._on_first = on_first

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block; a second one cancels the current task. Works in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if self.signal is not None:
                task.cancel()
                return
            self.signal = number
            self._on_first()
            logger.warning("%s: ending what is begun; once more to stop at once", signal.Signals(number).name)

        def hear(number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(stop, number)

        before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
