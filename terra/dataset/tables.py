"""Reading and writing of a shard's tables and its camera: poses, actions, state (Parquet) and camera.json."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float64

from decoder.camera import Camera
from terra.actions import TableSpace
from terra.actions.space import Values
from terra.dataset.format import CAMERA_AXES, CAMERA_FRAME, CAMERA_UNITS
from terra.dataset.poses import Poses
from terra.errors import ConfigError, DatasetError
from tokenizer.files import read_json, replacing, write_json

# The numeric columns of poses.parquet and the fields of `Poses` that they hold.
POSE_COLUMNS = {
    "time": "time_s",
    "x": "x_m",
    "y": "y_m",
    "z": "z_m",
    "heading": "heading_rad",
    "pitch": "pitch_rad",
    "speed": "speed_m_s",
}
State = Mapping[str, Float64[np.ndarray, " frames"]]
"""What a source tells of its state at each frame of an episode, by name."""
_TIME_TOLERANCE = 1e-6  # s; rows are placed at multiples of 1 / fps, so only rounding may differ


def write_poses(path: Path, poses: Mapping[str, Poses]) -> None:
    """Write the poses of a shard's episodes, by id, as one table. Raises OutputError."""
    parts = {
        name: {column: getattr(part, field) for field, column in POSE_COLUMNS.items()} for name, part in poses.items()
    }
    _write_table(path, list(POSE_COLUMNS.values()), parts)


def write_actions(path: Path, space: TableSpace, actions: Mapping[str, Values]) -> None:
    """Write the actions of a shard's episodes, by id, as one table. Raises OutputError."""
    parts = {name: dict(zip(space.columns, values.T, strict=True)) for name, values in actions.items()}
    _write_table(path, list(space.columns), parts)


def write_state(path: Path, states: Mapping[str, State]) -> None:
    """Write the states of a shard's episodes, by id, all of the same names, as one table. Raises OutputError."""
    _write_table(path, list(next(iter(states.values()))), states)


def _write_table(path: Path, names: Sequence[str], parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write columns of float64, `parts` by episode and column, behind the columns episode and frame."""
    lengths = [len(part[names[0]]) for part in parts.values()]
    columns: dict[str, Any] = {
        "episode": pa.array(np.repeat(np.array(list(parts), dtype=object), lengths), pa.string()),
        "frame": pa.array(np.concatenate([np.arange(length) for length in lengths]), pa.int32()),
    }
    for name in names:
        columns[name] = np.concatenate([part[name] for part in parts.values()])
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def read_poses(path: Path) -> dict[str, Poses]:
    """Read the poses of a shard's episodes, by id. Raises DatasetError on a damaged table or a number not finite."""
    parts = _read_table(path, list(POSE_COLUMNS.values()), "poses")
    return {
        name: Poses(**{field: part[column] for field, column in POSE_COLUMNS.items()}) for name, part in parts.items()
    }


def read_actions(path: Path, space: TableSpace) -> dict[str, Values]:
    """Read the actions of a shard's episodes, by id.

    Raises:
        DatasetError: a damaged table, one of other columns, or a value outside the space.
    """
    parts = _read_table(path, list(space.columns), "actions")
    actions = {name: np.stack([part[column] for column in space.columns], axis=1) for name, part in parts.items()}
    for name, values in actions.items():
        for row, problem in enumerate(map(space.problem, values)):
            if problem is not None:
                raise DatasetError(f"{path}: {name}: frame {row}: {problem}")
    return actions


def read_state(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Read the states of a shard's episodes, by id and name; they may be infinite or NaN. Raises DatasetError."""
    return _read_table(path, None, "states")


def _read_table(path: Path, names: Sequence[str] | None, what: str) -> dict[str, dict[str, np.ndarray]]:
    """Read what `_write_table` writes; None takes the columns that are there, of any numbers. Raises DatasetError."""
    try:
        # No threads: processes read shards in parallel, and a shard has a hundred thousand rows at most.
        table = pq.read_table(path, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"{path}: expected a Parquet table of {what}, got: {reason}") from None
    is_known = names is not None
    names = table.column_names[2:] if names is None else names
    wanted = ["episode", "frame", *names]
    if table.column_names != wanted:
        raise DatasetError(f"{path}: expected the columns {', '.join(wanted)}, got {', '.join(table.column_names)}")
    for name in names:
        is_number = table[name].type == pa.float64()
        if not is_number or (is_known and not np.isfinite(table[name].to_numpy()).all()):
            raise DatasetError(f"{path}: {name}: expected finite float64 numbers, got {table[name].type} or NaN")
    ids = table["episode"].to_numpy()
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.zeros(0, int)
    ends = np.r_[starts[1:], len(ids)]
    columns = {name: table[name].to_numpy() for name in names}
    frames = table["frame"].to_numpy()
    parts: dict[str, dict[str, np.ndarray]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if ids[start] in parts or not np.array_equal(frames[start:end], np.arange(end - start)):
            raise DatasetError(f"{path}: {ids[start]}: expected frames from 0 on, each once and in order")
        parts[str(ids[start])] = {name: values[start:end] for name, values in columns.items()}
    return parts


def check_spacing(poses: Poses, num_poses: int, fps: float, where: str) -> None:
    """Raise DatasetError unless there are `num_poses` rows, 1 / fps s apart."""
    if len(poses.time) != num_poses:
        raise DatasetError(
            f"{where}: expected {num_poses} poses (those of the frames and 3 s more), got {len(poses.time)}"
        )
    late = np.abs(poses.time - poses.time[0] - np.arange(num_poses) / fps) > _TIME_TOLERANCE
    if late.any():
        row = int(np.argmax(late))
        raise DatasetError(f"{where}: expected rows {1 / fps:g} s apart, got time_s {poses.time[row]} in row {row}")


def write_camera(path: Path, camera: Camera | None, image_size: tuple[int, int], fps: float) -> None:
    """Write camera.json, with null for an unknown camera. Raises OutputError."""
    facts: dict[str, Any] = {"frame": CAMERA_FRAME, "axes": CAMERA_AXES, "units": CAMERA_UNITS, "fps": fps}
    facts |= {"image_size": list(image_size), "mount": None, "intrinsics": None}
    if camera is not None:
        height, width = image_size
        focal = width / (2 * math.tan(math.radians(camera.fov_degrees) / 2))
        facts["mount"] = camera.to_dict()
        facts["intrinsics"] = {"fx": focal, "fy": focal, "cx": width / 2, "cy": height / 2}
    write_json(path, facts)


def read_camera(path: Path) -> Camera | None:
    """Read the camera of a shard; None if camera.json has null. Raises DatasetError."""
    facts = read_json(path, DatasetError, "the camera of a shard")
    declared = {"frame": CAMERA_FRAME, "axes": CAMERA_AXES, "units": CAMERA_UNITS}
    for name, value in declared.items():
        if facts.get(name) != value:
            raise DatasetError(f"{path}: {name}: expected {value!r}, got {facts.get(name)!r}")
    mount = facts.get("mount")
    if mount is None:
        return None
    if not isinstance(mount, dict):
        raise DatasetError(f"{path}: mount: expected an object or null, got {mount!r}")
    try:
        return Camera.from_dict(mount, where=f"{path}: mount")
    except ConfigError as error:
        raise DatasetError(str(error)) from None
