"""A look at all drives of a source, or at a sample of them, before an import: what each has, and what would be kept."""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from terra.actions import ActionTrack
from terra.dataset.importing.recognize.found import some
from terra.dataset.importing.source import DriveSource, SourceDrive
from terra.dataset.poses import Poses
from terra.errors import TerraError
from terra.progress import ProgressLine

_MOST_NUMBERS = 20_000_000  # of tracks and times that are held: 160 MB
_VARIES = 0.1  # share of the median interval
_GAP = 2.5  # median intervals


@dataclass(frozen=True)
class Timing:
    """The times of a drive's frames.

    Attributes:
        num_frames: how many there are.
        seconds: from the first to the last, without the time in its breaks and gaps.
        rate: frames a second, in the median.
        mean_rate: frames a second, in the mean.
        is_variable: whether more than a tenth of the intervals are off the median by a tenth or more.
    """

    num_frames: int
    seconds: float
    rate: float
    mean_rate: float
    is_variable: bool

    @property
    def fps(self) -> float:
        """A rate that the drive has nearly everywhere."""
        return min(self.rate, self.mean_rate) if self.is_variable else self.rate

    @classmethod
    def of(cls, drive: SourceDrive) -> "Timing":
        """The timing of a drive's frames, without the steps over its breaks."""
        times = drive.frame_times
        steps = np.delete(np.diff(times), [each.frame - 1 for each in drive.breaks if 0 < each.frame < len(times)])
        steps = steps[steps > 0]
        if not len(steps):
            return cls(len(times), 0.0, math.nan, math.nan, False)
        middle = float(np.median(steps))
        steps = steps[steps <= _GAP * middle]
        seconds = float(steps.sum())
        varies = float((np.abs(steps - middle) > _VARIES * middle).mean()) > 0.1
        return cls(len(times), seconds, 1 / middle, len(steps) / seconds, varies)


@dataclass(eq=False)
class Survey:
    """What was seen of a source.

    Attributes:
        names: all drives, by name.
        recordings: which drives were cut from one recording, see `DriveSource.recordings`.
        drives: those that were opened, in the order of `names`.
        timings: the timing of each of `drives`.
        num_tried: how many were tried within the time; the others were not looked at.
        problems: (drive, what is wrong with it).
    """

    names: tuple[str, ...]
    recordings: Mapping[str, tuple[str, ...]]
    drives: list[SourceDrive] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    num_tried: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def driven(self) -> list[SourceDrive]:
        """The drives with poses."""
        return [drive for drive in self.drives if isinstance(drive.track, Poses)]

    @property
    def played(self) -> list[tuple[str, ActionTrack]]:
        """The drives with actions: (name, actions)."""
        return [(drive.name, drive.track) for drive in self.drives if isinstance(drive.track, ActionTrack)]


def survey(source: DriveSource, max_seconds: float) -> Survey:
    """Open the drives of a source, evenly spread ones first, until all are open or the time is over.

    Args:
        source: the source.
        max_seconds: no drive is opened after so long; the first one always is.

    Raises:
        TerraError: the source is invalid.
    """
    names = source.list_drives()
    seen = Survey(names, source.recordings)
    started, numbers = monotonic(), 0
    until = started + max_seconds
    with ProgressLine("looking", len(names)) as line:
        for index in _evenly(len(names)):
            if seen.num_tried and (monotonic() > until or numbers > _MOST_NUMBERS):
                break
            seen.num_tried += 1
            try:
                drive = source.open_drive(names[index])
            except TerraError as error:
                seen.problems.append((names[index], str(error)))
            else:
                seen.drives.append(drive)
                numbers += len(drive.frame_times) + _numbers(drive)
            if seen.num_tried < len(names):
                left = (monotonic() - started) / seen.num_tried * (len(names) - seen.num_tried)
                words = f"{seen.num_tried} of {len(names)} drives"
                line.show(seen.num_tried, words, seconds_left=min(left, max(until - monotonic(), 0.0)))
    place = {name: index for index, name in enumerate(names)}
    seen.drives.sort(key=lambda drive: place[drive.name])
    seen.problems.sort(key=lambda problem: place[problem[0]])
    seen.timings = [Timing.of(drive) for drive in seen.drives]
    return seen


def once_each(problems: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each kind of problem: the first one, and how many and which other drives have the same.

    Lines are the same if they differ in numbers and in the drive's name alone.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, line in problems:
        kind = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "*", line)
        groups.setdefault(re.sub(r"\d+(\.\d+)?", "0", kind), []).append((name, line))
    lines = []
    for group in groups.values():
        others = list(dict.fromkeys(name for name, _ in group[1:] if name != group[0][0]))
        lines.append(group[0][1] + (f" (so in {len(others)} more: {some(others, 3)})" if others else ""))
    return lines


def spans(values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest value of each column over all drives."""
    return np.min([each.min(axis=0) for each in values], axis=0), np.max([each.max(axis=0) for each in values], axis=0)


def _numbers(drive: SourceDrive) -> int:
    return drive.track.values.size if isinstance(drive.track, ActionTrack) else 7 * len(drive.track.time)


def _evenly(count: int) -> list[int]:
    """The numbers from 0 on, in an order of which each beginning is evenly spread."""
    bits = max(count - 1, 0).bit_length()
    backwards = (int(f"{number:0{bits}b}"[::-1], 2) if bits else number for number in range(1 << bits))
    return [number for number in backwards if number < count]


class Notes(logging.Handler):
    """What sources say while a block looks at them; nothing of it is printed meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._by_kind: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._by_kind.setdefault(str(record.msg), []).append(record.getMessage())

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take what is said within the block."""
        logger = logging.getLogger("terra.dataset.importing")
        propagates, level = logger.propagate, logger.level
        logger.propagate = False
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.propagate = propagates
            logger.setLevel(level)

    def lines(self) -> list[str]:
        """One line for each kind of note: the first one, and how many others there are."""
        kinds = [list(dict.fromkeys(each)) for each in self._by_kind.values()]
        return [each[0] + (f" (and {len(each) - 1} more such lines)" if len(each) > 1 else "") for each in kinds]
