"""Times of messages: which clock tells them, in which order they belong, and where that clock was set back."""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

from terra.errors import DatasetError

Clock = Literal["auto", "header", "log"]
Times = Int64[np.ndarray, " messages"]

_LATE = 8  # messages that may follow a later one
_HOLE = 0.6  # of the usual distance: what a late message needs to both sides; one of a clock set back has at most half
_LOOKED_AT = 64  # of the latest messages
_SAME_CLOCK = 1e9  # ns between a header's time and its logging, if both clocks tell the same


@dataclass(frozen=True, eq=False)
class Stamps:
    """The times of a topic's messages, in the order of the bag.

    Attributes:
        log: when each was logged, ns.
        header: what its header says, ns; 0 where it says nothing.
        has_header: whether the type has such a field at all.
    """

    log: Times
    header: Times
    has_header: bool

    @property
    def is_stamped(self) -> bool:
        """Whether the headers tell most messages apart."""
        return 2 * len(np.unique(self.header[self.header > 0])) > len(self.header)

    @property
    def offset(self) -> float:
        """Nanoseconds from the header's time to the logging, in the median."""
        known = self.header > 0
        return float(np.median(self.log[known] - self.header[known])) if known.any() else 0.0


def choose_clocks(stamps: Mapping[str, Stamps], clock: Clock, where: str) -> tuple[dict[str, Times], str]:
    """The times of each topic's messages (ns; 0: unknown), and a few words on the clocks.

    Headers count where they are set, unless topics would then be told by clocks that differ by more than a second.

    Raises:
        DatasetError: `clock` is "header", and a topic has no such times.
    """
    topics = [topic for topic, each in stamps.items() if len(each.log)]
    by_header = [topic for topic in topics if stamps[topic].is_stamped]
    by_log = [topic for topic in topics if topic not in by_header]
    if clock == "header" and by_log:
        got = "headers that don't tell messages apart" if stamps[by_log[0]].has_header else "a type without"
        raise DatasetError(f"{where}: bags.clock=header: expected header.stamp in {by_log[0]}, got {got}")
    if clock == "log":
        by_header, by_log = [], topics
    reason = ""
    if clock == "auto" and by_header:
        offsets = {topic: stamps[topic].offset for topic in by_header} | dict.fromkeys(by_log, 0.0)
        apart = max(offsets.values()) - min(offsets.values())
        if apart > _SAME_CLOCK:
            by_header, by_log = [], topics
            reason = f", because headers tell times {apart / 1e9:.3g} s apart"
    times = {topic: stamps[topic].header if topic in by_header else stamps[topic].log for topic in stamps}
    words = [
        f"{name} of {', '.join(part)}" for name, part in (("header.stamp", by_header), ("log time", by_log)) if part
    ]
    return times, " and ".join(words) + reason


@dataclass(frozen=True)
class Stretches:
    """Messages in the order of their times.

    Attributes:
        parts: the indexes of messages, in stretches within which times increase; the clock was set back before each but
            the first.
        repeated: the indexes of those that have the time of another one.
        num_late: how many came behind a later one and were put in order.
    """

    parts: list[list[int]]
    repeated: list[int]
    num_late: int


def in_order(times: Times) -> Stretches:
    """Put messages in order that came a little late, and find out where the clock was set back.

    A late message fills a hole between others. After a clock was set back the times go on beside those before.
    """
    steps = np.diff(times)
    usual = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
    parts: list[list[int]] = [[0]] if len(times) else []
    repeated: list[int] = []
    num_late, at = 0, 1
    while at < len(times):
        part = parts[-1]
        if times[at] > times[part[-1]]:
            part.append(at)
        elif times[at] == times[part[-1]]:
            repeated.append(at)
        else:
            end = at
            while end < min(at + _LATE, len(times)) and times[end] <= times[part[-1]]:
                end += 1
            ends_here = end < len(times) and times[end] <= times[part[-1]]
            late = list(range(at, end))
            merged = (
                None if ends_here else _merged([(int(times[i]), i) for i in part[-_LOOKED_AT:]], late, times, usual)
            )
            if merged is None:
                parts.append([at])
            else:
                kept, doubled = merged
                part[-_LOOKED_AT:] = kept
                repeated += doubled
                num_late += len(late) - len(doubled)
                at = end
                continue
        at += 1
    return Stretches(parts, repeated, num_late)


def _merged(
    tail: list[tuple[int, int]], late: list[int], times: Times, usual: float
) -> tuple[list[int], list[int]] | None:
    """The latest messages with some late ones among them, and those that repeat a time; None if they don't fit in."""
    doubled: list[int] = []
    for index in late:
        time = int(times[index])
        place = bisect_left(tail, (time, -1))
        if place == 0:
            return None
        if place < len(tail) and tail[place][0] == time:
            doubled.append(index)
            continue
        nearest = min(abs(time - tail[each][0]) for each in (place - 1, place) if each < len(tail))
        if nearest < _HOLE * usual:
            return None
        insort(tail, (time, index))
    # A whole run of doubled times is a clock that was set back by whole periods.
    if len(doubled) == len(late) and len(late) > 1:
        return None
    return [index for _, index in tail], doubled
