"""A bag as a drive: its messages are read in one pass, then ordered by time, and pictures are matched with actions."""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field as item
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from terra.actions import ActionTrack, TableSpace, Vector
from terra.dataset.importing.bag_clock import Clock, Stamps, Times, choose_clocks, in_order
from terra.dataset.importing.bag_fields import Column, FieldReader, field_readers
from terra.dataset.importing.bag_files import Lost, Message, Recording, UndecodableError, binary, field, header_time
from terra.dataset.importing.bag_pictures import VIDEO_TYPES, Still
from terra.dataset.importing.bag_shared import SharedReading
from terra.dataset.importing.bag_video import UnitChecker, check_codec, stream_units
from terra.dataset.importing.source import Break, Footage, SourceDrive
from terra.errors import DatasetError

logger = logging.getLogger(__name__)

Numbers = Int64[np.ndarray, " messages"]
Rows = tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, "rows columns"]]

_EDGE = 8  # messages of one clock that may stand among those of another
_NEAR = 20e9  # ns from the pictures between two settings of the clock, within which an action belongs to them
_LAP = 1e6  # s by which a drive's own time goes back where its clock was set back
_GAP = 2.5  # of the usual step: longer, and a field that is told regularly is silent
_REGULAR = 0.9  # of the steps of such a field are usual
_UNDECODABLE = "pictures that can't be decoded"
_UNTIMED = "pictures without a time"
_WITHOUT_ACTIONS = "pictures between two settings of the clock, without actions"
_BETWEEN = "pictures between two settings of the clock"
_REPEATED = "pictures with the time of another one"
_SET_BACK = "the clock was set back"


@dataclass(frozen=True)
class Selection:
    """What of a bag becomes a drive.

    Attributes:
        videos: the topic with the pictures of each camera, by the cameras' names; the first is the main one.
        columns: the columns of actions.
        space: what they mean.
        clock: whose times count.
    """

    videos: Mapping[str, str]
    columns: tuple[Column, ...]
    space: TableSpace
    clock: Clock

    @property
    def video(self) -> str:
        """The topic of the main camera."""
        return next(iter(self.videos.values()))

    @property
    def topics(self) -> frozenset[str]:
        """All topics that are read."""
        return frozenset((*self.videos.values(), *(column.topic for column in self.columns)))


def open_bag(recording: Recording, selection: Selection) -> SourceDrive:
    """Open a bag as a drive; each of its pictures is decoded once, to know which can be shown. Raises DatasetError."""
    return _Bag(recording, selection, _read(recording, selection)).drive()


@dataclass
class _Series:
    """The values of a column, and in which message of its topic each stands."""

    messages: array = item(default_factory=lambda: array("q"))
    values: array = item(default_factory=lambda: array("d"))


@dataclass
class _Pictures:
    """What a topic with pictures has.

    Attributes:
        kind: the messages' type.
        codec: of video; "" of pictures.
        count: how many messages there are.
        problems: why a picture can't be shown, by its number among the messages of its topic.
        first_problem: the same of the first one, in more words.
        lost: where messages are lost: the number of the next picture, and why.
    """

    kind: str = ""
    codec: str = ""
    count: int = 0
    problems: dict[int, str] = item(default_factory=dict)
    first_problem: str = ""
    lost: list[tuple[int, str]] = item(default_factory=list)


@dataclass
class _Reading:
    """What a bag has of the chosen topics.

    Attributes:
        pictures: the pictures of each topic of a camera.
        stamps: by topic, for each message three numbers: its place in the bag, its log time, and its header's time (0:
            not set, -1: has none).
        series: the columns' values.
    """

    pictures: Mapping[str, _Pictures]
    stamps: dict[str, array] = item(default_factory=dict)
    series: dict[Column, _Series] = item(default_factory=dict)


class _PictureChecker:
    """Decodes the pictures of a topic one after another, and notes which can't be shown."""

    def __init__(self, pictures: _Pictures, where: str) -> None:
        self._pictures, self._where = pictures, where
        self._still: Still | None = None
        self._units: UnitChecker | None = None

    def add(self, message: Message, decoded: Any, time: int) -> None:
        """Take the next picture. Raises DatasetError if pictures of its kind can't be shown."""
        pictures, kind = self._pictures, message.channel.type
        codec = check_codec(str(field(decoded, "format")), self._where) if kind in VIDEO_TYPES else ""
        if pictures.kind and (pictures.kind, pictures.codec) != (kind, codec):
            got = f"{pictures.kind} {pictures.codec}".strip(), f"{kind} {codec}".strip()
            raise DatasetError(f"{self._where}: expected messages of one type, got {got[0]} and {got[1]}")
        pictures.kind, pictures.codec = kind, codec
        if codec:
            self._units = self._units or UnitChecker(pictures.codec, self._where, pictures.problems)
            self._units.add(pictures.count, binary(decoded), time)
            return
        try:
            self._still = self._still or Still(kind, self._where)
            self._still.read(decoded)
        except UndecodableError as error:
            self.note(str(error))

    def note(self, problem: str) -> None:
        """Take note that the next picture can't be decoded."""
        self._pictures.problems[self._pictures.count] = _UNDECODABLE
        self._pictures.first_problem = self._pictures.first_problem or problem
        self._interrupt()

    def lose(self, reason: str) -> None:
        """Take note that messages are lost here."""
        self._pictures.lost.append((self._pictures.count, reason))
        self._interrupt()

    def _interrupt(self) -> None:
        if self._units is not None:
            self._units.lose()

    def finish(self) -> None:
        """Decode what is left."""
        if self._units is not None:
            self._units.finish()


def _read(recording: Recording, selection: Selection) -> _Reading:
    """Read the times and the actions of a bag, and see which pictures can be shown. Raises DatasetError."""
    pictures = {video: _Pictures() for video in selection.videos.values()}
    reading = _Reading(pictures)
    checkers = {video: _PictureChecker(each, f"{recording.path}: {video}") for video, each in pictures.items()}
    specs = dict.fromkeys(column.spec for column in selection.columns)
    readers: dict[str, list[FieldReader]] = {}
    wanted = frozenset(selection.columns)
    for place, message in enumerate(recording.messages(selection.topics)):
        if isinstance(message, Lost):
            for checker in checkers.values():
                checker.lose(message.reason)
            continue
        channel, stamp, decoded = message.channel, 0, None
        topic = channel.topic
        checker = checkers.get(topic)
        try:
            decoded = channel.decode(message.data)
            stamp = header_time(decoded)
            if checker is not None:
                checker.add(message, decoded, stamp or message.log_time)
        except UndecodableError as error:
            if checker is not None:
                checker.note(str(error))
        stamps = reading.stamps.setdefault(topic, array("q"))
        stamps.extend((place, message.log_time, -1 if stamp is None else stamp))
        if checker is not None:
            pictures[topic].count += 1
        if decoded is None:
            continue
        if topic not in readers:
            readers[topic] = field_readers(specs, topic, channel.type, str(recording.path))
        for reader in readers[topic]:
            for column, value in reader.read(decoded):
                if column in wanted:
                    series = reading.series.setdefault(column, _Series())
                    series.messages.append(len(stamps) // 3 - 1)
                    series.values.append(value)
    for checker in checkers.values():
        checker.finish()
    return reading


@dataclass(frozen=True, eq=False)
class _Told:
    """The values of a column that are finite and have a time, in the order of the bag; or a camera's pictures.

    Attributes:
        name: the column, or the topic.
        places: of the messages in the bag.
        times: theirs, in ns.
        values: the column's values, or the numbers of the pictures.
    """

    name: str
    places: Numbers
    times: Times
    values: Float64[np.ndarray, " rows"] | Numbers


class _Bag:
    """A bag's messages, which become a drive."""

    def __init__(self, recording: Recording, selection: Selection, reading: _Reading) -> None:
        self._recording, self._selection, self._reading = recording, selection, reading
        self._where = str(recording.path)
        topics = list(dict.fromkeys((*selection.videos.values(), *(column.topic for column in selection.columns))))
        for topic in topics:
            if topic not in reading.stamps:
                raise DatasetError(f"{self._where}: expected messages of {topic}, got none")
        table = {topic: np.array(reading.stamps[topic], np.int64).reshape(-1, 3) for topic in topics}
        self._places = {topic: each[:, 0] for topic, each in table.items()}
        told = {
            topic: Stamps(each[:, 1], np.maximum(each[:, 2], 0), bool((each[:, 2] >= 0).any()))
            for topic, each in table.items()
        }
        self._times, self._clock = choose_clocks(told, selection.clock, self._where)
        self._shared: SharedReading | None = None

    def drive(self) -> SourceDrive:
        """The drive. Raises DatasetError."""
        main = self._selection.video
        times, (good, problems) = self._times[main], self._good(main)
        ordered = in_order(times[good])
        columns = self._columns()
        cameras = {name: self._camera(video) for name, video in self._selection.videos.items() if video != main}
        laps = self._laps([good[part] for part in ordered.parts], [*columns, *cameras.values()])
        tracks = [self._track(columns, laps, lap) for lap in range(len(laps))]
        for lap, track in zip(laps, tracks, strict=True):
            if track is None:
                problems |= dict.fromkeys(lap.tolist(), _WITHOUT_ACTIONS)
        rows = [track for track in tracks if track is not None]
        if not rows:
            raise DatasetError(f"{self._where}: expected times at which all of bags.action are told, got none")
        is_kept = [track is not None for track in tracks]
        others = {name: self._footage(camera, laps, is_kept) for name, camera in cameras.items()}
        laps = [lap for lap, keeps in zip(laps, is_kept, strict=True) if keeps]
        laps = [self._heard(lap, columns, problems) if len(columns) > 1 else lap for lap in laps]
        if not sum(map(len, laps)):
            raise DatasetError(f"{self._where}: expected pictures while all of bags.action are told, got none")
        left_out = Counter(problems.values())
        left_out[_REPEATED] = len(ordered.repeated)
        for reason in dict.fromkeys(reason for _, reason in self._reading.pictures[main].lost):
            logger.warning("%s: %s: what could be read is imported", self._where, reason)
        late = f"; {ordered.num_late} pictures that came late are in their place" if ordered.num_late else ""
        order = np.concatenate(laps)
        return SourceDrive(
            name=self._recording.name,
            track=self._checked(
                np.concatenate([at - lap * _LAP for lap, (at, _) in enumerate(rows)]),
                np.concatenate([values for _, values in rows]),
            ),
            frame_times=self._frame_times(main, laps),
            frames=partial(self._frames, main, {int(number): frame for frame, number in enumerate(order)}),
            intrinsics=None,
            origin=self._where,
            breaks=_breaks(laps, problems, self._reading.pictures[main].lost),
            left_out=_nonzero(left_out),
            clock=self._clock + late,
            others=others,
        )

    def _good(self, video: str) -> tuple[Numbers, dict[int, str]]:
        """The numbers of the pictures that can be shown, and why the others can't. Raises DatasetError if all can't."""
        pictures, times = self._reading.pictures[video], self._times[video]
        problems = dict(pictures.problems)
        for number in np.flatnonzero(times <= 0).tolist():
            problems.setdefault(number, _UNTIMED)
        good = np.array([number for number in range(len(times)) if number not in problems], np.int64)
        if len(good) < 2:
            first = pictures.first_problem or next(iter(problems.values()), "")
            got = f"{len(good)} of {len(times)}{f', the first problem being: {first}' if first else ''}"
            raise DatasetError(f"{self._where}: {video}: expected 2 or more pictures that can be shown, got {got}")
        return good, problems

    def _camera(self, video: str) -> _Told:
        good, _ = self._good(video)
        return _Told(video, self._places[video][good], self._times[video][good], good)

    def _footage(self, camera: _Told, laps: Sequence[Numbers], is_kept: Sequence[bool]) -> Footage:
        """The pictures of a further camera in those laps of the main one that are kept. Raises DatasetError."""
        video = camera.name
        _, problems = self._good(video)
        repeated: set[int] = set()
        found: list[Numbers] = []
        offsets: list[float] = []
        for lap in range(len(laps)):
            rows, again = self._belonging(camera, laps, lap)
            found.append(camera.values[rows].astype(np.int64))
            repeated.update(camera.values[again].tolist())
            offsets += self._offset(camera, rows, laps[lap])
        if len(offsets) > 1 and np.ptp(offsets) > _GAP * max(map(_period, (camera.times, *self._times_of(laps)))):
            got = f"{np.ptp(offsets) / 1e9:.3g} s apart before and after a clock was set back"
            raise DatasetError(
                f"{self._where}: {video}: expected the clock of {self._selection.video}, got times {got}"
            )
        # Between two laps a picture may go on by either clock.
        times_found = Counter(np.concatenate(found).tolist())
        own = [
            np.array([number for number in lap.tolist() if times_found[number] == 1], np.int64)
            for lap, keeps in zip(found, is_kept, strict=True)
            if keeps
        ]
        order = np.concatenate(own)
        if len(order) < 2:
            got = f"{len(order)} of {len(self._times[video])}"
            expected = f"2 or more pictures by the clock of {self._selection.video}"
            raise DatasetError(f"{self._where}: {video}: expected {expected}, got {got}")
        repeated -= set(order.tolist())
        problems |= dict.fromkeys(set(camera.values.tolist()) - set(order.tolist()) - repeated, _BETWEEN)
        left_out = Counter(problems.values())
        left_out[_REPEATED] = len(repeated)
        return Footage(
            self._frame_times(video, own),
            partial(self._frames, video, {int(number): frame for frame, number in enumerate(order)}),
            breaks=_breaks(own, problems, self._reading.pictures[video].lost),
            left_out=_nonzero(left_out),
        )

    def _offset(self, camera: _Told, rows: Numbers, lap: Numbers) -> list[float]:
        """What a camera's times are ahead of the main one's among which its messages stand, in ns; [] without such."""
        numbers = np.sort(lap)
        places = self._places[self._selection.video][numbers]
        among = rows[(camera.places[rows] >= places[0]) & (camera.places[rows] <= places[-1])]
        told = np.interp(camera.places[among], places, self._times[self._selection.video][numbers])
        return [float(np.median(camera.times[among] - told))] if len(among) else []

    def _times_of(self, laps: Sequence[Numbers]) -> list[Times]:
        return [self._times[self._selection.video][lap] for lap in laps]

    def _frame_times(self, video: str, laps: Sequence[Numbers]) -> Float64[np.ndarray, " pictures"]:
        times = self._times[video]
        return np.concatenate([self._seconds(times[part]) - lap * _LAP for lap, part in enumerate(laps)])

    def _seconds(self, times: Times) -> Float64[np.ndarray, " messages"]:
        """Seconds after the main camera's first picture."""
        known = self._times[self._selection.video]
        return (times - known[known > 0][0]) / 1e9

    def _columns(self) -> list[_Told]:
        """The columns' values. Raises DatasetError if a column has none."""
        columns = []
        for column in self._selection.columns:
            name, count = f"{column.spec}{column.entry}", len(self._times[column.topic])
            series = self._reading.series.get(column, _Series())
            messages, values = np.array(series.messages, np.int64), np.array(series.values)
            times, places = self._times[column.topic][messages], self._places[column.topic][messages]
            known = np.isfinite(values) & (times > 0)
            if not known.any():
                raise DatasetError(f"{self._where}: expected finite numbers in {name}, got none in {count} messages")
            if not known.all():
                words = "without a finite number or a time are left out"
                logger.warning("%s: %s: %d of %d messages %s", self._where, name, (~known).sum(), count, words)
            columns.append(_Told(name, places[known], times[known], values[known]))
        return columns

    def _laps(self, laps: list[Numbers], columns: Sequence[_Told]) -> list[Numbers]:
        """Cut the pictures also where the clock of actions or of another camera was set back while there were none."""
        places = self._places[self._selection.video]
        for column in columns:
            for lap in in_order(column.times).parts[1:]:
                before, after = column.places[lap[0] - 1], column.places[lap[0]]
                # Pictures whose clock was set back between the same two messages tell of it themselves.
                if not any(places[b].min() > before and places[a].max() < after for a, b in pairwise(laps)):
                    halves = [(each[places[each] < after], each[places[each] >= after]) for each in laps]
                    laps = [half for pair in halves for half in pair if len(half)]
        return laps

    def _track(self, columns: Sequence[_Told], laps: Sequence[Numbers], lap: int) -> Rows | None:
        """The actions near the pictures of a lap; None if some column has none. Raises DatasetError."""
        series = []
        for column in columns:
            rows, _ = self._belonging(column, laps, lap)
            if not len(rows):
                return None
            series.append((self._seconds(column.times[rows]), column.values[rows]))
        return _joined(series, isinstance(self._selection.space, Vector))

    def _belonging(self, column: _Told, laps: Sequence[Numbers], lap: int) -> tuple[Numbers, Numbers]:
        """The rows near the pictures of a lap by their clock, in order of time, and those that repeat a time.

        Raises:
            DatasetError: rows whose clock goes back where that of the pictures doesn't.
        """
        places, times = self._places[self._selection.video], self._times[self._selection.video]
        begin, end = places[laps[lap]].min(), places[laps[lap]].max()
        # Those between two laps belong to the one by whose clock they go on.
        after = places[laps[lap - 1]].max() if lap else -1
        before = places[laps[lap + 1]].min() if lap + 1 < len(laps) else np.iinfo(np.int64).max
        near = np.flatnonzero((column.places > after) & (column.places < before))
        ordered = in_order(column.times[near])
        pieces = [near[piece] for piece in ordered.parts]
        within = [int(((column.places[each] >= begin) & (column.places[each] <= end)).sum()) for each in pieces]
        if (len(laps) == 1 and len(pieces) > 1) or sum(count > _EDGE for count in within) > 1:
            got = "some that go back where those of the pictures don't; bags.clock= may help"
            raise DatasetError(f"{self._where}: {column.name}: expected increasing times, got {got}")
        best = max(range(len(pieces)), key=lambda piece: (within[piece], len(pieces[piece])), default=None)
        if best is None or (len(laps) > 1 and not within[best]):
            return near[:0], near[:0]  # they do not stand among the pictures: it is not known by which clock they are
        rows = pieces[best]
        if len(laps) > 1:
            first, last = times[laps[lap]][[0, -1]]
            rows = rows[(column.times[rows] >= first - _NEAR) & (column.times[rows] <= last + _NEAR)]
        return rows, near[ordered.repeated]

    def _heard(self, lap: Numbers, columns: Sequence[_Told], problems: dict[int, str]) -> Numbers:
        """The pictures at which no column is silent that is told regularly; the others become problems.

        Rows of several topics together don't show that one of them is silent. Where all columns are of one message the
        track itself shows it.
        """
        if all(np.array_equal(columns[0].places, column.places) for column in columns[1:]):
            return lap
        times = self._times[self._selection.video]
        period = float(np.median(np.diff(times[lap]))) if len(lap) > 1 else 0.0
        for column in columns:
            steps = np.diff(column.times)
            usual = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
            if not len(steps) or (np.abs(steps - usual) < usual / 2).mean() <= _REGULAR:
                continue  # it is told when it changes, and holds
            for row in np.flatnonzero(steps > _GAP * max(usual, period)).tolist():
                told = times[lap]
                is_silent = (told > column.times[row] + usual) & (told < column.times[row + 1])
                problems |= dict.fromkeys(lap[is_silent].tolist(), f"pictures while {column.name} is silent")
                lap = lap[~is_silent]
        return lap

    def _checked(self, at: Float64[np.ndarray, " rows"], values: Float64[np.ndarray, "rows columns"]) -> ActionTrack:
        space = self._selection.space
        for row, problem in enumerate(map(space.problem, values)):
            if problem is not None:
                raise DatasetError(f"{self._where}: {at[row]:.3f} s: {problem}")
        return ActionTrack(space, at, values, self._where)

    def _frames(self, video: str, order: Mapping[int, int]) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """Yield the pictures of some messages of a topic, by their numbers, in the order of their times."""
        waiting: dict[int, np.ndarray] = {}
        due = 0
        for number, picture in zip(*self._shown(video), strict=True):
            if number in order:
                waiting[order[number]] = picture
            while due in waiting:
                yield waiting.pop(due)
                due += 1

    def _shown(self, video: str) -> tuple[Iterator[int], Iterator[UInt8[np.ndarray, "height width 3"]]]:
        """The numbers of all messages of a topic that can be shown, and their pictures, in the bag's order."""
        pictures, where = self._reading.pictures[video], f"{self._where}: {video}"
        numbers = (number for number in range(len(self._times[video])) if number not in pictures.problems)
        messages = enumerate(self._messages(video))
        decoded = (each.channel.decode(each.data) for number, each in messages if number not in pictures.problems)
        if pictures.codec:
            return numbers, stream_units(pictures.codec, map(binary, decoded), where)
        return numbers, map(Still(pictures.kind, where).read, decoded)

    def _messages(self, video: str) -> Iterator[Message]:
        """The messages of a topic; cameras whose pictures are asked for together share one reading of the bag."""
        if self._shared is None or self._shared.has_begun(video):
            # The same topics as before: a reader of a damaged bag stops where it can't read one of them.
            read = partial(self._recording.messages, self._selection.topics)
            self._shared = SharedReading(read, tuple(self._selection.videos.values()))
        return self._shared.messages(video)


def _breaks(laps: Sequence[Numbers], problems: Mapping[int, str], lost: Sequence[tuple[int, str]]) -> tuple[Break, ...]:
    """Where a drive is interrupted: behind pictures that are left out, where messages are lost, at a clock set back."""
    numbers = np.maximum.accumulate(np.concatenate(laps))
    found: dict[int, str] = {}
    for number, reason in sorted([*problems.items(), *((before - 1, reason) for before, reason in lost)]):
        found.setdefault(int(np.searchsorted(numbers, number, side="right")), reason)
    for start in accumulate(len(lap) for lap in laps[:-1]):
        found[start] = _SET_BACK
    return tuple(Break(frame, found[frame]) for frame in sorted(found) if 0 < frame < len(numbers))


def _period(times: Times) -> float:
    """Nanoseconds between two messages, in the median; 0 of fewer than two."""
    steps = np.diff(times)
    return float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0


def _nonzero(counts: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}


def _joined(series: Sequence[tuple[np.ndarray, np.ndarray]], is_linear: bool) -> Rows | None:
    """Columns of different topics as rows, one at each time at which a column was told; None if no time has all.

    Between its own times a column is interpolated, or held.
    """
    first = series[0][0]
    if all(np.array_equal(at, first) for at, _ in series):
        return first, np.column_stack([values for _, values in series])
    at = np.unique(np.concatenate([at for at, _ in series]))
    at = at[(at >= max(each[0] for each, _ in series)) & (at <= min(each[-1] for each, _ in series))]
    if not len(at):
        return None
    if is_linear:
        return at, np.column_stack([np.interp(at, times, values) for times, values in series])
    return at, np.column_stack([values[np.searchsorted(times, at, side="right") - 1] for times, values in series])
