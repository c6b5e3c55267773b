"""Recorded driving on disk.

    DIR/dataset.json                what all episodes share, and how many are complete
    DIR/episodes/<id>/video.mp4     H.264 (crf 16), the frames
    DIR/episodes/<id>/poses.npz     float64 time (s), x, y (m), heading (rad), speed (m/s), one row each 1 / fps s:
                                    one a frame, and those of 3 s more, so that every frame has its future path
    DIR/episodes/<id>/episode.json  the episode's facts and the SHA-256 of the two files; written last

dataset.json holds {"format": "terra-driving", "version": 1, "fps", "image_size": [height, width], "camera", "frame":
"world", "axes": "x_y_heading_ccw", "units", "episodes", "seed"}. Pose k is that of the camera when frame k was taken:
x and y in a fixed frame of the town, heading counter-clockwise from +x and never wrapped.

An id is <split>_<town seed, 6 digits>_<number, 2 digits>, and for the futures of one start <id>_<maneuver>. Splits
differ in their towns: train has the seeds from 0 on, held_out those from 900000 on. The folder of one of several
futures also has context/frame_0000.png ... (its first frames, lossless, equal in all futures of the start) and
trajectory.json (its poses, as `terra.trajectory` reads them).
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decoder.camera import Camera
from terra.errors import DatasetError, OutputError
from terra.recording.drives import FPS, NUM_FUTURE_POSES, Poses

FORMAT, VERSION = "terra-driving", 1
SPLIT_SEEDS = {"train": 0, "held_out": 900_000}
POSE_FIELDS = ("time", "x", "y", "heading", "speed")
UNITS = {"position": "m", "angle": "rad", "time": "s", "speed": "m/s"}
_FACTS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "split": str,
    "town_seed": int,
    "weather": str,
    "num_frames": int,
    "fps": (int, float),
    "image_size": list,
    "events": list,
    "sha256": dict,
}


@dataclass(frozen=True, eq=False)
class Episode:
    """One recorded drive, checked: its files are whole and fit each other.

    `image_size` is (height, width) in pixels, `poses` has `num_frames` + 30 rows, `events` are (frame, what) in order:
    left, straight, right (into a junction), stop, hard_brake, swerve_left/right, lane_change_left/right. `group` and
    `maneuver` are set for one of several futures of a start, whose first `num_context` frames are equal.
    """

    id: str
    split: str
    town_seed: int
    weather: str
    num_frames: int
    fps: float
    image_size: tuple[int, int]
    events: tuple[tuple[int, str], ...]
    poses: Poses
    video: Path
    group: str | None
    maneuver: str | None
    num_context: int


def list_episodes(folder: Path | str, split: str | None = None) -> list[Path]:
    """Folders of the complete episodes (of a split) in the order of their names.

    Raises:
        DatasetError: no dataset there, of another version, or without such an episode.
    """
    folder = Path(folder)
    read_dataset(folder)
    complete = sorted(path.parent for path in (folder / "episodes").glob("*/episode.json"))
    wanted = [path for path in complete if split is None or path.name.startswith(f"{split}_")]
    if not wanted:
        have = [name for name in SPLIT_SEEDS if any(path.name.startswith(f"{name}_") for path in complete)]
        raise DatasetError(f"{folder}: expected an episode of split {split or 'any'}, got {have or 'no episode'}")
    return wanted


def load_episode(folder: Path | str) -> Episode:
    """Read and check one episode; the video's bytes are checked, but not decoded.

    Raises:
        DatasetError: a file is missing or damaged, or the files don't fit each other.
    """
    folder = Path(folder)
    facts = _read_json(folder / "episode.json")
    for name, kind in _FACTS.items():
        if not isinstance(facts.get(name), kind):
            raise DatasetError(f"{folder / 'episode.json'}: {name}: expected {kind}, got {facts.get(name)!r}")
    for name in ("video.mp4", "poses.npz"):
        actual, expected = file_sha256(folder / name), facts["sha256"].get(name)
        if actual != expected:
            raise DatasetError(f"{folder / name}: expected the file with SHA-256 {expected}, got {actual}: damaged")
    return Episode(
        **{name: facts[name] for name in ("id", "split", "town_seed", "weather", "num_frames")},
        fps=float(facts["fps"]),
        image_size=(int(facts["image_size"][0]), int(facts["image_size"][1])),
        events=tuple((int(frame), str(what)) for frame, what in facts["events"]),
        poses=_read_poses(folder / "poses.npz", facts["num_frames"] + NUM_FUTURE_POSES),
        video=folder / "video.mp4",
        group=facts.get("group"),
        maneuver=facts.get("maneuver"),
        num_context=int(facts.get("num_context", 0)),
    )


def is_complete(folder: Path) -> bool:
    """Whether an episode has been recorded to its end."""
    return (folder / "episode.json").is_file()


def create_dataset(folder: Path, image_size: tuple[int, int], camera: Camera, seed: int) -> None:
    """Write dataset.json, or check that the one that is there describes the same kind of frames.

    Raises:
        DatasetError: the dataset there has other frames.
        OutputError: the folder can't be written.
    """
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "fps": FPS,
        "image_size": list(image_size),
        "camera": camera.to_dict(),
        "frame": "world",
        "axes": "x_y_heading_ccw",
        "units": UNITS,
        "episodes": 0,
        "seed": seed,
    }
    if (folder / "dataset.json").exists():
        present = read_dataset(folder)
        for name in set(facts) - {"episodes", "seed"}:
            if present.get(name) != facts[name]:
                expected = f"{name} {present.get(name)} as in the episodes there"
                raise DatasetError(f"{folder / 'dataset.json'}: expected {expected}, got {facts[name]}")
        return
    try:
        (folder / "episodes").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: expected a folder that can be written: {error.strerror}") from error
    write_json(folder / "dataset.json", facts)


def count_episodes(folder: Path) -> int:
    """Count the complete episodes and note the number in dataset.json."""
    facts = read_dataset(folder)
    facts["episodes"] = sum(1 for _ in (folder / "episodes").glob("*/episode.json"))
    write_json(folder / "dataset.json", facts)
    return facts["episodes"]


def read_dataset(folder: Path) -> dict[str, Any]:
    """dataset.json, if it is of this format and version; else DatasetError."""
    facts = _read_json(folder / "dataset.json")
    got = (facts.get("format"), facts.get("version"))
    if got != (FORMAT, VERSION):
        raise DatasetError(f"{folder / 'dataset.json'}: expected {FORMAT} version {VERSION}, got {got[0]} {got[1]}")
    return facts


def write_poses(path: Path, poses: Poses) -> None:
    """Write poses.npz, whole or not at all; OutputError if it can't be written."""
    with _replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **asdict(poses))


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; OutputError if it can't be written."""
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex; DatasetError if it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DatasetError(f"{path}: expected a file: {error.strerror}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that takes its place when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: expected a place that can be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(f"{path}: expected a file of recorded driving: {error.strerror}") from error
    except ValueError as error:
        raise DatasetError(f"{path}: expected JSON: {error}") from error
    if not isinstance(facts, dict):
        raise DatasetError(f"{path}: expected a JSON object, got {type(facts).__name__}")
    return facts


def _read_poses(path: Path, num_poses: int) -> Poses:
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in POSE_FIELDS}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path}: expected arrays {', '.join(POSE_FIELDS)}: {error}") from error
    for name, column in columns.items():
        if column.shape != (num_poses,) or column.dtype != np.float64 or not np.isfinite(column).all():
            got = f"{column.dtype} {column.shape}"
            raise DatasetError(f"{path}: {name}: expected {num_poses} finite float64 numbers, got {got}")
    return Poses(**columns)
