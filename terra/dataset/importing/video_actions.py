"""A folder of videos or of folders with pictures, each with a file of actions of the same name."""

from dataclasses import dataclass
from pathlib import Path

from terra.actions import TableSpace, load_actions
from terra.actions.files import SUFFIXES
from terra.dataset.importing.source import SourceDrive, find_footage, open_footage, say_left_out


@dataclass(frozen=True)
class VideoActionsSource:
    """FOLDER/NAME.mp4 (or another video), or pictures in FOLDER/NAME/, beside FOLDER/NAME.csv, .json or .npz.

    A video's first frame was taken at time 0 of the actions, and the others when the video shows them. Of pictures the
    rate is given. With `views` each of these cameras has a video or a folder: NAME.front.mp4, NAME.wrist/. All begin
    at time 0 of the actions.

    Attributes:
        folder: FOLDER.
        space: what the actions mean, see `terra.actions`.
        picture_fps: pictures a second; None if there are only videos.
        views: the names of several cameras, the main one first; nothing for one.
    """

    folder: Path
    space: TableSpace
    picture_fps: float | None
    views: tuple[str, ...] = ()

    @property
    def declared(self) -> dict[str, str | None]:
        """The pictures' rate, which no file tells, and the cameras."""
        views = {"views": ",".join(self.views)} if self.views else {}
        return {"picture_fps": None if self.picture_fps is None else f"{self.picture_fps:g}", **views}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}

    def list_drives(self) -> tuple[str, ...]:
        """The names of the files of actions that have a video or a folder of pictures. Raises DatasetError if none."""
        found = find_footage(self.folder, SUFFIXES, "actions", self.views)
        say_left_out(self.folder, [path for each in found.values() for path in each], "videos with actions")
        return tuple(found)

    def open_drive(self, name: str) -> SourceDrive:
        """Open the frames and the actions of one name."""
        path, *videos = find_footage(self.folder, SUFFIXES, "actions", self.views)[name]
        footage, *others = (open_footage(video, self.picture_fps) for video in videos)
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
            others=dict(zip(self.views[1:], others, strict=True)),
        )
