"""Checks of the settings that recording, importing and inspecting share: a wrong one is named in one line."""

import math
from collections.abc import Sequence

from terra.errors import ConfigError

LEAST_SIDE, MOST_SIDE = 16, 4096  # pixels
_MOST_WORKERS = 1024


def check_count(name: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is a whole number from `least` to `most`; else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")
    return value


def check_number(name: str, value: object, least: float, most: float = math.inf) -> float:
    """Return `value` if it is a number from `least` to `most`; else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name}: expected a number {bounds}, got {value!r}")
    return float(value)


def check_image_size(value: object) -> tuple[int, int]:
    """Return (height, width) if both are even and of a size that videos have; else ConfigError."""
    if isinstance(value, list | tuple) and len(value) == 2:
        height, width = value
        sides = [side for side in (height, width) if type(side) is int and side % 2 == 0]
        if len(sides) == 2 and all(LEAST_SIDE <= side <= MOST_SIDE for side in sides):
            return height, width
    raise ConfigError(f"image_size: expected even height and width from {LEAST_SIDE} to {MOST_SIDE}, got {value}")


def check_names(name: str, value: object) -> tuple[str, ...]:
    """Return a list of names, each once; else ConfigError. A number such as 10 is the name that it was written as."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{name}: expected a list such as [a,b], got {value!r}")
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in value):
        raise ConfigError(f"{name}: expected names, got {list(value)}")
    names = tuple(str(item) for item in value)
    if len(set(names)) != len(names):
        raise ConfigError(f"{name}: expected each once, got {', '.join(names)}")
    return names


def check_workload(workers: object, max_seconds: object = None) -> None:
    """ConfigError unless `workers` can be a number of processes (0: none but this), `max_seconds` a limit or None."""
    check_count("workers", workers, 0, _MOST_WORKERS)
    if max_seconds is not None:
        check_number("max_seconds", max_seconds, 1)
