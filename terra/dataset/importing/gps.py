"""Reading of GPS tracks: GPX (topografix.com/GPX/1/1) and CSV; and meters on the plane that touches the earth.

A GPX file is XML of which nothing is expanded or fetched: a document type or an entity is refused where it begins.
"""

import csv
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from xml.parsers import expat

import numpy as np
from jaxtyping import Float64, Int

from terra.errors import DatasetError
from tokenizer.files import read_bytes, read_text
from tokenizer.limits import LIMITS, Limits

MAX_LATITUDE = 85.0  # degrees; nearer to a pole a flat map of east and north means little
_MAX_DEPTH = 32  # elements within each other
_TIME_CHARS = 64
_CHUNK = 1 << 16  # bytes; a tag that goes on for longer is refused before its attributes take memory
_UNTIMED, _OUT_OF_ORDER = "points without a time", "fixes at a time that is not after the one before"
_CSV_COLUMNS = ("time", "lat", "lon")
# WGS 84: the earth's semi-major axis (m), and the square of its eccentricity.
_AXIS, _ECCENTRICITY_2 = 6_378_137.0, 6.694_379_990_14e-3


@dataclass(frozen=True, eq=False)
class GpsTrack:
    """The fixes of a track, in the order of their times.

    Attributes:
        times: seconds, increasing; of GPX and of ISO 8601 since 1970 (UTC).
        latitude, longitude: degrees north and east, WGS 84.
        segment: the number of the track's segment (<trkseg>) that each fix is of; a CSV has one.
        left_out: reason -> number of points that are no fixes: they lack a time, or their times do not increase.
    """

    times: Float64[np.ndarray, " fixes"]
    latitude: Float64[np.ndarray, " fixes"]
    longitude: Float64[np.ndarray, " fixes"]
    segment: Int[np.ndarray, " fixes"]
    left_out: Mapping[str, int]

    def meters(self, origin: int = 0) -> Float64[np.ndarray, "fixes 2"]:
        """Meters east and north of a fix, on the plane that touches the ellipsoid there.

        Longitudes may pass the 180th meridian. 10 km away the plane is off by some 10 m of scale, which turns no path.
        """
        latitude = math.radians(self.latitude[origin])
        curving = 1 - _ECCENTRICITY_2 * math.sin(latitude) ** 2
        along_meridian, across = _AXIS * (1 - _ECCENTRICITY_2) / curving**1.5, _AXIS / math.sqrt(curving)
        east = np.mod(self.longitude - self.longitude[origin] + 180, 360) - 180
        north = self.latitude - self.latitude[origin]
        return np.radians(np.stack([east * across * math.cos(latitude), north * along_meridian], axis=1))


def load_gps(path: Path, limits: Limits = LIMITS) -> GpsTrack:
    """Read the fixes of a .gpx (the points of its tracks), or of a .csv with the columns time, lat and lon.

    A CSV's time is ISO 8601 (UTC unless it says otherwise) or a number of seconds; lat and lon are degrees north and
    east. Further columns are ignored, as are lines that begin with #. A point without a time is left out, and so are
    the fewest fixes without which the times of a segment increase. Segments are sorted by their times; where two
    overlap, the fixes of the later one are left out.

    Args:
        path: the file; its suffix says which format it has.
        limits: bounds on bytes, lines and characters.

    Raises:
        DatasetError: one line with the file, the line in it, what was expected and what came.
    """
    is_gpx = path.suffix.lower() == ".gpx"
    fixes, untimed = _read_gpx(path, limits) if is_gpx else _read_csv(path, limits)
    if untimed and not fixes:
        what = "a <time> in the point" if is_gpx else "a time"
        raise DatasetError(f"{path}: line {untimed[0]}: expected {what}, got none: a track without times moves no car")
    kept: list[_Fix] = []
    segments = [list(segment) for _, segment in groupby(fixes, key=lambda fix: fix.segment)]
    for segment in sorted(map(_in_order, segments), key=lambda segment: segment[0].time):
        kept += [fix for fix in segment if not kept or fix.time > kept[-1].time]
    counts = {_UNTIMED: len(untimed), _OUT_OF_ORDER: len(fixes) - len(kept)}
    left_out = {reason: count for reason, count in counts.items() if count}
    if len(kept) < 2:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        got = f"{len(kept)} (left out: {reasons})" if reasons else f"{len(kept)}"
        raise DatasetError(f"{path}: expected 2 or more fixes, got {got}")
    times, latitude, longitude = np.array([(fix.time, fix.latitude, fix.longitude) for fix in kept]).T.copy()
    return GpsTrack(times, latitude, longitude, np.array([fix.segment for fix in kept]), left_out)


def _in_order(fixes: list["_Fix"]) -> list["_Fix"]:
    """The longest selection of fixes whose times increase; of fixes at one time the first."""
    last: list[int] = []  # of a selection of k + 1 fixes: the one that ends earliest
    ends: list[float] = []
    before = [-1] * len(fixes)
    for row, fix in enumerate(fixes):
        length = bisect_left(ends, fix.time)
        if length < len(ends) and ends[length] == fix.time:
            continue
        before[row] = last[length - 1] if length else -1
        last[length : length + 1], ends[length : length + 1] = [row], [fix.time]
    chosen = [last[-1]]
    while (row := before[chosen[-1]]) >= 0:
        chosen.append(row)
    return [fixes[row] for row in reversed(chosen)]


@dataclass(frozen=True, slots=True)
class _Fix:
    time: float
    latitude: float
    longitude: float
    segment: int


class _GpxReader:
    """The handlers of an expat parser; `fixes` holds the points with a time, `untimed` the lines of the others."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._open: list[str] = []
        self._point: tuple[object, object, int] | None = None
        self._time: list[str] | None = None
        self._text: list[str] = []
        self._segment = 0
        self.fixes: list[_Fix] = []
        self.untimed: list[int] = []
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._data
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.parser.EntityDeclHandler = self._refuse

    @property
    def _where(self) -> str:
        return f"{self._path}: line {self.parser.CurrentLineNumber}"

    def _refuse(self, *_: object) -> None:
        raise DatasetError(f"{self._where}: expected GPX without a document type or entities, got one")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        if not self._open and name != "gpx":
            raise DatasetError(f"{self._where}: expected a GPX file, got <{name[:80]}>")
        if len(self._open) >= _MAX_DEPTH:
            raise DatasetError(f"{self._where}: expected at most {_MAX_DEPTH} elements within each other, got more")
        self._open.append(name)
        if name == "trkpt":
            self._point = attributes.get("lat"), attributes.get("lon"), self.parser.CurrentLineNumber
            self._time = None
            if len(self.fixes) + len(self.untimed) >= self._limits.table_lines:
                raise DatasetError(f"{self._where}: expected at most {self._limits.table_lines} points, got more")
        elif name == "trkseg":
            self._segment += 1
        elif name == "time" and self._is_of_point():
            self._time = []

    def _is_of_point(self) -> bool:
        return len(self._open) > 1 and self._open[-2] == "trkpt"

    def _data(self, text: str) -> None:
        if self._time is not None and self._open[-1] == "time" and self._is_of_point():
            self._time.append(text)
            if sum(map(len, self._time)) > _TIME_CHARS:
                raise DatasetError(f"{self._where}: time: expected at most {_TIME_CHARS} characters, got more")

    def _end(self, name: str) -> None:
        if self._open.pop() == "trkpt" and self._point is not None:
            latitude, longitude, line = self._point
            where = f"{self._path}: line {line}"
            text = "".join(self._time or []).strip()
            if text:
                time = _time(text, f"{where}: time")
                self.fixes.append(_fix(time, latitude, longitude, self._segment, where))
            else:
                self.untimed.append(line)
            self._point = None


def _read_gpx(path: Path, limits: Limits) -> tuple[list[_Fix], list[int]]:
    """The fixes, and the lines of points without a time."""
    data = read_bytes(path, DatasetError, "a GPX file", max_bytes=limits.table_bytes)
    reader = _GpxReader(path, limits)
    try:
        for start in range(0, len(data), _CHUNK):
            reader.parser.Parse(data[start : start + _CHUNK], False)
            if start + _CHUNK - reader.parser.CurrentByteIndex > 3 * _CHUNK:
                raise DatasetError(f"{path}: expected tags of at most {_CHUNK} bytes, got a larger one")
        reader.parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise DatasetError(
            f"{path}: line {error.lineno}: expected well-formed XML, got: {expat.ErrorString(error.code)}"
        ) from None
    except (LookupError, ValueError) as error:  # an encoding that Python doesn't know
        raise DatasetError(f"{path}: expected XML in UTF-8, got: {str(error)[:80]}") from None
    return reader.fixes, reader.untimed


def _read_csv(path: Path, limits: Limits) -> tuple[list[_Fix], list[int]]:
    lines = read_text(path, DatasetError, max_bytes=limits.table_bytes).splitlines()
    if len(lines) > limits.table_lines:
        raise DatasetError(f"{path}: expected at most {limits.table_lines} lines, got {len(lines)}")
    header: list[str] | None = None
    fixes: list[_Fix] = []
    untimed: list[int] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        if len(line) > limits.line_chars:
            raise DatasetError(f"{where}: expected at most {limits.line_chars} characters, got {len(line)}")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = cells
            for name in _CSV_COLUMNS:
                if header.count(name) != 1:
                    expected = f"the columns {', '.join(_CSV_COLUMNS)}, each once"
                    raise DatasetError(f"{where}: expected {expected}, got {', '.join(header)[:200]}")
            continue
        if len(cells) != len(header):
            raise DatasetError(f"{where}: expected {len(header)} columns, got {len(cells)}")
        row = dict(zip(header, cells, strict=True))
        if row["time"]:
            fixes.append(_fix(_time(row["time"], f"{where}: time"), row["lat"], row["lon"], 0, where))
        else:
            untimed.append(number)
    return fixes, untimed


def _fix(time: float, latitude: object, longitude: object, segment: int, where: str) -> _Fix:
    north = _degrees(latitude, MAX_LATITUDE, f"{where}: lat")
    return _Fix(time, north, _degrees(longitude, 180.0, f"{where}: lon"), segment)


def _degrees(text: object, most: float, where: str) -> float:
    try:
        value = float(text) if isinstance(text, str) and len(text) <= _TIME_CHARS else math.nan
    except ValueError:
        value = math.nan
    if not -most <= value <= most:
        raise DatasetError(f"{where}: expected {-most:g} to {most:g} degrees, got {str(text)[:80]!r}")
    return value


def _time(text: str, where: str) -> float:
    """Seconds, of ISO 8601 since 1970 (UTC where no zone is said), or as they are written."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            time = datetime.fromisoformat(text)
            seconds = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
    if not abs(seconds) <= 1e11:
        raise DatasetError(f"{where}: expected ISO 8601, such as 2026-05-01T12:00:00Z, or seconds, got {text[:80]!r}")
    return seconds
