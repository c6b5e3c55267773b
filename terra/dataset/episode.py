"""The episodes of a dataset as its reader returns them: facts and poses are checked, videos are not yet decoded."""

from dataclasses import dataclass
from pathlib import Path

from decoder.camera import Camera
from terra.actions import ActionSpace
from terra.actions.space import Values
from terra.dataset.poses import Poses
from terra.errors import DatasetError
from terra.views import Views


@dataclass(frozen=True, eq=False)
class Episode:
    """One drive, or a part of one: its facts and poses have been checked, its video has not been read.

    Attributes:
        id: name of the episode, unique in the dataset; its video has the same stem.
        split: "train" or "held_out".
        source: name of the source ("town", "kitti", ...).
        place: the town or drive; `source` and `place` name the shard.
        weather: the source's word for the weather, or "unknown".
        num_frames: number of the video's frames.
        fps: frames per second.
        image_size: (height, width) in pixels.
        events: (frame, event) in the order of the frames: left, right, straight (into a junction), stop, ...
        space: what the actions between the frames mean.
        motion: the vehicle's pose at each frame and for 3 s after the last frame; None where actions are no waypoints.
        actions: the values of the action space at each frame, (frames, columns); None where actions are waypoints. The
            last one leads nowhere.
        video: path of the MP4.
        video_sha256: SHA-256 of the MP4's bytes, in hexadecimal.
        group: name of the start that several futures share, or None.
        maneuver: name of this future in its group, or None.
        num_context: number of first frames that all futures of the group share; 0 without a group.
        camera: the camera of all the shard's frames; None if the source does not describe it.
        views: the cameras whose pictures share each frame; None for one camera.
    """

    id: str
    split: str
    source: str
    place: str
    weather: str
    num_frames: int
    fps: float
    image_size: tuple[int, int]
    events: tuple[tuple[int, str], ...]
    space: ActionSpace
    motion: Poses | None
    actions: Values | None
    video: Path
    video_sha256: str
    group: str | None
    maneuver: str | None
    num_context: int
    camera: Camera | None
    views: Views | None = None

    @property
    def poses(self) -> Poses:
        """The poses of an episode of driving. Raises DatasetError for another world."""
        if self.motion is None:
            raise DatasetError(f"{self.video}: expected an episode of driving, got one of {self.space.title}")
        return self.motion

    @property
    def seconds(self) -> float:
        """Duration of the video."""
        return self.num_frames / self.fps


@dataclass(frozen=True)
class Split:
    """The readable episodes of a split, ordered by shard, then as they were recorded.

    `damaged` has one line for each shard or episode that was left out, which says why.
    """

    episodes: tuple[Episode, ...]
    damaged: tuple[str, ...]
