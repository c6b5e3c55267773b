"""Names files and folders in a record without the paths of the machine, and finds them again on another one.

A location is one of

    terra:demo/contexts/day     a file or folder of the package terra, wherever it is installed
    worlds:doom/contexts/hall   one of an unpacked world, in `worlds_folder`
    ../data/drive.json          a path relative to the record's folder
    drive.json                  a name alone: the way there leads through a home, or there is none

The last two are hints: who looks for such a file compares its hash, and looks beside the record, too.
"""

import os
from pathlib import Path, PurePosixPath
from typing import Any

PACKAGE = Path(__file__).parent
"""The folder of the package terra."""

DEMO = PACKAGE / "demo"
"""The folder of the model that ships with Terra, its adapters and contexts."""


def worlds_folder() -> Path:
    """Where worlds that are not in the package are looked for: $TERRA_WORLDS, else ~/.cache/terra/worlds."""
    return Path(os.environ.get("TERRA_WORLDS") or Path.home() / ".cache" / "terra" / "worlds")


def location(path: Path, folder: Path) -> str:
    """The location of a file or folder for a record in `folder`, or in another folder with the same parent."""
    for scheme, root in _roots().items():
        real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
        if real.is_relative_to(real_root):
            return f"{scheme}:{real.relative_to(real_root).as_posix()}"
    absolute, start, home = Path(os.path.abspath(path)), folder.resolve(), Path.home()  # noqa: PTH100
    common = Path(os.path.commonpath([absolute, start]))
    leads_through_home = common in home.parents or common == Path(common.anchor)
    return absolute.name if leads_through_home else Path(os.path.relpath(absolute, start)).as_posix()


def with_locations(value: Any, folder: Path) -> Any:
    """A JSON value in which the `location` of each absolute path stands for that path."""
    if isinstance(value, dict):
        return {key: with_locations(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_locations(each, folder) for each in value]
    return location(Path(value), folder) if isinstance(value, str) and Path(value).is_absolute() else value


def places_of(location: str, folder: Path) -> list[Path]:
    """Where a location of a record in `folder` may be, most likely first: there, or by its name beside the record."""
    scheme, _, rest = location.partition(":")
    beside = folder / PurePosixPath(location).name
    if scheme in _roots():
        leaves = PurePosixPath(rest).is_absolute() or ".." in PurePosixPath(rest).parts
        return [beside] if leaves else [_roots()[scheme] / rest, beside]
    if Path(location).is_absolute():
        return [beside]
    return list(dict.fromkeys([Path(os.path.normpath(folder.resolve() / location)), beside.absolute()]))


def _roots() -> dict[str, Path]:
    return {"terra": PACKAGE, "worlds": worlds_folder()}
