"""What a reader of a dataset gets: checked episodes, whose video is decoded only when asked for."""

from dataclasses import dataclass
from pathlib import Path

from decoder.camera import Camera
from terra.dataset.poses import Poses


@dataclass(frozen=True, eq=False)
class Episode:
    """One drive, or a part of one: its facts and its poses, checked; the video is not read.

    Attributes:
        id: its name, once in a dataset; also that of its video.
        split: "train" or "held_out".
        source: where it came from ("town", "kitti", ...).
        place: the town or drive; with `source` the name of its shard.
        weather: a word of the source's, or "unknown".
        num_frames: frames of the video.
        fps: frames a second.
        image_size: (height, width) in pixels.
        events: (frame, what) in the order of the frames: left, right, straight (into a junction), stop, ...
        poses: those of the frames, and of 3 s more.
        video: the MP4.
        video_sha256: of the MP4's bytes, in hexadecimal.
        group: the start that this is one future of, or None.
        maneuver: which future of the group, or None.
        num_context: the first frames that all futures of the group share; 0 without a group.
        camera: that of all frames of the shard; None if the source doesn't say.
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
    poses: Poses
    video: Path
    video_sha256: str
    group: str | None
    maneuver: str | None
    num_context: int
    camera: Camera | None

    @property
    def seconds(self) -> float:
        """How long the video is."""
        return self.num_frames / self.fps


@dataclass(frozen=True)
class Split:
    """The readable episodes of a split, ordered by shard, then as they were recorded.

    `damaged` says, a line each, why something was left out.
    """

    episodes: tuple[Episode, ...]
    damaged: tuple[str, ...]
