"""A folder of videos, each with the GPS track of the drive: poses for people who have none."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terra.dataset.importing.gps import load_gps
from terra.dataset.importing.smoothing import STEP, smooth
from terra.dataset.importing.source import PoseFiles, SourceDrive, find_pairs, motion, open_footage, say_left_out
from terra.errors import DatasetError
from terra.trajectory.checks import MAX_POSE_GAP, MAX_SPEED

logger = logging.getLogger(__name__)

SUFFIXES = (".gpx", ".csv")
_MARGIN = 10.0  # s of fixes before and after the video, by which its ends are known better
_MAX_NODES = 500_000  # of the smoother: they take a gigabyte, and some minutes
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
        """Open the video, and make poses of the track over its time."""
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
        if track.num_dropped:
            logger.warning("%s: %d fixes left out, at the time of the one before", path, track.num_dropped)
        if (count := int(near.sum())) + np.ptp(times[near]) / STEP > _MAX_NODES:
            got = f"{count} fixes over {np.ptp(times[near]):.0f} s"
            raise DatasetError(f"{path}: expected a day of fixes at most, or {_MAX_NODES} fixes, got {got}")
        times, positions = times[near], track.meters(int(np.argmax(near)))[near]
        gaps = np.diff(times)
        speeds = np.hypot(*np.diff(positions, axis=0).T) / gaps
        # Two fixes may be off by some standard deviations to opposite sides.
        if (too_fast := speeds > MAX_SPEED + 10 * self.sigma_meters / gaps).any():
            row = int(np.argmax(too_fast))
            got = f"{speeds[row]:.0f} m/s at {times[row]:.1f} s of the video"
            raise DatasetError(f"{path}: expected a car's motion, at most {MAX_SPEED:g} m/s, got {got}")
        moves = np.ptp(positions, axis=0).max() >= _LEAST_METERS
        nodes, states = smooth(times, positions, self.sigma_meters, MAX_POSE_GAP)
        if not moves or states[:, 3].max() < _LEAST_SPEED:
            raise DatasetError(
                f"{path}: expected a car that moves, because its heading is that of the motion, got none"
            )

        return SourceDrive(
            name=name,
            track=motion(nodes, states[:, :2], states[:, 2], speeds=states[:, 3]),
            frame_times=footage.times,
            frames=footage.frames,
            intrinsics=None,
            origin=str(path),
            clock=footage.clock,
            breaks=footage.breaks,
            left_out=footage.left_out,
        )
