"""Donkeycar tubs by a plan: record i has steering i / 1000 and a picture that shows i."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

START = 1_700_000_000_000  # ms
Records = list[dict[str, Any]]


def drive(count: int, session: str | None = "26-05-01_0", *, first: int = 0, start: int = START) -> Records:
    """Records of a session, 20 a second; `first` is the index of the first of them."""
    own = {} if session is None else {"_session_id": session}
    return [
        {
            **own,
            "_index": index,
            "_timestamp_ms": start + 50 * (index - first),
            "cam/image_array": f"{index}_cam_image_array_.jpg",
            "user/angle": index / 1000,
            "user/mode": "user",
            "user/throttle": 0.5,
        }
        for index in range(first, first + count)
    ]


def shift_clock(records: Records, row: int, seconds: float) -> None:
    """Let the clock go forward (a pause) or back before a record."""
    for record in records[row:]:
        record["_timestamp_ms"] += round(1000 * seconds)


def picture(index: int, size: tuple[int, int] = (48, 32)) -> Image.Image:
    return Image.new("RGB", size, (8 * (index % 30) + 4, 8 * (index // 30) + 4, 0))


def shown(frame: np.ndarray) -> int:
    """The index that a picture shows, whatever its size."""
    red, green = frame[frame.shape[0] // 2, frame.shape[1] // 2, :2].tolist()
    return red // 8 + 30 * (green // 8)


def write_pictures(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        if isinstance(name := record.get("cam/image_array"), str) and name.endswith(".jpg"):
            picture(record["_index"]).save(folder / name, quality=95)


def write_tub(
    folder: Path,
    records: Sequence[dict[str, Any]],
    *,
    deleted: Iterable[int] = (),
    inputs: Sequence[str] = ("cam/image_array", "user/angle", "user/throttle", "user/mode"),
    catalog_records: int = 50,
) -> Path:
    """Write a tub of version 2, as donkeycar 5 lays it out; `deleted` are positions of lines."""
    write_pictures(folder / "images", records)
    paths = []
    for number, start in enumerate(range(0, len(records), catalog_records)):
        part = records[start : start + catalog_records]
        lines = [json.dumps(record, sort_keys=True) + "\n" for record in part]
        paths.append(f"catalog_{number}.catalog")
        (folder / paths[-1]).write_text("".join(lines))
        facts = {"path": f"{paths[-1]}_manifest", "line_lengths": [len(line) for line in lines], "start_index": start}
        (folder / f"{paths[-1]}_manifest").write_text(json.dumps(facts) + "\n")
    last = {"paths": paths, "current_index": len(records), "max_len": catalog_records, "deleted_indexes": [*deleted]}
    types = ["image_array", *["float"] * (len(inputs) - 2), "str"]
    rows = [list(inputs), types, {}, {"created_at": 1.7e9}, last]
    (folder / "manifest.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_old_tub(folder: Path, records: Sequence[dict[str, Any]], *, excluded: Sequence[int] = ()) -> Path:
    """Write a tub of version 1, as donkeycar 3 lays it out: record_N.json and pictures, N from 1."""
    pictures = [{**record, "cam/image_array": f"{record['_index'] + 1}_cam-image_array_.jpg"} for record in records]
    write_pictures(folder, pictures)
    for record in pictures:
        number = record["_index"] + 1
        kept = {key: value for key, value in record.items() if not key.startswith("_")}
        if "_timestamp_ms" in record:
            kept["milliseconds"] = record["_timestamp_ms"] - START
        (folder / f"record_{number}.json").write_text(json.dumps(kept))
    (folder / "meta.json").write_text(json.dumps({"inputs": [], "types": [], "start": START / 1000}))
    if excluded:
        (folder / "exclude.json").write_text(json.dumps(list(excluded)))
    return folder
