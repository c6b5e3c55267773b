"""A folder of videos or of folders with pictures, each with a file of actions of the same name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from decoder.video import probe_video, stream_video
from terra.actions import TableSpace, load_actions
from terra.actions.files import SUFFIXES
from terra.context import VIDEO_SUFFIXES, is_picture, natural_key
from terra.dataset.importing.source import SourceDrive, read_picture, say_left_out
from terra.errors import ConfigError, DatasetError


@dataclass(frozen=True)
class VideoActionsSource:
    """FOLDER/NAME.mp4 (or .mov, .m4v, .gif), or pictures in FOLDER/NAME/, beside FOLDER/NAME.csv, .json or .npz.

    Frame k was taken k / fps seconds after time 0 of the actions. A video has its own fps; of pictures it is given.

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
        found: dict[str, tuple[Path, Path]] = {}
        for path in sorted(self.folder.iterdir()):
            if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
                frames = self._frames(path)
                if path.stem in found:
                    raise DatasetError(
                        f"{path}: expected one file of actions, got {found[path.stem][0].name} beside it"
                    )
                if frames is not None:
                    found[path.stem] = path, frames
        say_left_out(self.folder, [path for pair in found.values() for path in pair], "videos with actions")
        if not found:
            kinds = f"{', '.join(VIDEO_SUFFIXES)} or a folder of pictures"
            raise DatasetError(f"{self.folder}: expected NAME.csv, .json or .npz beside NAME ({kinds}), got none")
        return tuple(found)

    def open_drive(self, name: str) -> SourceDrive:
        """Open the frames and the actions of one name."""
        (path,) = [path for path in (self.folder / f"{name}{suffix}" for suffix in SUFFIXES) if path.is_file()]
        frames = self._frames(path)
        if frames is None:
            raise DatasetError(f"{path}: expected a video or a folder of pictures {path.stem} beside it, got none")
        if frames.is_dir():
            if self.picture_fps is None:
                raise ConfigError(f"picture_fps: expected how many pictures a second {frames} has, got null")
            pictures = sorted(filter(is_picture, frames.iterdir()), key=natural_key)
            count, fps = len(pictures), self.picture_fps
        else:
            pictures, info = [], probe_video(frames)
            count, fps = info.num_frames, info.fps

        def read() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            return map(read_picture, pictures) if pictures else stream_video(frames)

        return SourceDrive(
            name=name,
            track=load_actions(path, self.space),
            frame_times=np.arange(count) / fps,
            frames=read,
            intrinsics=None,
            origin=str(path),
        )

    def _frames(self, actions: Path) -> Path | None:
        """The video, or the folder of pictures, that a file of actions belongs to; None if there is neither."""
        beside = [actions.with_suffix(suffix) for suffix in VIDEO_SUFFIXES]
        found = [path for path in beside if path.is_file()]
        folder = actions.with_suffix("")
        if folder.is_dir() and any(map(is_picture, folder.iterdir())):
            found.append(folder)
        if len(found) > 1:
            raise DatasetError(
                f"{actions}: expected one video or folder, got {' and '.join(each.name for each in found)}"
            )
        return found[0] if found else None
