"""What a look at a folder's names and metadata finds, before any drive is opened."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from decoder.video import VIDEO_SUFFIXES
from terra.context import IMAGE_SUFFIXES
from terra.errors import DatasetError

_MOST_ENTRIES = 100_000
_SHOWN = 5


@dataclass(frozen=True)
class Camera:
    """One camera of a source.

    Attributes:
        name: its name in the source; "" where there is only one, without a name.
        size: (height, width) in pixels, or None where only a frame tells.
        note: what else is known, such as "30 frames a second".
        is_taken: whether the proposed import takes it.
    """

    name: str
    size: tuple[int, int] | None = None
    note: str = ""
    is_taken: bool = True


@dataclass(frozen=True, eq=False)
class Found:
    """What a folder was recognized as.

    Attributes:
        kind: of `terra import`; "dataset" for Terra's own format.
        title: the format in words, with its version.
        folder: which folder to give as input=.
        settings: what the source is opened with, by the names of `SourceSettings`.
        arguments: how a command line writes `settings`, where that is not name=value.
        cameras: all of them, the taken one included; empty where only frames tell.
        facts: further lines: (label, text).
        comments: lines beside the proposed command: what else could be chosen.
        held_out: recordings of the source (`DriveSource.recordings`) that it declares to be no training data.
        driving: whether the drives have poses of a vehicle.
    """

    kind: str
    title: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    cameras: tuple[Camera, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    comments: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    driving: bool = False


@dataclass(frozen=True)
class Listing:
    """The names in a folder, read once for all recognizers; hidden ones are left out."""

    folder: Path

    @cached_property
    def _entries(self) -> tuple[list[str], list[str]]:
        files: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(self.folder) as entries:
                for number, entry in enumerate(entries):
                    if number == _MOST_ENTRIES:
                        break
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif entry.is_file():
                        files.append(entry.name)
        except OSError as error:
            raise DatasetError(f"{self.folder}: expected a folder that can be read, got: {error.strerror}") from None
        return sorted(files), sorted(folders)

    @property
    def files(self) -> list[str]:
        """The names of the regular files, sorted; of a larger folder some 100,000. Raises DatasetError."""
        return self._entries[0]

    @property
    def folders(self) -> list[str]:
        """The names of the folders, sorted. Raises DatasetError."""
        return self._entries[1]

    def with_suffix(self, suffixes: Iterable[str]) -> list[str]:
        """The names of the files that end so, in upper or lower case."""
        wanted = tuple(suffixes)
        return [name for name in self.files if name.lower().endswith(wanted)]

    @property
    def videos(self) -> list[str]:
        """The names of the videos."""
        return self.with_suffix(VIDEO_SUFFIXES)

    @property
    def pictures(self) -> list[str]:
        """The names of the pictures."""
        return self.with_suffix(IMAGE_SUFFIXES)

    def inside(self, name: str) -> "Listing":
        """The listing of one of the folders."""
        return Listing(self.folder / name)


def some(names: Iterable[str], shown: int = _SHOWN) -> str:
    """Some names for a line: "a, b, c and 90 more"."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(count: int, word: str, plural: str | None = None) -> str:
    """A number with its word: "1 frame", "2 frames"."""
    return f"{count:,} {word if count == 1 else plural or word + 's'}"
