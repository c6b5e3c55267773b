"""Tables beside videos: which kind a table is, and the action space that its columns suggest."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from terra.actions.files import FORMAT as ACTIONS_FORMAT
from terra.actions.space import CHOICE_COLUMN, MOST_NAMES, TIME_COLUMN
from terra.dataset.importing.recognize.found import some
from terra.errors import DatasetError
from terra.trajectory.document import FORMAT as POSES_FORMAT
from terra.trajectory.npz import read_arrays
from tokenizer.files import parse_json, read_text
from tokenizer.limits import LIMITS

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_GPS = {"time", "lat", "lon"}
_BLOCK = 10_000  # rows of a table in memory
_DIGITS = 3  # of a proposed range


@dataclass(eq=False)
class Columns:
    """What one table holds, reduced to what a proposal needs.

    Attributes:
        path: the file.
        kind: of `terra import` for this table beside its video.
        texts: the distinct texts of each column that is not of numbers.
        ranges: the least and the greatest number of each column of numbers.
        is_binary: whether a column of numbers is always 0 or 1.
        num_rows: how many rows there are.
        step: seconds from row to row, in the median; NaN if unknown.
        space: the action space that the file itself declares.
    """

    path: Path
    kind: str
    texts: dict[str, set[str]] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    is_binary: dict[str, bool] = field(default_factory=dict)
    num_rows: int = 0
    step: float = math.nan
    space: dict[str, Any] | None = None


def read_columns(path: Path) -> Columns:
    """Read a table beside a video. Raises DatasetError or TrajectoryError with what hinders its import, in one line."""
    match path.suffix.lower():
        case ".gpx":
            return Columns(path, "gpx")
        case ".csv":
            return _read_csv(path)
        case ".npz":
            return _of_arrays(path, read_arrays(path))
        case _:
            return _read_json(path)


def propose_space(tables: Sequence[Columns]) -> dict[str, Any]:
    """The action space of all tables together, as action_space= takes it. Raises DatasetError if there is none."""
    declared = [table.space for table in tables if table.space is not None]
    if declared:
        return declared[0]
    first = tables[0]
    names = [*first.ranges, *first.texts]
    for table in tables:
        if {*table.ranges, *table.texts} != set(names):
            got = some([*table.ranges, *table.texts])
            raise DatasetError(f"{table.path}: expected the columns of {first.path.name}, {some(names)}, got {got}")
    texts = sorted({name for table in tables for name in table.texts})
    if texts:
        if names != [CHOICE_COLUMN]:
            expected = f"numbers in each column, or {TIME_COLUMN} and {CHOICE_COLUMN} alone with the name of a choice"
            raise DatasetError(f"{first.path}: expected {expected}, got text in {some(texts)}")
        choices = sorted({text for table in tables for text in _as_texts(table)})
        return {"kind": "choice", "names": _checked_names(first.path, choices, "choices")}
    _checked_names(first.path, names, "columns")
    if all(table.is_binary[name] for table in tables for name in names):
        return {"kind": "keys", "names": names}
    low, high = (
        [reach(table.ranges[name][end] for table in tables) for name in names] for end, reach in ((0, min), (1, max))
    )
    return vector_of(names, low, high)


def vector_of(names: Sequence[str], low: Iterable[float], high: Iterable[float]) -> dict[str, Any]:
    """A vector of ranges that were read, made a little wider so that few digits tell them; no units are known."""
    bounds = [_widened(float(least), float(most)) for least, most in zip(low, high, strict=True)]
    count = len(bounds)
    names = [re.sub(r"[^A-Za-z0-9_.-]", "_", name) for name in names]
    if len(names) != count or len(set(names)) < count or not all(map(_NAME.fullmatch, names)):
        names = [f"action_{index}" for index in range(count)]
    lows, highs = ([bound[end] for bound in bounds] for end in (0, 1))
    return {"kind": "vector", "names": list(names), "units": [""] * count, "low": lows, "high": highs}


def _widened(low: float, high: float) -> tuple[float, float]:
    if low == high:
        return low - 1, high + 1
    unit = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high)))) + 1 - _DIGITS)
    digits = max(0, -math.floor(math.log10(unit) + 0.5))
    return round(math.floor(low / unit) * unit, digits), round(math.ceil(high / unit) * unit, digits)


def _checked_names(path: Path, names: Sequence[str], what: str) -> list[str]:
    """The names, if an action space can have them. Raises DatasetError."""
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:
        expected = "a letter, then letters, digits, '_', '.' and '-'"
        raise DatasetError(f"{path}: {what}: expected names such as steering ({expected}), got {wrong[0][:80]!r}")
    if not 1 <= len(names) <= MOST_NAMES:
        raise DatasetError(f"{path}: {what}: expected 1 to {MOST_NAMES} beside {TIME_COLUMN}, got {len(names)}")
    return list(names)


def _as_texts(table: Columns) -> set[str]:
    return table.texts.get(CHOICE_COLUMN, set())


def _read_csv(path: Path) -> Columns:
    text = read_text(path, DatasetError, max_bytes=LIMITS.table_bytes)
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    try:
        rows = ([cell.strip() for cell in row] for row in csv.reader(lines))
        header = next(rows, None)
        if header is None:
            raise DatasetError(f"{path}: expected a header and rows, got an empty table")
        kind = _kind_by_header(path, header)
        found, times = Columns(path, kind), []
        while block := list(islice(rows, _BLOCK)):
            found.num_rows += len(block)
            if kind == "video_actions":
                columns = {name: [row[at] for row in block if at < len(row)] for at, name in enumerate(header)}
                times += map(_float, columns.pop(TIME_COLUMN)[: _BLOCK - len(times)])
                _add_numbers(found, columns)
    except csv.Error as error:
        raise DatasetError(f"{path}: expected comma-separated values: {error}") from None
    found.step = _step(np.array(times))
    return found


def _kind_by_header(path: Path, header: Sequence[str]) -> str:
    """The kind of a CSV by the names of its columns. Raises DatasetError if one must be renamed."""
    if set(header) >= _GPS:
        return "gpx"
    if {name.partition("_")[0] for name in header} >= {"time", "x", "y", "heading"}:
        return "video_poses"
    if TIME_COLUMN in header:
        return "video_actions"
    lower = {name.lower(): name for name in header}
    place = [name for word in ("lat", "lon") for name in lower if name.startswith(word)]
    if len(place) == 2:
        got = ", ".join(lower[name] for name in place)
        raise DatasetError(f"{path}: expected the columns time, lat and lon of a GPS track, got {got}: rename them")
    times = [name for name in header if name.lower().startswith(("time", "t_", "stamp")) or name.lower() == "t"]
    hint = f"{times[0]!r}: rename it, if it is seconds" if times else f"only {some(header)}"
    raise DatasetError(f"{path}: expected a column {TIME_COLUMN} (seconds), got {hint}")


def _read_json(path: Path) -> Columns:
    document = parse_json(read_text(path, DatasetError, max_bytes=LIMITS.json_bytes), str(path), DatasetError)
    if document.get("format") == POSES_FORMAT:
        if document.get("frame") != "world":
            got = document.get("frame")
            raise DatasetError(f"{path}: frame: expected 'world', got {got!r}: paths don't say where the vehicle was")
        poses = document.get("poses")
        return Columns(path, "video_poses", num_rows=len(poses) if isinstance(poses, list) else 0)
    actions = document.get("actions")
    if document.get("format") != ACTIONS_FORMAT or not isinstance(actions, list) or not actions:
        expected = f"JSON of {POSES_FORMAT} or of {ACTIONS_FORMAT} with actions"
        raise DatasetError(f"{path}: expected {expected}, got the keys {some(document)}")
    space = document.get("space")
    found = Columns(path, "video_actions", num_rows=len(actions), space=space if isinstance(space, dict) else None)
    times, fps = document.get("times_s"), document.get("fps")
    if isinstance(fps, int | float) and fps > 0:
        found.step = 1 / fps
    elif isinstance(times, list) and len(times) > 1:
        found.step = _step(np.array([time if isinstance(time, int | float) else math.nan for time in times]))
    if found.space is not None:
        return found
    if all(isinstance(action, str) for action in actions):
        found.texts[CHOICE_COLUMN] = set(actions)
    elif all(isinstance(action, dict) for action in actions):
        names = dict.fromkeys(name for action in actions for name in action)
        _add_numbers(found, {name: [action.get(name) for action in actions] for name in names})
    elif all(isinstance(action, list) and all(isinstance(key, str) for key in action) for action in actions):
        for name in sorted({key for action in actions for key in action}):
            found.ranges[name], found.is_binary[name] = (0.0, 1.0), True
    else:
        raise DatasetError(f"{path}: expected a space, or actions with names, got a list without names")
    return found


def _of_arrays(path: Path, arrays: Mapping[str, object]) -> Columns:
    if TIME_COLUMN not in arrays:
        raise DatasetError(f"{path}: expected an array {TIME_COLUMN} (seconds), got {some(arrays)}")
    columns = {name: np.ravel(array).tolist() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    times = columns.pop(TIME_COLUMN, [])
    found = Columns(path, "video_actions", num_rows=len(times), step=_step(np.array([_float(time) for time in times])))
    _add_numbers(found, columns)
    return found


def _add_numbers(found: Columns, columns: Mapping[str, Sequence[Any]]) -> None:
    """Widen what is known of each column by some more of its cells."""
    for name, cells in columns.items():
        values = np.array([_float(cell) for cell in cells])
        if name in found.texts or not len(values) or not np.isfinite(values).all():
            found.texts.setdefault(name, set()).update(str(cell) for cell in cells)
            found.ranges.pop(name, None)
            continue
        low, high = found.ranges.get(name, (math.inf, -math.inf))
        found.ranges[name] = min(low, float(values.min())), max(high, float(values.max()))
        found.is_binary[name] = found.is_binary.get(name, True) and bool(np.isin(values, (0.0, 1.0)).all())


def _float(cell: object) -> float:
    try:
        return float(cell) if isinstance(cell, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _step(times: np.ndarray) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else math.nan
