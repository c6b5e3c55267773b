"""Reading of donkeycar's tubs, versions 1 and 2: each record with the values that drove the car, or why it is left out.

Version 2 is a folder with manifest.json (its last line names the catalogs and the deleted records), catalog_N.catalog
(a JSON object a line: "_index", "_timestamp_ms", "_session_id", "cam/image_array", "user/angle", "user/throttle",
"user/mode"), and images/. What is read and what is passed over follows donkeycar's own reader, `ManifestIterator` of
donkeycar/parts/datastore_v2.py (5.3.0): `deleted_indexes` are positions of lines, counted through all catalogs from 0,
not the records' `_index`; a line that is no JSON is passed over and counts; the first empty line ends its catalog, and
the lines after it are neither read nor counted. Records with "__empty__", with which a conversion from version 1 fills
gaps, are none.

Version 1 is a folder with record_N.json beside the pictures, ordered by N; exclude.json lists the deleted N. Its time
is "milliseconds" since the tub was begun (donkeycar 3.0), or else "timestamp", a date in text.

Who drove is what `DriveMode` of donkeycar/templates/complete.py makes of "user/mode": "user" takes the user's steering
and throttle, "local_angle" the pilot's steering ("pilot/angle") and the user's throttle, any other mode the pilot's
both. The pilot's values are stored where donkeycar ran with RECORD_DURING_AI; where they are not, the values that drove
the car are unknown, and such a record is left out. The stored throttle of the pilot has the launch boost in it, but not
the factor AI_THROTTLE_MULT (1 unless it was set), which no tub tells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from terra.actions import Vector
from terra.errors import DatasetError
from tokenizer.files import decode_text, parse_json, read_bytes, read_json, read_text
from tokenizer.settings import Settings, checked

SPACE = Vector(names=("steering", "throttle"), units=("", ""), low=(-1.0, -1.0), high=(1.0, 1.0))
MANIFEST = "manifest.json"
_EMPTY = "__empty__"
_USED = {"cam/image_array", "user/angle", "user/throttle", "user/mode", "pilot/angle", "pilot/throttle"}
_USED |= {_EMPTY, "timestamp", "milliseconds"}


@dataclass(frozen=True)
class Record:
    """A record of a tub.

    Attributes:
        number: its place in the order of the tub, counted with those that are left out.
        session: the name of its session; empty where the tub names none.
        milliseconds: its time; None if the tub does not tell.
        picture: the file name of its picture.
        values: the steering and throttle that drove the car, each from -1 to 1.
        by_pilot: do some of the values come from a pilot (a model), not from the user?
    """

    number: int
    session: str
    milliseconds: float | None
    picture: str
    values: tuple[float, float]
    by_pilot: bool


@dataclass(frozen=True)
class Loss:
    """A record that is left out.

    Attributes:
        number, session: see `Record`; the session is None if it is unknown.
        reason: why, in words that hold for any number of records: "deleted records".
        detail: what is wrong with it, with its file; empty if nothing is.
    """

    number: int
    session: str | None
    reason: str
    detail: str = ""


Entry = Record | Loss


@dataclass(frozen=True)
class Tub:
    """What is in a tub.

    Attributes:
        folder: its folder.
        pictures: the folder of its pictures.
        entries: its records, in order, and those that are left out.
        unused: channels that are recorded and not read.
        shifted: the first record whose `_index` is not the position of its line, though deleted records are counted so;
            empty if there is none, or nothing is deleted.
    """

    folder: Path
    pictures: Path
    entries: tuple[Entry, ...]
    unused: tuple[str, ...]
    shifted: str = ""

    def sessions(self) -> dict[str, list[Entry]]:
        """The entries of each session, in the order in which the sessions begin."""
        session = next((entry.session for entry in self.entries if entry.session is not None), "")
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            session = session if entry.session is None else entry.session
            found.setdefault(session, []).append(entry)
        return found


class _Fields(Settings):
    model_config = ConfigDict(extra="ignore")

    image: Annotated[str, Field(pattern=r"^[^/\\\x00]{1,200}$", alias="cam/image_array")]
    steering: Annotated[float, Field(alias="user/angle")]
    throttle: Annotated[float, Field(alias="user/throttle")]
    mode: Annotated[str, Field(alias="user/mode")] = "user"
    pilot_steering: Annotated[float | None, Field(alias="pilot/angle")] = None
    pilot_throttle: Annotated[float | None, Field(alias="pilot/throttle")] = None
    milliseconds: Annotated[float | None, Field(alias="_timestamp_ms", ge=-1e15, le=1e15)] = None
    session: Annotated[str, Field(alias="_session_id", max_length=100)] = ""

    def driving(self) -> tuple[float | None, float | None]:
        """Steering and throttle that drove the car; None where the record does not tell."""
        if self.mode == "user":
            return self.steering, self.throttle
        return self.pilot_steering, self.throttle if self.mode == "local_angle" else self.pilot_throttle


def is_tub(folder: Path) -> bool:
    """Is this the folder of a tub, of either version?"""
    return (folder / MANIFEST).is_file() or next(folder.glob("record_*.json"), None) is not None


def read_tub(folder: Path) -> Tub:
    """Read a tub's records; its pictures are not looked at.

    Raises:
        DatasetError: the tub's manifest, or a catalog as a whole, can't be read.
    """
    return _read_version_2(folder) if (folder / MANIFEST).is_file() else _read_version_1(folder)


def _read_version_2(folder: Path) -> Tub:
    path = folder / MANIFEST
    lines = [line for line in read_text(path, DatasetError).splitlines() if line.strip()]
    last = parse_json(lines[-1] if lines else "", str(path), DatasetError, first_line=len(lines))
    catalogs, deleted = last.get("paths"), last.get("deleted_indexes", [])
    if not isinstance(catalogs, list) or not isinstance(deleted, list):
        raise DatasetError(
            f"{path}: expected paths and deleted_indexes in its last line, as a tub of version 2 has them"
        )
    gone = {each for each in deleted if isinstance(each, int)}
    entries: list[Entry] = []
    unused: set[str] = set()
    last_with: dict[str, int] = {}  # a picture's name -> the last entry that names it
    shifted, position = "", 0
    for name in catalogs:
        if not isinstance(name, str) or Path(name).name != name:
            raise DatasetError(f"{path}: paths: expected names of files beside it, got {str(name)[:80]!r}")
        catalog = str(folder / name)
        ended = False
        for number, line in enumerate(read_bytes(folder / name, DatasetError).split(b"\n"), start=1):
            line = line.rstrip(b"\r")
            where = f"{catalog}: line {number}"
            if ended and line:
                entries.append(Loss(len(entries), None, "records after an empty line, which donkeycar does not read"))
            if ended or not line:
                ended = True
                continue
            record = _parse(line, catalog, number)
            is_deleted, position = position in gone, position + 1
            if isinstance(record, str):
                reason = "deleted records" if is_deleted else "records that can't be read"
                entries.append(Loss(len(entries), None, reason, "" if is_deleted else record))
                continue
            if gone and not shifted and record.get("_index", position - 1) != position - 1:
                shifted = where
            unused.update(key for key in record if not key.startswith("_") and key not in _USED)
            if isinstance(picture := record.get("cam/image_array"), str):
                last_with[picture] = len(entries)
            entries.append(_entry(record, len(entries), where, is_deleted=is_deleted))
    for number, entry in enumerate(entries):
        if isinstance(entry, Record) and last_with[entry.picture] != number:
            # Written after a loss of power: the index began again where the manifest had last been saved.
            entries[number] = Loss(number, entry.session, "records whose picture a later record has overwritten")
    return Tub(folder, folder / "images", tuple(entries), tuple(sorted(unused)), shifted)


def _read_version_1(folder: Path) -> Tub:
    numbered = {}
    for path in folder.glob("record_*.json"):
        digits = path.stem.removeprefix("record_")
        if digits.isascii() and digits.isdigit() and len(digits) < 19:
            numbered[int(digits)] = path
    gone: set[object] = set()
    if (path := folder / "exclude.json").is_file():
        # A list, which is no object of JSON.
        excluded = parse_json(f'{{"excluded": {read_text(path, DatasetError)}}}', str(path), DatasetError)["excluded"]
        gone = {each for each in excluded if isinstance(each, int)} if isinstance(excluded, list) else set()
    entries: list[Entry] = []
    unused: set[str] = set()
    for number in sorted(numbered):
        path = numbered[number]
        try:
            record = _dated(read_json(path, DatasetError))
        except DatasetError as error:
            entries.append(Loss(number, None, "records that can't be read", str(error)))
            continue
        unused.update(key for key in record if not key.startswith("_") and key not in _USED)
        entries.append(_entry(record, number, str(path), is_deleted=number in gone))
    return Tub(folder, folder, tuple(entries), tuple(sorted(unused)))


def _dated(record: dict[str, Any]) -> dict[str, Any]:
    """A record of version 1 with its time where version 2 has it, and without a session."""
    time = record.get("milliseconds")
    if time is None and isinstance(text := record.get("timestamp"), str):
        try:
            date = datetime.fromisoformat(text)
            time = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp() * 1000
        except (ValueError, OverflowError):
            time = None
    return {**record, "_timestamp_ms": time, "_session_id": ""}


def _parse(line: bytes, path: str, number: int) -> dict[str, Any] | str:
    """The object of a file's line, or what is wrong with it."""
    try:
        text = decode_text(line, path, DatasetError, number)
        return parse_json(text, path, DatasetError, first_line=number)
    except DatasetError as error:
        return str(error)


def _entry(record: Mapping[str, Any], number: int, where: str, *, is_deleted: bool) -> Entry:
    session = record.get("_session_id", "")
    session = session if isinstance(session, str) else None
    if is_deleted:
        return Loss(number, session, "deleted records")
    if _EMPTY in record:
        return Loss(number, session, "empty records, with which a conversion filled gaps")
    try:
        fields = checked(_Fields, record, where, DatasetError)
    except DatasetError as error:
        return Loss(number, session, "records with a missing or wrong field", str(error))
    steering, throttle = fields.driving()
    if steering is None or throttle is None:
        return Loss(number, session, "records that the pilot drove with values that are not stored")
    if problem := SPACE.problem(np.array([steering, throttle])):
        return Loss(number, session, "records with values out of range", f"{where}: {problem}")
    return Record(
        number=number,
        session=fields.session,
        milliseconds=fields.milliseconds,
        picture=fields.image,
        values=(steering, throttle),
        by_pilot=fields.mode != "user",
    )
