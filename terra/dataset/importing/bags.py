"""Import of bags: MCAP, ROS 1 and ROS 2, with pictures of one topic, and fields of any topics as actions."""

import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field as item
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from pydantic import Field

from terra.actions import ActionTrack, TableSpace, Vector
from terra.dataset.importing.bag_clock import Clock, Stamps, Times, choose_clocks, in_order
from terra.dataset.importing.bag_files import (
    Lost,
    Message,
    Recording,
    UndecodableError,
    binary,
    field,
    fields,
    find_recordings,
    header_time,
)
from terra.dataset.importing.bag_pictures import PICTURE_TYPES, VIDEO_TYPES, Still, message_size
from terra.dataset.importing.bag_video import UnitChecker, check_codec, stream_units
from terra.dataset.importing.source import Break, SourceDrive
from terra.errors import ConfigError, DatasetError
from tokenizer.settings import Settings, Text, checked, expected_names

logger = logging.getLogger(__name__)

_PART = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\[\]]+)\]")
_SET_BACK = 60.0  # s between two stretches of a drive, in its own times, so that nothing is interpolated across
_SILENT_PERIODS, _SILENT_SECONDS = 10, 1.0  # a field that says nothing for longer than both is silent
_DAMAGED = "pictures that can't be decoded"
_EDGE = 8  # messages of an earlier clock that may stand behind pictures of a later one
_UNITS = {
    "geometry_msgs/Twist": {"linear": "m/s", "angular": "rad/s"},
    "geometry_msgs/TwistStamped": {"twist.linear": "m/s", "twist.angular": "rad/s"},
}


class Bags(Settings):
    """What of a bag is imported.

    Attributes:
        video: the topic with the pictures; None takes the only one.
        action: fields, such as "/cmd_vel.linear.x", "/joint_states.position[3]", "/joint_states.position[elbow]" by the
            message's `name`, or "/joint_states.position" for all its numbers.
        clock: "header" takes messages' own times, "log" the recorder's, "auto" their own where they are set.
    """

    video: Text | None = None
    action: Annotated[tuple[Text, ...], Field(strict=False, max_length=256)] = ()
    clock: Clock = "auto"


@dataclass(frozen=True)
class Topic:
    """What a recording has of a topic.

    Attributes:
        name: the topic.
        type: its messages' type.
        count: how many.
        bytes: their size, all together.
        seconds: from the first to the last, by the log.
        picture_size: "640x480" if the first message is a picture whose size can be told, else None.
    """

    name: str
    type: str
    count: int
    bytes: int
    seconds: float
    picture_size: str | None

    @property
    def rate(self) -> float:
        """Messages a second; 0 if there is one."""
        return (self.count - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_picture(self) -> bool:
        """Whether its messages hold pictures that can be imported."""
        return self.type in PICTURE_TYPES


def list_topics(folder: Path) -> dict[str, tuple[Topic, ...]]:
    """The topics of each recording in a folder, by the recordings' and the topics' names; every bag is read through.

    Raises:
        DatasetError: no bags, or a file that is none.
    """
    return {recording.name: _scan(recording, ()).topics for recording in find_recordings(folder)}


@dataclass(frozen=True)
class BagSource:
    """Bags in a folder; each is a drive.

    Attributes:
        folder: the folder.
        video: the topic with the pictures.
        columns: the fields that are the actions, in the order of the space's columns.
        clock: see `Bags`.
        space: what the actions mean.
    """

    folder: Path
    video: str
    columns: tuple["Column", ...]
    clock: Clock
    space: TableSpace

    @classmethod
    def open(cls, folder: Path, bags: Bags, space: TableSpace | None) -> "BagSource":
        """Find topics and columns, and without a `space` the range of each column, over all bags of a folder.

        Raises:
            ConfigError: no fields, or a topic or a field that is not there.
            DatasetError: no bags, no pictures, or several topics with pictures.
        """
        if not bags.action:
            raise ConfigError("bags.action: expected fields such as [/cmd_vel.linear.x,/cmd_vel.angular.z], got none")
        scans: list[_Scan] = []
        failures: list[DatasetError] = []
        for recording in find_recordings(folder):
            try:
                scans.append(_scan(recording, bags.action))
            except DatasetError as error:
                logger.warning("%s", error)
                failures.append(error)
        if not scans:
            raise failures[0]
        video = _only_video(folder, [each.topics for each in scans], bags.video)
        reaches: dict[Column, _Reach] = {}
        for scan in scans:
            for column, reach in scan.reaches.items():
                reaches.setdefault(column, _Reach()).join(reach)
        columns: list[Column] = []
        for spec in bags.action:
            found = [column for column in reaches if column.spec == spec]
            if not found:
                raise ConfigError(f"bags.action: {_missing(spec, scans)}")
            columns += found
        if space is None:
            space = _found_space(columns, reaches)
        elif len(space.columns) != len(columns):
            got = f"{len(columns)}: {', '.join(column.name for column in columns)[:200]}"
            raise ConfigError(f"bags.action: expected {len(space.columns)} fields, as action_space has, got {got}")
        return cls(folder, video, tuple(columns), bags.clock, space)

    @property
    def declared(self) -> dict[str, str | None]:
        """The topic, the fields and the clock."""
        fields = ", ".join(f"{column.spec}{column.entry}" for column in self.columns)
        return {"video": self.video, "action": fields, "clock": self.clock}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}

    def list_drives(self) -> tuple[str, ...]:
        """The names of the bags. Raises DatasetError if there are none."""
        return tuple(recording.name for recording in find_recordings(self.folder))

    def open_drive(self, name: str) -> SourceDrive:
        """Open one bag; each of its pictures is decoded once, to know which can be shown."""
        recording = next(each for each in find_recordings(self.folder) if each.name == name)
        return _Opening(self, recording, _read(recording, self.video, self.columns)).drive()


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


class _Reach:
    """The least and the greatest of a column's finite values."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)

    def join(self, other: "_Reach") -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass(frozen=True, eq=False)
class _Scan:
    recording: Recording
    topics: tuple[Topic, ...]
    reaches: dict[Column, _Reach]


@dataclass
class _Count:
    type: str
    first: int
    last: int
    count: int = 0
    bytes: int = 0
    picture_size: str | None = None


def _scan(recording: Recording, specs: Sequence[str]) -> _Scan:
    """Read a bag through for its topics and the values of some fields. Raises DatasetError, ConfigError."""
    counts: dict[str, _Count] = {}
    reaches: dict[Column, _Reach] = {}
    readers: dict[str, list[_FieldReader]] = {}
    for message in recording.messages():
        if isinstance(message, Lost):
            continue
        channel, time = message.channel, message.log_time
        count = counts.get(channel.topic)
        if count is None:
            count = counts[channel.topic] = _Count(channel.type, time, time)
            if channel.type in PICTURE_TYPES:
                with suppress(UndecodableError):
                    count.picture_size = message_size(channel.type, channel.decode(message.data))
            readers[channel.topic] = [
                _FieldReader(spec, channel.topic, channel.type, str(recording.path))
                for spec in specs
                if spec.startswith(f"{channel.topic}.")
            ]
        count.count += 1
        count.bytes += len(message.data)
        count.first, count.last = min(count.first, time), max(count.last, time)
        for column, value in _values(readers[channel.topic], message):
            reaches.setdefault(column, _Reach()).add(value)
    topics = tuple(
        Topic(name, each.type, each.count, each.bytes, (each.last - each.first) / 1e9, each.picture_size)
        for name, each in sorted(counts.items())
    )
    return _Scan(recording, topics, reaches)


def _values(readers: "Sequence[_FieldReader]", message: Message) -> Iterator[tuple[Column, float]]:
    if not readers:
        return
    try:
        decoded = message.channel.decode(message.data)
    except UndecodableError:
        return
    for reader in readers:
        yield from reader.read(decoded)


class _FieldReader:
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


def _only_video(folder: Path, scans: Sequence[tuple[Topic, ...]], wanted: str | None) -> str:
    """The topic with the pictures. Raises ConfigError if it is not clear which."""
    pictures: dict[str, Topic] = {}
    others: dict[str, Topic] = {}
    for topics in scans:
        for topic in topics:
            (pictures if topic.is_picture else others).setdefault(topic.name, topic)
    shown = ", ".join(
        f"{each.name} ({each.count} of {each.picture_size or each.type}, {each.bytes / 1e6:.1f} MB)"
        for each in pictures.values()
    )
    if wanted is None and len(pictures) == 1:
        return next(iter(pictures))
    if wanted in pictures:
        assert wanted is not None
        return wanted
    if wanted in others:
        raise ConfigError(f"bags.video: expected a topic of {', '.join(PICTURE_TYPES)}, got {others[wanted].type}")
    if not pictures:
        got = ", ".join(f"{each.name} ({each.type})" for each in others.values()) or "no messages"
        raise DatasetError(f"{folder}: expected a topic of {', '.join(PICTURE_TYPES)}, got {got[:500]}")
    got = "none" if wanted is None else wanted
    raise ConfigError(f"bags.video: expected one of {shown}, got {got}")


def _missing(spec: str, scans: "Sequence[_Scan]") -> str:
    topics = {topic.name: topic for scan in scans for topic in scan.topics}
    for name, topic in topics.items():
        if spec.startswith(f"{name}."):
            return f"{spec}: expected numbers, got {topic.count} messages of {topic.type} without"
    return f"{spec}: {expected_names(sorted(topics), re.split(r'[.]', spec)[0], 'a field of')}"


def _found_space(columns: Sequence[Column], reaches: "Mapping[Column, _Reach]") -> Vector:
    """A vector of the columns, from the least to the greatest value of each. Raises ConfigError."""
    low, high = [], []
    for column in columns:
        reach = reaches[column]
        if reach.low > reach.high:
            raise ConfigError(f"bags.action: {column.spec}{column.entry}: expected finite numbers, got none")
        is_still = reach.low == reach.high
        if is_still:
            logger.warning("%s is always %g: its range is taken to be 1 below to 1 above", column.name, reach.low)
        low.append(reach.low - is_still)
        high.append(reach.high + is_still)
    values = {"names": [each.name for each in columns], "units": [each.unit for each in columns]}
    return checked(Vector, {**values, "low": low, "high": high}, "bags.action", ConfigError)


@dataclass
class _Series:
    """The values of a column: in which message of its topic each stands."""

    messages: array = item(default_factory=lambda: array("q"))
    values: array = item(default_factory=lambda: array("d"))


@dataclass
class _Reading:
    """What a bag has of the chosen topics.

    Attributes:
        kind: the type of the messages with pictures.
        codec: of video; "" for pictures.
        stamps: by topic: for each message its place in the bag, log time and header's time; -1: has none.
        series: the columns' values.
        problems: why a picture can't be shown, by its number among the messages of its topic.
        reasons: the same, in more words, of the first picture.
        lost: where messages are lost: the number of the next picture, and why.
    """

    kind: str
    codec: str = ""
    stamps: dict[str, array] = item(default_factory=dict)
    series: dict[Column, _Series] = item(default_factory=dict)
    problems: dict[int, str] = item(default_factory=dict)
    first_problem: str = ""
    lost: list[tuple[int, str]] = item(default_factory=list)


def _read(recording: Recording, video: str, columns: Sequence[Column]) -> _Reading:
    """Read times and actions of a bag, and decode every picture to see whether it can be shown. Raises DatasetError."""
    reading = _Reading("")
    wanted = dict.fromkeys(columns)
    where = f"{recording.path}: {video}"
    readers: dict[str, list[_FieldReader]] = {}
    checker: UnitChecker | None = None
    still: Still | None = None
    topics = {video, *(column.topic for column in columns)}
    for place, message in enumerate(recording.messages(topics)):
        count = len(reading.stamps.get(video, ())) // 3
        if isinstance(message, Lost):
            reading.lost.append((count, message.reason))
            if checker is not None:
                checker.lose()
            continue
        topic, decoded = message.channel.topic, None
        try:
            decoded = message.channel.decode(message.data)
            stamp = header_time(decoded)
        except UndecodableError as error:
            stamp = 0
            if topic == video:
                _note(reading, count, str(error))
                if checker is not None:
                    checker.lose()
        stamps = reading.stamps.setdefault(topic, array("q"))
        stamps.extend((place, message.log_time, -1 if stamp is None else stamp))
        if decoded is None:
            continue
        if topic == video:
            kind = reading.kind = message.channel.type
            if kind in VIDEO_TYPES:
                reading.codec = check_codec(str(field(decoded, "format")), where)
                checker = checker or UnitChecker(reading.codec, where, reading.problems)
                checker.add(count, binary(decoded), stamp or message.log_time)
            else:
                try:
                    still = still or Still(kind, where)
                    still.read(decoded)
                except UndecodableError as error:
                    _note(reading, count, str(error))
        if topic not in readers:
            specs = dict.fromkeys(column.spec for column in columns if column.topic == topic)
            readers[topic] = [_FieldReader(spec, topic, message.channel.type, str(recording.path)) for spec in specs]
        for reader in readers[topic]:
            for column, value in reader.read(decoded):
                if column in wanted:
                    series = reading.series.setdefault(column, _Series())
                    series.messages.append(len(stamps) // 3 - 1)
                    series.values.append(value)
    if checker is not None:
        checker.finish()
    return reading


def _note(reading: _Reading, number: int, reason: str) -> None:
    reading.problems[number] = _DAMAGED
    reading.first_problem = reading.first_problem or reason


class _Opening:
    """Makes a drive of what was read of a bag."""

    def __init__(self, source: BagSource, recording: Recording, reading: _Reading) -> None:
        self._source, self._recording, self._reading = source, recording, reading
        self._where = str(recording.path)
        self._stamps = {topic: np.array(each, np.int64).reshape(-1, 3) for topic, each in reading.stamps.items()}

    def drive(self) -> SourceDrive:
        """The drive. Raises DatasetError."""
        source, reading, video = self._source, self._reading, self._source.video
        topics = dict.fromkeys((video, *(column.topic for column in source.columns)))
        for topic in topics:
            if topic not in self._stamps:
                raise DatasetError(f"{self._where}: expected messages of {topic}, got none")
        times, words = choose_clocks(
            {
                topic: Stamps(each[:, 1], np.maximum(each[:, 2], 0), bool((each[:, 2] >= 0).any()))
                for topic, each in ((topic, self._stamps[topic]) for topic in topics)
            },
            source.clock,
            self._where,
        )
        problems = dict(reading.problems)
        for number in np.flatnonzero(times[video] <= 0).tolist():
            problems.setdefault(number, "pictures without a time")
        good = np.array([number for number in range(len(times[video])) if number not in problems], np.int64)
        if len(good) < 2:
            first = reading.first_problem or next(iter(problems.values()), "")
            got = f"{len(good)} of {len(times[video])}{f', the first problem being: {first}' if first else ''}"
            raise DatasetError(f"{self._where}: {video}: expected 2 or more pictures that can be shown, got {got}")
        ordered = in_order(times[video][good])
        parts = self._parts([good[part] for part in ordered.parts], times)
        if ordered.num_late:
            words += f"; {ordered.num_late} pictures that came late are in their place"
        clocks = _Parts(parts, times[video], self._stamps[video][:, 0])
        left_out = dict(Counter(problems.values()))
        if ordered.repeated:
            left_out["pictures with the time of another one"] = len(ordered.repeated)
        for _, reason in dict.fromkeys(reading.lost):
            logger.warning("%s: %s: what could be read is imported", self._where, reason)
        return SourceDrive(
            name=self._recording.name,
            track=self._track(times, clocks),
            frame_times=np.concatenate([clocks.seconds(times[video][part], k) for k, part in enumerate(parts)]),
            frames=partial(self._frames, {int(number): frame for frame, number in enumerate(np.concatenate(parts))}),
            intrinsics=None,
            origin=self._where,
            breaks=_breaks(parts, problems, reading.lost),
            left_out=left_out,
            clock=words,
        )

    def _parts(self, parts: list[np.ndarray], times: Mapping[str, Times]) -> list[np.ndarray]:
        """Cut the pictures also where the clock of actions was set back while there were no pictures."""
        places = self._stamps[self._source.video][:, 0]
        for topic in dict.fromkeys(column.topic for column in self._source.columns):
            known = np.flatnonzero(times[topic] > 0)
            rows = self._stamps[topic][known, 0]
            for part in in_order(times[topic][known]).parts[1:]:
                before, after = rows[part[0] - 1], rows[part[0]]
                # Pictures whose clock was set back between the same two messages tell of it themselves.
                if any(
                    places[later].min() > before and places[earlier].max() < after for earlier, later in pairwise(parts)
                ):
                    continue
                halves = [(each[places[each] < after], each[places[each] >= after]) for each in parts]
                parts = [half for pair in halves for half in pair if len(half)]
        return parts

    def _track(self, times: Mapping[str, Times], clocks: "_Parts") -> ActionTrack:
        """The actions of all columns, at every time at which one of them was told. Raises DatasetError."""
        space, named = self._source.space, [f"{each.spec}{each.entry}" for each in self._source.columns]
        series = []
        for column, name in zip(self._source.columns, named, strict=True):
            rows = self._reading.series.get(column)
            count = len(self._stamps[column.topic])
            if rows is None:
                raise DatasetError(f"{self._where}: expected {name} in {count} messages, got none")
            messages, values = np.array(rows.messages, np.int64), np.array(rows.values)
            told = times[column.topic][messages]
            known = np.isfinite(values) & (told > 0)
            if not known.all():
                words = "without a finite number or a time are left out"
                logger.warning("%s: %s: %d of %d messages %s", self._where, name, (~known).sum(), count, words)
            places = self._stamps[column.topic][messages, 0]
            at, kept = clocks.rows(told[known], places[known], f"{self._where}: {name}")
            series.append((at, values[known][kept]))
        at, rows = _joined(series, isinstance(space, Vector), self._where)
        for row, problem in enumerate(map(space.problem, rows)):
            if problem is not None:
                raise DatasetError(f"{self._where}: {at[row]:.3f} s: {problem}")
        return ActionTrack(space, at, rows, self._where)

    def _frames(self, order: Mapping[int, int]) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """Yield the pictures of some messages, by their numbers, in the order of their times."""
        waiting: dict[int, np.ndarray] = {}
        due = 0
        for number, picture in zip(*self._shown(), strict=True):
            if number in order:
                waiting[order[number]] = picture
            while due in waiting:
                yield waiting.pop(due)
                due += 1

    def _shown(self) -> tuple[Iterator[int], Iterator[UInt8[np.ndarray, "height width 3"]]]:
        """The numbers of all messages that can be shown, and their pictures, in the bag's order."""
        problems, video = self._reading.problems, self._source.video
        numbers = [number for number in range(len(self._stamps[video])) if number not in problems]
        where = f"{self._where}: {video}"

        def decoded() -> Iterator[Any]:
            messages = (each for each in self._recording.messages({video}) if isinstance(each, Message))
            for number, message in enumerate(messages):
                if number not in problems:
                    yield message.channel.decode(message.data)

        if self._reading.codec:
            return iter(numbers), stream_units(self._reading.codec, map(binary, decoded()), where)
        return iter(numbers), map(Still(self._reading.kind, where).read, decoded())


class _Parts:
    """The times of a drive whose clock may have been set back: its parts follow each other with a minute between."""

    def __init__(self, parts: Sequence[np.ndarray], times: Times, places: Times) -> None:
        self._first = [int(times[part[0]]) for part in parts]
        self._last = [int(times[part[-1]]) for part in parts]
        self._places = [(int(places[part].min()), int(places[part].max())) for part in parts]
        lengths = [(last - first) / 1e9 + _SET_BACK for first, last in zip(self._first, self._last, strict=True)]
        self._starts = [0.0, *accumulate(lengths)][: len(parts)]

    def seconds(self, times: Times, part: int) -> Float64[np.ndarray, " times"]:
        """Times of a part by the drive's own clock, which begins with 0 at its first picture."""
        return (times - self._first[part]) / 1e9 + self._starts[part]

    def rows(
        self, times: Times, places: Times, where: str
    ) -> tuple[Float64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Put rows in order: their times by the drive's clock, and which rows they are. Raises DatasetError."""
        at, kept = [], []
        for part, (begin, end) in enumerate(self._places):
            # Those between two parts belong to the one by whose clock they go on.
            after = self._places[part - 1][1] if part else -1
            before = self._places[part + 1][0] if part + 1 < len(self._places) else np.iinfo(np.int64).max
            near = np.flatnonzero((places > after) & (places < before))
            pieces = [near[piece] for piece in in_order(times[near]).parts]
            within = [int(((places[piece] >= begin) & (places[piece] <= end)).sum()) for piece in pieces]
            if (len(self._places) == 1 and len(pieces) > 1) or sum(count > _EDGE for count in within) > 1:
                got = f"times that go back {len(pieces) - 1} times within those of the pictures"
                raise DatasetError(f"{where}: expected values at increasing times, got {got}; bags.clock= may help")
            if not pieces:
                continue
            rows = pieces[max(range(len(pieces)), key=lambda number: (within[number], len(pieces[number])))]
            reach = int(_SET_BACK / 3 * 1e9) if len(self._places) > 1 else np.iinfo(np.int64).max // 2
            rows = rows[(times[rows] >= self._first[part] - reach) & (times[rows] <= self._last[part] + reach)]
            kept.append(rows)
            at.append(self.seconds(times[rows], part))
        if not sum(map(len, kept)):
            raise DatasetError(f"{where}: expected values near the pictures, got none")
        return np.concatenate(at), np.concatenate(kept)


def _breaks(
    parts: Sequence[np.ndarray], problems: Mapping[int, str], lost: Sequence[tuple[int, str]]
) -> tuple[Break, ...]:
    """Where a drive is interrupted: behind pictures that are left out, where messages are lost, at a clock set back."""
    numbers = np.maximum.accumulate(np.concatenate(parts))
    found: dict[int, str] = {}
    for number, reason in sorted([*problems.items(), *((before - 1, reason) for before, reason in lost)]):
        found.setdefault(int(np.searchsorted(numbers, number, side="right")), reason)
    for start in accumulate(len(part) for part in parts[:-1]):
        found[start] = "the clock was set back"
    return tuple(Break(frame, found[frame]) for frame in sorted(found) if 0 < frame < len(numbers))


def _joined(
    series: Sequence[tuple[np.ndarray, np.ndarray]], is_linear: bool, where: str
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, "rows columns"]]:
    """Columns of different topics as rows: at each time at which a column was told, and none is silent.

    Between its own times a column is interpolated, or held. Raises DatasetError if no time has all columns.
    """
    first = series[0][0]
    if all(len(at) == len(first) and (at == first).all() for at, _ in series):
        return first, np.column_stack([values for _, values in series])
    at = np.unique(np.concatenate([at for at, _ in series]))
    at = at[(at >= max(each[0] for each, _ in series)) & (at <= min(each[-1] for each, _ in series))]
    for times, _ in series:
        steps = np.diff(times)
        longest = max(_SILENT_SECONDS, _SILENT_PERIODS * float(np.median(steps))) if len(steps) else 0.0
        for row in np.flatnonzero(steps > longest).tolist():
            at = at[(at <= times[row]) | (at >= times[row + 1])]
    if not len(at):
        spans = ", ".join(f"{times[0]:.1f} to {times[-1]:.1f} s" for times, _ in series)
        raise DatasetError(f"{where}: expected times at which all fields of bags.action are told, got {spans[:200]}")
    if is_linear:
        return at, np.column_stack([np.interp(at, times, values) for times, values in series])
    held = [values[np.searchsorted(times, at, side="right") - 1] for times, values in series]
    return at, np.column_stack(held)
