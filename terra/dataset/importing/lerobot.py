"""Import of LeRobot datasets, versions 2 and 3, as driving or as any world (huggingface.co/docs/lerobot).

Version 2 has a file of rows and a video for each episode; version 3 has several episodes in each file.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from terra.actions import ActionSpace, ActionTrack, TableSpace, Vector, Waypoints
from terra.dataset.importing.lerobot_files import (
    CAMERAS,
    Row,
    camera_fault,
    check_camera,
    check_column,
    episode_rows,
    file_of,
    number,
    numbers,
    own_frames,
    picture_shape,
    read_episodes,
    read_info,
    read_lines,
    row_times,
    stored_pictures,
    video_frames,
)
from terra.dataset.importing.source import Footage, SourceDrive, VideoFrames, motion
from terra.dataset.poses import Poses
from terra.errors import ConfigError, DatasetError, TerraError
from tokenizer.files import read_json
from tokenizer.settings import checked

logger = logging.getLogger(__name__)

METERS_PER_DEGREE = 111_320.0  # a degree of latitude, or of longitude at the equator: 40,075 km / 360
POSITION_UNITS = ("m", "deg")
HEADING_UNITS = {"rad": 1.0, "deg": math.pi / 180}
HEADINGS_FROM = ("x_ccw", "north_cw")
SPEED_UNITS = {"m/s": 1.0, "km/h": 1 / 3.6}

_SHOWN = 3  # names in a line
_RANGE_TOLERANCE = 1e-5  # of a range: statistics are rounded to float32 by some writers
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_OTHER_CHARACTER = re.compile(r"[^A-Za-z0-9_.-]")
_DECLARE = "declare one with action_space='{kind:vector,names:[a],units:[rad],low:[-1],high:[1]}'"
_ACTION = re.compile(r"actions?([._].*)?")
_PREFIX = "episode_"
_SPAN = re.compile(r"(\d{1,9}):(\d{1,9})")
_COLUMN = re.compile(r"(?P<feature>[^\[\]]+)(\[(?P<entry>[^\[\]]+)\])?")


@dataclass(frozen=True, kw_only=True)
class LeRobotColumns:
    """The columns that hold the motion, with their units and axes, which LeRobot's format does not declare.

    Attributes:
        video: the feature with the frames, such as "observation.images.front"; or those of several cameras.
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

    video: str | tuple[str, ...]
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
        _check_video(self.video)
        for name in ("heading", "x", "y", "speed"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "heading"):
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
        return cls(**_with_tuples(values))


@dataclass(frozen=True, kw_only=True)
class LeRobotActions:
    """The features that hold the frames and the actions of a world that is no driving.

    Attributes:
        video: the feature with the frames, such as "observation.images.front"; or those of several cameras, the main
            one first. None takes the only one.
        action: the feature with the actions, such as "action"; all its numbers are taken. None takes the only one.

    Raises:
        ConfigError: no names of features.
    """

    video: str | tuple[str, ...] | None = None
    action: str | None = None

    def __post_init__(self) -> None:
        if self.video is not None:
            _check_video(self.video)
        if not isinstance(self.action, str | None):
            raise ConfigError(f"lerobot.action: expected the name of a feature, got {self.action!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LeRobotActions":
        """Build it from a mapping that must name both fields and nothing else. Raises ConfigError."""
        if values.keys() != {"video", "action"}:
            raise ConfigError(f"lerobot: expected video and action, or the columns of driving, got {sorted(values)}")
        return cls(**_with_tuples(values))


def _check_video(video: object) -> None:
    """Raise ConfigError unless it is the name of a feature, or names of several."""
    names, expected = (video, "names of features") if isinstance(video, tuple) else ((video,), "the name of a feature")
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"lerobot.video: expected {expected}, got {video!r}")


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


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
        return self.action_space or _stated_space(self.folder, self._action)

    @property
    def declared(self) -> dict[str, str | None]:
        """Return the declared columns, or the features that are taken."""
        video = ",".join(self._cameras)
        if isinstance(self.columns, LeRobotColumns):
            return {**asdict(self.columns), "video": video}
        return {"video": video, "action": self._action}

    @property
    def views(self) -> tuple[str, ...]:
        """The cameras by the last part of their features' names: "front" of observation.images.front."""
        return tuple(camera.rpartition(".")[2] for camera in self._cameras)

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """The episodes of each of the dataset's `splits` but "train"; else each drive is a recording of its own.

        Raises:
            DatasetError: an invalid info.json.
        """
        splits = read_info(self.folder).get("splits")
        spans = {name: _SPAN.fullmatch(str(span)) for name, span in splits.items()} if isinstance(splits, dict) else {}
        found = {int(name.removeprefix(_PREFIX)): name for name in _files(self.folder, self._cameras).found}
        drives = {
            name: tuple(drive for index, drive in found.items() if int(span[1]) <= index < int(span[2]))
            for name, span in spans.items()
            if span is not None and name != "train"
        }
        return {name: each for name, each in drives.items() if each}

    @property
    def _cameras(self) -> tuple[str, ...]:
        if self.columns.video is not None:
            return (self.columns.video,) if isinstance(self.columns.video, str) else self.columns.video
        features = read_info(self.folder)["features"]
        cameras = {name: feature for name, feature in features.items() if feature.get("dtype") in CAMERAS}
        shown = [name for name, feature in cameras.items() if camera_fault(feature) is None]
        return (_only(self.folder, "video", shown or list(cameras)),)

    @property
    def _action(self) -> str:
        assert isinstance(self.columns, LeRobotActions)
        if self.columns.action is not None:
            return self.columns.action
        features = read_info(self.folder)["features"].items()
        numeric = [name for name, feature in features if str(feature.get("dtype")).startswith(("float", "int", "uint"))]
        return _only(self.folder, "action", list(filter(_ACTION.fullmatch, numeric)))

    def list_drives(self) -> tuple[str, ...]:
        """The names of the episodes whose files are there, such as episode_000012; a line names the others."""
        info, cameras = read_info(self.folder), self._cameras
        num_episodes, declared = len(read_episodes(self.folder)), info.get("total_episodes")
        if declared is not None and declared != num_episodes:
            logger.warning("%s: expected %s episodes (total_episodes), got %d", self.folder, declared, num_episodes)
        files = _files(self.folder, cameras)
        for what, (path, *names) in files.missing.items():
            more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
            line = f"{self.folder}: {len(names)} of {num_episodes} episodes have no {what}, such as {path}"
            if not files.found:
                raise DatasetError(line)
            logger.warning("%s; left out: %s%s", line, ", ".join(names[:_SHOWN]), more)
        if check_camera(self.folder, cameras[0]) == "video":
            _say_size(self.folder, cameras[0], next(iter(files.found.values())))
        return tuple(files.found)

    def open_drive(self, name: str) -> SourceDrive:
        """Open one episode."""
        info, columns = read_info(self.folder), self.columns
        episode = read_episodes(self.folder)[int(name.removeprefix(_PREFIX))]
        data = file_of(self.folder, "data_path", episode)
        where = f"{data}: {name}"
        rows = episode_rows(data, episode, where)
        times = row_times(rows["timestamp"], number(info, "fps", where), where)
        stamps = numbers(rows["timestamp"], "timestamp", where)[:, 0]
        footage = [self._footage(camera, episode, times, stamps, where) for camera in self._cameras]
        cameras = dict(zip(self.views, footage, strict=True))
        first, *others = cameras
        if isinstance(columns, LeRobotColumns):
            track = _poses(columns, rows, times, info, where)
        else:
            track = _actions(self.space, self._action, rows, times, where)
        return SourceDrive(
            name,
            track,
            times,
            cameras[first].frames,
            intrinsics=None,
            origin=where,
            left_out=cameras[first].left_out,
            others={view: cameras[view] for view in others},
        )

    def _footage(
        self,
        camera: str,
        episode: Row,
        times: Float[np.ndarray, " rows"],
        stamps: Float[np.ndarray, " rows"],
        where: str,
    ) -> Footage:
        """A camera's frames of an episode, one for each row, whose times have been taken from its time stamps."""
        index = int(episode["episode_index"])
        if check_camera(self.folder, camera) == "image":
            data = file_of(self.folder, "data_path", episode)
            check_column(data, camera)
            return Footage(times, partial(stored_pictures, self.folder, data, camera, index, where))
        frames, left_out = _video_part(self.folder, camera, episode, stamps, f"{_PREFIX}{index:06d}")
        return Footage(times, frames, left_out=left_out)


@dataclass(frozen=True)
class _Files:
    """Which episodes have their files.

    Attributes:
        found: the file with the main camera's frames of each episode that has all of its files, by the episode's name.
        missing: what the others lack: for each kind of file the first path, then the names of the episodes.
    """

    found: Mapping[str, Path]
    missing: Mapping[str, list[str]]


@lru_cache(maxsize=4)
def _files(folder: Path, cameras: tuple[str, ...]) -> _Files:
    wanted = {"file of rows": ("data_path", "")}
    for camera in cameras:
        if check_camera(folder, camera) == "video":
            wanted[f"video of {camera}"] = ("video_path", camera)
    found: dict[str, Path] = {}
    missing: dict[str, list[str]] = {}
    for index, episode in sorted(read_episodes(folder).items()):
        name = f"{_PREFIX}{index:06d}"
        for what, (template, key) in wanted.items():
            path = file_of(folder, template, episode, key)
            if not path.is_file():
                missing.setdefault(what, [str(path)]).append(name)
                found.pop(name, None)
                break
            if key in ("", cameras[0]):
                found[name] = path
    return _Files(found, missing)


def _only(folder: Path, setting: str, names: list[str]) -> str:
    """The only one of the features that fit. Raises DatasetError if there is none, and ConfigError for several."""
    if not names:
        path, features = folder / "meta" / "info.json", read_info(folder)["features"]
        raise DatasetError(f"{path}: expected a feature for lerobot.{setting}, got {', '.join(features) or 'none'}")
    if len(names) > 1:
        raise ConfigError(f"lerobot.{setting}: expected one of {', '.join(names)}, got null")
    return names[0]


def _video_part(
    folder: Path, camera: str, episode: dict[str, Any], stamps: Float[np.ndarray, " rows"], name: str
) -> tuple[VideoFrames, dict[str, int]]:
    """An episode's frames, one for each row, and how many frames of its video are left out, by where they are.

    Which of its frames are missing can't be told of an episode that has fewer, so that it is refused. One that has
    more begins with its first frame, or at the time stamp of its first row, where LeRobot's own reader begins.

    Raises:
        DatasetError: no such video, or fewer frames than rows.
        VideoError: a video that can't be read.
    """
    video = file_of(folder, "video_path", episode, camera)
    where = f"{video}: {name}"
    if not video.is_file():
        raise DatasetError(f"{where}: expected the video of {camera}, got no file")
    first, count = own_frames(folder, camera, episode, video, where)
    more = count - len(stamps)
    if more < 0:
        raise DatasetError(f"{where}: expected a frame for each of its {len(stamps)} rows, got {max(count, 0)} frames")
    times, display = video_frames(video).seconds, video_frames(video).display
    skipped = 0
    if more:
        own = times[first : first + count] - times[first]
        nearest = np.searchsorted(own, stamps - float(np.median(np.diff(own))) / 2)
        if nearest[-1] < count and (np.diff(nearest) == 1).all():
            skipped = int(nearest[0])
    start = 0.0 if first + skipped == 0 else float(times[first + skipped - 1 : first + skipped + 1].mean())
    parts = {"before": skipped, "behind": more - skipped}
    left_out = {f"frames of the video {part} those of the rows": number for part, number in parts.items() if number}
    return VideoFrames(video, display, start, 0, len(stamps)), left_out


def _say_size(folder: Path, camera: str, video: Path) -> None:
    """Say in a line that a video has another size than info.json says. A video that can't be read is told later."""
    height, width, _ = picture_shape(read_info(folder)["features"][camera])
    try:
        display = video_frames(video).display
    except TerraError:
        return
    if None not in (height, width) and {height, width} != {display.height, display.width}:
        said, got = f"{width} x {height}", f"{display.width} x {display.height}"
        logger.warning("%s: info.json says %s pixels of %s, got %s: taken as they are", folder, said, camera, got)


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
    values = numbers(rows[feature], feature, where)
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
    info, path = read_info(folder), folder / "meta" / "info.json"
    facts = info["features"].get(feature)
    if facts is None:
        raise DatasetError(f"{path}: expected a feature {feature}, got {', '.join(info['features'])}")
    low, high = _stated_range(folder, feature)
    said = entry_names(facts.get("names"))
    names = [_OTHER_CHARACTER.sub("_", name) for name in said]
    if len(names) != len(low) or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
        names = [f"{_OTHER_CHARACTER.sub('_', feature)}_{index}" for index in range(len(low))]
        logger.warning(
            "%s: %s has no %d names of its own that can be taken: %s, ...", path, feature, len(low), names[0]
        )
    elif names != said:
        old, new = next(pair for pair in zip(said, names, strict=True) if pair[0] != pair[1])
        logger.warning("%s: %s: names are taken with _ for other characters: %s for %r", path, feature, new, old)
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
        where, parts = each, [line.get("stats") for line in read_lines(each)]
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


def _column(rows: dict[str, Any], name: str, info: dict[str, Any], where: str) -> Float[np.ndarray, " rows"]:
    """Read one column of numbers by "feature", "feature[3]" or "feature[name]"."""
    match = _COLUMN.fullmatch(name)
    if match is None or match["feature"] not in rows:
        raise DatasetError(f"{where}: expected a column {name}, got {', '.join(rows)}")
    feature, entry = match["feature"], match["entry"]
    values = numbers(rows[feature], name, where)
    if entry is None:
        index = 0 if values.shape[1] == 1 else -1
    else:
        names = entry_names(info["features"].get(feature, {}).get("names"))
        index = int(entry) if entry.isdecimal() else names.index(entry) if entry in names else -1
    if values.ndim != 2 or not 0 <= index < values.shape[1]:
        raise DatasetError(f"{where}: {name}: expected one of the {values.shape[1]} numbers of {feature}")
    if not np.isfinite(values[:, index]).all():
        raise DatasetError(f"{where}: {name}: expected finite numbers, got NaN or infinity")
    return values[:, index]


def entry_names(names: Any) -> list[str]:
    """A feature's `names` in a list: nested lists, an object of lists ({"motors": [...]}), or of each name's index."""
    if isinstance(names, dict):
        places = list(names.values())
        if all(type(place) is int for place in places):
            return sorted(names, key=lambda name: names[name]) if sorted(places) == list(range(len(places))) else []
        names = places
    if isinstance(names, list):
        return [name for part in names for name in entry_names(part)]
    return [] if names is None else [str(names)]
