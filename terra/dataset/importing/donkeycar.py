"""Import of donkeycar's tubs, version 2: pictures with steering and throttle of a small car.

A tub is a folder with manifest.json (its last line names the catalogs and the deleted records), catalog_N.catalog (a
JSON object a line: _index, _timestamp_ms, "cam/image_array", "user/angle", "user/throttle"), and images/ (see
docs.donkeycar.com/utility/donkey).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import UInt8
from pydantic import ConfigDict, Field

from decoder.pictures import read_picture
from terra.actions import ActionTrack, Vector
from terra.dataset.importing.source import SourceDrive
from terra.errors import DatasetError
from tokenizer.files import parse_json, read_text
from tokenizer.limits import LIMITS
from tokenizer.settings import Settings, checked

SPACE = Vector(names=("steering", "throttle"), units=("", ""), low=(-1.0, -1.0), high=(1.0, 1.0))
_MANIFEST = "manifest.json"


class _Record(Settings):
    model_config = ConfigDict(extra="ignore")

    index: Annotated[int, Field(ge=0, alias="_index")]
    timestamp_ms: Annotated[float, Field(alias="_timestamp_ms")]
    image: Annotated[str, Field(pattern=r"^[^/\\\x00]{1,200}$", alias="cam/image_array")]
    steering: Annotated[float, Field(alias="user/angle")]
    throttle: Annotated[float, Field(alias="user/throttle")]


@dataclass(frozen=True)
class DonkeycarSource:
    """A tub, or a folder of tubs; the actions are [steering, throttle], each from -1 to 1.

    Attributes:
        folder: the tub, or the folder of tubs.
        picture_fps: records a second, where the records' own times mean nothing; None takes these times.
        sections: into how many drives of equal length each tub is cut, so that some can be held out.
    """

    folder: Path
    picture_fps: float | None
    sections: int = 1

    @property
    def space(self) -> Vector:
        """Steering and throttle."""
        return SPACE

    @property
    def declared(self) -> dict[str, str | None]:
        """The pictures' rate, and the number of sections."""
        fps = None if self.picture_fps is None else f"{self.picture_fps:g}"
        return {"picture_fps": fps, "sections": str(self.sections)}

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """The tubs, and the sections of each, which show one place."""
        return {tub.name: self._names(tub) for tub in self._tubs()} if self.sections > 1 else {}

    def list_drives(self) -> tuple[str, ...]:
        """The names of the tubs or, where they are cut, of their sections: tub_00, tub_01, ..."""
        return tuple(name for tub in self._tubs() for name in self._names(tub))

    def open_drive(self, name: str) -> SourceDrive:
        """Open one tub or section."""
        tub, section = next((tub, i) for tub in self._tubs() for i, each in enumerate(self._names(tub)) if each == name)
        records = _read_records(tub)
        bounds = np.linspace(0, len(records), self.sections + 1).round().astype(int)
        records = records[bounds[section] : bounds[section + 1]]
        if len(records) < 2:
            raise DatasetError(f"{tub}: expected 2 or more records in {name}, got {len(records)}")
        times = np.array([record.timestamp_ms / 1000 for record in records])
        if self.picture_fps is not None:
            times = np.array([record.index for record in records]) / self.picture_fps
        if (np.diff(times) <= 0).any():
            raise DatasetError(f"{tub}: expected _timestamp_ms that increase; or give picture_fps=, such as 20")
        values = np.array([[record.steering, record.throttle] for record in records])
        for record, row in zip(records, values, strict=True):
            if problem := SPACE.problem(row):
                raise DatasetError(f"{tub}: record {record.index}: {problem}")
        paths = [tub / "images" / record.image for record in records]

        def frames() -> Iterator[UInt8[np.ndarray, "height width 3"]]:
            return map(read_picture, paths)

        return SourceDrive(
            name=name,
            track=ActionTrack(SPACE, times, values, str(tub)),
            frame_times=times,
            frames=frames,
            intrinsics=None,
            origin=str(tub),
        )

    def _names(self, tub: Path) -> tuple[str, ...]:
        if self.sections == 1:
            return (tub.name,)
        return tuple(f"{tub.name}_{section:02d}" for section in range(self.sections))

    def _tubs(self) -> tuple[Path, ...]:
        if (self.folder / _MANIFEST).is_file():
            return (self.folder,)
        tubs = tuple(path.parent for path in sorted(self.folder.glob(f"*/{_MANIFEST}")))
        if not tubs:
            raise DatasetError(
                f"{self.folder}: expected a donkeycar tub with {_MANIFEST}, or a folder of tubs, got none"
            )
        return tubs


def _read_records(tub: Path) -> list[_Record]:
    """The records that are not deleted, by their index. Raises DatasetError."""
    path = tub / _MANIFEST
    lines = [line for line in read_text(path, DatasetError, max_bytes=LIMITS.json_bytes).splitlines() if line.strip()]
    last = parse_json(lines[-1] if lines else "", str(path), DatasetError, first_line=len(lines))
    catalogs, deleted = last.get("paths"), last.get("deleted_indexes", [])
    if not isinstance(catalogs, list) or not isinstance(deleted, list):
        raise DatasetError(
            f"{path}: expected paths and deleted_indexes in its last line, as a tub of version 2 has them"
        )
    records: dict[int, _Record] = {}
    for name in catalogs:
        if not isinstance(name, str) or Path(name).name != name:
            raise DatasetError(f"{path}: paths: expected names of files beside it, got {json.dumps(name)[:80]}")
        for record in _read_catalog(tub / name):
            records[record.index] = record
    kept = [records[index] for index in sorted(records.keys() - {each for each in deleted if isinstance(each, int)})]
    if not kept:
        raise DatasetError(f"{tub}: expected records, got none")
    return kept


def _read_catalog(path: Path) -> Iterator[_Record]:
    text = read_text(path, DatasetError, max_bytes=LIMITS.json_bytes)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            record: dict[str, Any] = parse_json(line, str(path), DatasetError, first_line=number)
            yield checked(_Record, record, f"{path}: line {number}", DatasetError)
