"""A folder of videos, each with a file of poses of the same stem."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder.frames import list_frames
from decoder.video import VIDEO_SUFFIXES
from terra.dataset.importing.source import PoseFiles, SourceDrive, VideoFrames, list_by_stem, motion, say_left_out
from terra.errors import DatasetError
from terra.trajectory import load_poses

_RATE_TOLERANCE = 0.01
_POSES = (".csv", ".json")


@dataclass(frozen=True)
class VideoPosesSource(PoseFiles):
    """FOLDER/drive.mp4 (or another video) beside FOLDER/drive.csv or drive.json, see `terra.trajectory.load_poses`.

    The video's first frame was taken at the time of the first pose, and the others when the video shows them. The rate
    that the poses declare must be the video's, in the mean or in the median.
    """

    folder: Path

    def list_drives(self) -> tuple[str, ...]:
        """The stems of the videos. Raises DatasetError if there are no videos, or two of one stem."""
        videos = self._videos()
        tables = list_by_stem(self.folder, _POSES)
        poses = [path for name in videos for path in tables.get(name, [])]
        say_left_out(self.folder, [*videos.values(), *poses], "videos or their poses (.csv, .json)")
        return tuple(videos)

    def open_drive(self, name: str) -> SourceDrive:
        """Open the video and the poses of one stem."""
        video, found = self._videos()[name], list_by_stem(self.folder, _POSES).get(name, [])
        if len(found) != 1:
            raise DatasetError(f"{video}: expected {name}.csv or {name}.json beside it, got {len(found)} of them")
        table, info = load_poses(found[0], as_logged=True), list_frames(video)
        steps = np.diff(info.seconds)
        usual = 1 / float(np.median(steps)) if len(steps) else info.fps
        if min(abs(info.fps - table.fps), abs(usual - table.fps)) > _RATE_TOLERANCE * table.fps:
            raise DatasetError(
                f"{video}: expected {table.fps:g} frames a second as {found[0].name} declares, got {info.fps:g}"
            )
        times, poses = table.poses[:, 0] - (table.poses[0, 0] if table.start is None else table.start), table.poses

        return SourceDrive(
            name=name,
            track=motion(times, poses[:, 1:3], poses[:, 3]),
            frame_times=info.seconds,
            frames=VideoFrames(video, info.display),
            intrinsics=None,
            origin=str(found[0]),
        )

    def _videos(self) -> dict[str, Path]:
        videos = list_by_stem(self.folder, VIDEO_SUFFIXES)
        for files in videos.values():
            if len(files) > 1:
                got = " and ".join(file.name for file in files)
                raise DatasetError(f"{self.folder}: expected one video of a name, got {got}")
        if not videos:
            raise DatasetError(f"{self.folder}: expected a folder with videos ({', '.join(VIDEO_SUFFIXES)}), got none")
        return {name: files[0] for name, files in videos.items()}
