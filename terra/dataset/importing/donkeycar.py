"""Import of donkeycar's tubs (docs.donkeycar.com/utility/donkey): pictures with steering and throttle of a small car.

Each session of a tub is a drive: another day or another place. See `donkeycar_tubs` for which records there are.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Float64, UInt8

from decoder.pictures import picture_problem, picture_size, read_picture
from terra.actions import ActionTrack, Vector
from terra.dataset.importing.donkeycar_tubs import MANIFEST, SPACE, Entry, Loss, Record, Tub, is_tub, read_tub
from terra.dataset.importing.source import Break, SourceDrive
from terra.errors import DatasetError

logger = logging.getLogger(__name__)

_SHORTEST = 10.0  # ms, in the median; records are this close where the times are those of a copy or a conversion
_PAUSE = 5.0  # periods without a record, where picture_fps= says the rate
_SAME_TIME = "records at the time of the one before"


@dataclass(frozen=True)
class DonkeycarSource:
    """A tub of version 1 or 2, or a folder of tubs; the actions are [steering, throttle], each from -1 to 1.

    A tub of one session is a drive named TUB, one of several sessions has the drives TUB_SESSION. With sections each of
    these is cut further, into NAME_00, NAME_01, ...: a tub of one session has nothing else to be held out.

    Attributes:
        folder: the tub, or the folder of tubs.
        picture_fps: records a second, where the records' own times mean nothing; None takes these times.
        sections: into how many drives of equal length each session is cut, so that some can be held out.
    """

    folder: Path
    picture_fps: float | None
    sections: int = 1

    @property
    def space(self) -> Vector:
        """Steering and throttle."""
        return SPACE

    @property
    def declared(self) -> dict[str, str | None]:
        """The pictures' rate, and the number of sections."""
        fps = None if self.picture_fps is None else f"{self.picture_fps:g}"
        return {"picture_fps": fps, "sections": str(self.sections)}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """The tubs of several drives with these; and the sessions with their sections, which show one place."""
        found: dict[str, tuple[str, ...]] = {}
        for tub in self._tubs():
            names = self._names(tub)
            if len(names) > 1:
                found[_name(tub)] = names
            if len(names) > self.sections > 1:
                for name in names:
                    session = name.rpartition("_")[0]
                    found[session] = (*found.get(session, ()), name)
        return found

    def list_drives(self) -> tuple[str, ...]:
        """The names of the drives: of tubs, of sessions or of their sections.

        What is left out of a tub as a whole is logged: sessions without records, and channels that are not used.
        """
        names = tuple(name for tub in self._tubs() for name in self._names(tub, log=True))
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DatasetError(f"{self.folder}: expected tubs and sessions of different names, got {twice[0]} again")
        return names

    def open_drive(self, name: str) -> SourceDrive:
        """Open a session of a tub, or a section of it; the header and the end of each picture are looked at."""
        tub, entries = self._find(name)
        origin = str(tub.folder) if name == _name(tub.folder) else f"{tub.folder}: {name}"
        entries = _without_bad_pictures(entries, tub.pictures)
        timeline = _arrange(entries, self.picture_fps, origin)
        records = timeline.records
        if len(records) < 2:
            raise DatasetError(_too_few(origin, len(records), timeline.left_out, entries))
        for reason, detail in _first_details(entries).items():
            logger.warning("%s: left out: %d %s; the first: %s", origin, timeline.left_out[reason], reason, detail)
        if by_pilot := sum(record.by_pilot for record in records):
            drove = f"the pilot drove {by_pilot} of {len(records)} records"
            logger.info("%s: %s: the actions are the values that drove the car", origin, drove)
        paths = [tub.pictures / record.picture for record in records]

        def frames() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            return map(read_picture, paths)

        return SourceDrive(
            name=name,
            track=ActionTrack(SPACE, timeline.times, np.array([record.values for record in records]), origin),
            frame_times=timeline.times,
            frames=frames,
            intrinsics=None,
            origin=origin,
            breaks=timeline.breaks,
            left_out=timeline.left_out,
            clock="" if self.picture_fps is None else f"picture_fps={self.picture_fps:g}, as declared",
        )

    def _find(self, name: str) -> tuple[Tub, list[Entry]]:
        """The tub of a drive, and its entries of the drive. Raises DatasetError if the tub can't be read."""
        for folder in self._tubs():
            if name == _name(folder) or name.startswith(f"{_name(folder)}_"):
                try:
                    tub = read_tub(folder)
                    drives = self._cut(tub)
                except DatasetError:
                    if name == _name(folder):
                        raise
                    continue  # a drive of another tub, whose name begins with this one's
                if name in drives:
                    return tub, drives[name]
        raise DatasetError(f"{self.folder}: expected a tub with the drive {name}, got none")

    def _names(self, folder: Path, *, log: bool = False) -> tuple[str, ...]:
        try:
            tub = read_tub(folder)
            drives = self._cut(tub, log=log)
        except DatasetError:
            return (_name(folder),)  # where it is opened, what is wrong is said, and other tubs are imported
        if log and tub.unused:
            logger.info("%s: not used as actions: %s", folder, ", ".join(tub.unused))
        if log and tub.shifted:
            deleted = "records are deleted by the positions of their lines, as donkeycar's reader does"
            logger.warning("%s: _index is not the line's position: %s", tub.shifted, deleted)
        return tuple(drives)

    def _cut(self, tub: Tub, *, log: bool = False) -> dict[str, list[Entry]]:
        """The entries of each drive of a tub. Raises DatasetError if no session has two records."""
        sessions: dict[str, list[Entry]] = {}
        for session, entries in tub.sessions().items():
            count = sum(isinstance(entry, Record) for entry in entries)
            if count >= 2:
                sessions[session] = entries
            elif log:
                where = f"{tub.folder}: session {session or 'without a name'} left out"
                logger.warning("%s", _too_few(where, count, _losses(entries), entries))
        if not sessions:
            count = sum(isinstance(entry, Record) for entry in tub.entries)
            raise DatasetError(_too_few(str(tub.folder), count, _losses(tub.entries), tub.entries))
        drives: dict[str, list[Entry]] = {}
        for session, entries in sessions.items():
            name = _name(tub.folder)
            if len(sessions) > 1:
                name = f"{name}_{re.sub(r'[^A-Za-z0-9._-]', '-', session) or 'no_session'}"
            parts = _sections(entries, self.sections)
            for section, part in enumerate(parts):
                each = name if len(parts) == 1 else f"{name}_{section:02d}"
                while each in drives:  # two sessions whose names differ in what no file's name may have
                    each += "-"
                drives[each] = part
        return drives

    def _tubs(self) -> tuple[Path, ...]:
        if is_tub(self.folder):
            return (self.folder,)
        tubs = tuple(path for path in sorted(self.folder.iterdir()) if path.is_dir() and is_tub(path))
        if not tubs:
            expected = f"a donkeycar tub with {MANIFEST} (or record_N.json), or a folder of tubs"
            raise DatasetError(f"{self.folder}: expected {expected}, got none")
        return tubs


@dataclass(frozen=True, eq=False)
class _Timeline:
    """The records of a drive with their times (s, increasing), where it is interrupted, and what is left out."""

    records: list[Record]
    times: Float64[np.ndarray, " records"]
    breaks: tuple[Break, ...]
    left_out: Counter[str]


def _arrange(entries: list[Entry], picture_fps: float | None, origin: str) -> _Timeline:
    """Time the records by their own clock, or by their numbers, and find where the drive is interrupted.

    With `picture_fps` the clock is heeded only for interruptions, and only if it shows about this rate. Where the clock
    is set back, the times go on after those before.

    Raises:
        DatasetError: records whose own times can't be those of a drive.
    """
    if picture_fps is None:
        entries = [_without_time(entry) for entry in entries]
    clock = [entry.milliseconds for entry in entries if isinstance(entry, Record) and entry.milliseconds is not None]
    period = float(np.median(np.abs(np.diff(clock)))) if len(clock) > 1 else 0.0
    has_clock = picture_fps is None or 0.5 <= period * picture_fps / 1000 <= 2
    if picture_fps is None and len(clock) > 1 and period < _SHORTEST:
        got = f"one each {period:g} ms, as a copy or a conversion leaves them: give picture_fps=, such as 20"
        raise DatasetError(f"{origin}: expected times of at most {1000 / _SHORTEST:g} records a second, got {got}")
    if picture_fps is not None and has_clock:
        got = f"one each {period:g} ms in the median"
        logger.warning("%s: its records have times, %s: they are exact without picture_fps=", origin, got)
    records: list[Record] = []
    elapsed: list[float] = []
    breaks: list[Break] = []
    left_out: Counter[str] = Counter()
    reason, expected = "", 0
    for entry in entries:
        if isinstance(entry, Loss):
            left_out[entry.reason] += 1
            reason = reason or entry.reason
            continue
        step = 0.0
        if records:
            now, before = entry.milliseconds, records[-1].milliseconds
            step = now - before if has_clock and now is not None and before is not None else period
            if picture_fps is None and step == 0 and not reason:
                left_out[_SAME_TIME] += 1
                expected = entry.number + 1
                continue
            if not reason and entry.number != expected:
                reason = "records are missing"
            if not reason and step < 0:
                reason = "the clock was set back"
            if not reason and picture_fps is not None and step > _PAUSE * period:
                reason = "the recording was paused"
            if reason:
                breaks.append(Break(len(records), reason))
        elapsed.append(elapsed[-1] + (step if step > 0 else period) if elapsed else 0.0)
        records.append(entry)
        reason, expected = "", entry.number + 1
    times = np.array(elapsed) / 1000
    if picture_fps is not None:
        times = np.array([record.number - records[0].number for record in records]) / picture_fps
    return _Timeline(records, times, tuple(breaks), left_out)


def _without_time(entry: Entry) -> Entry:
    """A record without a time as one that is left out; any other as it is."""
    if isinstance(entry, Record) and entry.milliseconds is None:
        return Loss(entry.number, entry.session, "records without a time, which picture_fps= would give")
    return entry


def _without_bad_pictures(entries: list[Entry], folder: Path) -> list[Entry]:
    """Leave out records whose picture is missing, cut off or of another size than most."""
    sizes: dict[int, tuple[int, int] | None] = {}
    looked: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Record):
            path = folder / entry.picture
            problem = picture_problem(path) if path.is_file() else "no such file"
            if problem is None:
                sizes[entry.number] = picture_size(path.read_bytes())
            else:
                wrong = f"{path}: expected a picture, got {problem}"
                entry = Loss(entry.number, entry.session, "records with a missing or damaged picture", wrong)
        looked.append(entry)
    most = Counter(sizes.values()).most_common(1)
    for row, entry in enumerate(looked):
        if isinstance(entry, Record) and sizes[entry.number] != most[0][0]:
            expected, got = (" x ".join(map(str, each or ())) for each in (most[0][0], sizes[entry.number]))
            wrong = f"{folder / entry.picture}: expected {expected} pixels as in most pictures, got {got}"
            looked[row] = Loss(entry.number, entry.session, "records with a picture of another size", wrong)
    return looked


def _sections(entries: list[Entry], count: int) -> list[list[Entry]]:
    """Cut entries into parts with equal numbers of records; what is left out belongs to the part before it."""
    rows = [row for row, entry in enumerate(entries) if isinstance(entry, Record)]
    starts = np.linspace(0, len(rows), count + 1).round().astype(int)[1:-1]
    bounds = [0, *(rows[start] if start < len(rows) else len(entries) for start in starts), len(entries)]
    return [entries[start:end] for start, end in pairwise(bounds)]


def _losses(entries: Sequence[Entry]) -> Counter[str]:
    return Counter(entry.reason for entry in entries if isinstance(entry, Loss))


def _first_details(entries: Sequence[Entry]) -> dict[str, str]:
    """What is wrong with the first entry of each reason for which something is wrong."""
    first: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Loss) and entry.detail:
            first.setdefault(entry.reason, entry.detail)
    return first


def _too_few(where: str, count: int, left_out: Counter[str], entries: Sequence[Entry]) -> str:
    """A message: "tub: expected 2 or more records, got 0 (left out: 40 deleted records)", and the first problem."""
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
    details = list(_first_details(entries).values())
    got = f"{count} (left out: {reasons})" if reasons else f"{count}"
    return f"{where}: expected 2 or more records, got {got}" + (f"; the first problem: {details[0]}" if details else "")


def _name(tub: Path) -> str:
    return tub.absolute().name
