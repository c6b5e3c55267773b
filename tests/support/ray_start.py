"""Ray's own limit of 30 s on a node's start is no setting, and a busy machine may take longer: it is tried again."""

from collections.abc import Callable
from typing import TypeVar

import ray

_T = TypeVar("_T")
TRIES = 4


def start_ray(start: Callable[[], _T]) -> _T:
    """Give what `start` gives, once Ray has begun. Raises what Ray raises, the last time."""
    for left in reversed(range(TRIES)):
        try:
            return start()
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")
