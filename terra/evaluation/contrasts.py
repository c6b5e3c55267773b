"""Counterfactual groups: one start with several instructed futures, whose generated motions must keep their order."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from terra.dataset import Episode
from terra.evaluation.clips import Clip, clip_seed
from terra.evaluation.motion import Steps


@dataclass(frozen=True)
class Contrast:
    """Maneuvers in falling order of `measure`, which differs by `gap` or more between neighbors in the recordings."""

    name: str
    maneuvers: tuple[str, ...]
    measure: Callable[[Steps], float]
    gap: float


def _heading(steps: Steps) -> float:
    return float(np.degrees(steps[:, 1].sum()))


def _distance(steps: Steps) -> float:
    return float(steps[:, 0].sum())


CONTRASTS = (
    # Counter-clockwise is positive, so that left has the largest heading; degrees.
    Contrast("turning", ("left", "straight", "right"), _heading, 10.0),
    Contrast("stopping", ("straight", "stop"), _distance, 3.0),  # meters
)


@dataclass(frozen=True, eq=False)
class CounterfactualGroup:
    """Two or more futures of one start, as clips in the contrast's order; all begin with the first clip's context."""

    contrast: Contrast
    clips: tuple[Clip, ...]

    def is_ordered(self, steps: Sequence[Steps]) -> bool:
        """Whether the measure of the futures' motions falls strictly in the contrast's order."""
        values = [self.contrast.measure(each) for each in steps]
        return all(before > after for before, after in pairwise(values))


def find_groups(
    episodes: Sequence[Episode],
    contrast: Contrast,
    *,
    num_frames: int,
    num_context: int,
    agree_within: float,
    max_groups: int,
    seed: int,
) -> tuple[list[CounterfactualGroup], dict[str, int]]:
    """Choose at most `max_groups` groups that show the contrast, evenly spread; count those left out, by reason.

    The last context frame is the latest frame up to which the true positions of the futures agree within
    `agree_within` meters. It is as late as possible before the decision, so that the futures differ within the few
    frames that are generated. A group is left out if a recording has fewer than `num_frames` frames, if the context
    would begin before the recording, or if the recorded futures do not differ by the contrast's gap in its order.
    """
    futures: dict[tuple[str, str, str], dict[str, Episode]] = {}
    for episode in episodes:
        if episode.group is not None and episode.maneuver in contrast.maneuvers:
            futures.setdefault((episode.source, episode.place, episode.group), {})[episode.maneuver] = episode
    left_out: Counter[str] = Counter()
    groups = []
    for key, future in sorted(futures.items()):
        ordered = [future[maneuver] for maneuver in contrast.maneuvers if maneuver in future]
        start = _last_common_frame(ordered, agree_within) - num_context + 1 if len(ordered) > 1 else -1
        if len(ordered) < 2:
            left_out["one future only"] += 1
        elif start < 0:
            left_out["futures part too early"] += 1
        elif min(episode.num_frames for episode in ordered) < start + num_frames:
            left_out["recording too short"] += 1
        else:
            name = "_".join((*key, contrast.name, f"{start:05d}", str(num_frames)))
            lengths = {"num_frames": num_frames, "num_context": num_context}
            group = _group(contrast, ordered, name, start, lengths, seed)
            if _differs(group):
                groups.append(group)
            else:
                left_out["recorded futures too similar"] += 1
    chosen = np.unique(np.linspace(0, len(groups) - 1, min(max_groups, len(groups))).round().astype(int))
    return [groups[index] for index in chosen], dict(left_out)


def _group(
    contrast: Contrast, futures: Sequence[Episode], name: str, start: int, lengths: Mapping[str, int], seed: int
) -> CounterfactualGroup:
    # All futures share one seed, so that they differ in their instructions alone.
    clips = (
        Clip(f"{name}_{episode.maneuver}", episode, start, **lengths, seed=clip_seed(seed, name)) for episode in futures
    )
    return CounterfactualGroup(contrast, tuple(clips))


def _last_common_frame(futures: Sequence[Episode], agree_within: float) -> int:
    """The last frame up to which all positions agree; -1 if the first positions differ already."""
    length = min(episode.num_frames for episode in futures)
    places = [np.stack([episode.poses.x[:length], episode.poses.y[:length]]) for episode in futures]
    apart = np.max([np.hypot(*(a - b)) for a, b in combinations(places, 2)], axis=0) > agree_within
    return int(np.argmax(apart)) - 1 if apart.any() else length - 1


def _differs(group: CounterfactualGroup) -> bool:
    values = [group.contrast.measure(clip.instructed) for clip in group.clips]
    return all(before - after >= group.contrast.gap for before, after in pairwise(values))
