"""The files of a LeRobot dataset: what meta/ says, an episode's rows, and which frames of a video are its own.

LeRobot's rule (huggingface.co/docs/lerobot): row k of an episode shows the frame of its video at `timestamp` seconds,
in version 3 of a file that holds several episodes, `from_timestamp` seconds later. Its recorder writes a frame for each
row, so that row k is the episode's frame k, whatever the rows' time stamps are.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, UInt8

from decoder.frames import FrameTimes, list_frames
from decoder.pictures import read_picture
from terra.errors import DatasetError
from tokenizer.files import parse_json, read_json, read_text
from tokenizer.limits import LIMITS

Row = dict[str, Any]

CAMERAS = ("video", "image")
TIME_TOLERANCE = 1e-4  # s; LeRobot's own between a row's time stamp and its frame's
_DEEP_GRAY = re.compile(r"gray(9|1\d|f)")  # ffmpeg's pixel formats of more than 8 bits
_PICTURES_AT_ONCE = 16


@lru_cache(maxsize=4)
def read_info(folder: Path) -> Row:
    """Read meta/info.json. Raises DatasetError if it is none of version 2 or 3."""
    path = folder / "meta" / "info.json"
    info = read_json(path, DatasetError, "a LeRobot dataset")
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith(("v2.", "v3.")):
        raise DatasetError(f"{path}: codebase_version: expected v2.x or v3.x, got {version!r}")
    for name, (kind, words) in {"data_path": (str, "text"), "features": (dict, "an object")}.items():
        if not isinstance(info.get(name), kind):
            raise DatasetError(f"{path}: {name}: expected {words}, got {info.get(name)!r}")
    if number(info, "fps", str(path)) <= 0:
        raise DatasetError(f"{path}: fps: expected a positive number, got {info['fps']!r}")
    for name, feature in info["features"].items():
        if not isinstance(feature, dict):
            raise DatasetError(f"{path}: {name}: expected an object, got {feature!r}")
    return info


def has_file_each(info: Row) -> bool:
    """Whether each episode has files of its own, as in version 2."""
    return info["codebase_version"].startswith("v2.")


@lru_cache(maxsize=4)
def read_episodes(folder: Path) -> dict[int, Row]:
    """The rows of meta/episodes (version 3) or meta/episodes.jsonl (version 2) by episode_index.

    Raises:
        DatasetError: no episodes, or two rows about one.
    """
    where = folder / "meta" / "episodes"
    if has_file_each(read_info(folder)):
        where = where.with_suffix(".jsonl")
        rows = read_lines(where)
    else:
        paths = sorted(where.glob("chunk-*/file-*.parquet"))
        rows = [row for path in paths for row in _read_table(path).to_pylist()]
    if not rows:
        hint = ": a recording that was not ended by LeRobotDataset.finalize() has none"
        raise DatasetError(f"{where}: expected episodes in chunk-*/file-*.parquet or a .jsonl, got none{hint}")
    counts = Counter(int(number(row, "episode_index", str(where))) for row in rows)
    twice = [index for index, count in counts.items() if count > 1]
    if twice:
        raise DatasetError(f"{where}: expected each episode once, got several rows of episode_index {twice[0]}")
    return {int(row["episode_index"]): row for row in rows}


def read_lines(path: Path) -> list[Row]:
    """The objects of a file of JSON lines. Raises DatasetError."""
    lines = read_text(path, DatasetError, max_bytes=LIMITS.json_bytes).splitlines()
    return [
        parse_json(line, str(path), DatasetError, first_line=count)
        for count, line in enumerate(lines, start=1)
        if line.strip()
    ]


def number(row: Row, name: str, where: str) -> float:
    """A finite number of a row or of info.json. Raises DatasetError."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DatasetError(f"{where}: {name}: expected a number, got {value!r}")
    return float(value)


def check_camera(folder: Path, camera: str) -> str:
    """Return "video" or "image", what a feature with pictures is.

    Raises:
        DatasetError: no such feature, or one that holds no pictures, such as a map of depths.
    """
    path, features = folder / "meta" / "info.json", read_info(folder)["features"]
    cameras = [name for name, feature in features.items() if feature.get("dtype") in CAMERAS]
    if camera not in cameras:
        got = ", ".join(cameras) or "none"
        raise DatasetError(f"{path}: expected {camera} among the features with pictures (video, image), got {got}")
    fault = camera_fault(features[camera])
    if fault is not None:
        raise DatasetError(f"{path}: {camera}: expected pictures, got {fault}")
    return features[camera]["dtype"]


def camera_fault(feature: Row) -> str | None:
    """What a feature of dtype video or image holds instead of pictures; None for pictures."""
    facts = [feature[name] for name in ("info", "video_info") if isinstance(feature.get(name), dict)]
    if any(each.get("is_depth_map") or each.get("video.is_depth_map") for each in facts):
        return "depths (is_depth_map)"
    formats = [str(each["video.pix_fmt"]) for each in facts if "video.pix_fmt" in each]
    deep = [name for name in formats if _DEEP_GRAY.match(name)]
    if deep:
        return f"numbers of more than 8 bits (video.pix_fmt {deep[0]})"
    channels = picture_shape(feature)[2]
    return None if channels in (None, 1, 3, 4) else f"{channels} channels"


def picture_shape(feature: Row) -> tuple[int | None, int | None, int | None]:
    """(height, width, channels) that info.json gives for a feature with pictures; None where it doesn't."""
    shape, names = feature.get("shape"), feature.get("names")
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(side) is int for side in shape):
        return None, None, None
    if isinstance(names, list) and len(names) == 3:
        first = str(names[0]).startswith("channel")
    else:
        first = shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)
    height, width, channels = (*shape[1:], shape[0]) if first else shape
    return height, width, channels


@lru_cache(maxsize=4)
def _read_table(path: Path) -> pa.Table:
    """A Parquet file without its pictures, which take much memory, and without the statistics of each feature."""
    with _damage_named(path), pq.ParquetFile(path) as file:
        names = [
            field.name
            for field in file.schema_arrow
            if not field.name.startswith("stats/")
            and not (pa.types.is_struct(field.type) or pa.types.is_binary(field.type))
        ]
        return file.read(columns=names, use_threads=False)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise DatasetError for a Parquet file that can't be read."""
    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        if "magic bytes not found in footer" in reason:
            reason = "a file without its end: cut off, or never ended by LeRobotDataset.finalize()"
        raise DatasetError(f"{path}: expected a Parquet table, got: {reason}") from None


def check_column(path: Path, name: str) -> None:
    """Raise DatasetError if a Parquet file has no such column."""
    with _damage_named(path):
        names = pq.read_schema(path).names
    if name not in names:
        raise DatasetError(f"{path}: expected a column {name}, got {', '.join(names)}")


def file_of(folder: Path, template: str, episode: Row, camera: str = "") -> Path:
    """The file of an episode's rows ("data_path"), or of a camera's video ("video_path"). Raises DatasetError."""
    info = read_info(folder)
    where = f"{folder / 'meta' / 'info.json'}: {template}"
    if has_file_each(info):
        index = int(episode["episode_index"])
        chunk = index // max(1, int(number(info, "chunks_size", str(folder / "meta" / "info.json"))))
        numbers = {"episode_index": index, "episode_chunk": chunk}
    else:
        prefix = f"videos/{camera}" if camera else "data"
        names = ("chunk_index", "file_index")
        numbers = {name: int(number(episode, f"{prefix}/{name}", str(folder / "meta/episodes"))) for name in names}
    if not isinstance(info.get(template), str):
        raise DatasetError(f"{where}: expected text, got {info.get(template)!r}")
    try:
        path = info[template].format(video_key=camera, **numbers)
    except (KeyError, IndexError, ValueError):
        raise DatasetError(f"{where}: expected a path of {info['codebase_version']}, got {info[template]!r}") from None
    return _inside(folder, path, where)


def _inside(folder: Path, path: str, where: str) -> Path:
    """A path that a file of the dataset names. Raises DatasetError if it leads out of the dataset's folder."""
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise DatasetError(f"{where}: expected a path within {folder}, got {path!r}")
    return folder / path


def episode_rows(path: Path, episode: Row, where: str) -> dict[str, pa.ChunkedArray]:
    """The columns of an episode's rows but pictures, as many and in the order that meta/ says. Raises DatasetError."""
    table = _read_table(path)
    for name in ("episode_index", "timestamp"):
        if name not in table.column_names:
            raise DatasetError(f"{path}: expected a column {name}, got {', '.join(table.column_names)}")
    mask = pa.array(table["episode_index"].to_numpy() == episode["episode_index"])
    rows = {name: table[name].filter(mask) for name in table.column_names}
    count = int(number(episode, "length", where))
    if len(rows["timestamp"]) != count:
        raise DatasetError(f"{where}: expected {count} rows, got {len(rows['timestamp'])}")
    if not count:
        raise DatasetError(f"{where}: expected rows, got none")
    starts = {"frame_index": 0.0}
    if episode.get("dataset_from_index") is not None:
        since, until = (number(episode, f"dataset_{name}_index", where) for name in ("from", "to"))
        if until - since != count:
            got = f"{since:.0f} and {until:.0f}"
            raise DatasetError(f"{where}: expected dataset_from_index and dataset_to_index {count} apart, got {got}")
        starts["index"] = since
    for name, start in starts.items():
        if name not in rows:
            continue
        values = numbers(rows[name], name, where)[:, 0]
        wrong = np.flatnonzero(values != start + np.arange(count))
        if len(wrong):
            row = int(wrong[0])
            raise DatasetError(f"{where}: {name}: expected {start + row:.0f} in row {row}, got {values[row]:g}")
    return rows


def row_times(stamps: pa.ChunkedArray, fps: float, where: str) -> Float[np.ndarray, " rows"]:
    """Seconds of an episode's rows from the first one on.

    They are index / fps where the time stamps are that but for their rounding (they are float32), which may be more
    than LeRobot's own tolerance late in a recording.

    Raises:
        DatasetError: time stamps that don't increase.
    """
    times = numbers(stamps, "timestamp", where)[:, 0]
    wrong = np.flatnonzero(~(np.diff(times) > 0))
    if len(wrong) or not np.isfinite(times).all():
        row = int(wrong[0]) + 1 if len(wrong) else 0
        got = f"{times[row]:.9g}" + (f" after {times[row - 1]:.9g}" if row else "")
        raise DatasetError(f"{where}: timestamp: expected seconds that increase, got {got} in row {row}")
    since, even = times - times[0], np.arange(len(times)) / fps
    rounding = max(TIME_TOLERANCE, 2 * float(np.spacing(np.float32(np.abs(times).max()))))
    return even if rounding < 0.25 / fps and np.abs(since - even).max() <= rounding else since


def numbers(column: pa.ChunkedArray, name: str, where: str) -> Float[np.ndarray, "rows entries"]:
    """A column as float64, all numbers of a row in one row. Raises DatasetError."""
    try:
        values = np.array(column.to_pylist(), dtype=np.float64)
    except (TypeError, ValueError):
        raise DatasetError(f"{where}: {name}: expected numbers, as many in each row, got {column.type}") from None
    return values.reshape(len(values), -1)


@lru_cache(maxsize=16)
def video_frames(path: Path) -> FrameTimes:
    """The times of a video's frames, and how they are shown; several episodes may share a video.

    Raises:
        DatasetError: a video of numbers that are no colors.
        VideoError: a video that can't be read.
    """
    frames = list_frames(path)
    if _DEEP_GRAY.match(frames.display.pixel_format):
        raise DatasetError(
            f"{path}: expected pictures, got numbers of more than 8 bits ({frames.display.pixel_format})"
        )
    return frames


def own_frames(folder: Path, camera: str, episode: Row, video: Path, where: str) -> tuple[int, int]:
    """The first frame of a video that is an episode's own, and how many are.

    In version 2 it is the whole file. In version 3 it is the frames whose times lie between from_timestamp and
    to_timestamp, give or take half a frame. Where all episodes of a file together have exactly its frames, and the
    length of each agrees with its time stamps, the frames are counted: sums of rounded durations drift.

    Raises:
        DatasetError: no time stamps.
        VideoError: a video that can't be read.
    """
    times = video_frames(video).seconds
    if has_file_each(read_info(folder)):
        return 0, len(times)
    prefix = f"videos/{camera}"
    span = [number(episode, f"{prefix}/{name}_timestamp", where) for name in ("from", "to")]
    period = float(np.median(np.diff(times))) if len(times) > 1 else 1 / float(read_info(folder)["fps"])
    neighbors = _episodes_by_video(folder, camera)[_place(episode, prefix)]
    lengths = [length for _, _, length, _ in neighbors]
    agree = all(abs(stop - start - length * period) < period / 2 for start, stop, length, _ in neighbors)
    if agree and sum(lengths) == len(times):
        place = [index for _, _, _, index in neighbors].index(episode["episode_index"])
        return int(sum(lengths[:place])), int(lengths[place])
    first, end = np.searchsorted(times, np.array(span) - period / 2).tolist()
    return first, end - first


def _place(episode: Row, prefix: str) -> tuple[Any, Any]:
    return episode.get(f"{prefix}/chunk_index"), episode.get(f"{prefix}/file_index")


@lru_cache(maxsize=4)
def _episodes_by_video(folder: Path, camera: str) -> dict[tuple[Any, Any], list[tuple[float, float, float, int]]]:
    """(from, to, length, index) of the episodes of each file of a camera, in the order of their times."""
    prefix = f"videos/{camera}"
    files: dict[tuple[Any, Any], list[tuple[float, float, float, int]]] = {}
    for index, episode in read_episodes(folder).items():
        facts = [episode.get(f"{prefix}/from_timestamp"), episode.get(f"{prefix}/to_timestamp"), episode.get("length")]
        start, stop, length = (value if isinstance(value, int | float) else math.nan for value in facts)
        files.setdefault(_place(episode, prefix), []).append((start, stop, length, index))
    return {place: sorted(each) for place, each in files.items()}


def stored_pictures(
    folder: Path, data: Path, camera: str, episode_index: int, where: str
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the pictures of an episode that its rows hold, as bytes or as paths within the dataset's folder.

    Raises:
        DatasetError: a row without a picture.
        VideoError: a picture that can't be read, or can't be shown rightly.
    """
    row = 0
    with _damage_named(data), pq.ParquetFile(data) as file:
        groups, columns = _row_groups(file, episode_index), ["episode_index", camera]
        for batch in file.iter_batches(_PICTURES_AT_ONCE, row_groups=groups, columns=columns, use_threads=False):
            mask = pa.array(batch["episode_index"].to_numpy() == episode_index)
            for picture in batch[camera].filter(mask).to_pylist():
                yield _stored_picture(folder, picture, f"{where}: {camera}: row {row}")
                row += 1


def _stored_picture(folder: Path, stored: Any, where: str) -> UInt8[np.ndarray, "height width 3"]:
    facts = stored if isinstance(stored, dict) else {"bytes": stored}
    if facts.get("bytes"):
        return read_picture(facts["bytes"], where)
    if not facts.get("path"):
        raise DatasetError(f"{where}: expected a picture, got none")
    return read_picture(_inside(folder, facts["path"], where))


def _row_groups(file: pq.ParquetFile, episode_index: int) -> list[int]:
    """The row groups that may have rows of an episode, by their statistics if they have any."""
    groups = []
    for place in range(file.num_row_groups):
        group = file.metadata.row_group(place)
        columns = map(group.column, range(group.num_columns))
        facts = next(each.statistics for each in columns if each.path_in_schema == "episode_index")
        if facts is None or not facts.has_min_max or facts.min <= episode_index <= facts.max:
            groups.append(place)
    return groups
