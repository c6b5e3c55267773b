"""A foreign drive at our frame rate and size: which of its frames, which poses, which part of its pictures."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from decoder.camera import Camera
from terra.dataset.format import num_future_poses
from terra.dataset.importing.source import Intrinsics, SourceDrive
from terra.dataset.poses import Poses
from terra.errors import DatasetError
from terra.trajectory.checks import check_poses, stack_poses

# Frames that come a little slower than asked for are shown as they are, one now and then twice: KITTI's come at 9.6 a
# second and are used at 10.
RATE_TOLERANCE = 1.05


@dataclass(frozen=True, eq=False)
class Alignment:
    """`frame_index` is the source's frame for each of ours; `poses` has the 3 s more; `num_repeated` were used again.

    `largest_offset` is how far, in seconds, a frame was from the instant that its pose is of.
    """

    frame_index: Int[np.ndarray, " frames"]
    poses: Poses
    num_repeated: int
    largest_offset: float


def align(drive: SourceDrive, fps: float) -> Alignment:
    """Take a drive's nearest frame each 1 / fps s, and the poses then, for as long as the next 3 s are known.

    Poses between two of the source's are interpolated linearly.

    Raises:
        TrajectoryError: poses that no vehicle has.
        DatasetError: too short, fewer frames a second than `fps`, or frames missing in between.
    """
    poses, times = drive.poses, drive.frame_times
    rows = stack_poses(poses.time, np.column_stack([poses.x, poses.y]), poses.heading, drive.origin)
    check_poses(rows, drive.origin, lambda row: f"{drive.origin}: pose {row}")
    if len(times) < 2 or (np.diff(times) <= 0).any():
        raise DatasetError(f"{drive.origin}: expected 2 or more frames at increasing times, got {len(times)}")
    period = float(np.median(np.diff(times)))
    if fps > RATE_TOLERANCE / period:
        raise DatasetError(f"{drive.origin}: expected fps of at most its frames' rate, {1 / period:.2f}, got {fps:g}")
    start = max(float(times[0]), float(poses.time[0]))
    num_future = num_future_poses(fps)
    end = min(float(times[-1]), float(poses.time[-1]) - num_future / fps)
    num_frames = math.floor((end - start) * fps + 1e-6) + 1
    if num_frames < 1:
        covers = f"{times[-1] - times[0]:.1f} s of frames, {poses.time[-1] - poses.time[0]:.1f} s of poses"
        raise DatasetError(f"{drive.origin}: expected frames with 3 s of poses after them, got {covers}")
    instants = start + np.arange(num_frames + num_future) / fps
    index = _nearest(times, instants[:num_frames])
    offsets = np.abs(times[index] - instants[:num_frames])
    if offsets.max() > 1.5 * period:
        missing = instants[int(np.argmax(offsets))] - times[0]
        raise DatasetError(f"{drive.origin}: expected a frame each {period:.3g} s, got none at {missing:.2f} s")
    columns = {name: np.interp(instants, poses.time, values) for name, values in vars(poses).items()}
    columns["time"] = np.arange(num_frames + num_future) / fps
    repeated = int((np.diff(index) == 0).sum())
    return Alignment(index, Poses(**columns), repeated, float(offsets.max()))


def cut(poses: Poses, num_frames: int, fps: float, most: int) -> list[tuple[int, Poses]]:
    """Cut a drive into parts of at most `most` frames and nearly equal length: each one's frames, and its poses."""
    num_parts = math.ceil(num_frames / most)
    bounds = [num_frames * part // num_parts for part in range(num_parts + 1)]
    parts = []
    for start, end in pairwise(bounds):
        rows = slice(start, end + num_future_poses(fps))
        columns = {name: values[rows] for name, values in vars(poses).items()}
        # Exactly as a drive of its own would have them.
        columns["time"] = np.arange(rows.stop - rows.start) / fps
        parts.append((end - start, Poses(**columns)))
    return parts


def crop_box(
    picture_size: tuple[int, int], image_size: tuple[int, int], intrinsics: Intrinsics | None
) -> tuple[float, float, float, float]:
    """The largest part of a picture with our aspect ratio, as (left, top, right, bottom).

    It is centered, or as near as possible to where the camera looks if that is known. Sizes are (height, width).
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
    """Crop a picture to our aspect ratio and resize it (bicubic, antialiased)."""
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
    """The camera of the fitted pictures; one whose horizon is not half way up is a camera that looks up or down."""
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
