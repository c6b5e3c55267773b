"""SIGTERM and SIGINT: the first asks a run to end what is begun, the second to stop at once."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Stopping:
    """Which signal a run was asked to stop with, if any.

    Args:
        on_first: called in the event loop at the first one.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.signal: int | None = None
        self._on_first = on_first

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen, in a coroutine, which a second signal cancels. Only the main thread can hear signals."""
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
