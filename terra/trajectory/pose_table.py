"""Poses from CSV: the column names declare units, a comment declares the frame rate, nothing is guessed."""

import logging
import math
import re
from pathlib import Path

import numpy as np

from terra.errors import TrajectoryError
from terra.trajectory.checks import POSE_COLUMNS, check_fps
from terra.trajectory.document import ANGLE_UNITS, POSITION_UNITS, TIME_UNITS
from terra.trajectory.model import PoseTable
from tokenizer.files import read_text
from tokenizer.limits import LIMITS, Limits

logger = logging.getLogger(__name__)

_MISSING = ("", "nan")  # cells without a value, as loggers write them
COLUMN_UNITS = {"time": TIME_UNITS, "x": POSITION_UNITS, "y": POSITION_UNITS, "heading": ANGLE_UNITS}
FPS_COMMENT = re.compile(r"#\s*fps\s*:\s*(?P<fps>.*?)\s*")


def read_csv(path: Path, limits: Limits = LIMITS, *, as_logged: bool = False) -> PoseTable:
    """Read poses in one fixed frame from CSV.

    A header names the columns time_s (or time_ms), x_m, y_m and heading_rad (or heading_deg), in any order; headings
    are counter-clockwise from +x. Lines that begin with # are comments, and one of them is "# fps: 10".

    With `as_logged`, of a recording, rows that lack a value (an empty cell, NaN), or have the time of the row before,
    are left out with a warning instead of refused.

    Raises:
        TrajectoryError: a column missing, unknown or without its unit, no frame rate, bad numbers, too long a file.
    """
    content = read_text(path, TrajectoryError, max_bytes=limits.table_bytes)
    if not content.strip():
        raise TrajectoryError(f"{path}: expected a trajectory, got an empty file")
    table = content.splitlines()
    if len(table) > limits.table_lines:
        raise TrajectoryError(f"{path}: expected at most {limits.table_lines} lines, got {len(table)}")
    fps: float | None = None
    header: list[str] = []
    scales: dict[str, float] | None = None
    rows: list[list[float]] = []
    lines: list[int] = []
    skipped: list[int] = []
    start: float | None = None
    for number, line in enumerate(table, start=1):
        where = f"{path}: line {number}"
        if len(line) > limits.line_chars:
            raise TrajectoryError(f"{where}: expected at most {limits.line_chars} characters, got {len(line)}")
        text = line.strip()
        if text.startswith("#"):
            if match := FPS_COMMENT.fullmatch(text):
                if fps is not None:
                    raise TrajectoryError(f"{where}: expected one comment '# fps: 10', got a second one")
                fps = _parse_fps(match["fps"], where)
        elif text:
            cells = [cell.strip().strip('"') for cell in text.split(",")]
            if scales is None:
                header = cells
                scales = _column_scales(header, where)
            elif as_logged and (
                any(cell.lower() in _MISSING for cell in cells) or (len(cells) < len(header) and number == len(table))
            ):
                skipped.append(number)
                if not rows and start is None:
                    # The video begins with the first row, whatever it lacks.
                    column = list(scales).index("time")
                    start = _parse_row([cells[column]], [header[column]], where)[0] / scales["time"]
            else:
                rows.append(_parse_row(cells, header, where))
                lines.append(number)
    if fps is None:
        raise TrajectoryError(f"{path}: expected the frame rate in a comment such as '# fps: 10', got none")
    if scales is None or not rows:
        raise TrajectoryError(f"{path}: expected a header and rows of poses, got {len(rows)} rows")
    order = [list(scales).index(name) for name in POSE_COLUMNS]
    poses = (np.array(rows) / list(scales.values()))[:, order]
    if as_logged:
        repeated = np.append(np.diff(poses[:, 0]) == 0, False)  # of rows at one time the last one holds
        skipped += [line for line, again in zip(lines, repeated, strict=True) if again]
        lines = [line for line, again in zip(lines, repeated, strict=True) if not again]
        poses = poses[~repeated]
    if skipped:
        logger.warning(
            "%s: %d of %d rows left out, which lack a value or repeat a time, such as line %d",
            *(path, len(skipped), len(skipped) + len(poses), skipped[0]),
        )
    return PoseTable(poses, fps, str(path), locate=lambda row: f"{path}: line {lines[row]}", start=start)


def _parse_fps(text: str, where: str) -> float:
    try:
        return check_fps(float(text), where)
    except ValueError as error:
        raise TrajectoryError(f"{where}: fps: expected a number, got {text!r}") from error


def _column_scales(header: list[str], where: str) -> dict[str, float]:
    """Map each column's quantity, in the header's order, to the number of its units in one SI unit."""
    scales: dict[str, float] = {}
    for column in header:
        quantity, _, unit = column.partition("_")
        if quantity not in COLUMN_UNITS:
            names = ", ".join(_names(name) for name in COLUMN_UNITS)
            raise TrajectoryError(f"{where}: expected the columns {names}, got {column!r}")
        if not unit:
            raise TrajectoryError(
                f"{where}: column {column!r}: expected a unit in the name, got none (rename it to {_names(quantity)})"
            )
        if unit not in COLUMN_UNITS[quantity]:
            raise TrajectoryError(f"{where}: column {column!r}: expected {_names(quantity)}, got the unit {unit!r}")
        if quantity in scales:
            raise TrajectoryError(f"{where}: column {column!r}: expected {quantity} once, got it twice")
        scales[quantity] = COLUMN_UNITS[quantity][unit]
    for quantity in COLUMN_UNITS:
        if quantity not in scales:
            raise TrajectoryError(f"{where}: expected a column {_names(quantity)}, got {', '.join(header)}")
    return scales


def _names(quantity: str) -> str:
    return " or ".join(f"{quantity}_{unit}" for unit in COLUMN_UNITS[quantity])


def _parse_row(cells: list[str], header: list[str], where: str) -> list[float]:
    if len(cells) != len(header):
        raise TrajectoryError(f"{where}: expected {len(header)} columns ({', '.join(header)}), got {len(cells)}")
    values = []
    for column, cell in zip(header, cells, strict=True):
        try:
            value = float(cell)
        except ValueError as error:
            raise TrajectoryError(f"{where}: column {column!r}: expected a number, got {cell!r}") from error
        if not math.isfinite(value):
            raise TrajectoryError(f"{where}: column {column!r}: expected a finite number, got {value}")
        values.append(value)
    return values
