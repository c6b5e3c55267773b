"""Import of bags: MCAP, ROS 1 and ROS 2, with pictures of one topic or several, and any fields as actions."""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from terra.actions import TableSpace, Vector
from terra.dataset.checks import Names
from terra.dataset.importing.bag_clock import Clock
from terra.dataset.importing.bag_drive import Selection, open_bag
from terra.dataset.importing.bag_fields import Column, FieldReader, field_readers
from terra.dataset.importing.bag_files import Lost, Recording, UndecodableError, find_recordings
from terra.dataset.importing.bag_pictures import PICTURE_TYPES, message_size
from terra.dataset.importing.source import SourceDrive, say_left_out
from terra.errors import ConfigError, DatasetError
from terra.views import MOST_VIEWS
from tokenizer.settings import Settings, checked, expected_names

logger = logging.getLogger(__name__)

_OTHER_CHARACTER = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST = 64  # characters of a camera's name


def _topics(value: object) -> object:
    """The names of topics, of which a single one may stand alone."""
    return (value,) if isinstance(value, str | int) else value


class Bags(Settings):
    """What of a bag is imported.

    Attributes:
        video: the topic with the pictures, or those of 2 to 4 cameras, the main one first; None takes the only one.
        action: fields, such as "/cmd_vel.linear.x", "/joint_states.position[3]", "/joint_states.position[elbow]" by the
            message's `name`, or "/joint_states.position" for all its numbers.
        clock: "header" takes messages' own times, "log" the recorder's, "auto" their own where they are set.
    """

    video: Annotated[Names, BeforeValidator(_topics)] | None = None
    action: Names = ()
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
        videos: the topic with the pictures, or those of several cameras, the main one first.
        columns: the fields that are the actions, in the order of the space's columns.
        clock: see `Bags`.
        space: what the actions mean.
        shapes: (height, width) of each topic's first picture; () if that of one can't be told without decoding.
    """

    folder: Path
    videos: tuple[str, ...]
    columns: tuple[Column, ...]
    clock: Clock
    space: TableSpace
    shapes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def open(cls, folder: Path, bags: Bags, space: TableSpace | None) -> "BagSource":
        """Find topics and columns, and without a `space` the range of each column, over all bags of a folder.

        Raises:
            ConfigError: no fields, or a topic or a field that is not there.
            DatasetError: no bags, or no pictures.
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
        videos = _videos(folder, [each.topics for each in scans], bags.video)
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
        return cls(folder, videos, tuple(columns), bags.clock, space, _shapes(scans, videos))

    @property
    def declared(self) -> dict[str, str | None]:
        """The topics, the fields and the clock."""
        fields = ", ".join(f"{column.spec}{column.entry}" for column in self.columns)
        return {"video": ",".join(self.videos), "action": fields, "clock": self.clock}

    @property
    def views(self) -> tuple[str, ...]:
        """The cameras by the part of their topics that tells them apart: "front" of /front/image; () of one camera."""
        return view_names(self.videos) if len(self.videos) > 1 else ()

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}

    def list_drives(self) -> tuple[str, ...]:
        """The names of the bags. Raises DatasetError if there are none."""
        recordings = find_recordings(self.folder)
        parts = (recording.path.relative_to(self.folder).parts for recording in recordings)
        used = [self.folder / first for first, *_ in filter(None, parts)]
        if self.folder not in (recording.path for recording in recordings):
            say_left_out(self.folder, used, "bags")
        return tuple(recording.name for recording in recordings)

    def open_drive(self, name: str) -> SourceDrive:
        """Open one bag; each of its pictures is decoded once, to know which can be shown."""
        recording = next(each for each in find_recordings(self.folder) if each.name == name)
        videos = dict(zip(self.views or ("",), self.videos, strict=True))
        return open_bag(recording, Selection(videos, self.columns, self.space, self.clock))


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
    readers: dict[str, list[FieldReader]] = {}
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
            readers[channel.topic] = field_readers(specs, channel.topic, channel.type, str(recording.path))
        count.count += 1
        count.bytes += len(message.data)
        count.first, count.last = min(count.first, time), max(count.last, time)
        with suppress(UndecodableError):
            decoded = channel.decode(message.data) if readers[channel.topic] else None
            for reader in readers[channel.topic]:
                for column, value in reader.read(decoded):
                    reaches.setdefault(column, _Reach()).add(value)
    topics = tuple(
        Topic(name, each.type, each.count, each.bytes, (each.last - each.first) / 1e9, each.picture_size)
        for name, each in sorted(counts.items())
    )
    return _Scan(recording, topics, reaches)


def view_names(topics: Sequence[str]) -> tuple[str, ...]:
    """A name for the camera of each topic: its first part that no other has, else all parts that not all have.

    Args:
        topics: different topics, such as "/camera/front/image_raw" and "/camera/wrist/image_raw".

    Returns:
        Different names, as `terra.views.check_view_names` has them: "front" and "wrist".
    """
    parts = [[part for part in topic.split("/") if part] for topic in topics]
    num_with = Counter(part for each in parts for part in set(each))
    choices = (
        [[part for part in each if num_with[part] == 1][:1] for each in parts],
        [[part for part in each if num_with[part] < len(topics)] for each in parts],
        parts,
    )
    for choice in choices:
        names = [_OTHER_CHARACTER.sub("_", "_".join(each)).strip("_-")[:_LONGEST] for each in choice]
        if all(names) and len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"camera{number}" for number in range(len(topics)))


def _videos(folder: Path, scans: Sequence[tuple[Topic, ...]], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The topics with the pictures. Raises ConfigError if it is not clear which, and DatasetError without any."""
    pictures: dict[str, Topic] = {}
    others: dict[str, Topic] = {}
    for topics in scans:
        for topic in topics:
            (pictures if topic.is_picture else others).setdefault(topic.name, topic)
    if wanted is None and len(pictures) == 1:
        return tuple(pictures)
    if wanted is not None and not 1 <= len(wanted) <= MOST_VIEWS:
        got = ", ".join(wanted) or "none"
        raise ConfigError(f"bags.video: expected 1 to {MOST_VIEWS} topics, got {got}")
    for name in wanted or ():
        if name in others:
            got = f"{others[name].type} of {name}"
            raise ConfigError(f"bags.video: expected a topic of {', '.join(PICTURE_TYPES)}, got {got}")
    if not pictures:
        got = ", ".join(f"{each.name} ({each.type})" for each in others.values()) or "no messages"
        raise DatasetError(f"{folder}: expected a topic of {', '.join(PICTURE_TYPES)}, got {got[:500]}")
    unknown = [name for name in wanted or () if name not in pictures]
    if wanted is None or unknown:
        shown = ", ".join(
            f"{each.name} ({each.count} of {each.picture_size or each.type}, {each.bytes / 1e6:.1f} MB)"
            for each in pictures.values()
        )
        several = "" if len(pictures) == 1 else ", or a list of several"
        raise ConfigError(f"bags.video: expected one of {shown}{several}, got {', '.join(unknown) or 'none'}")
    return tuple(wanted)


def _shapes(scans: "Sequence[_Scan]", videos: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(height, width) of each topic's first picture; () if one can't be told."""
    topics = [topic for scan in reversed(scans) for topic in scan.topics]
    sizes = {topic.name: topic.picture_size.split("x") for topic in topics if topic.picture_size is not None}
    if not sizes.keys() >= set(videos):
        return ()
    return tuple((int(sizes[video][1]), int(sizes[video][0])) for video in videos)


def _missing(spec: str, scans: "Sequence[_Scan]") -> str:
    topics = {topic.name: topic for scan in scans for topic in scan.topics}
    for name, topic in topics.items():
        if spec.startswith(f"{name}."):
            return f"{spec}: expected numbers, got {topic.count} messages of {topic.type} without"
    return f"{spec}: {expected_names(sorted(topics), spec.partition('.')[0], 'a field of')}"


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
