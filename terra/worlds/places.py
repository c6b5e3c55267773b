"""Finds worlds: the shipped one, those that are unpacked, and the archives of a clone. Imports nothing heavy."""

from pathlib import Path

from terra.locations import worlds_folder

_ARCHIVES = Path(__file__).parent  # of a clone; a wheel has none


def unpacked_worlds() -> dict[str, Path]:
    """The folders of the worlds in `worlds_folder`, by name."""
    found = sorted(worlds_folder().glob("*"))
    return {path.name: path for path in found if (path / "world_model" / "config.json").is_file()}


def archives_at_hand() -> dict[str, Path]:
    """The archives of worlds that come with a clone, by the worlds' names."""
    return {path.stem: path for path in sorted(_ARCHIVES.glob("*.zip"))}


def packed_worlds() -> list[str]:
    """The names of the worlds of which the archive is at hand, and no folder is there."""
    return [name for name in archives_at_hand() if not (worlds_folder() / name).exists()]


def archive_of(pretrained: str) -> Path | None:
    """The archive at hand of a world that is not unpacked; None for one that is, and for what is no such world."""
    path = Path(pretrained)
    if path.parent != worlds_folder() or path.exists():
        return None
    return archives_at_hand().get(path.name)


def missing_world(pretrained: str) -> str | None:
    """One line that says where a world is to be had; None for one that is there or at hand, or for no such world."""
    path = Path(pretrained)
    if path.parent != worlds_folder() or path.is_dir() or archive_of(pretrained) is not None:
        return None
    unpack = f"terra unpack {path.name}.zip; archives are in terra/worlds of Terra's repository"
    return f"model={path.name}: no folder {path}: unpack its archive, once: {unpack}"


def find_archive(named: str | Path) -> Path | None:
    """The archive that a path or the name of a world at hand means; None for neither."""
    path = Path(named)
    return path if path.is_file() else archives_at_hand().get(str(named))
