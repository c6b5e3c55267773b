"""The frames of held-out drives that show again what was seen before, by which memory is measured."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from terra.dataset import Episode
from terra.errors import DatasetError
from terra.evaluation.clips import Clip, clip_seed
from terra.memory import MemoryRule, covered

logger = logging.getLogger(__name__)

# The same for all models, whatever they were trained with.
VIEW = MemoryRule(frames=1, field_of_view=90.0, range=40.0)
AGE_SECONDS = 3.0
SEEN_AGAIN, OUT_OF_VIEW = 0.6, 0.1  # shares of a view that another frame covers


@dataclass(frozen=True, eq=False)
class Revisit:
    """A clip that comes back to what it has seen.

    Attributes:
        clip: the clip.
        kind: the first event of its recording, such as circle, out_and_back or block.
        frames: the clip's generated frames that show again what was seen, in order.
        before: for each of these the earlier frame that covers most of its view.
    """

    clip: Clip
    kind: str
    frames: Int64[np.ndarray, " revisits"]
    before: Int64[np.ndarray, " revisits"]


def find_revisits(
    poses: Float64[np.ndarray, "frames 3"], fps: float
) -> tuple[Int64[np.ndarray, " revisits"], Int64[np.ndarray, " revisits"]]:
    """The frames that show again what was seen, and for each the earlier frame that covers most of its view.

    A frame counts if a frame that is at least 3 s older covers 60 % of its view (`terra.memory.covered`), and if the
    camera looked elsewhere in between: the older frame covers less than 10 % of some frame's view.

    Args:
        poses: x, y (m) and heading (rad) at each frame.
        fps: frames a second.
    """
    covers = np.stack([covered(VIEW, poses, pose) for pose in poses])  # [frame, earlier frame]
    order = np.arange(len(poses))
    between = np.where(order[:, None] > order, covers, np.inf)
    left = np.minimum.accumulate(between, axis=0)
    was_left = np.pad(left[:-1], ((1, 0), (0, 0)), constant_values=np.inf) < OUT_OF_VIEW
    is_old = order[:, None] - order >= round(AGE_SECONDS * fps)
    best = np.where(is_old & was_left, covers, 0.0)
    frames = np.flatnonzero(best.max(axis=1) >= SEEN_AGAIN)
    return frames, best[frames].argmax(axis=1)


def choose_revisits(
    episodes: Sequence[Episode], count: int, *, num_frames: int, num_context: int, seed: int
) -> list[Revisit]:
    """At most `count` drives that come back, spread evenly over the episodes that belong to no group.

    A clip is an episode's beginning. Drives that do not come back within `num_frames` are left out.

    Raises:
        DatasetError: no drive comes back.
    """
    usable = [each for each in episodes if each.group is None and each.motion is not None]
    chosen = [usable[index * len(usable) // count] for index in range(count)] if usable else []
    found = []
    for episode in dict.fromkeys(chosen):
        length = min(num_frames, episode.num_frames)
        frames, before = find_revisits(poses_of(episode)[:length], episode.fps)
        kept = frames >= num_context
        if kept.any():
            name = f"{episode.id}_revisit_{length}"
            clip = Clip(name, episode, 0, length, num_context, clip_seed(seed, name))
            kind = episode.events[0][1] if episode.events else "drive"
            found.append(Revisit(clip, kind, frames[kept], before[kept]))
    if count and not found:
        expected = f"drives that come back within revisit_frames={num_frames} (terra record revisit=1)"
        raise DatasetError(f"revisit_clips: expected {expected}, got none")
    if len(found) < len(set(chosen)):
        logger.info("%d of %d drives come back within %d frames", len(found), len(set(chosen)), num_frames)
    return found


def poses_of(episode: Episode) -> Float[np.ndarray, "frames 3"]:
    """x, y (m) and heading (rad) at each of an episode's frames. Raises DatasetError where it is no driving."""
    poses = episode.poses
    return np.stack([poses.x, poses.y, poses.heading], axis=1)[: episode.num_frames]
