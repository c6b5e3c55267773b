"""The `terra-trajectory` document: poses in a fixed frame, or paths in ego frames, as JSON or NPZ."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from terra.errors import OutputError, TrajectoryError
from terra.trajectory.checks import check_fps, check_poses, number_array, stack_poses
from terra.trajectory.model import PoseTable, Trajectory
from terra.trajectory.npz import read_arrays
from tokenizer.files import parse_json, read_text, replacing
from tokenizer.limits import LIMITS, Limits

FORMAT = "terra-trajectory"
POSE_AXES = "x_y_heading_ccw"
PATH_AXES = "x_forward_y_left"
# For each allowed unit, how many of it make one second, meter or radian, which are the units of `Trajectory`.
TIME_UNITS = {"s": 1.0, "ms": 1000.0}
POSITION_UNITS = {"m": 1.0}
ANGLE_UNITS = {"rad": 1.0, "deg": 180.0 / np.pi}


def read_document(path: Path, limits: Limits = LIMITS) -> dict[str, Any]:
    """Read a JSON document; TrajectoryError if it is no object, empty, or beyond a bound."""
    text = read_text(path, TrajectoryError, max_bytes=limits.json_bytes)
    if not text.strip():
        raise TrajectoryError(f"{path}: expected a trajectory, got an empty file")
    return parse_json(text, str(path), TrajectoryError, limits=limits)


def load_json(path: Path, seconds: float | None = None, limits: Limits = LIMITS) -> Trajectory:
    """Load a JSON document; TrajectoryError if it is malformed, undeclared or beyond a bound."""
    return parse_document(read_document(path, limits), str(path), seconds, limits)


def load_npz(path: Path, seconds: float | None = None, limits: Limits = LIMITS) -> Trajectory:
    """Load the document's keys from an NPZ archive.

    Numbers are arrays, words are 0-d strings, and units are the keys units_position, units_angle and units_time.
    Pickled objects are refused. Raises TrajectoryError.
    """
    document: dict[str, object] = {}
    units: dict[str, object] = {}
    for key, value in read_arrays(path, limits).items():
        if key.startswith("units_"):
            units[key.removeprefix("units_")] = value
        else:
            document[key] = value
    if units:
        document["units"] = units
    return parse_document(document, str(path), seconds, limits)


def parse_document(
    document: Mapping[str, object], source: str, seconds: float | None = None, limits: Limits = LIMITS
) -> Trajectory:
    """Make a Trajectory of a document whose frame, axes, units and rate are all declared.

    Args:
        document: the document's keys.
        source: its origin, with which every message begins.
        seconds: cut the paths of the frames up to this time and one more out of poses; None for all frames.
        limits: bounds on the numbers in a trajectory.

    Raises:
        TrajectoryError: a key missing, unknown or with another value than the two forms allow; bad numbers.
    """
    fps, frame = _check_header(document, source)
    if frame == "world":
        return _parse_poses(document, fps, source, limits).trajectory(seconds, limits)
    return _parse_paths(document, fps, source, limits)


def read_json_poses(path: Path, limits: Limits = LIMITS) -> PoseTable:
    """Read the poses of a JSON document; TrajectoryError if it is malformed, undeclared, or holds paths."""
    document = read_document(path, limits)
    fps, frame = _check_header(document, str(path))
    if frame != "world":
        raise TrajectoryError(f"{path}: frame: expected 'world', got {frame!r}: paths don't say where the vehicle was")
    return _parse_poses(document, fps, str(path), limits)


def _check_header(document: Mapping[str, object], source: str) -> tuple[float, str]:
    """Check a document's keys, and return its frame rate and its coordinate frame ("world" or "ego")."""
    _expect(document, "format", (FORMAT,), source)
    frame = _expect(document, "frame", ("world", "ego"), source)
    data_keys = ("poses",) if frame == "world" else ("times", "paths")
    expected = ("format", "frame", "axes", "units", "fps", *data_keys)
    for key in expected:
        if key not in document:
            raise TrajectoryError(f"{source}: expected the key {key!r} (frame {frame!r}), got none")
    for key in document:
        if key not in expected:
            raise TrajectoryError(f"{source}: expected only {', '.join(expected)}, got the key {key!r}")
    _expect(document, "axes", (POSE_AXES if frame == "world" else PATH_AXES,), source)
    return check_fps(document["fps"], source), frame


def _parse_poses(document: Mapping[str, object], fps: float, source: str, limits: Limits) -> PoseTable:
    allowed = {"position": POSITION_UNITS, "angle": ANGLE_UNITS, "time": TIME_UNITS}
    scale = _unit_scales(document["units"], allowed, source)
    rows = number_array(document["poses"], (None, 4), f"{source}: poses", limits)
    poses = rows / [scale["time"], scale["position"], scale["position"], scale["angle"]]
    return PoseTable(poses, fps, source, locate=lambda row: f"{source}: poses[{row}]")


def _parse_paths(document: Mapping[str, object], fps: float, source: str, limits: Limits) -> Trajectory:
    scale = _unit_scales(document["units"], {"position": POSITION_UNITS, "time": TIME_UNITS}, source)
    times = number_array(document["times"], (None,), f"{source}: times", limits) / scale["time"]
    paths = number_array(document["paths"], (None, len(times), 2), f"{source}: paths", limits) / scale["position"]
    return Trajectory(paths, times, fps, source)


def _expect(mapping: Mapping[str, object], key: str, allowed: tuple[str, ...], source: str) -> str:
    wanted = " or ".join(repr(value) for value in allowed)
    if key not in mapping:
        raise TrajectoryError(f"{source}: {key}: expected {wanted}, got nothing (it must be declared)")
    value = mapping[key]
    if not isinstance(value, str) or value not in allowed:
        raise TrajectoryError(f"{source}: {key}: expected {wanted}, got {reprlib.repr(value)}")
    return value


def _unit_scales(units: object, allowed: dict[str, dict[str, float]], source: str) -> dict[str, float]:
    if not isinstance(units, dict) or not units.keys() <= allowed.keys():
        raise TrajectoryError(f"{source}: units: expected {', '.join(allowed)}, got {reprlib.repr(units)}")
    prefixed = {f"units.{kind}": value for kind, value in units.items()}
    return {kind: known[_expect(prefixed, f"units.{kind}", tuple(known), source)] for kind, known in allowed.items()}


def save_poses(
    path: Path,
    times: Float[np.ndarray, " poses"],
    positions: Float[np.ndarray, "poses 2"],
    headings: Float[np.ndarray, " poses"],
    fps: float,
) -> None:
    """Write a drive as a JSON document of poses that `load_trajectory` reads back exactly.

    Args:
        path: a .json file; it appears whole or not at all.
        times: seconds, strictly increasing.
        positions: x, y in meters in one fixed frame.
        headings: radians, counter-clockwise from +x.
        fps: frames per second of the drive.

    Raises:
        TrajectoryError: numbers that `load_trajectory` would refuse.
        OutputError: a name that does not end in .json, or a folder that can't be written.
    """
    if path.suffix.lower() != ".json":
        raise OutputError(f"{path}: expected a name that ends in .json, got {path.suffix!r}")
    poses = stack_poses(times, positions, headings, str(path))
    check_poses(poses, str(path), lambda row: f"{path}: poses[{row}]")
    header = {
        "format": FORMAT,
        "frame": "world",
        "axes": POSE_AXES,
        "units": {"position": "m", "angle": "rad", "time": "s"},
        "fps": check_fps(fps, str(path)),
    }
    rows = ",\n".join(json.dumps(row) for row in poses.tolist())
    text = json.dumps(header, indent=1).removesuffix("\n}") + f',\n "poses": [\n{rows}\n]}}\n'
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
