"""Import of LeRobot datasets, versions 2 and 3, as driving or as any world (huggingface.co/docs/lerobot).

Version 2 has a file of rows and a video for each episode; version 3 has several episodes in each file.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, UInt8

from decoder.video import stream_video
from terra.actions import ActionSpace, ActionTrack, TableSpace, Vector, Waypoints
from terra.dataset.importing.source import SourceDrive, motion
from terra.dataset.poses import Poses
from terra.errors import ConfigError, DatasetError
from tokenizer.files import parse_json, read_json, read_text
from tokenizer.limits import LIMITS
from tokenizer.settings import checked

logger = logging.getLogger(__name__)

METERS_PER_DEGREE = 111_320.0  # a degree of latitude, or of longitude at the equator: 40,075 km / 360
POSITION_UNITS = ("m", "deg")
HEADING_UNITS = {"rad": 1.0, "deg": math.pi / 180}
HEADINGS_FROM = ("x_ccw", "north_cw")
SPEED_UNITS = {"m/s": 1.0, "km/h": 1 / 3.6}

_RANGE_TOLERANCE = 1e-5  # of a range: statistics are rounded to float32 by some writers
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_DECLARE = "declare one with action_space='{kind:vector,names:[a],units:[rad],low:[-1],high:[1]}'"
_COLUMN = re.compile(r"(?P<feature>[^\[\]]+)(\[(?P<entry>[^\[\]]+)\])?")


@dataclass(frozen=True, kw_only=True)
class LeRobotColumns:
    """The columns that hold the motion, with their units and axes, which LeRobot's format does not declare.

    Attributes:
        video: the feature with the frames, such as "observation.images.front".
        heading: a column: "feature", "feature[3]", or "feature[name]" by the names in info.json.
        heading_unit: "rad" or "deg".
        heading_from: "x_ccw" (counter-clockwise from +x) or "north_cw" (clockwise from north, which is +y).
        x, y: columns; both None if the path is to be integrated from speed and heading.
        position_unit: "m", or "deg" for degrees of longitude (x, to the east) and latitude (y, to the north).
        speed: a column, or None if the speed is to be derived from the positions.
        speed_unit: "m/s" or "km/h".

    Raises:
        ConfigError: an invalid column name, an unknown unit, or neither positions nor a speed.
    """

    video: str
    heading: str
    heading_unit: str
    heading_from: str
    x: str | None
    y: str | None
    position_unit: str
    speed: str | None
    speed_unit: str

    def __post_init__(self) -> None:
        allowed = {"position_unit": POSITION_UNITS, "heading_unit": HEADING_UNITS, "heading_from": HEADINGS_FROM}
        for name, words in {**allowed, "speed_unit": SPEED_UNITS}.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"lerobot.{name}: expected one of {', '.join(words)}, got {getattr(self, name)!r}")
        for name in ("video", "heading", "x", "y", "speed"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("video", "heading")):
                raise ConfigError(f"lerobot.{name}: expected the name of a column, got {value!r}")
        if (self.x is None) != (self.y is None) or (self.x is None and self.speed is None):
            raise ConfigError(
                f"lerobot: expected columns x and y, or neither and a speed, got {self.x}, {self.y}, {self.speed}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> "LeRobotColumns":
        """Build the columns from a mapping that must name every field. Raises ConfigError."""
        names = {field.name for field in fields(cls)}
        if values is None or values.keys() != names:
            raise ConfigError(f"lerobot: expected {', '.join(sorted(names))}, got {sorted(values or {})}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class LeRobotActions:
    """The features that hold the frames and the actions of a world that is no driving.

    Attributes:
        video: the feature with the frames, such as "observation.images.front".
        action: the feature with the actions, such as "action"; all its numbers are taken.

    Raises:
        ConfigError: no names of features.
    """

    video: str
    action: str

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, str):
                raise ConfigError(f"lerobot.{name}: expected the name of a feature, got {value!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LeRobotActions":
        """Build it from a mapping that must name both fields and nothing else. Raises ConfigError."""
        if values.keys() != {"video", "action"}:
            raise ConfigError(f"lerobot: expected video and action, or the columns of driving, got {sorted(values)}")
        return cls(**values)


@dataclass(frozen=True)
class LeRobotSource:
    """A folder with meta/info.json (codebase_version v2.x or v3.x), data and videos; its episodes are drives.

    Attributes:
        folder: the folder.
        columns: the columns of the motion, or the feature of the actions.
        action_space: what the actions mean; None takes the names of info.json, and the range that the dataset's own
            statistics have.
    """

    folder: Path
    columns: LeRobotColumns | LeRobotActions
    action_space: TableSpace | None = None

    @property
    def space(self) -> ActionSpace:
        """Waypoints, which are made of poses; or what the actions mean. Raises DatasetError."""
        if isinstance(self.columns, LeRobotColumns):
            return Waypoints()
        return self.action_space or _stated_space(self.folder, self.columns.action)

    @property
    def declared(self) -> dict[str, str | None]:
        """Return the declared columns."""
        return asdict(self.columns)

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """Return {}: each drive is a recording of its own."""
        return {}

    def list_drives(self) -> tuple[str, ...]:
        """The episodes' names, such as episode_000012."""
        return tuple(f"episode_{index:06d}" for index in sorted(_read_episodes(self.folder)))

    def open_drive(self, name: str) -> SourceDrive:
        """Open one episode."""
        info, columns = _read_info(self.folder), self.columns
        if columns.video not in info["features"]:
            known = [key for key, value in info["features"].items() if value.get("dtype") == "video"]
            got = f"the videos {', '.join(known)}" if known else "no video"
            raise DatasetError(f"{self.folder / 'meta' / 'info.json'}: expected a feature {columns.video}, got {got}")
        episode = _read_episodes(self.folder)[int(name.removeprefix("episode_"))]
        data = self.folder / _fill(info, "data_path", episode, "data")
        where = f"{data}: {name}"
        rows = _episode_rows(data, int(episode["episode_index"]))
        if len(rows["timestamp"]) != episode["length"]:
            raise DatasetError(f"{where}: expected {episode['length']} rows, got {len(rows['timestamp'])}")
        times = np.asarray(rows["timestamp"], np.float64)
        video = self.folder / _fill(info, "video_path", episode, f"videos/{columns.video}", columns.video)
        if not video.is_file():
            raise DatasetError(f"{video}: expected the video of {columns.video}, got no file")
        has_file_each = info["codebase_version"].startswith("v2.")
        start = 0.0 if has_file_each else _number(episode, f"videos/{columns.video}/from_timestamp", where)

        def frames() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            # Seek half a frame early, because time stamps in the file are rounded.
            return islice(stream_video(video, start - 0.5 / float(info["fps"])), len(times))

        if isinstance(columns, LeRobotColumns):
            track = _poses(columns, rows, times, info, where)
        else:
            track = _actions(self.space, columns.action, rows, times, where)
        return SourceDrive(name=name, track=track, frame_times=times, frames=frames, intrinsics=None, origin=where)


def _poses(
    columns: LeRobotColumns, rows: dict[str, Any], times: Float[np.ndarray, " rows"], info: dict[str, Any], where: str
) -> Poses:
    """The motion in an episode's rows. Raises DatasetError."""
    heading = _column(rows, columns.heading, info, where) * HEADING_UNITS[columns.heading_unit]
    if columns.heading_from == "north_cw":
        heading = math.pi / 2 - heading
    speeds = None
    if columns.speed is not None:
        speeds = _column(rows, columns.speed, info, where) * SPEED_UNITS[columns.speed_unit]
    return motion(times, _positions(columns, rows, times, heading, speeds, info, where), heading, speeds=speeds)


def _positions(
    columns: LeRobotColumns,
    rows: dict[str, Any],
    times: Float[np.ndarray, " rows"],
    heading: Float[np.ndarray, " rows"],
    speeds: Float[np.ndarray, " rows"] | None,
    info: dict[str, Any],
    where: str,
) -> Float[np.ndarray, "rows 2"]:
    """x and y in meters from the episode's first position: as stored, or integrated by the trapezoidal rule."""
    if columns.x is None or columns.y is None:
        assert speeds is not None
        rates = speeds[:, None] * np.stack([np.cos(heading), np.sin(heading)], axis=1)
        steps = (rates[1:] + rates[:-1]) / 2 * np.diff(times)[:, None]
        return np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    places = [_column(rows, name, info, where) for name in (columns.x, columns.y)]
    positions = np.stack(places, axis=1)
    if columns.position_unit == "deg":
        # A drive is short compared with the earth's radius, so a flat map is exact enough.
        latitude = math.radians(float(positions[0, 1]))
        positions = (positions - positions[0]) * METERS_PER_DEGREE * [math.cos(latitude), 1.0]
    return positions - positions[0]


def _actions(
    space: ActionSpace, feature: str, rows: dict[str, Any], times: Float[np.ndarray, " rows"], where: str
) -> ActionTrack:
    """The actions in an episode's rows. Raises DatasetError for one outside the space."""
    assert not isinstance(space, Waypoints)
    if feature not in rows:
        raise DatasetError(f"{where}: expected a column {feature}, got {', '.join(rows)}")
    values = _numbers(rows[feature], feature, where)
    if values.shape[1:] != (len(space.columns),):
        raise DatasetError(f"{where}: {feature}: expected {len(space.columns)} numbers, got {values.shape[1:]}")
    if isinstance(space, Vector):
        low, high = np.array(space.low), np.array(space.high)
        slack = _RANGE_TOLERANCE * (high - low)
        values = np.where((values >= low - slack) & (values <= high + slack), np.clip(values, low, high), values)
    for row, problem in enumerate(map(space.problem, values)):
        if problem is not None:
            raise DatasetError(f"{where}: {feature}: row {row}: {problem}; {_DECLARE}")
    return ActionTrack(space, times, values, where)


@lru_cache(maxsize=4)
def _stated_space(folder: Path, feature: str) -> Vector:
    """The vector that info.json names, with the least and greatest values of the dataset's own statistics.

    Raises:
        DatasetError: no such feature, or no statistics of it.
    """
    info, path = _read_info(folder), folder / "meta" / "info.json"
    facts = info["features"].get(feature)
    if facts is None:
        raise DatasetError(f"{path}: expected a feature {feature}, got {', '.join(info['features'])}")
    low, high = _stated_range(folder, feature)
    names = _entry_names(facts)
    if len(names) != len(low) or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
        names = [f"{re.sub(r'[^A-Za-z0-9_.-]', '_', feature)}_{index}" for index in range(len(low))]
        logger.warning(
            "%s: %s has no %d names of its own that can be taken: %s, ...", path, feature, len(low), names[0]
        )
    still = [name for name, least, most in zip(names, low, high, strict=True) if least == most]
    if still:
        logger.warning("%s: always the same: %s; its range is taken to be 1 below to 1 above", path, ", ".join(still))
    return checked(
        Vector,
        {
            "names": names,
            "units": [""] * len(low),
            "low": [least - (least == most) for least, most in zip(low, high, strict=True)],
            "high": [most + (least == most) for least, most in zip(low, high, strict=True)],
        },
        f"{path}: {feature}",
        DatasetError,
    )


def _stated_range(folder: Path, feature: str) -> tuple[list[float], list[float]]:
    """Least and greatest values of a feature's numbers by meta/stats.json, or by meta/episodes_stats.jsonl (v2.1)."""
    each = folder / "meta" / "episodes_stats.jsonl"
    if each.is_file():
        where, parts = each, [line.get("stats") for line in _read_lines(each)]
    else:
        where = folder / "meta" / "stats.json"
        parts = [read_json(where, DatasetError, f"statistics that hold the range of {feature}; else {_DECLARE}")]
    try:
        least, most = (
            reach(np.array([np.ravel(part[feature][name]) for part in parts if part], np.float64), axis=0)
            for name, reach in (("min", np.min), ("max", np.max))
        )
    except (KeyError, TypeError, ValueError):
        least = most = np.array([np.nan])
    if least.shape != most.shape or not np.isfinite([least, most]).all():
        raise DatasetError(f"{where}: {feature}: expected min and max of each number, got none; {_DECLARE}")
    return least.tolist(), most.tolist()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. Raises DatasetError."""
    lines = read_text(path, DatasetError, max_bytes=LIMITS.json_bytes).splitlines()
    return [
        parse_json(line, str(path), DatasetError, first_line=number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


@lru_cache(maxsize=4)
def _read_info(folder: Path) -> dict[str, Any]:
    info = read_json(folder / "meta" / "info.json", DatasetError, "a LeRobot dataset")
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith(("v2.", "v3.")):
        raise DatasetError(f"{folder / 'meta' / 'info.json'}: codebase_version: expected v2.x or v3.x, got {version!r}")
    types = {"data_path": (str, "text"), "video_path": (str, "text"), "fps": (int | float, "a number")}
    for name, (kind, words) in {**types, "features": (dict, "an object")}.items():
        if not isinstance(info.get(name), kind):
            raise DatasetError(f"{folder / 'meta' / 'info.json'}: {name}: expected {words}, got {info.get(name)!r}")
    for name, feature in info["features"].items():
        if not isinstance(feature, dict):
            raise DatasetError(f"{folder / 'meta' / 'info.json'}: {name}: expected an object, got {feature!r}")
    return info


@lru_cache(maxsize=4)
def _read_episodes(folder: Path) -> dict[int, dict[str, Any]]:
    """The rows of meta/episodes (v3) or meta/episodes.jsonl (v2) by episode_index."""
    where = folder / "meta" / "episodes"
    if _read_info(folder)["codebase_version"].startswith("v2."):
        where = where.with_suffix(".jsonl")
        rows = _read_lines(where)
    else:
        paths = sorted(where.glob("chunk-*/file-*.parquet"))
        rows = [row for path in paths for row in _without_statistics(_read_table(path)).to_pylist()]
    if not rows:
        raise DatasetError(f"{where}: expected episodes in chunk-*/file-*.parquet or a .jsonl, got none")
    for row in rows:
        for name in ("episode_index", "length"):
            _number(row, name, str(where))
    return {int(row["episode_index"]): row for row in rows}


def _without_statistics(table: pa.Table) -> pa.Table:
    # Most columns are statistics of each feature, which the import does not need.
    return table.select([name for name in table.column_names if not name.startswith("stats/")])


@lru_cache(maxsize=2)
def _read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path}: expected a Parquet table, got: {str(error).partition(chr(10))[0]}") from None


def _episode_rows(path: Path, episode_index: int) -> dict[str, Any]:
    table = _read_table(path)
    for name in ("episode_index", "timestamp"):
        if name not in table.column_names:
            raise DatasetError(f"{path}: expected a column {name}, got {', '.join(table.column_names)}")
    mask = table["episode_index"].to_numpy() == episode_index
    return {name: table[name].filter(pa.array(mask)) for name in table.column_names}


def _fill(info: dict[str, Any], template: str, episode: dict[str, Any], prefix: str, video_key: str = "") -> str:
    """Fill the episode's chunk and file into a path template of info.json."""
    if info["codebase_version"].startswith("v2."):
        index = int(episode["episode_index"])
        numbers = {
            "episode_index": index,
            "episode_chunk": index // max(1, int(_number(info, "chunks_size", "info.json"))),
        }
    else:
        names = ("chunk_index", "file_index")
        numbers = {name: int(_number(episode, f"{prefix}/{name}", "meta/episodes")) for name in names}
    try:
        return info[template].format(video_key=video_key, **numbers)
    except (KeyError, IndexError, ValueError) as error:
        raise DatasetError(
            f"meta/info.json: {template}: expected a path of {info['codebase_version']}, got {info[template]!r}"
        ) from error


def _number(row: dict[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DatasetError(f"{where}: {name}: expected a number, got {value!r}")
    return float(value)


def _column(rows: dict[str, Any], name: str, info: dict[str, Any], where: str) -> Float[np.ndarray, " rows"]:
    """Read one column of numbers by "feature", "feature[3]" or "feature[name]"."""
    match = _COLUMN.fullmatch(name)
    if match is None or match["feature"] not in rows:
        raise DatasetError(f"{where}: expected a column {name}, got {', '.join(rows)}")
    feature, entry = match["feature"], match["entry"]
    values = _numbers(rows[feature], name, where)
    if entry is None:
        index = 0 if values.shape[1] == 1 else -1
    else:
        names = _entry_names(info["features"].get(feature, {}))
        index = int(entry) if entry.isdecimal() else names.index(entry) if entry in names else -1
    if values.ndim != 2 or not 0 <= index < values.shape[1]:
        raise DatasetError(f"{where}: {name}: expected one of the {values.shape[1]} numbers of {feature}")
    if not np.isfinite(values[:, index]).all():
        raise DatasetError(f"{where}: {name}: expected finite numbers, got NaN or infinity")
    return values[:, index]


def _numbers(column: pa.ChunkedArray, name: str, where: str) -> Float[np.ndarray, "rows entries"]:
    """A column as float64, one row of numbers for each row. Raises DatasetError."""
    try:
        values = np.array(column.to_pylist(), dtype=np.float64)
    except (TypeError, ValueError):
        raise DatasetError(f"{where}: {name}: expected numbers, as many in each row, got {column.type}") from None
    return values[:, None] if values.ndim == 1 else values


def _entry_names(feature: dict[str, Any]) -> list[str]:
    """A feature's `names`: a list, or an object of one list ({"motors": [...]})."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    return [str(name) for name in names] if isinstance(names, list) else []
