"""Fields of messages as columns of actions: which there are, and their values."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from terra.dataset.importing.bag_files import field, fields
from terra.errors import ConfigError

_PART = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\[\]]+)\]")
_UNITS = {
    "geometry_msgs/Twist": {"linear": "m/s", "angular": "rad/s"},
    "geometry_msgs/TwistStamped": {"twist.linear": "m/s", "twist.angular": "rad/s"},
}


@dataclass(frozen=True)
class Column:
    """A column of actions: a field of a topic, or one number of a field that is an array.

    Attributes:
        spec: the field as the user wrote it.
        entry: "" for the field itself, "[3]" or "[elbow]" for a number of its array.
        topic: its topic.
        unit: its unit, "" if it is not known.
    """

    spec: str
    entry: str
    topic: str
    unit: str

    @property
    def name(self) -> str:
        """A name for an action space: "cmd_vel.linear.x"."""
        text = re.sub(r"[^A-Za-z0-9_.-]", "_", re.sub(r"[\[\]/]+", ".", self.spec + self.entry).strip("."))
        return re.sub(r"^[^A-Za-z]+", "", text[-64:]) or "action"


class FieldReader:
    """Reads a field of the messages of a topic. Raises ConfigError if it is written wrongly or is not there."""

    def __init__(self, spec: str, topic: str, kind: str, where: str) -> None:
        self._spec, self._where = spec, f"bags.action: {spec}"
        path = spec[len(topic) :]
        parts = list(_PART.finditer(path))
        if "".join(match[0] for match in parts) != path:
            raise ConfigError(f"{self._where}: expected a field such as {topic}.linear.x or {topic}.position[3]")
        self._parts = [(match[1], match[2]) for match in parts]
        self._origin = where
        names = ".".join(name for name, _ in self._parts if name)
        units = _UNITS.get(kind, {})
        unit = next((unit for start, unit in units.items() if names.startswith(f"{start}.")), "")
        self._column = lambda entry: Column(spec, entry, topic, unit)
        self._plain = self._column("")
        self._entries: dict[str, Column] = {}
        self._length: int | None = None

    def read(self, message: Any) -> Iterator[tuple[Column, float]]:
        """Yield the columns that a message has, and their values."""
        value = parent = message
        for name, entry in self._parts:
            if name:
                parent = value
                try:
                    value = field(value, name)
                except AttributeError:
                    known = ", ".join(fields(value)) or f"a {type(value).__name__}"
                    raise ConfigError(f"{self._where}: {self._origin}: expected a field {name}, got {known}") from None
                continue
            number = self._place(entry, parent, value)
            if number is None:
                return
            value = value[number]
        if isinstance(value, str | bytes) or fields(value):
            got = "text" if isinstance(value, str | bytes) else f"fields: {', '.join(fields(value))}"
            raise ConfigError(f"{self._where}: {self._origin}: expected a number or an array of numbers, got {got}")
        if not hasattr(value, "__len__"):
            yield self._plain, float(value)
            return
        names = _names(parent)
        if names is None or len(names) != len(value):
            names = [str(index) for index in range(len(value))]
            if self._length not in (None, len(value)):
                got = f"{self._length} and {len(value)}"
                raise ConfigError(
                    f"{self._where}: {self._origin}: expected as many numbers in each message, got {got}; "
                    "name one, such as [0]"
                )
            self._length = len(value)
        for entry, number in zip(names, value, strict=True):
            column = self._entries.get(entry)
            if column is None:
                column = self._entries[entry] = self._column(f"[{entry}]")
            yield column, float(number)

    def _place(self, entry: str, parent: Any, value: Any) -> int | None:
        """Where an entry is in an array; None if this message doesn't have it."""
        if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
            raise ConfigError(f"{self._where}: {self._origin}: expected an array before [{entry}], got none")
        if entry.isdecimal():
            return int(entry) if int(entry) < len(value) else None
        names = _names(parent)
        if names is None:
            raise ConfigError(f"{self._where}: {self._origin}: expected a number in [{entry}]: there are no names")
        place = names.index(entry) if entry in names else None
        return place if place is not None and place < len(value) else None


def _names(message: Any) -> list[str] | None:
    """The names beside an array, as sensor_msgs/JointState has them."""
    try:
        names = field(message, "name")
    except AttributeError:
        return None
    return None if isinstance(names, str | bytes) or not hasattr(names, "__len__") else [str(name) for name in names]


def field_readers(specs: Iterable[str], topic: str, kind: str, where: str) -> list[FieldReader]:
    """The readers of those fields that a topic's messages have, by the topic's name. Raises ConfigError."""
    return [FieldReader(spec, topic, kind, where) for spec in specs if spec.startswith(f"{topic}.")]
