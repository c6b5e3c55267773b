"""nuScenes' tables (nuscenes.org): JSON files, each a list of rows that refer to each other by tokens.

The tables are read without nuscenes-devkit, whose version 1.2.0 requires numpy below 2. They are read row by row,
because sample_data.json and ego_pose.json have 2.6 million rows in the full dataset.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terra.errors import DatasetError

Row = dict[str, Any]

_CHUNK = 1 << 20  # characters read at once
_LONGEST_ROW = 1 << 16  # characters; rows of the tables below have a few hundred
_OPENING, _SEPARATOR = re.compile(r"\s*\[\s*"), re.compile(r"\s*([,\]])\s*")


@dataclass(frozen=True)
class Kind:
    """The kind of value that a column holds: in words for messages, and as a check of a value."""

    words: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_vector(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(_is_number, value))


def _is_rotation(value: Any) -> bool:
    return _is_vector(value, 4) and abs(math.hypot(*value) - 1) < 0.01


TEXT = Kind("text", lambda value: isinstance(value, str))
MICROSECONDS = Kind("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
POSITION = Kind("3 numbers [x, y, z]", lambda value: _is_vector(value, 3))
ROTATION = Kind("a unit quaternion [w, x, y, z]", _is_rotation)
# Sensors that are no cameras have an empty list.
INTRINSICS = Kind(
    "a 3x3 matrix or []",
    lambda value: value == [] or (isinstance(value, list) and len(value) == 3 and all(_is_vector(v, 3) for v in value)),
)

TABLES: dict[str, dict[str, Kind]] = {
    "scene": {"token": TEXT, "name": TEXT, "log_token": TEXT},
    "log": {"token": TEXT, "logfile": TEXT},
    "sample": {"token": TEXT, "scene_token": TEXT},
    "sensor": {"token": TEXT, "channel": TEXT},
    "calibrated_sensor": {"token": TEXT, "sensor_token": TEXT, "camera_intrinsic": INTRINSICS},
    "sample_data": {
        **{"token": TEXT, "sample_token": TEXT, "ego_pose_token": TEXT, "calibrated_sensor_token": TEXT},
        **{"timestamp": MICROSECONDS, "filename": TEXT},
    },
    "ego_pose": {"token": TEXT, "translation": POSITION, "rotation": ROTATION},
}


@dataclass(frozen=True)
class Table:
    """The rows of one table by their tokens, reduced to the columns that `TABLES` names."""

    path: Path
    rows: dict[str, Row]

    def __getitem__(self, token: str) -> Row:
        if token not in self.rows:
            raise DatasetError(f"{self.path}: expected a row with the token {token!r}, got none")
        return self.rows[token]


def read_table(folder: Path, name: str, keep: Callable[[Row], bool] = lambda row: True) -> Table:
    """Read `folder`/NAME.json, check all rows, and return those for which `keep` is true.

    Raises:
        DatasetError: no such file, no list of objects, a column that is missing or of another kind, or a token that two
            of the returned rows share.
    """
    path, kinds = folder / f"{name}.json", TABLES[name]
    rows: dict[str, Row] = {}
    for number, row in enumerate(_stream_rows(path)):
        for column, kind in kinds.items():
            if column not in row or not kind.accepts(row[column]):
                got = reprlib.repr(row[column]) if column in row else "nothing"
                raise DatasetError(f"{path}: row {number}: {column}: expected {kind.words}, got {got}")
        if keep(row):
            if row["token"] in rows:
                raise DatasetError(f"{path}: row {number}: token: expected one of its own, got {row['token']!r} again")
            rows[row["token"]] = {column: row[column] for column in kinds}
    return Table(path, rows)


def _stream_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list without holding the whole file in memory."""
    decoder, number = json.JSONDecoder(), 0
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CHUNK)
            opening = _OPENING.match(text)
            if opening is None:
                raise DatasetError(f"{path}: expected a list of rows, got {text[:20]!r}")
            start = opening.end()
            while text[start : start + 1] != "]":
                if len(text) - start < _LONGEST_ROW:
                    text, start = text[start:] + file.read(_CHUNK), 0
                row, start = decoder.raw_decode(text, start)
                if not isinstance(row, dict):
                    raise DatasetError(f"{path}: row {number}: expected an object, got {reprlib.repr(row)}")
                yield row
                number += 1
                separator = _SEPARATOR.match(text, start)
                if separator is None:
                    raise DatasetError(f"{path}: expected ',' or ']' after row {number - 1}: was the file cut off?")
                start = separator.start(1) if separator[1] == "]" else separator.end()
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: row {number}: expected JSON, got: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: expected UTF-8 text, got another byte at offset {error.start}") from None
    except OSError as error:
        raise DatasetError(f"{path}: expected a table of nuScenes, got: {error.strerror}") from None
