"""A folder of videos, each with the GPS track of the drive: poses for people who have none."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64, Int, UInt8

from terra.dataset.importing.gps import load_gps
from terra.dataset.importing.smoothing import STEP, States, smooth
from terra.dataset.importing.source import (
    Break,
    Footage,
    PoseFiles,
    SourceDrive,
    find_pairs,
    motion,
    open_footage,
    say_left_out,
)
from terra.errors import DatasetError
from terra.trajectory.checks import MAX_POSE_GAP, MAX_SPEED

logger = logging.getLogger(__name__)

SUFFIXES = (".gpx", ".csv")
_MARGIN = 10.0  # s of fixes before and after the video, by which its ends are known better
_MAX_NODES = 500_000  # of the smoother: they take a gigabyte, and some minutes
_JUMPS, _JUMPS_PART = 2, 0.01  # steps from fix to fix, that may be too fast for a car: so many, or this part of them
_GAP = "the GPS track has a gap, a jump or a new segment"
_LEAST_METERS = 10.0
_LEAST_SPEED = 1.0  # m/s, that must be reached for a heading


@dataclass(frozen=True)
class GpxSource(PoseFiles):
    """FOLDER/NAME.mp4 (or another video or a folder) beside FOLDER/NAME.gpx, or NAME.csv with time, lat and lon.

    The heading is that of the motion; a car is taken to drive forward. x points east, y north.

    Attributes:
        folder: FOLDER.
        picture_fps: pictures a second; None if there are only videos.
        offset_seconds: time from the first fix to the video's first frame; negative if the video begins earlier.
        sigma_meters: standard deviation of a fix to the east and to the north.
    """

    folder: Path
    picture_fps: float | None = None
    offset_seconds: float = 0.0
    sigma_meters: float = 2.0

    @property
    def declared(self) -> dict[str, str | None]:
        """The pictures' rate, the clocks' difference, and the fixes' noise."""
        fps = None if self.picture_fps is None else f"{self.picture_fps:g}"
        return {
            "picture_fps": fps,
            "offset_seconds": f"{self.offset_seconds:g}",
            "sigma_meters": f"{self.sigma_meters:g}",
        }

    def list_drives(self) -> tuple[str, ...]:
        """The names of the tracks that have a video or a folder of pictures. Raises DatasetError if none."""
        pairs = find_pairs(self.folder, SUFFIXES, "GPS tracks")
        say_left_out(self.folder, [path for pair in pairs.values() for path in pair], "videos with GPS tracks")
        return tuple(pairs)

    def open_drive(self, name: str) -> SourceDrive:
        """Open the video, and make poses of the track over its time.

        The track is smoothed in stretches: a segment, or a part of one, without a gap of more than 3 s or a jump. The
        video's frames between two stretches are left out. So are those of a stretch in which the car stands: it has no
        heading there.
        """
        path, video = find_pairs(self.folder, SUFFIXES, "GPS tracks")[name]
        track, footage = load_gps(path), open_footage(video, self.picture_fps)
        seconds = float(footage.times[-1])
        times = track.times - track.times[0] - self.offset_seconds
        near = (times >= -_MARGIN) & (times <= seconds + _MARGIN)
        if near.sum() < 2 or times[near][-1] <= 0 or times[near][0] >= seconds:
            span = f"{times[0]:.1f} to {times[-1]:.1f} s after the first frame"
            raise DatasetError(
                f"{path}: expected fixes during the video's {seconds:.1f} s, got {span}: see offset_seconds="
            )
        for reason, count in track.left_out.items():
            logger.warning("%s: left out: %d %s", path, count, reason)
        if (count := int(near.sum())) + np.ptp(times[near]) / STEP > _MAX_NODES:
            got = f"{count} fixes over {np.ptp(times[near]):.0f} s"
            raise DatasetError(f"{path}: expected a day of fixes at most, or {_MAX_NODES} fixes, got {got}")
        times, positions, segment = times[near], track.meters(int(np.argmax(near)))[near], track.segment[near]
        ends = (np.diff(times) > MAX_POSE_GAP) | (np.diff(segment) != 0) | self._jumps(times, positions, path)
        ends = np.flatnonzero(ends) + 1
        rows = [slice(start, end) for start, end in pairwise([0, *ends.tolist(), len(times)])]
        stretches = [each for row in rows if (each := self._stretch(times[row], positions[row])) is not None]
        if not stretches:
            raise DatasetError(
                f"{path}: expected a car that moves, because its heading is that of the motion, got none"
            )
        known, breaks = _known_frames(footage, stretches, path)
        wanted = frozenset(known.tolist())
        left_out = Counter(footage.left_out)
        left_out["frames without fixes"] = len(footage.times) - len(known)
        nodes, states = (np.concatenate(parts) for parts in zip(*stretches, strict=True))

        def frames() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            return (frame for index, frame in enumerate(footage.frames()) if index in wanted)

        return SourceDrive(
            name=name,
            track=motion(nodes, states[:, :2], states[:, 2], speeds=states[:, 3]),
            frame_times=footage.times[known],
            frames=frames,
            intrinsics=None,
            origin=str(path),
            breaks=breaks,
            left_out=+left_out,
            clock=footage.clock,
        )

    def _jumps(
        self, times: Float64[np.ndarray, " fixes"], positions: Float64[np.ndarray, "fixes 2"], path: Path
    ) -> Bool[np.ndarray, " steps"]:
        """Where no car can come from a fix to the next; a fix far off has such a step before and after it.

        Raises DatasetError if these are more than a few: then the track is no car's, or its unit of time is wrong.
        """
        gaps = np.diff(times)
        speeds = np.hypot(*np.diff(positions, axis=0).T) / gaps
        # Two fixes may be off by some standard deviations to opposite sides.
        too_fast = speeds > MAX_SPEED + 10 * self.sigma_meters / gaps
        if too_fast.any():
            row = int(np.argmax(too_fast))
            got = f"{speeds[row]:.0f} m/s at {times[row]:.1f} s of the video"
            if too_fast.sum() > max(_JUMPS, _JUMPS_PART * len(too_fast)):
                raise DatasetError(f"{path}: expected a car's motion, at most {MAX_SPEED:g} m/s, got {got}")
            logger.warning("%s: %s is no car's motion: cut there, and at %d more", path, got, too_fast.sum() - 1)
        return too_fast

    def _stretch(
        self, times: Float64[np.ndarray, " fixes"], positions: Float64[np.ndarray, "fixes 2"]
    ) -> tuple[Float64[np.ndarray, " nodes"], States] | None:
        """The motion through fixes without a gap; None if it has no heading: one fix, or a car that stands."""
        if len(times) < 2:
            return None
        if np.ptp(positions, axis=0).max() < _LEAST_METERS:
            return None
        nodes, states = smooth(times, positions, self.sigma_meters, MAX_POSE_GAP)
        return (nodes, states) if states[:, 3].max() >= _LEAST_SPEED else None


def _known_frames(
    footage: Footage,
    stretches: Sequence[tuple[Float64[np.ndarray, " nodes"], States]],
    path: Path,
) -> tuple[Int[np.ndarray, " known"], tuple[Break, ...]]:
    """The footage's frames that are not between two stretches, and its breaks with those where the next stretch begins.

    The gaps between the stretches are logged.
    """
    frame_times = footage.times
    known = np.ones(len(frame_times), bool)
    starts = []
    for (before, _), (after, _) in pairwise(stretches):
        lost = (frame_times > before[-1]) & (frame_times < after[0])
        known &= ~lost
        starts.append(after[0])
        gap = f"from {before[-1]:.1f} to {after[0]:.1f} s"
        logger.warning("%s: no motion is known %s of the video: %d frames left out", path, gap, lost.sum())
    (rows,) = np.nonzero(known)
    reasons = {int(np.searchsorted(frame_times[rows], start)): _GAP for start in starts}
    reasons |= {int(np.searchsorted(rows, each.frame)): each.reason for each in footage.breaks}
    # A stretch may begin before or after all frames.
    return rows, tuple(Break(frame, reasons[frame]) for frame in sorted(reasons) if 0 < frame < len(rows))
