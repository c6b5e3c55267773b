"""The interface of an import source: it opens drives, each with frames, their times, and the vehicle's motion."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import imageio.v3 as iio
import numpy as np
from jaxtyping import Float, UInt8

from terra.dataset.poses import Poses
from terra.errors import DatasetError


@dataclass(frozen=True)
class Intrinsics:
    """A pinhole camera with square pixels: focal length and principal point, in pixels of the source's pictures."""

    focal: float
    center_x: float
    center_y: float


@dataclass(frozen=True, eq=False)
class SourceDrive:
    """One drive at the source's own frame rate and size; its values are not checked yet.

    Attributes:
        name: letters, digits, '.', '_' and '-'.
        poses: poses at the source's times, in the axes and units of `terra.dataset.format`; speed is along the heading.
        frame_times: time of each frame in seconds, by the same clock as the poses.
        frames: returns an iterator over all frames, RGB in [0, 255].
        intrinsics: the camera's intrinsics, or None if the source does not give them.
        origin: name of the file with the poses, with which error messages begin.
    """

    name: str
    poses: Poses
    frame_times: Float[np.ndarray, " frames"]
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]
    intrinsics: Intrinsics | None
    origin: str


class DriveSource(Protocol):
    """A collection of drives; small and picklable, because worker processes open drives by name."""

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


def read_picture(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """Read a picture, whose format the file's suffix tells, as RGB in [0, 255]. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            return iio.imread(file, plugin="pillow", extension=path.suffix, mode="RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DatasetError(f"{path}: expected a picture, got: {str(error).partition(chr(10))[0]}") from None


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
