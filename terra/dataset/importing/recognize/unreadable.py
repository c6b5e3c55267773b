"""What is in a folder that no source reads: one line that names it, and what to do about it."""

from collections.abc import Callable
from pathlib import Path, PurePath

from decoder.video import VIDEO_SUFFIXES
from terra.context import IMAGE_SUFFIXES
from terra.dataset.importing.recognize.found import Listing, counted, some

ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_TABLES = (".csv", ".json", ".npz", ".gpx")
_CONVERT = "convert it to LeRobot, or to videos with a table of actions each (terra import --help)"
_BESIDE = "a table of its name beside it: NAME.csv of actions or poses, or NAME.gpx"


def explain(listing: Listing) -> str:
    """What was seen in a folder that nothing recognized, and what to do, as the end of a line."""
    for look in (_archives, _hdf5, _tensorflow, _zarr, _arrays, _kitti_raw, _videos, _pictures):
        if (line := look(listing)) is not None:
            return line
    if not listing.files and not listing.folders:
        return "an empty folder"
    return f"{some([*(f'{name}/' for name in listing.folders), *listing.files])}: no format that is known here"


def explain_file(path: Path) -> str:
    """What a file is that was given in place of a folder, and what to do, as the end of a line."""
    name = path.name.lower()
    if name.endswith(ARCHIVES):
        return f"an archive: {_unpack(path)}"
    if name.endswith(VIDEO_SUFFIXES):
        beside = [other.name for other in map(path.with_suffix, _TABLES) if other.is_file()]
        if beside:
            return f"a video with {beside[0]} beside it: give their folder, data={path.parent}"
        return f"a video: give a folder that has {_BESIDE}"
    if name.endswith(IMAGE_SUFFIXES):
        return f"a picture: give a folder that has a folder of pictures, and {_BESIDE}"
    looks: dict[tuple[str, ...], str] = {
        (".h5", ".hdf5"): "an HDF5 file, which is not read",
        (".mcap", ".bag", ".db3"): f"a bag: give its folder, data={path.parent}",
        (".tfrecord",): "a TFRecord file, which is not read",
        _TABLES: "a table: give its folder, with a video of its name beside it",
    }
    for suffixes, words in looks.items():
        if name.endswith(suffixes):
            return f"{words}: {_CONVERT}" if words.endswith("not read") else words
    return f"a file: give the folder of the recordings, perhaps data={path.parent}"


def _unpack(path: Path) -> str:
    folder = path.parent / path.name.partition(".")[0]
    if path.name.lower().endswith(_TARS):
        how = f"mkdir -p {folder} && tar -xf {path} -C {folder}"
    elif path.suffix.lower() == ".zip":
        how = f"unzip {path} -d {folder}"
    else:
        return "unpack it first"
    return f"unpack it first, for example: {how}"


def _archives(listing: Listing) -> str | None:
    found = listing.with_suffix(ARCHIVES)
    if not found:
        return None
    return f"{counted(len(found), 'archive')} ({some(found)}): {_unpack(listing.folder / found[0])}"


def _named(suffixes: tuple[str, ...], words: str) -> Callable[[Listing], str | None]:
    def look(listing: Listing) -> str | None:
        found = listing.with_suffix(suffixes)
        return f"{words} ({some(found)}), not read: {_CONVERT}" if found else None

    return look


_hdf5 = _named((".h5", ".hdf5"), "HDF5 files, as robomimic and ALOHA have them")
_arrays = _named((".pkl", ".pickle", ".npy", ".pt", ".arrow"), "arrays or Python objects")


def _tensorflow(listing: Listing) -> str | None:
    records = [name for name in listing.files if ".tfrecord" in name.lower()]
    if not records and not {"dataset_info.json", "features.json"} <= set(listing.files):
        return None
    return f"TFRecord files, as RLDS and Waymo have them ({some(records or listing.files)}), not read: {_CONVERT}"


def _zarr(listing: Listing) -> str | None:
    found = [name for name in listing.folders if name.lower().endswith(".zarr")]
    own = any((listing.folder / name).is_file() for name in (".zgroup", ".zarray", "zarr.json"))
    return f"zarr arrays ({some(found or [listing.folder.name])}), not read: {_CONVERT}" if found or own else None


def _kitti_raw(listing: Listing) -> str | None:
    if "oxts" not in listing.folders and not any(name.endswith("_sync") for name in listing.folders):
        return None
    return (
        "KITTI's raw recordings, not read: take the odometry benchmark (sequences/ and poses/), or make poses of oxts/"
    )


def _videos(listing: Listing) -> str | None:
    videos, tables = listing.videos, listing.with_suffix(_TABLES)
    if not videos:
        return None
    if not tables:
        return f"{counted(len(videos), 'video')} ({some(videos)}) without tables: each needs {_BESIDE}"
    got = f"{counted(len(videos), 'video')} ({some(videos, 2)}) and {counted(len(tables), 'table')} ({some(tables, 2)})"
    stem = PurePath(videos[0]).stem
    return f"{got} of different names: call a video's table {stem}{PurePath(tables[0]).suffix}"


def _pictures(listing: Listing) -> str | None:
    if listing.pictures:
        name, got = listing.folder.name, counted(len(listing.pictures), "picture")
        return (
            f"{got} ({some(listing.pictures, 2)}) alone: an import takes the folder above, "
            f"with a table {name}.csv (of actions; or time, lat and lon) beside {name}/"
        )
    inside = [name for name in listing.folders[:50] if listing.inside(name).pictures]
    if inside:
        count = counted(len(inside), "folder of pictures", "folders of pictures")
        return f"{count} ({some(inside)}) without tables: each needs {_BESIDE}"
    return None
