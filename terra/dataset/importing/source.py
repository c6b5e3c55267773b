"""The interface of an import source: it opens drives, each with frames, their times, and the motion or actions."""

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from decoder.frames import list_frames, stream_planes
from decoder.pictures import is_picture, list_pictures, missing_pictures, picture_problem, read_picture
from decoder.showing import Display
from decoder.video import VIDEO_SUFFIXES, stream_video
from terra.actions import ActionSpace, ActionTrack, Waypoints
from terra.dataset.poses import Poses
from terra.errors import ConfigError, DatasetError

logger = logging.getLogger(__name__)

_NAMED = 5  # files named in a line
_DAMAGED = "damaged pictures"


_Frame = TypeVar("_Frame")


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
    """A place where a recording is interrupted, whatever its times say: a deleted record, a clock that was set back.

    Attributes:
        frame: index of the first frame after it.
        reason: what happened, such as "deleted records".
    """

    frame: int
    reason: str


@dataclass(frozen=True)
class VideoFrames:
    """The frames of a video, or some of them, as `SourceDrive.frames`; a video goes to a video without becoming RGB.

    Attributes:
        path: the video.
        display: what `decoder.frames.list_frames` found of its showing.
        start_seconds: from where on it is read.
        first, count: which frames behind that; None: all.
    """

    path: Path
    display: Display
    start_seconds: float = 0.0
    first: int = 0
    count: int | None = None

    def __call__(self) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """An iterator over the frames, RGB in [0, 255]."""
        return self._some(stream_video(self.path, self.start_seconds))

    def planes(
        self, box: tuple[float, float, float, float], size: tuple[int, int]
    ) -> Iterator[UInt8[np.ndarray, "rows width"]]:
        """An iterator over the frames as `decoder.frames.stream_planes` has them; the video must be plain."""
        return self._some(stream_planes(self.path, self.display, box, size, start_seconds=self.start_seconds))

    def part(self, first: int, last: int) -> "VideoFrames":
        """The frames from `first` on, before `last`."""
        return replace(self, first=self.first + first, count=last - first)

    def _some(self, frames: Iterator[_Frame]) -> Iterator[_Frame]:
        return islice(frames, self.first, None if self.count is None else self.first + self.count)


@dataclass(frozen=True, eq=False)
class SourceDrive:
    """One drive at the source's own frame rate and size; its values are not checked yet.

    Attributes:
        name: letters, digits, '.', '_' and '-'.
        track: poses at the source's times, in the axes and units of `terra.dataset.format`, with the speed along the
            heading; or actions, in worlds that are not driven by poses.
        frame_times: time of each frame in seconds, by the same clock as the track; they increase between two breaks.
        frames: returns an iterator over all frames, RGB in [0, 255].
        intrinsics: the camera's intrinsics, or None if the source does not give them.
        origin: name of the file with the track, with which error messages begin.
        breaks: where the recording is interrupted; the import cuts there. Times and track may go back at a break.
        left_out: how many of the source's frames are not among these, by the reason.
        clock: what is to be said about the times, such as a rate that the user declared; "" for times from the source.
        others: the further cameras by their names, in the order of the source's `views`, with times by the clock of
            `frame_times`; where the clock goes back, times before and after must lie apart.
    """

    name: str
    track: Poses | ActionTrack
    frame_times: Float[np.ndarray, " frames"]
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]
    intrinsics: Intrinsics | None
    origin: str
    breaks: tuple[Break, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    clock: str = ""
    others: Mapping[str, "Footage"] = field(default_factory=dict)

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


@runtime_checkable
class SeveralCameras(Protocol):
    """A source whose drives have several cameras, or may have."""

    @property
    def views(self) -> tuple[str, ...]:
        """The cameras' names, the main one first; one name or none for drives of one camera."""
        ...


@runtime_checkable
class KnownShapes(Protocol):
    """A source of several cameras that may know their pictures' shapes before it opens a drive."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each camera's pictures, in the order of the source's `views`; () if not known."""
        ...


def views_of(source: DriveSource) -> tuple[str, ...]:
    """The names of the cameras of a source's drives; nothing for one camera."""
    return source.views if isinstance(source, SeveralCameras) else ()


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


@dataclass(frozen=True, eq=False)
class Footage:
    """The frames of a video or of a folder of pictures.

    Attributes:
        times: when each was taken, in seconds after the first.
        frames: returns an iterator over them, RGB in [0, 255].
        clock: what the times are, where no file tells them; "" for a video's own.
        breaks, left_out: of pictures that can't be read, see `SourceDrive`.
    """

    times: Float[np.ndarray, " frames"]
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]
    clock: str = ""
    breaks: tuple[Break, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def open_footage(path: Path, picture_fps: float | None) -> Footage:
    """Open a video or a folder of pictures without decoding more than a frame.

    Args:
        path: the video or the folder.
        picture_fps: pictures a second of a folder; the frames of a video have times of their own.

    Raises:
        ConfigError: a folder, and no `picture_fps`.
        VideoError: a video that can't be read.
    """
    if not path.is_dir():
        listing = list_frames(path)
        if listing.display.num_streams > 1:
            logger.warning("%s: has %d video streams, of which the first is taken", path, listing.display.num_streams)
        return Footage(listing.seconds, VideoFrames(path, listing.display))
    if picture_fps is None:
        raise ConfigError(f"picture_fps: expected how many pictures a second {path} has, got null")
    pictures = list_pictures(path.iterdir(), str(path))
    places = missing_pictures(pictures)
    times = (np.arange(len(pictures)) if places is None else places) / picture_fps
    return picture_footage(pictures, times, f"picture_fps={picture_fps:g}, as declared")


def picture_footage(paths: Sequence[Path], times: Float[np.ndarray, " frames"], clock: str = "") -> Footage:
    """The frames that are stored as pictures; one that is missing, empty or cut off is left out, and a break.

    Args:
        paths: the pictures.
        times: when each was taken, in seconds.
        clock: see `Footage`.

    Raises:
        DatasetError: none of them can be read.
    """
    problems = {index: problem for index, path in enumerate(paths) if (problem := picture_problem(path)) is not None}
    kept = [index for index in range(len(paths)) if index not in problems]
    if not kept:
        first = next(iter(problems.items()), None)
        got = "none" if first is None else f"{paths[first[0]]}: {first[1]}"
        raise DatasetError(f"{paths[0].parent if paths else 'pictures'}: expected pictures that can be read, got {got}")
    for index, problem in list(problems.items())[:1]:
        more = "" if len(problems) == 1 else f" (and {len(problems) - 1} more)"
        logger.warning("%s: left out%s: %s", paths[index], more, problem)
    pictures = [paths[index] for index in kept]
    return Footage(
        times[kept],
        lambda: map(read_picture, pictures),
        clock,
        tuple(Break(new, _DAMAGED) for new, (a, b) in enumerate(pairwise(kept), start=1) if b - a > 1),
        {_DAMAGED: len(problems)} if problems else {},
    )


def find_pairs(folder: Path, suffixes: Sequence[str], what: str) -> dict[str, tuple[Path, Path]]:
    """The files of a folder that lie beside footage of the same name: (file, video or folder of pictures) by the name.

    Arguments and errors are those of `find_footage`.
    """
    return {name: (file, video) for name, (file, video) in find_footage(folder, suffixes, what).items()}


def find_footage(
    folder: Path, suffixes: Sequence[str], what: str, views: Sequence[str] = ()
) -> dict[str, tuple[Path, ...]]:
    """The files of a folder that lie beside footage of the same name: (file, footage of each camera) by the name.

    Footage is a video or a folder of pictures. Suffixes count in any case: cameras write .MP4, spreadsheets .CSV.

    Args:
        folder: the folder.
        suffixes: of the files.
        what: the files' content, for messages: "actions".
        views: the names of several cameras, whose footage is called NAME.VIEW; nothing for one camera.

    Raises:
        DatasetError: no such file, or two files or two videos of one name.
    """
    tables, footage = list_by_stem(folder, suffixes), list_by_stem(folder, VIDEO_SUFFIXES)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and any(map(is_picture, path.iterdir())):
            footage.setdefault(drive_name(path.name), []).append(path)
    complete: dict[str, tuple[Path, ...]] = {}
    for name in sorted(tables):
        shown = {f"{name}.{view}": footage.get(f"{name}.{view}", []) for view in views} or {name: footage.get(name, [])}
        missing = [camera for camera, found in shown.items() if not found]
        if missing:
            if len(missing) < len(shown):
                logger.warning("%s: left out: expected a video or folder %s, got none", tables[name][0], missing[0])
            continue
        for found, kind in (*((each, "video or folder") for each in shown.values()), (tables[name], f"file of {what}")):
            if len(found) > 1:
                got = " and ".join(each.name for each in found)
                raise DatasetError(f"{folder / name}: expected one {kind} of its name, got {got}")
        complete[name] = (tables[name][0], *(found[0] for found in shown.values()))
    if not complete:
        kinds = f"{', '.join(VIDEO_SUFFIXES)} or a folder of pictures"
        beside = " and ".join(f"NAME.{view}" for view in views) or "NAME"
        raise DatasetError(f"{folder}: expected NAME{' or '.join(suffixes)} beside {beside} ({kinds}), got none")
    return complete


def list_by_stem(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """The files of a folder that end in one of the suffixes, in any case, by the drives' names; none hidden."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file():
            files.setdefault(drive_name(path.stem), []).append(path)
    return files


def drive_name(name: str) -> str:
    """A file's name as that of a drive: of letters (without accents), digits, '.', '_' and '-'; '_' for all else."""
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    return re.sub(r"[^A-Za-z0-9._-]", "_", plain).lstrip("._-") or "drive"


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
