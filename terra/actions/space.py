"""Action spaces: what an action means, and the rows of numbers that a world model sees of it.

An action is given by VALUES, one float64 for each column of a file, and reaches the model as ROWS, float32 of the
shape (slots, action_dim), one row for each action slot:

    kind        columns             values                         rows
    waypoints   (trajectory files)  -                              (times, 3): [y left (m), x forward (m), t (s)]
    vector      one for each name   in their own units             (1, names): low becomes -1, high becomes 1
    keys        one for each name   1 pressed, 0 not               (1, names): the same
    choice      "action"            index of the name, from 0      (1, names): 1 for the chosen name, else 0

The action of frame k leads from frame k to frame k + 1, so a rollout of n frames has n - 1 actions that count.

As JSON a space is an object with its `kind` and fields: {"kind": "keys", "names": ["forward", "left"]}. Where a file
has none, as in all published checkpoints, its actions are waypoints (`read_space`, `describe_space`).
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from jaxtyping import Float32, Float64
from pydantic import Field, model_validator

from terra.errors import ActionError, TerraError
from terra.trajectory.model import WAYPOINT_TIMES
from tokenizer.settings import Settings, checked, expecting

TIME_COLUMN = "time_s"
CHOICE_COLUMN = "action"
MOST_NAMES = 256
_SHOWN = 4  # names in a title
_ROUNDED = 0.00075  # s
ROUNDING = 0.35
"""The part of a frame by which the time of a logged row may be off."""

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"),
    expecting("a name: a letter, then up to 63 letters, digits, '_', '.' and '-'"),
]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1, max_length=MOST_NAMES)]
Numbers = Annotated[tuple[float, ...], Field(strict=False, max_length=MOST_NAMES)]
Units = Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(strict=False, max_length=MOST_NAMES)]
WaypointTime = Annotated[float, Field(ge=0, le=60)]

Values = Float64[np.ndarray, "steps columns"]
Rows = Float32[np.ndarray, "steps slots action_dim"]
Json = dict[str, Any] | list[Any] | str


class Waypoints(Settings):
    """The future path of a vehicle: a point for each of `times`, seconds ahead of the frame, in its own ego frame."""

    kind: Literal["waypoints"] = "waypoints"
    times: Annotated[tuple[WaypointTime, ...], Field(strict=False, min_length=1, max_length=64)] = WAYPOINT_TIMES

    @model_validator(mode="after")
    def _increase(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.times)):
            raise ValueError(f"times: expected increasing seconds, got {reprlib.repr(self.times)}")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(slots, action_dim)."""
        return len(self.times), 3

    @property
    def title(self) -> str:
        """A few words for messages."""
        return f"waypoints at {', '.join(f'{time:g}' for time in self.times)} s"


class _Columns(Settings):
    """Base of the spaces whose actions are columns of numbers."""

    names: Names

    @model_validator(mode="after")
    def _once(self) -> Self:
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated or TIME_COLUMN in self.names:
            got = repeated[0] if repeated else TIME_COLUMN
            raise ValueError(f"names: expected each once, and none of them {TIME_COLUMN}, got {got}")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(slots, action_dim)."""
        return 1, len(self.names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file, in order."""
        return self.names

    @property
    def title(self) -> str:
        """A few words for messages."""
        more = f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        return f"{type(self).__name__.lower()} of {', '.join(self.names[:_SHOWN])}{more}"


class Vector(_Columns):
    """Numbers, each with a unit and a range: a joint's angle (rad), a throttle (no unit: "").

    Attributes:
        names: what the numbers are called.
        units: their units, for people and for files to agree on; "" where there is none.
        low, high: the least and the greatest value of each; what is outside is refused.
    """

    kind: Literal["vector"] = "vector"
    units: Units
    low: Numbers
    high: Numbers

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for name in ("units", "low", "high"):
            if len(getattr(self, name)) != len(self.names):
                raise ValueError(
                    f"{name}: expected {len(self.names)}, one for each name, got {len(getattr(self, name))}"
                )
        for name, low, high in zip(self.names, self.low, self.high, strict=True):
            if not low < high or not math.isfinite(high - low):
                raise ValueError(f"low: expected less than high, got {low:g} and {high:g} of {name}")
        return self

    @property
    def neutral(self) -> Float64[np.ndarray, " columns"]:
        """The values of nothing done: 0, or the middle of a range without 0."""
        low, high = np.array(self.low), np.array(self.high)
        return np.where((low <= 0) & (high >= 0), 0.0, (low + high) / 2)

    def rows(self, values: Values) -> Rows:
        """The model's rows of some actions."""
        low, high = np.array(self.low), np.array(self.high)
        return ((values - low) / (high - low) * 2 - 1).astype(np.float32)[:, None]

    def values(self, rows: Rows) -> Values:
        """The values that rows stand for, within the range also after rounding."""
        low, high = np.array(self.low), np.array(self.high)
        return np.clip((rows[:, 0].astype(np.float64) + 1) / 2 * (high - low) + low, low, high)

    def problem(self, values: Float64[np.ndarray, " columns"]) -> str | None:
        """What is wrong with an action, in one line; None if nothing is."""
        for name, unit, low, high, value in zip(self.names, self.units, self.low, self.high, values, strict=True):
            if not low <= value <= high:
                unit = f" {unit}" if unit else ""
                return f"{name}: expected {low:g} to {high:g}{unit}, got {value:g}"
        return None

    def resampled(
        self,
        times: Float64[np.ndarray, " rows"],
        values: Values,
        at: Float64[np.ndarray, " frames"],
        until: float,
        *,
        holds: bool = False,
    ) -> Values:
        """The values at some instants, interpolated linearly and held at both ends. `until` is of no use here.

        `holds`: a row holds until the next one, as in a log that is written when something changes.
        """
        if holds:
            return values[_held(times, at, _rounding(times, at, until))]
        return np.stack([np.interp(at, times, column) for column in values.T], axis=1)

    def text(self, values: Float64[np.ndarray, " columns"]) -> str:
        """An action in words: "steering 0.20 rad  throttle 0.50"."""
        named = zip(self.names, self.units, values, strict=True)
        return "  ".join(f"{name} {value:.2f}{f' {unit}' if unit else ''}" for name, unit, value in named)

    def to_json(self, values: Float64[np.ndarray, " columns"]) -> Json:
        """An action as JSON: {"steering": 0.2, "throttle": 0.5}."""
        return dict(zip(self.names, values.tolist(), strict=True))

    def from_json(self, value: object, where: str) -> Float64[np.ndarray, " columns"]:
        """The values of an action that came as JSON, by name or as a list in the order of the names.

        Raises:
            ActionError: a name missing or unknown, no number, or one out of range.
        """
        if isinstance(value, list):
            value = _by_name(value, self.names, where)
        given = checked(dict[str, float], value, where, ActionError)
        _check_names(given, self.names, where)
        return _fitting(self, np.array([given[name] for name in self.names]), where)


class Keys(_Columns):
    """Keys or buttons, of which several may be pressed at once."""

    kind: Literal["keys"] = "keys"

    @property
    def neutral(self) -> Float64[np.ndarray, " columns"]:
        """No key pressed."""
        return np.zeros(len(self.names))

    def rows(self, values: Values) -> Rows:
        """The model's rows of some actions."""
        return values.astype(np.float32)[:, None]

    def values(self, rows: Rows) -> Values:
        """The values that rows stand for."""
        return (rows[:, 0] > 0.5).astype(np.float64)

    def problem(self, values: Float64[np.ndarray, " columns"]) -> str | None:
        """What is wrong with an action, in one line; None if nothing is."""
        for name, value in zip(self.names, values, strict=True):
            if value not in (0, 1):
                return f"{name}: expected 1 (pressed) or 0, got {value:g}"
        return None

    def resampled(
        self,
        times: Float64[np.ndarray, " rows"],
        values: Values,
        at: Float64[np.ndarray, " frames"],
        until: float,
        *,
        holds: bool = True,
    ) -> Values:
        """Whether each key is down at some time from an instant on, until the next one (the last: until `until`).

        A key always holds until the next row says otherwise.
        """
        off = _rounding(times, at, until)
        first, last = _held(times, at, off), _held(times, np.append(at[1:], until), off, side="left")
        return np.stack([values[a : max(b, a) + 1].max(axis=0) for a, b in zip(first, last, strict=True)])

    def text(self, values: Float64[np.ndarray, " columns"]) -> str:
        """An action in words: "forward + left", or "-" where nothing is pressed."""
        return " + ".join(name for name, value in zip(self.names, values, strict=True) if value) or "-"

    def to_json(self, values: Float64[np.ndarray, " columns"]) -> Json:
        """An action as JSON: the pressed keys' names."""
        return [name for name, value in zip(self.names, values, strict=True) if value]

    def from_json(self, value: object, where: str) -> Float64[np.ndarray, " columns"]:
        """The values of an action that came as JSON: a list of the pressed keys' names. Raises ActionError."""
        pressed, known = checked(list[str], value, where, ActionError), frozenset(self.names)
        for name in pressed:
            if name not in known:
                raise ActionError(f"{where}: expected keys of {', '.join(self.names)}, got {reprlib.repr(name)}")
        down = frozenset(pressed)
        if len(down) < len(pressed):
            raise ActionError(f"{where}: expected each key once, got {reprlib.repr(pressed)}")
        return np.array([float(name in down) for name in self.names])


class Choice(_Columns):
    """Exactly one of some named actions, such as a game's joystick positions."""

    kind: Literal["choice"] = "choice"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file, in order: one, which holds names."""
        return (CHOICE_COLUMN,)

    @property
    def neutral(self) -> Float64[np.ndarray, " columns"]:
        """The first action."""
        return np.zeros(1)

    def rows(self, values: Values) -> Rows:
        """The model's rows of some actions."""
        return np.eye(len(self.names), dtype=np.float32)[values[:, 0].astype(int)][:, None]

    def values(self, rows: Rows) -> Values:
        """The values that rows stand for."""
        return rows[:, 0].argmax(axis=1).astype(np.float64)[:, None]

    def problem(self, values: Float64[np.ndarray, " columns"]) -> str | None:
        """What is wrong with an action, in one line; None if nothing is."""
        (index,) = values
        if index in range(len(self.names)):
            return None
        return f"{CHOICE_COLUMN}: expected 0 to {len(self.names) - 1}, got {index:g}"

    def resampled(
        self,
        times: Float64[np.ndarray, " rows"],
        values: Values,
        at: Float64[np.ndarray, " frames"],
        until: float,
        *,
        holds: bool = True,
    ) -> Values:
        """The action that holds at each instant; one always does."""
        return values[_held(times, at, _rounding(times, at, until))]

    def text(self, values: Float64[np.ndarray, " columns"]) -> str:
        """The action's name."""
        return self.names[int(values[0])]

    def to_json(self, values: Float64[np.ndarray, " columns"]) -> Json:
        """An action as JSON: its name."""
        return self.text(values)

    def from_json(self, value: object, where: str) -> Float64[np.ndarray, " columns"]:
        """The values of an action that came as JSON: one of the names. Raises ActionError."""
        if value not in self.names:
            raise ActionError(f"{where}: expected one of {', '.join(self.names)}, got {reprlib.repr(value)}")
        return np.array([float(self.names.index(str(value)))])


TableSpace = Vector | Keys | Choice
"""The spaces whose actions are columns of a table."""

ActionSpace = Waypoints | TableSpace
_CLASSES: dict[str, type[ActionSpace]] = {"waypoints": Waypoints, "vector": Vector, "keys": Keys, "choice": Choice}
KINDS = tuple(_CLASSES)


def parse_space(value: object, where: str, error_class: type[TerraError] = ActionError) -> ActionSpace:
    """A space of JSON or YAML: an object with its `kind`, and the fields of that kind's class. Raises `error_class`."""
    if not isinstance(value, Mapping) or value.get("kind") not in KINDS:
        got = value.get("kind") if isinstance(value, Mapping) else value
        raise error_class(f"{where}: kind: expected one of {', '.join(KINDS)}, got {reprlib.repr(got)}")
    return checked(_CLASSES[value["kind"]], dict(value), where, error_class)


def read_space(facts: Mapping[str, Any], where: str, error_class: type[TerraError]) -> ActionSpace:
    """The space that a JSON object has under `action_space`, else waypoints at its `waypoint_times`, if it has these.

    Raises:
        error_class: what stands there is not a valid action space.
    """
    if facts.get("action_space") is not None:
        return parse_space(facts["action_space"], f"{where}: action_space", error_class)
    times = facts.get("waypoint_times")
    return Waypoints() if times is None else checked(Waypoints, {"times": times}, where, error_class)


def describe_space(space: ActionSpace) -> dict[str, Any]:
    """What `read_space` reads: for waypoints `waypoint_times` alone, as in published checkpoints."""
    if isinstance(space, Waypoints):
        return {"waypoint_times": list(space.times)}
    return {"action_space": space.model_dump(mode="json")}


def require_waypoints(space: ActionSpace, purpose: str) -> Waypoints:
    """The space, if it is one of waypoints. Raises ActionError: `purpose` says what needs them."""
    if not isinstance(space, Waypoints):
        raise ActionError(f"{purpose}: expected a world of waypoints, got one of {space.title}")
    return space


def require_table(space: ActionSpace, purpose: str) -> TableSpace:
    """The space, if its actions are columns of a table. Raises ActionError: `purpose` says what needs them."""
    if isinstance(space, Waypoints):
        raise ActionError(f"{purpose}: expected a world of vectors, keys or choices, got one of {space.title}")
    return space


def _rounding(times: np.ndarray, at: np.ndarray, until: float) -> float:
    """By how much (s) the time of a row may be off, early or late, from the instant that it means.

    Loggers round: to float32, to 1 ms, to 10 ms at 60 rows a second. Where there is a row for each frame, a row means
    the frame that is nearest. Otherwise it means its own time, to 0.75 ms.
    """
    period = (until - at[0]) / len(at)
    steps = np.diff(times)
    if not len(steps):
        return min(_ROUNDED, ROUNDING * period)
    steady = steps[steps <= 2.5 * np.median(steps)].mean()
    return ROUNDING * period if abs(steady / period - 1) < 0.02 else min(_ROUNDED, 0.1 * steady, 0.1 * period)


def _held(times: np.ndarray, at: np.ndarray, off: float, side: Literal["left", "right"] = "right") -> np.ndarray:
    """For each instant the row that holds then: the last one that is not later (left: that is earlier).

    A row that is not further than `off` from an instant counts as a row of that instant.
    """
    return np.clip(np.searchsorted(times, at + (off if side == "right" else -off), side=side) - 1, 0, len(times) - 1)


def _by_name(values: Sequence[object], names: Sequence[str], where: str) -> dict[str, object]:
    if len(values) != len(names):
        raise ActionError(f"{where}: expected {len(names)} numbers ({', '.join(names)}), got {len(values)}")
    return dict(zip(names, values, strict=True))


def _check_names(given: Mapping[str, object], names: Sequence[str], where: str) -> None:
    if given.keys() != set(names):
        got = ", ".join(given) or "none"
        raise ActionError(f"{where}: expected {', '.join(names)}, each once, got {got[:200]}")


def _fitting(space: Vector, values: Float64[np.ndarray, " columns"], where: str) -> Float64[np.ndarray, " columns"]:
    problem = space.problem(values)
    if problem is not None:
        raise ActionError(f"{where}: {problem}")
    return values
