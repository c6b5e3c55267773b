"""Types of the settings that recording, importing, inspecting and a dataset's own files share."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from tokenizer.settings import Text, checked, expecting

LEAST_SIDE, MOST_SIDE = 16, 4096  # pixels

_Side = Annotated[int, Field(ge=LEAST_SIDE, le=MOST_SIDE, multiple_of=2)]

ImageSize = Annotated[
    tuple[_Side, _Side],
    Field(strict=False),
    expecting(f"even height and width from {LEAST_SIDE} to {MOST_SIDE}"),
]
"""(height, width) in pixels, of a size that videos have."""

Workers = Annotated[int, Field(ge=0, le=1024)]
"""Processes; 0 works in this one."""

Seconds = Annotated[float, Field(ge=1)]


def _list(value: object) -> object:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"expected a list such as [a,b], got {value!r}")
    return value


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError(f"expected each once, got {', '.join(names)}")
    return names


Names = Annotated[tuple[Text, ...], Field(strict=False), AfterValidator(_each_once), BeforeValidator(_list)]
"""Names, each once. A number such as 10 is the name that it was written as."""


def check_workload(workers: object, max_seconds: object = None) -> None:
    """ConfigError unless `workers` can be a number of processes (0: none but this), `max_seconds` a limit or None."""
    checked(Workers, workers, "workers")
    if max_seconds is not None:
        checked(Seconds, max_seconds, "max_seconds")
