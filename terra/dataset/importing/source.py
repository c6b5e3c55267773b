"""The interface of an import source: it opens drives, each with frames, their times, and the motion or actions."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from decoder.video import VIDEO_SUFFIXES, probe_video, stream_video
from terra.actions import ActionSpace, ActionTrack, Waypoints
from terra.context import DAMAGED_IMAGE, check_scans, is_picture, natural_key
from terra.dataset.poses import Poses
from terra.errors import ConfigError, DatasetError
from tokenizer.limits import LIMITS, Limits

logger = logging.getLogger(__name__)

_NAMED = 5  # files named in a line


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera with square pixels: focal length and principal point, in pixels of the source's pictures."""

    focal: float
    center_x: float
    center_y: float

    def moved(self, left: float, top: float) -> "Intrinsics":
        """The intrinsics of a part of the picture whose upper left corner lies there."""
        return Intrinsics(self.focal, self.center_x - left, self.center_y - top)


@dataclass(frozen=True)
class Break:
    """An interruption of a recording before the frame `frame` (an index into the frames' times), and why."""

    frame: int
    reason: str


@dataclass(frozen=True, eq=False)
class SourceDrive:
    """One drive at the source's own frame rate and size; its values are not checked yet.

    Attributes:
        name: letters, digits, '.', '_' and '-'.
        track: poses at the source's times, in the axes and units of `terra.dataset.format`, with the speed along the
            heading; or actions, in worlds that are not driven by poses.
        frame_times: time of each frame in seconds, by the same clock as the poses.
        frames: returns an iterator over all frames, RGB in [0, 255].
        intrinsics: the camera's intrinsics, or None if the source does not give them.
        origin: name of the file with the track, with which error messages begin.
        breaks: where the recording is interrupted, whatever the times say: a deleted record, a bad picture, the clock
            set back. Times increase between two breaks, and may go back at one.
        left_out: reason -> number of the source's frames or records that are not in `frame_times`.
    """

    name: str
    track: Poses | ActionTrack
    frame_times: Float[np.ndarray, " frames"]
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]
    intrinsics: Intrinsics | None
    origin: str
    breaks: tuple[Break, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def poses(self) -> Poses:
        """The poses of a drive that has them. Raises DatasetError."""
        if not isinstance(self.track, Poses):
            raise DatasetError(f"{self.origin}: expected poses, got actions of {self.track.space.title}")
        return self.track


class DriveSource(Protocol):
    """A collection of drives; small and picklable, because worker processes open drives by name."""

    @property
    def space(self) -> ActionSpace:
        """What the actions mean; waypoints where drives have poses."""
        ...

    @property
    def declared(self) -> Mapping[str, str | None]:
        """Facts that the user declares because the source's files lack them; the imported data depend on them."""
        ...

    @property
    def recordings(self) -> Mapping[str, tuple[str, ...]]:
        """Recordings and the drives that were cut from each; all drives of a recording belong in one split."""
        ...

    def list_drives(self) -> tuple[str, ...]:
        """The names of all drives, in order. Raises DatasetError if the source is invalid."""
        ...

    def open_drive(self, name: str) -> SourceDrive:
        """Open one drive without decoding its frames. Raises DatasetError, TrajectoryError or VideoError."""
        ...


class PoseFiles:
    """What most sources of poses have in common: files that declare their own units, each drive its own recording."""

    @property
    def space(self) -> Waypoints:
        """Waypoints, which are made of poses."""
        return Waypoints()

    @property
    def declared(self) -> dict[str, str | None]:
        """Return {}: the files declare their own units and axes."""
        return {}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}


def motion(
    times: Float[np.ndarray, " poses"],
    positions: Float[np.ndarray, "poses axes"],
    headings: Float[np.ndarray, " poses"],
    pitches: Float[np.ndarray, " poses"] | None = None,
    speeds: Float[np.ndarray, " poses"] | None = None,
) -> Poses:
    """Make poses from 2-D or 3-D positions; headings are unwrapped, and missing speeds derived along the heading."""
    headings = np.unwrap(headings)
    pitches = np.zeros_like(headings) if pitches is None else pitches
    places = np.zeros((len(times), 3))
    places[:, : positions.shape[1]] = positions
    if speeds is None:
        speeds = _forward_speeds(times, places, headings, pitches)
    x, y, z = places.T.copy()
    return Poses(times, x, y, z, headings, pitches, speeds)


def read_picture(path: Path, limits: Limits = LIMITS) -> UInt8[np.ndarray, "height width 3"]:
    """Read a PNG or JPEG picture as RGB in [0, 255]; its size is checked before it is unpacked. Raises DatasetError."""
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as picture:
            width, height = picture.size
            if width * height > limits.picture_pixels:
                raise DatasetError(f"{path}: expected at most {limits.picture_pixels} pixels, got {width} x {height}")
            check_scans(picture, limits)
            return np.asarray(picture.convert("RGB"))
    except DAMAGED_IMAGE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DatasetError(f"{path}: expected a PNG or JPEG picture, got: {reason}") from None


@dataclass(frozen=True, eq=False)
class Footage:
    """The frames of a video or of a folder of pictures.

    Attributes:
        num_frames: how many there are.
        fps: frames a second.
        frames: returns an iterator over them, RGB in [0, 255].
    """

    num_frames: int
    fps: float
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]


def open_footage(path: Path, picture_fps: float | None) -> Footage:
    """Open a video or a folder of pictures without decoding more than a frame.

    Args:
        path: the video or the folder.
        picture_fps: pictures a second of a folder; a video has its own rate.

    Raises:
        ConfigError: a folder, and no `picture_fps`.
        VideoError: a video that can't be read.
    """
    if not path.is_dir():
        info = probe_video(path)
        return Footage(info.num_frames, info.fps, lambda: stream_video(path))
    if picture_fps is None:
        raise ConfigError(f"picture_fps: expected how many pictures a second {path} has, got null")
    pictures = sorted(filter(is_picture, path.iterdir()), key=natural_key)
    return Footage(len(pictures), picture_fps, lambda: map(read_picture, pictures))


def find_pairs(folder: Path, suffixes: Sequence[str], what: str) -> dict[str, tuple[Path, Path]]:
    """The files of a folder that lie beside footage of the same name: (file, video or folder of pictures) by the name.

    Args:
        folder: the folder.
        suffixes: of the files.
        what: the files' content, for messages: "actions".

    Raises:
        DatasetError: no pair, or two files or two videos of one name.
    """
    pairs: dict[str, tuple[Path, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith(".") or not path.is_file():
            continue
        footage = [video for video in map(path.with_suffix, VIDEO_SUFFIXES) if video.is_file()]
        pictures = path.with_suffix("")
        if pictures.is_dir() and any(map(is_picture, pictures.iterdir())):
            footage.append(pictures)
        if len(footage) > 1:
            got = " and ".join(each.name for each in footage)
            raise DatasetError(f"{path}: expected one video or folder of its name, got {got}")
        if footage and path.stem in pairs:
            raise DatasetError(f"{path}: expected one file of {what}, got {pairs[path.stem][0].name} beside it")
        if footage:
            pairs[path.stem] = path, footage[0]
    if not pairs:
        kinds = f"{', '.join(VIDEO_SUFFIXES)} or a folder of pictures"
        raise DatasetError(f"{folder}: expected NAME{' or '.join(suffixes)} beside NAME ({kinds}), got none")
    return pairs


def say_left_out(folder: Path, used: Iterable[Path], purpose: str) -> None:
    """Say in one line which files of a folder an import has no use for; hidden files are not counted.

    Args:
        folder: the folder that was looked through.
        used: the files that the import reads.
        purpose: what the folder was looked through for.
    """
    known = set(used)
    left = [path.name for path in sorted(folder.iterdir()) if path not in known and not path.name.startswith(".")]
    if left:
        more = "" if len(left) <= _NAMED else f" and {len(left) - _NAMED} more"
        logger.warning("%s: not used as %s: %s%s", folder, purpose, ", ".join(left[:_NAMED]), more)


def _forward_speeds(
    times: Float[np.ndarray, " poses"],
    places: Float[np.ndarray, "poses 3"],
    headings: Float[np.ndarray, " poses"],
    pitches: Float[np.ndarray, " poses"],
) -> Float[np.ndarray, " poses"]:
    if len(times) < 2:
        return np.zeros(len(times))
    ahead = np.stack([np.cos(headings) * np.cos(pitches), np.sin(headings) * np.cos(pitches), np.sin(pitches)], axis=1)
    return np.einsum("pc,pc->p", np.gradient(places, times, axis=0), ahead)
