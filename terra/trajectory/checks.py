"""Checks of a trajectory's numbers; every violation is a one-line `TrajectoryError` that says where it is."""

import math
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from terra.errors import TrajectoryError
from tokenizer.limits import LIMITS, Limits

MIN_FPS, MAX_FPS = 0.01, 100.0
MAX_SPEED = 80.0  # m/s, 288 km/h: above any road vehicle, and below any car whose meters are centimeters
MAX_POSE_GAP = 3.0  # s, the length of a future path: between poses further apart its shape would be made up
MAX_HEADING_JUMP = math.pi / 2
MAX_START_DISTANCE = 5.0  # m, a vehicle's length: wherever on the vehicle the ego frame sits, a path starts there
SIDEWAYS_RATIO = 0.7  # 35 degrees: no car slips so far across its heading for a whole drive
SIDEWAYS_MIN_METERS = 5.0
MOVE_METERS = 1.0  # smaller moves are left to the noise of a standing vehicle

POSE_COLUMNS = ("time", "x", "y", "heading")


def check_fps(fps: object, source: str) -> float:
    """Return `fps` as a float, or raise TrajectoryError unless it is a number from 0.01 to 100."""
    is_number = isinstance(fps, int | float | np.integer | np.floating) and not isinstance(fps, bool)
    rate: Any = fps
    if is_number and MIN_FPS <= rate <= MAX_FPS:
        return float(rate)
    raise TrajectoryError(f"{source}: fps: expected a number from {MIN_FPS:g} to {MAX_FPS:g}, got {reprlib.repr(fps)}")


def number_array(value: object, shape: tuple[int | None, ...], where: str, limits: Limits = LIMITS) -> np.ndarray:
    """Turn nested lists, or a numeric array, into float64 of the given shape.

    Args:
        value: the value that a file has at `where`.
        shape: the expected length of each axis; None is any length but 0.
        where: file and field, the beginning of an error message.
        limits: bounds on the count of numbers.

    Raises:
        TrajectoryError: another shape, an entry that is no number, NaN or infinity, too many numbers.
    """
    if isinstance(value, np.ndarray):
        expected = "x".join("n" if length is None else str(length) for length in shape)
        fits = value.ndim == len(shape) and all(
            got > 0 if length is None else got == length for got, length in zip(value.shape, shape, strict=True)
        )
        if value.dtype.kind not in "fiu" or not fits:
            got = f"{value.dtype} of shape {'x'.join(map(str, value.shape)) or '()'}"
            raise TrajectoryError(f"{where}: expected numbers of shape {expected}, got {got}")
        check_count(value.size, where, limits)
    else:
        _check_nested(value, shape, where)
        check_count(_count(value), where, limits)
    try:
        array = np.asarray(value, dtype=np.float64)
    except OverflowError as error:
        raise TrajectoryError(f"{where}: expected finite numbers, got an integer beyond float64") from error
    check_finite(array, where)
    return array


def check_count(numbers: int, where: str, limits: Limits) -> None:
    """Raise TrajectoryError for more numbers than a trajectory may have."""
    if numbers > limits.trajectory_numbers:
        most = limits.trajectory_numbers
        raise TrajectoryError(f"{where}: expected at most {most} numbers, got {numbers}")


def _count(value: object) -> int:
    """The count of numbers in nested lists of one shape."""
    return len(value) * _count(value[0]) if isinstance(value, list) else 1


def _check_nested(value: object, shape: tuple[int | None, ...], where: str) -> None:
    expected = "a list that is not empty" if shape[0] is None else f"a list of {shape[0]}"
    if not isinstance(value, list):
        raise TrajectoryError(f"{where}: expected {expected}, got {reprlib.repr(value)}")
    if (shape[0] is None and not value) or (shape[0] is not None and len(value) != shape[0]):
        raise TrajectoryError(f"{where}: expected {expected}, got a list of {len(value)}")
    for index, item in enumerate(value):
        if len(shape) > 1:
            _check_nested(item, shape[1:], f"{where}[{index}]")
        elif type(item) is not float and type(item) is not int:
            raise TrajectoryError(f"{where}[{index}]: expected a number, got {reprlib.repr(item)}")


def check_finite(array: np.ndarray, where: str) -> None:
    """Raise TrajectoryError with the index of the first NaN or infinity."""
    if not np.isfinite(array).all():
        index = tuple(np.argwhere(~np.isfinite(array))[0])
        place = where + "".join(f"[{i}]" for i in index)
        raise TrajectoryError(f"{place}: expected a finite number, got {array[index]}")


def check_path_times(times: Float64[np.ndarray, " points"], source: str) -> None:
    """Raise TrajectoryError unless there are two or more finite times >= 0 s, strictly increasing."""
    if times.ndim != 1 or len(times) < 2:
        raise TrajectoryError(f"{source}: times: expected 2 or more times in one row, got shape {times.shape}")
    check_finite(times, f"{source}: times")
    if times[0] < 0:
        raise TrajectoryError(f"{source}: times[0]: expected a time >= 0 s after the frame, got {times[0]:g} s")
    check_increasing(times, lambda index: f"{source}: times[{index}]")


def check_increasing(times: Float64[np.ndarray, " rows"], locate: Callable[[int], str]) -> None:
    """Raise TrajectoryError at the first time that repeats the one before it or goes backwards."""
    late = np.flatnonzero(np.diff(times) <= 0)
    if len(late):
        row = int(late[0]) + 1
        verb = "repeated" if times[row] == times[row - 1] else "going backwards"
        raise TrajectoryError(
            f"{locate(row)}: expected a time after {times[row - 1]!s} s, got {times[row]!s} s ({verb})"
        )


def check_paths(paths: np.ndarray, times: Float64[np.ndarray, " points"], source: str) -> None:
    """Raise TrajectoryError unless paths (frames, points, 2) are finite, start at the ego and stay below 80 m/s."""
    if paths.ndim != 3 or paths.shape[0] == 0 or paths.shape[1:] != (len(times), 2):
        raise TrajectoryError(f"{source}: paths: expected shape (frames, {len(times)}, 2), got {paths.shape}")
    check_finite(paths, f"{source}: paths")
    with np.errstate(over="ignore"):
        start = np.hypot(paths[:, 0, 0], paths[:, 0, 1])
        too_far = np.flatnonzero(start > MAX_START_DISTANCE + MAX_SPEED * times[0])
    if len(too_far):
        frame = int(too_far[0])
        raise TrajectoryError(
            f"{source}: paths[{frame}][0]: expected a path that starts at its own frame's ego, within"
            f" {MAX_START_DISTANCE:g} m of (0, 0), got {start[frame]:.4g} m away (are these world coordinates?)"
        )
    speeds = _speeds(paths, times)
    frame, point = np.unravel_index(np.argmax(~(speeds <= MAX_SPEED)), speeds.shape)
    _check_speed(float(speeds[frame, point]), f"{source}: paths[{frame}][{point + 1}]")


def stack_poses(times: ArrayLike, positions: ArrayLike, headings: ArrayLike, source: str) -> np.ndarray:
    """Return float64 rows of [time, x, y, heading]; TrajectoryError if the three do not belong together."""
    shapes = np.shape(times), np.shape(positions), np.shape(headings)
    if len(shapes[0]) != 1 or shapes != (shapes[0], (*shapes[0], 2), shapes[0]):
        expected = "times (poses,), positions (poses, 2) and headings (poses,)"
        raise TrajectoryError(f"{source}: expected {expected}, got shapes {shapes[0]}, {shapes[1]}, {shapes[2]}")
    return np.column_stack([times, positions, headings]).astype(np.float64)


def check_poses(poses: Float64[np.ndarray, "poses 4"], source: str, locate: Callable[[int], str]) -> None:
    """Check rows of [time s, x m, y m, heading rad, counter-clockwise from +x].

    `locate` turns a row's index into the beginning of a message ("drive.csv: line 7").

    Raises:
        TrajectoryError: fewer than 2 rows, NaN or infinity, time repeated or going backwards, poses more than 3 s
            apart, more than 80 m/s or 90 degrees between two of them, or a vehicle that moves across its heading.
    """
    if len(poses) < 2:
        raise TrajectoryError(f"{source}: expected 2 or more poses, got {len(poses)}")
    for row, column in np.argwhere(~np.isfinite(poses))[:1]:
        name = POSE_COLUMNS[column]
        raise TrajectoryError(f"{locate(row)}: {name}: expected a finite number, got {poses[row, column]}")
    times, positions, headings = poses[:, 0], poses[:, 1:3], poses[:, 3]
    check_increasing(times, locate)
    speeds = _speeds(positions, times)
    row = int(np.argmax(~(speeds <= MAX_SPEED)))
    _check_speed(float(speeds[row]), locate(row + 1))
    gaps = np.diff(times)
    row = int(np.argmax(gaps > MAX_POSE_GAP))
    if gaps[row] > MAX_POSE_GAP:
        raise TrajectoryError(
            f"{locate(row + 1)}: expected at most {MAX_POSE_GAP:g} s after the pose before, got {gaps[row]:g} s"
            " (are the times in milliseconds?)"
        )
    turns = np.mod(np.diff(headings) + math.pi, math.tau) - math.pi
    row = int(np.argmax(np.abs(turns) > MAX_HEADING_JUMP))
    if abs(turns[row]) > MAX_HEADING_JUMP:
        raise TrajectoryError(
            f"{locate(row + 1)}: heading: expected a turn of at most {math.degrees(MAX_HEADING_JUMP):.0f} degrees from"
            f" the pose before, got {abs(math.degrees(turns[row])):.0f} degrees (are degrees declared as radians?)"
        )
    _check_along_heading(positions, np.concatenate([[0.0], np.cumsum(turns)]) + headings[0], source)


def _check_along_heading(positions: np.ndarray, headings: np.ndarray, source: str) -> None:
    """Compare the moves between poses a meter or more apart with the (unwrapped) headings half way."""
    rows = [0]
    for row in range(1, len(positions)):
        if math.dist(positions[row], positions[rows[-1]]) >= MOVE_METERS:
            rows.append(row)
    moves = np.diff(positions[rows], axis=0)
    middle = (headings[rows[1:]] + headings[rows[:-1]]) / 2
    along = np.abs(moves[:, 0] * np.cos(middle) + moves[:, 1] * np.sin(middle)).sum()
    across = np.abs(moves[:, 1] * np.cos(middle) - moves[:, 0] * np.sin(middle)).sum()
    if across > max(SIDEWAYS_RATIO * along, SIDEWAYS_MIN_METERS):
        raise TrajectoryError(
            f"{source}: expected a vehicle that moves along its heading (counter-clockwise from +x), got {along:.4g} m"
            f" along and {across:.4g} m across (are x and y swapped, or headings clockwise, from north or in degrees?)"
        )


def _speeds(points: np.ndarray, times: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.diff(points, axis=-2)
        return np.hypot(steps[..., 0], steps[..., 1]) / np.diff(times)


def _check_speed(speed: float, where: str) -> None:
    if not speed <= MAX_SPEED:
        raise TrajectoryError(
            f"{where}: expected at most {MAX_SPEED:g} m/s from the point before, got {speed:.4g} m/s"
            " (are positions in centimeters, or times in another unit?)"
        )
