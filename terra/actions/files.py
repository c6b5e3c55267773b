"""Files of actions, for every space whose actions are columns; the suffix of a file tells its format.

    .csv    a header with time_s and the space's columns, in any order, then a row for each moment; # begins a comment
                time_s,steering,throttle          time_s,forward,left,fire          time_s,action
                0.00,0.10,0.50                    0.0,1,0,0                         0.0,jump
    .json   {"format": "terra-actions", "version": 1, "space": {...}, "times_s": [0.0, 0.1], "actions": [...]}
            with each action as the space's JSON has it ({"steering": 0.1, "throttle": 0.5} | ["forward"] | "jump");
            "fps": 10 in place of "times_s" means a row each 1 / fps s; "space" may be left out
    .npz    arrays of the same names as the columns of a CSV, one number (or a choice's name) for each moment

A row holds from its time on until the next row's. The first row is that of a rollout's first context frame.
"""

import csv
import logging
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64

from terra.actions.space import CHOICE_COLUMN, TIME_COLUMN, Choice, Rows, TableSpace, Values, parse_space
from terra.errors import ActionError, TrajectoryError
from terra.trajectory.checks import check_fps, check_increasing
from terra.trajectory.npz import read_arrays
from tokenizer.files import parse_json, read_text, write_json
from tokenizer.limits import LIMITS, Limits

FORMAT, VERSION = "terra-actions", 1
SUFFIXES = (".csv", ".json", ".npz")
_TOLERANCE = 1e-5  # s
_MISSING = ("", "nan")  # cells without a value, as loggers write them

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ActionTrack:
    """Actions over time, as a file has them: checked, not yet at a model's frame rate.

    Attributes:
        space: what the values mean.
        times: seconds, increasing; a rollout's first frame is at the first of them.
        values: one row of the space's values for each time.
        source: the file, with which error messages begin.
    """

    space: TableSpace
    times: Float64[np.ndarray, " rows"]
    values: Values
    source: str

    @property
    def end(self) -> float:
        """Until when (s) the last row holds: as long after its time as the rows lie apart, in the median."""
        return float(self.times[-1]) + (float(np.median(np.diff(self.times))) if len(self.times) > 1 else math.inf)

    def at_rate(self, fps: float, num_actions: int) -> Values:
        """The actions of frames 0 to `num_actions` - 1, which lie 1 / fps s apart.

        Vectors are interpolated linearly, choices are those that hold at the frame, and a key counts as pressed if it
        is down at any moment before the next frame.

        Raises:
            ActionError: the file ends before the last of these frames.
        """
        start = float(self.times[0])
        if self.end - start < num_actions / fps - _TOLERANCE:
            raise ActionError(
                f"{self.source}: covers {self.end - start:.4g} s, {num_actions} actions at {fps:g} a second need "
                f"{num_actions / fps:.4g} s"
            )
        at = start + np.arange(num_actions) / fps
        return self.space.resampled(self.times, self.values, at, start + num_actions / fps)

    def rows(self, fps: float, num_actions: int) -> Rows:
        """The model's rows of `at_rate`."""
        return self.space.rows(self.at_rate(fps, num_actions))


def load_actions(
    path: str | Path, space: TableSpace, *, as_logged: bool = False, limits: Limits = LIMITS
) -> ActionTrack:
    """Load a file of actions.

    Args:
        path: the file; its suffix says which format it has.
        space: the world model's action space: which columns there must be, and what values.
        as_logged: of a recording: rows of a CSV or NPZ that lack a value (an empty cell, NaN), or have the time of the
            row before, are left out with a warning instead of refused.
        limits: bounds on what is read.

    Raises:
        ActionError: one line with the file, the line or field in it, what was expected and what came.
    """
    path = Path(path)
    readers = {".csv": _read_csv, ".json": _read_json, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ActionError(f"{path}: expected actions in a file that ends in .csv, .json or .npz, got {path.suffix!r}")
    times, values, locate, skipped = reader(path, space, limits, as_logged)
    if as_logged and len(times):
        repeated = np.append(np.diff(times) == 0, False)  # of rows at one time the last one holds
        skipped = [*skipped, *map(locate, np.flatnonzero(repeated).tolist())]
        rows = np.flatnonzero(~repeated)
        first, of_all = locate, rows.tolist()
        times, values, locate = times[rows], values[rows], lambda row: first(of_all[row])
    if skipped:
        logger.warning(
            "%s: %d of %d rows left out, which lack a value or repeat a time, such as %s",
            *(path, len(skipped), len(skipped) + len(times), skipped[0].removeprefix(f"{path}: ")),
        )
    return _track(space, (times, values, locate, []), str(path))


def parse_document(
    document: Mapping[str, Any], space: TableSpace, source: str, *, limits: Limits = LIMITS
) -> ActionTrack:
    """The actions of a parsed JSON document, see the module.

    Args:
        document: the document's keys.
        space: the world model's action space.
        source: where the document comes from, with which every message begins.
        limits: bounds on what is read; there may be as many actions as a rollout may have frames.

    Raises:
        ActionError: as `load_actions`.
    """
    actions = document.get("actions")
    if isinstance(actions, list) and len(actions) > limits.rollout_frames:
        raise ActionError(f"{source}: actions: expected at most {limits.rollout_frames}, got {len(actions)}")
    return _track(space, _read_document(document, space, source, limits), source)


def save_actions(path: Path, space: TableSpace, fps: float, values: Values) -> None:
    """Write actions that lie 1 / fps s apart as JSON. Raises OutputError."""
    actions = [space.to_json(row) for row in values]
    facts = {"format": FORMAT, "version": VERSION, "space": space.model_dump(mode="json"), "fps": fps}
    write_json(path, {**facts, "actions": actions})


_Cell = TypeVar("_Cell")
# The times and the values, what messages call a row, and so the rows that were left out.
_Read = tuple[Float64[np.ndarray, " rows"], Values, Callable[[int], str], list[str]]


def _track(space: TableSpace, read: _Read, source: str) -> ActionTrack:
    times, values, locate, _ = read
    if not len(times):
        raise ActionError(f"{source}: expected rows of actions, got none")
    if len(times) > 1:
        check_increasing(times, locate)
    return ActionTrack(space, times, values, source)


def _read_csv(path: Path, space: TableSpace, limits: Limits, as_logged: bool) -> _Read:
    lines = read_text(path, ActionError, max_bytes=limits.table_bytes).splitlines()
    if len(lines) > limits.table_lines:
        raise ActionError(f"{path}: expected at most {limits.table_lines} lines, got {len(lines)}")
    header: list[str] | None = None
    numbers: list[int] = []
    times: list[float] = []
    values: list[np.ndarray] = []
    skipped: list[str] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        if len(line) > limits.line_chars * (1 + len(space.columns) // 32):
            raise ActionError(f"{where}: expected at most {limits.line_chars} characters, got {len(line)}")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise ActionError(f"{where}: expected comma-separated values: {error}") from None
        if header is None:
            header = cells
            _check_columns(header, space, where)
            continue
        if as_logged and len(cells) < len(header) and number == len(lines):  # cut off with the power
            skipped.append(where)
            continue
        if len(cells) != len(header):
            raise ActionError(f"{where}: expected {len(header)} columns ({', '.join(header)}), got {len(cells)}")
        if as_logged and any(cell.lower() in _MISSING for cell in cells):
            skipped.append(where)
            continue
        row = dict(zip(header, cells, strict=True))
        times.append(_cell(row[TIME_COLUMN], f"{where}: {TIME_COLUMN}"))
        values.append(_row_values(row, space, where, _cell))
        numbers.append(number)
    if header is None:
        raise ActionError(f"{path}: expected a header with {_expected(space)}, got an empty file")
    return np.array(times), np.array(values), lambda row: f"{path}: line {numbers[row]}", skipped


def _read_json(path: Path, space: TableSpace, limits: Limits, as_logged: bool) -> _Read:
    text = read_text(path, ActionError, max_bytes=limits.json_bytes)
    document = parse_json(text, str(path), ActionError, limits=limits)
    return _read_document(document, space, str(path), limits)


def _read_document(document: Mapping[str, Any], space: TableSpace, source: str, limits: Limits) -> _Read:
    if (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        got = (document.get("format"), document.get("version"))
        raise ActionError(f"{source}: expected format {FORMAT} version {VERSION}, got {got[0]!r} version {got[1]!r}")
    unknown = document.keys() - {"format", "version", "space", "times_s", "fps", "actions"}
    if unknown:
        raise ActionError(f"{source}: expected space, times_s or fps, and actions, got {sorted(unknown)[0]!r}")
    if document.get("space") is not None:
        declared = parse_space(document["space"], f"{source}: space")
        if declared != space:
            raise ActionError(f"{source}: expected actions of the model's {space.title}, got {declared.title}")
    actions = document.get("actions")
    if not isinstance(actions, list):
        raise ActionError(f"{source}: actions: expected a list, got {reprlib.repr(actions)}")
    numbers = len(actions) * len(space.columns)
    if numbers > limits.trajectory_numbers:
        raise ActionError(f"{source}: actions: expected at most {limits.trajectory_numbers} numbers, got {numbers}")
    if ("times_s" in document) == ("fps" in document):
        raise ActionError(f"{source}: expected one of times_s and fps")
    if "fps" in document:
        times = np.arange(len(actions)) / _rate(document["fps"], source)
    else:
        given = document["times_s"]
        if not isinstance(given, list) or len(given) != len(actions):
            got = f"{len(given)}" if isinstance(given, list) else reprlib.repr(given)
            raise ActionError(f"{source}: times_s: expected {len(actions)} numbers, as many as actions, got {got}")
        times = np.array([_number(time, f"{source}: times_s[{index}]") for index, time in enumerate(given)])
    rows = [space.from_json(action, f"{source}: actions[{index}]") for index, action in enumerate(actions)]
    return times, np.array(rows), lambda row: f"{source}: times_s[{row}]", []


def _read_npz(path: Path, space: TableSpace, limits: Limits, as_logged: bool) -> _Read:
    try:
        arrays = read_arrays(path, limits)
    except TrajectoryError as error:
        raise ActionError(str(error)) from None
    _check_columns(list(arrays), space, str(path))
    columns = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.ndim == 1}
    lengths = {name: len(columns[name]) if name in columns else None for name in arrays}
    if len(columns) < len(arrays) or len(set(lengths.values())) != 1:
        raise ActionError(f"{path}: expected one row of values for each column, all of one length, got {lengths}")
    numbers = len(columns[TIME_COLUMN]) * len(space.columns)
    if numbers > limits.trajectory_numbers:
        raise ActionError(f"{path}: expected at most {limits.trajectory_numbers} numbers, got {numbers}")
    lists = [(array + 0 if array.dtype == bool else array).tolist() for array in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]
    where = [f"{path}: row {index}" for index in range(len(rows))]
    skipped = [index for index, row in enumerate(rows) if as_logged and any(each != each for each in row.values())]
    for index in reversed(skipped):
        del rows[index]
    left_out = [where.pop(index) for index in reversed(skipped)][::-1]
    times = np.array(
        [_number(row[TIME_COLUMN], f"{place}: {TIME_COLUMN}") for row, place in zip(rows, where, strict=True)]
    )
    values = np.array([_row_values(row, space, place, _number) for row, place in zip(rows, where, strict=True)])
    return times, values, lambda row: where[row], left_out


def _check_columns(header: Sequence[str], space: TableSpace, where: str) -> None:
    wanted = (TIME_COLUMN, *space.columns)
    for name in header:
        if header.count(name) > 1:
            raise ActionError(f"{where}: column {name!r}: expected it once, got it twice")
    if set(header) != set(wanted):
        if len(header) == 1 and ";" in header[0]:
            raise ActionError(f"{where}: expected commas between the columns, got {header[0][:80]!r}")
        missing = [name for name in wanted if name not in header]
        unknown = [name for name in header if name not in wanted]
        got = f"none of {missing[0]}" if missing else f"{unknown[0][:80]!r}"
        hint = ""
        if len(missing) == len(unknown) == 1:
            unit = ", in seconds" if missing[0] == TIME_COLUMN else ""
            if missing[0] == TIME_COLUMN and "ms" in unknown[0].lower().split("_"):
                unit += ", which it becomes if you divide it by 1000"
            hint = f" but {unknown[0][:80]!r}: rename that column, if it is {missing[0]}{unit}"
        raise ActionError(f"{where}: expected {_expected(space)}, got {got}{hint}")


def _expected(space: TableSpace) -> str:
    return f"the columns {', '.join((TIME_COLUMN, *space.columns))}"


def _row_values(
    row: Mapping[str, _Cell], space: TableSpace, where: str, number: Callable[[_Cell, str], float]
) -> Float64[np.ndarray, " columns"]:
    if isinstance(space, Choice):
        return space.from_json(row[CHOICE_COLUMN], f"{where}: {CHOICE_COLUMN}")
    values = np.array([number(row[name], f"{where}: {name}") for name in space.columns])
    problem = space.problem(values)
    if problem is not None:
        raise ActionError(f"{where}: {problem}")
    return values


def _cell(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return _finite(number, text, where)


def _number(value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.nan
    return _finite(number, value, where)


def _finite(number: float, value: object, where: str) -> float:
    if not math.isfinite(number):
        raise ActionError(f"{where}: expected a finite number, got {reprlib.repr(value)}")
    return number


def _rate(value: object, source: str) -> float:
    try:
        return check_fps(value, source)
    except TrajectoryError as error:
        raise ActionError(str(error)) from None
