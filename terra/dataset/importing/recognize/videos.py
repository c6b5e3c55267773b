"""Recognition of videos, or folders of pictures, each beside a table of its name: poses, GPS fixes, or actions."""

from collections import Counter
from pathlib import PurePath
from time import monotonic
from typing import Any

from terra.dataset.importing.recognize.columns import Columns, propose_space, read_columns
from terra.dataset.importing.recognize.found import Found, Listing, counted
from terra.errors import DatasetError, TerraError

_SUFFIXES = (".csv", ".json", ".npz", ".gpx")
_WORDS = {"video_poses": "poses", "gpx": "GPS tracks", "video_actions": "actions"}
_MOST_SECONDS = 60.0  # for reading tables
_GUESS = 10.0  # pictures a second, where nothing tells


def recognize(listing: Listing) -> Found | None:
    """Footage with tables. Raises DatasetError if no table can be read, or only tables that must be changed."""
    pairs = _pairs(listing)
    if not pairs:
        return None
    tables: dict[str, Columns] = {}
    wrong: dict[str, str] = {}
    until = monotonic() + _MOST_SECONDS
    for table in pairs:
        if tables and monotonic() > until:
            break
        try:
            tables[table] = read_columns(listing.folder / table)
        except TerraError as error:
            wrong[table] = str(error)
    if not tables:
        more = f" (and {len(wrong) - 1} more tables)" if len(wrong) > 1 else ""
        raise DatasetError(next(iter(wrong.values())) + more)
    kind = Counter(table.kind for table in tables.values()).most_common(1)[0][0]
    of_kind = {name: table for name, table in tables.items() if table.kind == kind}
    footage = [pairs[name] for name in of_kind]
    folders = sum(name in listing.folders for name in footage)
    what = [counted(len(footage) - folders, "video")] if folders < len(footage) else []
    what += [counted(folders, "folder of pictures", "folders of pictures")] if folders else []
    formats = ", ".join(sorted({PurePath(name).suffix.lstrip(".").upper() for name in of_kind}))
    facts = [("not used", f"{other}: {each.kind}") for other, each in tables.items() if each.kind != kind][:3]
    comments: list[str] = []
    settings: dict[str, Any] = {}
    if kind == "video_actions":
        settings["action_space"] = propose_space(list(of_kind.values()))
        if settings["action_space"]["kind"] == "vector" and all(table.space is None for table in of_kind.values()):
            comments.append("action_space: the ranges are those that were read; widen them, and fill in the units")
        if len(tables) + len(wrong) < len(pairs):
            comments.append(f"action_space: of {len(tables)} of {len(pairs)} tables, the rest was not read in time")
    if folders and kind != "video_poses":
        settings["picture_fps"], tells = _picture_fps(listing, of_kind, pairs)
        if not tells:
            comments.append("picture_fps: nothing tells how many pictures were taken a second; 10 is a guess")
    if kind != "video_actions":
        comments.append("camera.fov_degrees= and camera.height_meters= place the path in overlays")
    return Found(
        kind=kind,
        title=f"{' and '.join(what)} with {_WORDS[kind]} ({formats})",
        folder=listing.folder,
        settings=settings,
        facts=tuple(facts),
        comments=tuple(comments),
        driving=kind != "video_actions",
    )


def _pairs(listing: Listing) -> dict[str, str]:
    """The names of the tables and, for each, of the video or folder of its stem."""
    footage = {PurePath(name).stem: name for name in listing.videos}
    tables = listing.with_suffix(_SUFFIXES)
    stems = {PurePath(name).stem for name in tables}
    footage |= {name: name for name in listing.folders if name in stems and listing.inside(name).pictures}
    return {name: footage[PurePath(name).stem] for name in tables if PurePath(name).stem in footage}


def _picture_fps(listing: Listing, tables: dict[str, Columns], pairs: dict[str, str]) -> tuple[float, bool]:
    """Pictures a second, and whether the tables tell it: they do if they have a row for each picture."""
    for name, table in tables.items():
        if pairs[name] in listing.folders and table.step > 0:
            count = len(listing.inside(pairs[name]).pictures)
            if count == table.num_rows:
                return round(1 / table.step, 3), True
    return _GUESS, False
