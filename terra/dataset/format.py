"""The dataset's format on disk, version 2.

    DIR/dataset.json                        what all episodes share
    DIR/README.md, contact_sheet.png, paths.png    what is in it, in numbers and in pictures
    DIR/<split>/<source>_<place>/           a SHARD: one town, one imported drive
        shard.json                          its episodes' facts, and the SHA-256 of its files
        <episode id>.mp4                    H.264 (crf 16), the frames
        poses.parquet                       the motion of all its episodes
        camera.json                         the camera of all its frames
        <group>/frame_0000.png ...          several futures of one start: the frames they share, lossless,
        <episode id>.json                   and each one's poses as `terra.trajectory` reads them

A shard is written under a hidden name (a dot first) and renamed: it is there complete or not at all. Splits (train,
held_out) differ in their places, so that no place is in both. The shard of several futures is named
<source>_<place>_futures. Names are made of letters, digits, dots, underscores and hyphens.

dataset.json: {"format": "terra-driving", "version": 2, "fps", "image_size": [height, width], "frame": "world", "axes":
"x_y_z_up_heading_ccw_pitch_up", "units": {"position": "m", "angle": "rad", "time": "s", "speed": "m/s"}, "sources":
[...], "notices": {source: the terms of its frames}}. The frame rate and the size are those of every episode.

poses.parquet: columns episode (text), frame (int32), time_s, x_m, y_m, z_m, heading_rad, pitch_rad, speed_m_s
(float64). Row k of an episode is the pose of the vehicle when frame k was taken: x, y, z in one frame fixed to the
place, heading counter-clockwise from +x and never wrapped, pitch up positive. Rows are 1 / fps s apart, one a frame and
those of 3 s more (30 at 10 frames a second), so that every frame knows its future path.

camera.json: {"frame": "vehicle", "axes": "x_forward_y_left_z_up", "units": {"length": "m", "angle": "rad", "image":
"px", "fov": "deg"}, "fps", "image_size", "mount": the fields of `decoder.camera.Camera` or null, "intrinsics":
{"fx", "fy", "cx", "cy"} of the stored frames or null}. Null is for what the source doesn't say.

shard.json: {"format": "terra-driving-shard", "version": 2, "split", "source", "place", "fps", "image_size", "recipe":
what was asked for, "sha256": {file: its hash, for all files but the videos}, "episodes": [{"id", "weather",
"num_frames", "events": [[frame, what], ...], "group", "maneuver", "num_context", "sha256" of the video}, ...]}.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from terra.dataset.checks import ImageSize
from terra.errors import DatasetError
from tokenizer.files import read_json
from tokenizer.settings import Settings, checked

FORMAT, SHARD_FORMAT, VERSION = "terra-driving", "terra-driving-shard", 2
SPLITS = ("train", "held_out")
DATASET_FILE, SHARD_FILE, POSES_FILE, CAMERA_FILE = "dataset.json", "shard.json", "poses.parquet", "camera.json"
FRAME, AXES = "world", "x_y_z_up_heading_ccw_pitch_up"
UNITS = {"position": "m", "angle": "rad", "time": "s", "speed": "m/s"}
CAMERA_FRAME, CAMERA_AXES = "vehicle", "x_forward_y_left_z_up"
CAMERA_UNITS = {"length": "m", "angle": "rad", "image": "px", "fov": "deg"}
FUTURE_SECONDS = 3.0
CRF = 16
MIN_FPS, MAX_FPS = 1.0, 100.0
UNKNOWN_WEATHER = "unknown"

FramesASecond = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def num_future_poses(fps: float) -> int:
    """Rows of poses that an episode has beyond its last frame: 3 s of them."""
    return math.ceil(FUTURE_SECONDS * fps - 1e-9)


def check_name(name: object, where: str) -> str:
    """Return `name` if it can name a file of a dataset; else DatasetError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DatasetError(f"{where}: expected a name of letters, digits, '.', '_' and '-', got {name!r}")
    return name


def shard_name(source: str, place: str, *, futures: bool = False) -> str:
    """The name of a shard's folder."""
    return f"{source}_{place}_futures" if futures else f"{source}_{place}"


def list_shards(folder: Path, split: str) -> list[Path]:
    """The shards of a split, by name; whether they are whole is not checked."""
    found = sorted(path for path in (folder / split).glob("*") if path.is_dir())
    return [path for path in found if not path.name.startswith(".")]


def read_dataset(folder: Path) -> dict[str, Any]:
    """The content of dataset.json, checked; DatasetError if it is missing, or of another format or version."""
    path = folder / DATASET_FILE
    facts = read_json(path, DatasetError, "a dataset of driving")
    got = (facts.get("format"), facts.get("version"))
    if got != (FORMAT, VERSION):
        raise DatasetError(f"{path}: expected {FORMAT} version {VERSION}, got {got[0]} {got[1]}")
    facts.setdefault("notices", {})  # not every source has terms to tell of
    checked(_Facts, facts, str(path), DatasetError)
    return facts


class _Facts(Settings):
    model_config = ConfigDict(extra="ignore")

    fps: FramesASecond
    image_size: ImageSize
    sources: list[Any]
    notices: dict[str, Any]
