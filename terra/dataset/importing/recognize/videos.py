"""Recognition of videos, or folders of pictures, each beside a table of its name: poses, GPS fixes, or actions."""

from collections import Counter
from pathlib import PurePath
from time import monotonic
from typing import Any

from terra.dataset.importing.recognize.columns import Columns, propose_space, read_columns
from terra.dataset.importing.recognize.found import Camera, Found, Listing, counted
from terra.errors import DatasetError, TerraError
from terra.views import check_view_names

_SUFFIXES = (".csv", ".json", ".npz", ".gpx")
_WORDS = {"video_poses": "poses", "gpx": "GPS tracks", "video_actions": "actions"}
_MOST_SECONDS = 60.0  # for reading tables
_GUESS = 10.0  # pictures a second, where nothing tells


def recognize(listing: Listing) -> Found | None:
    """Footage with tables. Raises DatasetError if no table can be read, or only tables that must be changed."""
    pairs, views = _pairs(listing), ()
    if not pairs:
        views = _views(listing)
        pairs = _pairs(listing, views[0]) if views else {}
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
    if views and kind != "video_actions":
        raise DatasetError(f"{listing.folder}: expected actions for several cameras, got {_WORDS[kind]}")
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
    if views:
        settings["views"] = views
        comments.append(f"views: {len(views)} cameras share a picture, the main one first; others: views=[{views[-1]}]")
        what[-1] += f" of each of {len(views)} cameras"
    return Found(
        kind=kind,
        title=f"{' and '.join(what)} with {_WORDS[kind]} ({formats})",
        folder=listing.folder,
        settings=settings,
        cameras=tuple(Camera(name, is_taken=True) for name in views),
        facts=tuple(facts),
        comments=tuple(comments),
        driving=kind != "video_actions",
    )


def _pairs(listing: Listing, view: str = "") -> dict[str, str]:
    """The names of the tables and, for each, of the video or folder of its stem, or of STEM.VIEW."""
    footage = {PurePath(name).stem: name for name in listing.videos}
    tables = {name: PurePath(name).stem + (f".{view}" if view else "") for name in listing.with_suffix(_SUFFIXES)}
    stems = set(tables.values())
    footage |= {name: name for name in listing.folders if name in stems and listing.inside(name).pictures}
    return {name: footage[stem] for name, stem in tables.items() if stem in footage}


def _views(listing: Listing) -> tuple[str, ...]:
    """The names of the cameras whose footage lies as STEM.CAMERA beside each table; nothing where there are not two."""
    stems = [PurePath(name).stem for name in listing.with_suffix(_SUFFIXES)]
    footage = [PurePath(name).stem for name in listing.videos] + listing.folders
    each = [{name.removeprefix(f"{stem}.") for name in footage if name.startswith(f"{stem}.")} for stem in stems]
    common = sorted(set.intersection(*filter(None, each))) if any(each) else []
    try:
        return tuple(check_view_names(common)) if len(common) > 1 else ()
    except ValueError:
        return ()


def _picture_fps(listing: Listing, tables: dict[str, Columns], pairs: dict[str, str]) -> tuple[float, bool]:
    """Pictures a second, and whether the tables tell it: they do if they have a row for each picture."""
    for name, table in tables.items():
        if pairs[name] in listing.folders and table.step > 0:
            count = len(listing.inside(pairs[name]).pictures)
            if count == table.num_rows:
                return round(1 / table.step, 3), True
    return _GUESS, False
