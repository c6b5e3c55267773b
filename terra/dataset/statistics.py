"""Statistics of a dataset's splits, as a table for the card and the terminal."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from terra.actions import Vector, require_table
from terra.dataset.episode import Episode
from terra.dataset.motion import MIN_TURNING

SPEED_EDGES = (0.0, 0.5, 5.0, 10.0, 15.0, 20.0, 30.0, math.inf)  # m/s


@dataclass(frozen=True)
class Statistics:
    """Statistics of one split.

    Attributes:
        meters: distance driven in the episodes' videos; None in worlds without poses.
        lengths: smallest, median and largest number of an episode's frames.
        speeds: number of frames in each range between `SPEED_EDGES`.
        turning: number of frames in which the car turns (left, right) faster than `MIN_TURNING`.
        actions: in worlds without poses, for each key or choice the share of frames with it, in percent, and of each
            number of a vector least, mean and greatest.
        places: number of places of each source.
        weathers, maneuvers: number of episodes of each kind.
        events: number of events of each kind.
    """

    num_shards: int
    num_episodes: int
    num_frames: int
    hours: float
    meters: float | None
    lengths: tuple[int, int, int]
    speeds: tuple[int, ...]
    turning: tuple[int, int]
    actions: dict[str, str]
    places: Counter[str]
    weathers: Counter[str]
    events: Counter[str]
    maneuvers: Counter[str]


def split_statistics(episodes: Sequence[Episode]) -> Statistics:
    """Compute the statistics of episodes from their facts and poses."""
    speeds = np.zeros(len(SPEED_EDGES) - 1, np.int64)
    meters, left, right = 0.0, 0, 0
    driven = [episode for episode in episodes if episode.motion is not None]
    for episode in driven:
        poses, count = episode.poses, episode.num_frames
        speeds += np.histogram(np.abs(poses.speed[:count]), SPEED_EDGES)[0]
        meters += float(np.hypot(np.diff(poses.x[:count]), np.diff(poses.y[:count])).sum())
        rates = np.diff(poses.heading[: count + 1]) * episode.fps
        left, right = left + int((rates > MIN_TURNING).sum()), right + int((rates < -MIN_TURNING).sum())
    lengths = sorted(episode.num_frames for episode in episodes) or [0]
    return Statistics(
        num_shards=len({episode.video.parent for episode in episodes}),
        num_episodes=len(episodes),
        num_frames=sum(episode.num_frames for episode in episodes),
        hours=sum(episode.seconds for episode in episodes) / 3600,
        meters=meters if len(driven) == len(episodes) else None,
        lengths=(lengths[0], lengths[len(lengths) // 2], lengths[-1]),
        speeds=tuple(speeds.tolist()),
        turning=(left, right),
        actions=_action_statistics([episode for episode in episodes if episode.motion is None]),
        places=Counter(source for source, _ in {(episode.source, episode.place) for episode in episodes}),
        weathers=Counter(episode.weather for episode in episodes),
        events=Counter(what for episode in episodes for _, what in episode.events),
        maneuvers=Counter(episode.maneuver for episode in episodes if episode.maneuver is not None),
    )


def _action_statistics(episodes: Sequence[Episode]) -> dict[str, str]:
    """The rows of a table about actions, each with its cell; none without episodes. All but the last actions count."""
    if not episodes:
        return {}
    space = require_table(episodes[0].space, "statistics")
    values = np.concatenate([each.actions[:-1] for each in episodes if each.actions is not None])
    if not len(values):
        return {}
    if isinstance(space, Vector):
        named = zip(space.names, space.units, values.T, strict=True)
        return {
            f"{name}{f' ({unit})' if unit else ''}, least, mean, greatest": (
                f"{column.min():.3g}, {column.mean():.3g}, {column.max():.3g}"
            )
            for name, unit, column in named
        }
    shares = space.rows(values)[:, 0].mean(axis=0)
    return {f"frames with {name}": f"{share:.1%}" for name, share in zip(space.names, shares, strict=True)}


def tabulate(splits: Mapping[str, Statistics]) -> dict[str, list[str]]:
    """Make a table of statistics: label of a row -> one cell per split; rows without any count are left out."""
    columns = list(splits.values())
    rows = {
        "shards": [f"{stats.num_shards:,}" for stats in columns],
        "episodes": [f"{stats.num_episodes:,}" for stats in columns],
        "frames": [f"{stats.num_frames:,}" for stats in columns],
        "frames of an episode": [
            f"{least:,}" if least == most else f"{least:,} to {most:,}, median {middle:,}"
            for least, middle, most in (stats.lengths for stats in columns)
        ],
        "hours": [_rounded(stats.hours) for stats in columns],
    }
    if any(stats.meters is not None for stats in columns):
        rows["kilometers"] = ["" if stats.meters is None else _rounded(stats.meters / 1000) for stats in columns]
    for name in dict.fromkeys(name for stats in columns for name in stats.actions):
        rows[name] = [stats.actions.get(name, "") for stats in columns]
    titles = {"places": "places, {}", "weathers": "episodes, {}", "maneuvers": "futures, {}", "events": "events, {}"}
    for name, title in titles.items():
        counters: list[Counter[str]] = [getattr(stats, name) for stats in columns]
        for word in sorted(set().union(*counters)):
            rows[title.format(word)] = [f"{counter[word]:,}" for counter in counters]
    shares = {f"turning {side}": [stats.turning[k] for stats in columns] for k, side in enumerate(("left", "right"))}
    for index, (low, high) in enumerate(pairwise(SPEED_EDGES)):
        label = f"{low:g} to {high:g} m/s" if math.isfinite(high) else f"{low:g} m/s and more"
        shares[label] = [stats.speeds[index] for stats in columns]
    for label, counts in shares.items():
        if any(counts):
            cells = zip(counts, columns, strict=True)
            rows[f"frames, {label}"] = [f"{count / max(1, stats.num_frames):.1%}" for count, stats in cells]
    return rows


def _rounded(value: float) -> str:
    """Format with three significant digits, and without decimals from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
