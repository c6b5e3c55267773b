"""What a source of foreign driving gives: drives, each with its frames, their times, and the vehicle's motion."""

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
    """One drive as its source has it, at the source's own rate and size; nothing is checked yet.

    Attributes:
        name: of letters, digits, '.', '_' and '-'.
        poses: in our axes and units, at the source's times; speed is along the heading.
        frame_times: seconds, by the clock of the poses, one for each frame.
        frames: gives the frames from the first on, RGB in [0, 255].
        intrinsics: the camera, or None if the source doesn't say.
        origin: the file that the poses are from, the beginning of messages.
    """

    name: str
    poses: Poses
    frame_times: Float[np.ndarray, " frames"]
    frames: Callable[[], Iterator[UInt8[np.ndarray, "height width 3"]]]
    intrinsics: Intrinsics | None
    origin: str


class DriveSource(Protocol):
    """Where drives are; small and picklable, since worker processes open drives by name."""

    @property
    def declared(self) -> Mapping[str, str | None]:
        """What the user says of the source because its files don't; what is imported depends on it."""
        ...

    @property
    def recordings(self) -> Mapping[str, tuple[str, ...]]:
        """Drives that were cut from one recording, by its name: they belong in one split."""
        ...

    def list_drives(self) -> tuple[str, ...]:
        """The names of all drives, in order. Raises DatasetError if the source isn't what it should be."""
        ...

    def open_drive(self, name: str) -> SourceDrive:
        """One drive, without decoding its frames. Raises DatasetError, TrajectoryError or VideoError."""
        ...


def motion(
    times: Float[np.ndarray, " poses"],
    positions: Float[np.ndarray, "poses axes"],
    headings: Float[np.ndarray, " poses"],
    pitches: Float[np.ndarray, " poses"] | None = None,
    speeds: Float[np.ndarray, " poses"] | None = None,
) -> Poses:
    """Poses of x, y and maybe z. Headings are unwrapped; a speed that is not given is the rate along the heading."""
    headings = np.unwrap(headings)
    pitches = np.zeros_like(headings) if pitches is None else pitches
    places = np.zeros((len(times), 3))
    places[:, : positions.shape[1]] = positions
    if speeds is None:
        speeds = _forward_speeds(times, places, headings, pitches)
    x, y, z = places.T.copy()
    return Poses(times, x, y, z, headings, pitches, speeds)


def read_picture(path: Path) -> UInt8[np.ndarray, "height width 3"]:
    """A picture of a format that its name's suffix says, as RGB in [0, 255]. Raises DatasetError."""
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
