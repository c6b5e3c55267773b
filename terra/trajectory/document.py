"""The `terra-trajectory` document: poses in a fixed frame, or paths in ego frames, as JSON or NPZ."""

import json
import reprlib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from terra.errors import OutputError, TrajectoryError
from terra.trajectory.checks import check_fps, check_poses, number_array, stack_poses
from terra.trajectory.model import PoseTable, Trajectory
from tokenizer.files import replacing

FORMAT = "terra-trajectory"
POSE_AXES = "x_y_heading_ccw"
PATH_AXES = "x_forward_y_left"
# For each allowed unit, how many of it make one second, meter or radian, which are the units of `Trajectory`.
TIME_UNITS = {"s": 1.0, "ms": 1000.0}
POSITION_UNITS = {"m": 1.0}
ANGLE_UNITS = {"rad": 1.0, "deg": 180.0 / np.pi}

MAX_NPZ_BYTES = 1 << 30  # unpacked: four hours of paths at 10 fps take about 140 MB


def read_text(path: Path) -> str:
    """Read a UTF-8 file (with or without a byte order mark); TrajectoryError if it is empty or no text."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TrajectoryError(f"{path}: line {line}: expected UTF-8 text, got byte {data[error.start]:#04x}") from error
    if not text.strip():
        raise TrajectoryError(f"{path}: expected a trajectory, got an empty file")
    return text


def parse_json(text: str, source: str, first_line: int = 1) -> dict[str, object]:
    """Parse one JSON object; TrajectoryError with the line, counted from `first_line`, if it is none."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        place = f"{source}: line {line}, column {error.colno}"
        raise TrajectoryError(f"{place}: expected JSON, got {error.msg.lower()}") from error
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{source}: line {first_line}: expected JSON that can be read, got {error}") from error
    if not isinstance(value, dict):
        raise TrajectoryError(f"{source}: line {first_line}: expected a JSON object, got {reprlib.repr(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


def load_json(path: Path) -> Trajectory:
    """Load a JSON document; TrajectoryError if it is malformed or undeclared."""
    return parse_document(parse_json(read_text(path), str(path)), str(path))


def load_npz(path: Path) -> Trajectory:
    """Load the document's keys from an NPZ archive.

    Numbers are arrays, words are 0-d strings, and units are the keys units_position, units_angle and units_time.
    Pickled objects are refused.
    """
    document: dict[str, object] = {}
    units: dict[str, object] = {}
    for key, array in _read_npz(path).items():
        value = array.item() if array.ndim == 0 else array
        if key.startswith("units_"):
            units[key.removeprefix("units_")] = value
        else:
            document[key] = value
    if units:
        document["units"] = units
    return parse_document(document, str(path))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_NPZ_BYTES:
            raise TrajectoryError(f"{path}: expected at most {MAX_NPZ_BYTES} bytes unpacked, got {size}")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrajectoryError(f"{path}: expected an NPZ archive of plain arrays, got: {reason}") from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TrajectoryError(f"{path}: {key}: expected a NumPy array, got another kind of file")
    return arrays


def parse_document(document: Mapping[str, object], source: str) -> Trajectory:
    """Make a Trajectory of a document whose frame, axes, units and rate are all declared.

    Raises:
        TrajectoryError: a key missing, unknown or with another value than the two forms allow; bad numbers.
    """
    fps, frame = _check_header(document, source)
    if frame == "world":
        return _parse_poses(document, fps, source).trajectory()
    return _parse_paths(document, fps, source)


def read_json_poses(path: Path) -> PoseTable:
    """Read the poses of a JSON document; TrajectoryError if it is malformed, undeclared, or holds paths."""
    document = parse_json(read_text(path), str(path))
    fps, frame = _check_header(document, str(path))
    if frame != "world":
        raise TrajectoryError(f"{path}: frame: expected 'world', got {frame!r}: paths don't say where the vehicle was")
    return _parse_poses(document, fps, str(path))


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


def _parse_poses(document: Mapping[str, object], fps: float, source: str) -> PoseTable:
    allowed = {"position": POSITION_UNITS, "angle": ANGLE_UNITS, "time": TIME_UNITS}
    scale = _unit_scales(document["units"], allowed, source)
    rows = number_array(document["poses"], (None, 4), f"{source}: poses")
    poses = rows / [scale["time"], scale["position"], scale["position"], scale["angle"]]
    return PoseTable(poses, fps, source, locate=lambda row: f"{source}: poses[{row}]")


def _parse_paths(document: Mapping[str, object], fps: float, source: str) -> Trajectory:
    scale = _unit_scales(document["units"], {"position": POSITION_UNITS, "time": TIME_UNITS}, source)
    times = number_array(document["times"], (None,), f"{source}: times") / scale["time"]
    paths = number_array(document["paths"], (None, len(times), 2), f"{source}: paths") / scale["position"]
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
