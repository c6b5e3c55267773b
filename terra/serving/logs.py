"""Keeps a flood of like messages out of the log: some of each are logged, and later how many were not."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_AT_ONCE = 10
_SECONDS = 10.0


class RateLimit(logging.Filter):
    """Passes ten records of each logger and message template in ten seconds; the next one then tells of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        key, now = (record.name, str(record.msg)[:200]), time.monotonic()
        begun, count = self._windows.get(key, (now, 0))
        if now - begun >= _SECONDS:
            if count > _AT_ONCE:
                record.msg, record.args = f"{record.getMessage()} ({count - _AT_ONCE} more like it)", ()
            begun, count = now, 0
        if len(self._windows) > 1000:
            self._windows.clear()
        self._windows[key] = begun, count + 1
        return count < _AT_ONCE


@contextmanager
def limited_logs() -> Iterator[None]:
    """Put a `RateLimit` on each handler of the root logger, and take it away at the end."""
    limits = [(handler, RateLimit()) for handler in logging.getLogger().handlers]
    for handler, limit in limits:
        handler.addFilter(limit)
    try:
        yield
    finally:
        for handler, limit in limits:
            handler.removeFilter(limit)
