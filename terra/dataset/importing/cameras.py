"""Several cameras of a drive: at each instant of the dataset the nearest frame of each, tiled into one picture.

    first camera  | | | | | | | | |      chosen as of a drive with one camera (`alignment`), with the action then
    another         |   |   |       |    its nearest frame; where it has a gap, or none near, the drive is cut
    instants        '---'---'     '-'    those that all cameras have seen

Cameras may have different rates and begin at different times, by one clock.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int

from terra.dataset.importing.alignment import (
    MIN_FRAMES,
    Alignment,
    Part,
    frame_period,
    gap_of,
    long_enough,
    nearest,
    part_of,
    stretches_of,
)
from terra.dataset.importing.source import DriveSource, KnownShapes, SourceDrive, views_of
from terra.errors import DatasetError, TerraError
from terra.views import Views

Frames = Int[np.ndarray, " instants"]


def alone(drive: SourceDrive, name: str) -> SourceDrive:
    """A drive with one of its further cameras alone."""
    footage = drive.others[name]
    return replace(
        drive,
        frame_times=footage.times,
        frames=footage.frames,
        breaks=footage.breaks,
        left_out=footage.left_out,
        origin=f"{drive.origin}: {name}",
        intrinsics=None,
        others={},
    )


def chosen_of(alignment: Alignment, name: str) -> Alignment:
    """The alignment with the frames of one of the further cameras."""
    return replace(alignment, parts=tuple(replace(part, frame_index=part.others[name]) for part in alignment.parts))


def lay_out(source: DriveSource, image_size: tuple[int, int]) -> Views | None:
    """The part of each of a source's cameras in a picture, by the shape of their first frames; None for one.

    Raises:
        ConfigError: a picture that can't be divided.
        TerraError: no drive of the source can be opened.
    """
    names = views_of(source)
    if len(names) < 2:
        return None
    if isinstance(source, KnownShapes) and source.shapes:
        return Views.tiled(names, image_size, _aspect(source.shapes))
    failure: TerraError | None = None
    for name in source.list_drives():
        try:
            drive = source.open_drive(name)
            cameras = [drive, *(alone(drive, other) for other in drive.others)]
            shapes = [next(camera.frames()).shape[:2] for camera in cameras]
        except TerraError as error:
            failure = failure or error
        else:
            return Views.tiled(names, image_size, _aspect(shapes))
    raise failure or DatasetError("expected a drive, got none")


def _aspect(shapes: Sequence[tuple[int, ...]]) -> float:
    """Width / height of pictures of several shapes (height, width), in the geometric mean."""
    return math.exp(sum(math.log(width / height) for height, width in shapes) / len(shapes))


def align_cameras(
    drive: SourceDrive,
    alignment: Alignment,
    fps: float,
    *,
    gap_seconds: float | None = None,
    min_frames: int = MIN_FRAMES,
) -> Alignment:
    """The instants of an alignment that all cameras of the drive have seen, with the nearest frame of each.

    Args:
        drive: the drive.
        alignment: that of its first camera.
        fps, gap_seconds, min_frames: see `terra.dataset.importing.alignment.align`.

    Raises:
        DatasetError: a camera with fewer frames a second than `fps`, or no instant that all have seen.
    """
    if not drive.others:
        return alignment
    left_out: Counter[str] = Counter()
    cameras = {name: _Camera(alone(drive, name), fps, gap_seconds) for name in drive.others}
    found: list[Part] = []
    for part in alignment.parts:
        chosen = {name: camera.frames_at(part.instants) for name, camera in cameras.items()}
        for name, index in chosen.items():
            left_out[f"without a frame of {name}"] += len(np.unique(part.frame_index[index < 0]))
        found += _runs(part, chosen, fps)
    if not found:
        raise DatasetError(f"{drive.origin}: expected instants that all cameras have seen, got {_reaches(drive)}")
    is_whole = len(alignment.parts) == len(found) == 1
    parts = found if is_whole else long_enough(found, min_frames, left_out)
    if not parts:
        most = max(len(part.frame_index) for part in found)
        expected = f"{min_frames} or more frames (min_frames=) without an interruption of any camera"
        raise DatasetError(f"{drive.origin}: expected {expected}, got at most {most}")
    times = {name: camera.drive.frame_times for name, camera in cameras.items()}
    kept = sum(len(part.frame_index) for part in parts)
    losses = alignment.losses.replace(
        kept=kept,
        parts=len(parts),
        seconds=kept / fps,
        repeated=sum(int(_repeats(part).sum()) for part in parts),
        moved_seconds=max(_moved(part, drive.frame_times, times) for part in parts),
        left_out=_nonzero(Counter(alignment.losses.left_out) + left_out + _own_losses(drive)),
    )
    return Alignment(tuple(parts), losses)


class _Camera:
    """Where a camera has frames, between its own gaps and breaks."""

    def __init__(self, drive: SourceDrive, fps: float, gap_seconds: float | None) -> None:
        self.drive = drive
        period = frame_period(drive, fps)
        self._reach = min(period, 1 / fps) / 2  # before the first frame of a stretch, and behind its last
        self._stretches = stretches_of(drive, gap_of(period, fps, gap_seconds), Counter())

    def frames_at(self, instants: Float64[np.ndarray, " instants"]) -> Frames:
        """The nearest frame of each instant; -1 where the camera has none."""
        index = np.full(len(instants), -1)
        for stretch in self._stretches:
            since, until = stretch.times[0] - self._reach, stretch.times[-1] + self._reach
            is_seen = (index < 0) & (instants >= since) & (instants <= until)
            if is_seen.any() and len(stretch.times) > 1:
                index[is_seen] = stretch.index[nearest(stretch.times, instants[is_seen])]
        return index


def _runs(part: Part, chosen: Mapping[str, Frames], fps: float) -> list[Part]:
    """The instants of a part that every camera has seen, one after another without an interruption."""
    is_seen = np.all([index >= 0 for index in chosen.values()], axis=0)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_seen, [False]]).astype(int)))
    return [
        replace(part_of(part, start, end, fps), others={name: index[start:end] for name, index in chosen.items()})
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def _repeats(part: Part) -> np.ndarray:
    """Whether a frame shows what the one before shows, in any camera."""
    return np.any([np.diff(index) == 0 for index in (part.frame_index, *part.others.values())], axis=0)


def _moved(part: Part, first: np.ndarray, times: Mapping[str, np.ndarray]) -> float:
    """Seconds between a frame of any camera and the instant that it stands for, at most."""
    shown = [first[part.frame_index], *(times[name][index] for name, index in part.others.items())]
    return max(float(np.abs(each - part.instants).max()) for each in shown)


def _own_losses(drive: SourceDrive) -> Counter[str]:
    return Counter(
        {f"{name}: {reason}": count for name, each in drive.others.items() for reason, count in each.left_out.items()}
    )


def _nonzero(counts: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}


def _reaches(drive: SourceDrive) -> str:
    cameras = {"the first": drive.frame_times, **{name: each.times for name, each in drive.others.items()}}
    return ", ".join(f"{name} {times.min():.1f} to {times.max():.1f} s" for name, times in cameras.items())
