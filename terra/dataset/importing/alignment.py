"""Alignment of a source's drive to the dataset's frame rate and image size: choice of frames, actions and crop."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np
from jaxtyping import Float64, Int, UInt8
from PIL import Image

from decoder.camera import Camera
from terra.actions import ActionTrack
from terra.actions.space import Values
from terra.dataset.format import FUTURE_SECONDS, num_future_poses
from terra.dataset.importing.source import Intrinsics, SourceDrive
from terra.dataset.poses import Poses
from terra.errors import DatasetError
from terra.trajectory.checks import check_poses, stack_poses

logger = logging.getLogger(__name__)

_INSTANT = 1e-6  # s
_ASPECT = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})")

# A drive may have up to this factor fewer frames per second than the dataset; some of its frames are then used twice.
# KITTI, for example, has 9.6 frames per second and is used at 10.
RATE_TOLERANCE = 1.05


@dataclass(frozen=True, eq=False)
class Alignment:
    """A drive's frames and its poses or actions at the dataset's frame rate.

    Attributes:
        frame_index: index of the source's frame for each frame of the dataset.
        track: the pose at each frame of the dataset and for 3 s after the last frame; or the values of the action
            space at each frame.
        num_repeated: number of frames that repeat the previous frame of the source.
        num_before: number of the source's frames at its start that have no pose or action.
        num_after: number of its frames at its end that are left out, because nothing is known of what follows.
        largest_offset: largest time, in seconds, between a frame and the instant that it stands for.
    """

    frame_index: Int[np.ndarray, " frames"]
    track: Poses | Values
    num_repeated: int
    num_before: int
    num_after: int
    largest_offset: float

    @property
    def poses(self) -> Poses:
        """The poses of a drive that has them."""
        assert isinstance(self.track, Poses)
        return self.track


def align(drive: SourceDrive, fps: float) -> Alignment:
    """Take a drive's nearest frame each 1 / fps s, with its pose or its action.

    Poses are interpolated linearly between those of the source, and a frame needs those of the next 3 s. Actions are
    resampled as their space has it (`terra.actions.space`); the last frame needs none.

    Raises:
        TrajectoryError: the poses are not the motion of a vehicle.
        DatasetError: the drive is too short, has fewer frames per second than `fps`, or lacks frames in between.
    """
    period = _period(drive, fps)
    if isinstance(drive.track, ActionTrack):
        track = drive.track
        instants = _instants(drive, fps, float(track.times[0]), track.end, "two frames with an action between them", 2)
        values = track.space.resampled(track.times, track.values, instants, float(instants[-1]) + 1 / fps)
        return _aligned(drive, instants, period, fps, values)
    poses = drive.track
    rows = stack_poses(poses.time, np.column_stack([poses.x, poses.y]), poses.heading, drive.origin)
    check_poses(rows, drive.origin, lambda row: f"{drive.origin}: pose {row}")
    num_future = num_future_poses(fps)
    end = float(poses.time[-1]) - num_future / fps
    instants = _instants(drive, fps, float(poses.time[0]), end, "frames with 3 s of poses after them", 1)
    num_frames = len(instants)
    known = instants[0] + np.arange(num_frames + num_future) / fps
    columns = {name: np.interp(known, poses.time, values) for name, values in vars(poses).items()}
    columns["time"] = np.arange(len(known)) / fps
    return _aligned(drive, instants, period, fps, Poses(**columns))


def shorten(drive: SourceDrive, start: float, end: float | None) -> SourceDrive:
    """The part of a drive from `start` to `end`, in seconds after its first frame; the poses go on for 3 s more.

    Raises:
        DatasetError: fewer than two frames in this part.
    """
    times = drive.frame_times
    first = int(np.searchsorted(times, times[0] + start - _INSTANT))
    last = len(times) if end is None else int(np.searchsorted(times, times[0] + end + _INSTANT, side="right"))
    if last - first < 2:
        expected = f"2 or more frames from {start:g} s to {'the end' if end is None else f'{end:g} s'}"
        raise DatasetError(f"{drive.origin}: expected {expected}, got {times[-1] - times[0]:.1f} s of frames in all")
    logger.info("%s: %d frames before start= and %d after end= left out", drive.origin, first, len(times) - last)
    track = drive.track
    if isinstance(track, Poses):
        since = max(int(np.searchsorted(track.time, times[first], side="right")) - 1, 0)
        until = int(np.searchsorted(track.time, times[last - 1] + FUTURE_SECONDS + 1)) + 1
        track = Poses(**{name: values[since:until] for name, values in vars(track).items()})
    return replace(
        drive, track=track, frame_times=times[first:last], frames=lambda: islice(drive.frames(), first, last)
    )


def cut(track: Poses | Values, num_frames: int, fps: float, most: int) -> list[tuple[int, Poses | Values]]:
    """Cut a drive into parts of nearly equal length, at most `most` frames: (number of frames, track) of each part."""
    num_parts = math.ceil(num_frames / most)
    bounds = [num_frames * part // num_parts for part in range(num_parts + 1)]
    parts: list[tuple[int, Poses | Values]] = []
    for start, end in pairwise(bounds):
        if not isinstance(track, Poses):
            parts.append((end - start, track[start:end]))
            continue
        rows = slice(start, end + num_future_poses(fps))
        columns = {name: values[rows] for name, values in vars(track).items()}
        # Each part's time starts at 0, as a drive's does.
        columns["time"] = np.arange(rows.stop - rows.start) / fps
        parts.append((end - start, Poses(**columns)))
    return parts


def _period(drive: SourceDrive, fps: float) -> float:
    """Seconds between two frames of the source, in the median. Raises DatasetError if these are too many."""
    times = drive.frame_times
    if len(times) < 2 or (np.diff(times) <= 0).any():
        raise DatasetError(f"{drive.origin}: expected 2 or more frames at increasing times, got {len(times)}")
    period = float(np.median(np.diff(times)))
    if fps > RATE_TOLERANCE / period:
        raise DatasetError(f"{drive.origin}: expected fps of at most its frames' rate, {1 / period:.2f}, got {fps:g}")
    return period


def _instants(
    drive: SourceDrive, fps: float, known_from: float, known_until: float, expected: str, fewest: int
) -> Float64[np.ndarray, " frames"]:
    """The instants of the dataset's frames: from the first that the source has frames and a track of, to the last."""
    times = drive.frame_times
    start, end = max(float(times[0]), known_from), min(float(times[-1]), known_until)
    num_frames = math.floor((end - start) * fps + 1e-6) + 1
    if num_frames < fewest:
        kind = "poses" if isinstance(drive.track, Poses) else "actions"
        track_times = drive.track.time if isinstance(drive.track, Poses) else drive.track.times
        covers = f"{times[-1] - times[0]:.1f} s of frames, {track_times[-1] - track_times[0]:.1f} s of {kind}"
        raise DatasetError(f"{drive.origin}: expected {expected}, got {covers}")
    return start + np.arange(num_frames) / fps


def _aligned(
    drive: SourceDrive, instants: Float64[np.ndarray, " frames"], period: float, fps: float, track: Poses | Values
) -> Alignment:
    times = drive.frame_times
    index = _nearest(times, instants)
    offsets = np.abs(times[index] - instants)
    if offsets.max() > 1.5 * period:
        missing = instants[int(np.argmax(offsets))] - times[0]
        raise DatasetError(f"{drive.origin}: expected a frame each {period:.3g} s, got none at {missing:.2f} s")
    repeated = int((np.diff(index) == 0).sum())
    before, after = int(index[0]), int((times > instants[-1] + 1 / fps - period / 2).sum())
    return Alignment(index, track, repeated, before, after, float(offsets.max()))


def check_crop(value: object) -> object:
    """Return a crop as `kept_box` takes it. Raises ValueError."""
    if value is None or (isinstance(value, str) and _ASPECT.fullmatch(value)):
        return value
    if isinstance(value, Sequence) and len(value) == 4 and all(type(edge) is int and edge >= 0 for edge in value):
        left, top, right, bottom = value
        if left < right and top < bottom:
            return left, top, right, bottom
    raise ValueError(f"expected [left,top,right,bottom] in pixels, or an aspect such as 16:9, got {value!r}")


def kept_box(
    picture_size: tuple[int, int], crop: tuple[int, int, int, int] | str, where: str
) -> tuple[int, int, int, int]:
    """The part of a picture that a crop keeps, as (left, top, right, bottom) in pixels.

    Args:
        picture_size: (height, width).
        crop: such a box, or an aspect such as "16:9", of which the largest centered box is taken.
        where: the beginning of a message.

    Raises:
        DatasetError: a box that is not within the picture.
    """
    height, width = picture_size
    if isinstance(crop, str):
        across, up = map(int, crop.split(":"))
        box_width = min(width, max(1, round(height * across / up)))
        box_height = min(height, max(1, round(width * up / across)))
        left, top = (width - box_width) // 2, (height - box_height) // 2
        return left, top, left + box_width, top + box_height
    if crop[2] > width or crop[3] > height:
        raise DatasetError(f"{where}: expected a crop within {width} x {height} pixels, got {list(crop)}")
    return crop


def crop_box(
    picture_size: tuple[int, int], image_size: tuple[int, int], intrinsics: Intrinsics | None
) -> tuple[float, float, float, float]:
    """The largest crop of a picture with the dataset's aspect ratio, as (left, top, right, bottom) in pixels.

    The crop is centered on the picture or, if the intrinsics are known, as near as possible on the principal point.
    Sizes are (height, width).
    """
    (height, width), aspect = picture_size, image_size[1] / image_size[0]
    box_width, box_height = min(float(width), height * aspect), min(float(height), width / aspect)
    center = width / 2 if intrinsics is None else intrinsics.center_x
    left = min(max(center - box_width / 2, 0.0), width - box_width)
    top = (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def fit_picture(
    picture: UInt8[np.ndarray, "height width 3"], image_size: tuple[int, int], intrinsics: Intrinsics | None
) -> UInt8[np.ndarray, "rows cols 3"]:
    """Crop a picture to the aspect ratio of `image_size` and resize it (bicubic, antialiased)."""
    box = crop_box((picture.shape[0], picture.shape[1]), image_size, intrinsics)
    size = (image_size[1], image_size[0])
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0))


def fitted_camera(
    picture_size: tuple[int, int],
    image_size: tuple[int, int],
    intrinsics: Intrinsics,
    *,
    height_meters: float,
    pitch_radians: float,
    x_forward_meters: float,
) -> Camera:
    """The camera of the fitted pictures; a horizon that is not half way up becomes the pitch of the camera."""
    left, top, right, bottom = crop_box(picture_size, image_size, intrinsics)
    tilt = math.atan((intrinsics.center_y - (top + bottom) / 2) / intrinsics.focal)
    fov = 2 * math.atan((right - left) / 2 / intrinsics.focal)
    return Camera(
        fov_degrees=math.degrees(fov),
        height_meters=height_meters,
        pitch_radians=pitch_radians + tilt,
        x_forward_meters=x_forward_meters,
    )


def _nearest(times: np.ndarray, instants: np.ndarray) -> Int[np.ndarray, " instants"]:
    after = np.clip(np.searchsorted(times, instants), 1, len(times) - 1)
    earlier = instants - times[after - 1] <= times[after] - instants
    return after - earlier
