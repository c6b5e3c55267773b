"""Recognition: which kind of recordings a folder holds, by names and metadata alone.

One module for each kind has a function `recognize(Listing) -> Found | None`; `RECOGNIZERS` is the table of them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from terra.dataset.format import DATASET_FILE
from terra.dataset.importing.recognize import bags, donkeycar, kitti, lerobot, nuscenes, videos
from terra.dataset.importing.recognize.found import Camera, Found, Listing, some
from terra.dataset.importing.recognize.unreadable import explain, explain_file
from terra.errors import DatasetError, TerraError

__all__ = ["RECOGNIZERS", "Camera", "Found", "recognize", "recognize_as"]

_DEEP = ("dataset", "lerobot", "nuscenes", "kitti")  # whose own folders are no recordings by themselves
_MOST_FOLDERS = 200  # that are looked into, one level deeper


def _own(listing: Listing) -> Found | None:
    if DATASET_FILE not in listing.files:
        return None
    return Found("dataset", "Terra's own dataset", listing.folder)


RECOGNIZERS: dict[str, Callable[[Listing], Found | None]] = {
    "dataset": _own,
    "lerobot": lerobot.recognize,
    "nuscenes": nuscenes.recognize,
    "kitti": kitti.recognize,
    "donkeycar": donkeycar.recognize,
    "mcap": bags.recognize,
    "video_poses, video_actions, gpx": videos.recognize,
}
"""What recognizes each kind, in the order in which they are asked."""


def recognize(path: Path) -> Found:
    """Find out what a folder holds, also where it lies one folder deeper or higher.

    Raises:
        DatasetError: nothing that can be imported, or several things: one line that says what was seen and what to do.
    """
    if not path.is_dir():
        raise DatasetError(f"{path}: expected a folder of recordings, got {explain_file(path)}")
    listing = Listing(path)
    if (found := _first(listing)) is not None:
        return found
    inside: list[Found] = []
    reasons: list[str] = []
    for name in listing.folders[:_MOST_FOLDERS]:
        try:
            each = _first(listing.inside(name))
        except TerraError as error:
            reasons.append(str(error))
        else:
            inside += [] if each is None else [each]
    if len(inside) == 1:
        return replace(inside[0], facts=(("", f"one folder deeper than {path}"), *inside[0].facts))
    if inside:
        seen = some(f"{each.folder.name}/ ({each.title})" for each in inside)
        raise DatasetError(f"{path}: expected one source, got {len(inside)}: {seen}: give one, data={inside[0].folder}")
    for parent in list(path.resolve().parents)[:3]:
        if (above := _above(parent)) is not None:
            raise DatasetError(f"{path}: expected a whole source, got a part of {above.title}: give data={parent}")
    if reasons:
        raise DatasetError(reasons[0])
    raise DatasetError(f"{path}: expected recordings that can be imported, got {explain(listing)}")


def recognize_as(kind: str, folder: Path) -> Found | None:
    """What a folder holds, if it is of this kind; None if it is not, or not surely. Raises DatasetError for damage."""
    for kinds, look in RECOGNIZERS.items():
        if kind in kinds.split(", "):
            found = look(Listing(folder))
            return found if found is not None and found.kind == kind else None
    return None


def _first(listing: Listing) -> Found | None:
    return next((found for look in RECOGNIZERS.values() if (found := look(listing)) is not None), None)


def _above(folder: Path) -> Found | None:
    """What a folder above is, if it is a source with folders of its own."""
    try:
        listing = Listing(folder)
        return next((found for kind in _DEEP if (found := RECOGNIZERS[kind](listing)) is not None), None)
    except TerraError:
        return None
