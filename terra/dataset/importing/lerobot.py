"""Import of LeRobot datasets, version 3 (huggingface.co/docs/lerobot/lerobot-dataset-v3): several episodes per file."""

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
from terra.actions import Waypoints
from terra.dataset.importing.source import SourceDrive, motion
from terra.errors import ConfigError, DatasetError
from tokenizer.files import read_json

METERS_PER_DEGREE = 111_320.0  # a degree of latitude, or of longitude at the equator: 40,075 km / 360
POSITION_UNITS = ("m", "deg")
HEADING_UNITS = {"rad": 1.0, "deg": math.pi / 180}
HEADINGS_FROM = ("x_ccw", "north_cw")
SPEED_UNITS = {"m/s": 1.0, "km/h": 1 / 3.6}

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


@dataclass(frozen=True)
class LeRobotSource:
    """A folder with meta/info.json (codebase_version v3.x), data, videos and meta/episodes; its episodes are drives."""

    folder: Path
    columns: LeRobotColumns

    @property
    def space(self) -> Waypoints:
        """Waypoints, which are made of poses."""
        return Waypoints()

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
        heading = _column(rows, columns.heading, info, where) * HEADING_UNITS[columns.heading_unit]
        if columns.heading_from == "north_cw":
            heading = math.pi / 2 - heading
        speeds = None
        if columns.speed is not None:
            speeds = _column(rows, columns.speed, info, where) * SPEED_UNITS[columns.speed_unit]
        video = self.folder / _fill(info, "video_path", episode, f"videos/{columns.video}", columns.video)
        if not video.is_file():
            raise DatasetError(f"{video}: expected the video of {columns.video}, got no file")
        start = _number(episode, f"videos/{columns.video}/from_timestamp", where)

        def frames() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            # Seek half a frame early, because time stamps in the file are rounded.
            return islice(stream_video(video, start - 0.5 / float(info["fps"])), len(times))

        return SourceDrive(
            name=name,
            track=motion(times, self._positions(rows, times, heading, speeds, info, where), heading, speeds=speeds),
            frame_times=times,
            frames=frames,
            intrinsics=None,
            origin=where,
        )

    def _positions(
        self,
        rows: dict[str, Any],
        times: Float[np.ndarray, " rows"],
        heading: Float[np.ndarray, " rows"],
        speeds: Float[np.ndarray, " rows"] | None,
        info: dict[str, Any],
        where: str,
    ) -> Float[np.ndarray, "rows 2"]:
        """x and y in meters from the episode's first position: as stored, or integrated by the trapezoidal rule."""
        if self.columns.x is None or self.columns.y is None:
            assert speeds is not None
            rates = speeds[:, None] * np.stack([np.cos(heading), np.sin(heading)], axis=1)
            steps = (rates[1:] + rates[:-1]) / 2 * np.diff(times)[:, None]
            return np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
        places = [_column(rows, name, info, where) for name in (self.columns.x, self.columns.y)]
        positions = np.stack(places, axis=1)
        if self.columns.position_unit == "deg":
            # A drive is short compared with the earth's radius, so a flat map is exact enough.
            latitude = math.radians(float(positions[0, 1]))
            positions = (positions - positions[0]) * METERS_PER_DEGREE * [math.cos(latitude), 1.0]
        return positions - positions[0]


@lru_cache(maxsize=4)
def _read_info(folder: Path) -> dict[str, Any]:
    info = read_json(folder / "meta" / "info.json", DatasetError, "a LeRobot dataset")
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith("v3."):
        raise DatasetError(f"{folder / 'meta' / 'info.json'}: codebase_version: expected v3.x, got {version!r}")
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
    """The rows of meta/episodes by episode_index."""
    _read_info(folder)
    paths = sorted((folder / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    rows = [row for path in paths for row in _without_statistics(_read_table(path)).to_pylist()]
    if not rows:
        raise DatasetError(f"{folder / 'meta' / 'episodes'}: expected episodes in chunk-*/file-*.parquet, got none")
    for row in rows:
        for name in ("episode_index", "length"):
            _number(row, name, str(folder / "meta" / "episodes"))
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
    numbers = {
        name: int(_number(episode, f"{prefix}/{name}", "meta/episodes")) for name in ("chunk_index", "file_index")
    }
    try:
        return info[template].format(video_key=video_key, **numbers)
    except (KeyError, IndexError, ValueError) as error:
        raise DatasetError(f"meta/info.json: {template}: expected a path of v3, got {info[template]!r}") from error


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
    try:
        values = np.array(rows[feature].to_pylist(), dtype=np.float64)
    except (TypeError, ValueError):
        kind = rows[feature].type
        raise DatasetError(f"{where}: {name}: expected numbers, as many in each row, got {kind}") from None
    values = values[:, None] if values.ndim == 1 else values
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


def _entry_names(feature: dict[str, Any]) -> list[str]:
    """A feature's `names`: a list, or an object of one list ({"motors": [...]})."""
    names = feature.get("names")
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    return [str(name) for name in names] if isinstance(names, list) else []
