"""A folder of videos or of folders with pictures, each with a file of actions of the same name."""

from dataclasses import dataclass
from pathlib import Path

from terra.actions import TableSpace, load_actions
from terra.actions.files import SUFFIXES
from terra.dataset.importing.source import SourceDrive, find_pairs, open_footage, say_left_out


@dataclass(frozen=True)
class VideoActionsSource:
    """FOLDER/NAME.mp4 (or another video), or pictures in FOLDER/NAME/, beside FOLDER/NAME.csv, .json or .npz.

    A video's first frame was taken at time 0 of the actions, and the others when the video shows them. Of pictures the
    rate is given.

    Attributes:
        folder: FOLDER.
        space: what the actions mean, see `terra.actions`.
        picture_fps: pictures a second; None if there are only videos.
    """

    folder: Path
    space: TableSpace
    picture_fps: float | None

    @property
    def declared(self) -> dict[str, str | None]:
        """The pictures' rate, which no file tells."""
        return {"picture_fps": None if self.picture_fps is None else f"{self.picture_fps:g}"}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}

    def list_drives(self) -> tuple[str, ...]:
        """The names of the files of actions that have a video or a folder of pictures. Raises DatasetError if none."""
        pairs = find_pairs(self.folder, SUFFIXES, "actions")
        say_left_out(self.folder, [path for pair in pairs.values() for path in pair], "videos with actions")
        return tuple(pairs)

    def open_drive(self, name: str) -> SourceDrive:
        """Open the frames and the actions of one name."""
        path, video = find_pairs(self.folder, SUFFIXES, "actions")[name]
        footage = open_footage(video, self.picture_fps)
        return SourceDrive(
            name=name,
            track=load_actions(path, self.space, as_logged=True),
            frame_times=footage.times,
            frames=footage.frames,
            intrinsics=None,
            origin=str(path),
            clock=footage.clock,
            breaks=footage.breaks,
            left_out=footage.left_out,
        )
