"""The frames of held-out drives that show again what was seen before, by which memory is measured."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from terra.dataset import Episode
from terra.errors import DatasetError
from terra.evaluation.clips import Clip, clip_seed
from terra.memory import MemoryRule, covered

logger = logging.getLogger(__name__)

# The same for all models, whatever they were trained with.
VIEW = MemoryRule(frames=1, field_of_view=90.0, range=40.0)
AGE_SECONDS = 3.0
SEEN_AGAIN, OUT_OF_VIEW = 0.6, 0.1  # shares of a view that another frame covers
AGES = (10, 20, 40)  # s


@dataclass(frozen=True, eq=False)
class Revisit:
    """Frames of a drive that comes back to what it has seen.

    Attributes:
        clip: what is generated. The frames of the drive before `clip.start` are given as a map; without any, this is a
            whole drive, which is generated from its first frames.
        kind: the first event of the drive's recording, such as circle, out_and_back or block.
        frames: the clip's generated frames that show again what was seen, in order.
        before: for each of these the earlier frame of the drive that covers most of its view. It lies before the clip,
            or anywhere in a whole drive.
    """

    clip: Clip
    kind: str
    frames: Int64[np.ndarray, " revisits"]
    before: Int64[np.ndarray, " revisits"]

    @property
    def seconds(self) -> float:
        """The time since what is seen again was in view: the median over frames."""
        return float(np.median(self.clip.start + self.frames - self.before)) / self.clip.episode.fps

    @property
    def age(self) -> int:
        """`seconds`, as the one of `AGES` whose ratio to it is nearest to 1."""
        return min(AGES, key=lambda age: abs(np.log(self.seconds / age)))


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


@dataclass(frozen=True, eq=False)
class Drive:
    """A drive, and what `find_revisits` finds in it."""

    episode: Episode
    frames: Int64[np.ndarray, " revisits"]
    before: Int64[np.ndarray, " revisits"]


def choose_drives(episodes: Sequence[Episode], count: int) -> list[Drive]:
    """Choose `count` drives at most, spread evenly over the episodes that belong to no group; leave out one-way drives.

    Raises:
        DatasetError: none comes back.
    """
    usable = [each for each in episodes if each.group is None and each.motion is not None]
    chosen = [usable[index * len(usable) // count] for index in range(count)] if usable else []
    drives = [Drive(each, *find_revisits(poses_of(each), each.fps)) for each in dict.fromkeys(chosen)]
    found = [each for each in drives if len(each.frames)]
    if count and not found:
        raise DatasetError("revisit_clips: expected drives that come back (terra record revisit=1), got none")
    if len(found) < len(drives):
        logger.info("%d of %d drives come back", len(found), len(drives))
    return found


def returns_of(drive: Drive, *, num_frames: int, num_context: int, seed: int) -> list[Revisit]:
    """At most one return for each of `AGES`, in their order: that with the most frames that count, the first of equals.

    A return has `num_frames` frames. What it shows again was seen before them.
    """
    best: dict[int, Revisit] = {}
    for start in range(1, drive.episode.num_frames - num_frames + 1):
        at = (drive.frames >= start + num_context) & (drive.frames < start + num_frames) & (drive.before < start)
        if at.any():
            revisit = _revisit(drive, at, start, num_frames, num_context, seed)
            if revisit.age not in best or len(revisit.frames) > len(best[revisit.age].frames):
                best[revisit.age] = revisit
    return [best[age] for age in sorted(best)]


def loop_of(drive: Drive, *, num_context: int, seed: int) -> Revisit:
    """The whole drive, generated from its first `num_context` frames; what these show does not count."""
    at = drive.before >= num_context
    return _revisit(drive, at, 0, drive.episode.num_frames, num_context, seed)


def _revisit(
    drive: Drive, at: Bool[np.ndarray, " revisits"], start: int, num_frames: int, num_context: int, seed: int
) -> Revisit:
    name = f"{drive.episode.id}_revisit_{start:05d}_{num_frames}"
    clip = Clip(name, drive.episode, start, num_frames, num_context, clip_seed(seed, name))
    kind = drive.episode.events[0][1] if drive.episode.events else "drive"
    return Revisit(clip, kind, drive.frames[at] - start, drive.before[at])


def poses_of(episode: Episode) -> Float[np.ndarray, "frames 3"]:
    """x, y (m) and heading (rad) at each of an episode's frames. Raises DatasetError where it is no driving."""
    poses = episode.poses
    return np.stack([poses.x, poses.y, poses.heading], axis=1)[: episode.num_frames]
