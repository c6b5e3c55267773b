"""The dataset's format on disk: driving (terra-driving, version 2), or any other world (terra-world, version 1).

    DIR/dataset.json                        the facts that all episodes share
    DIR/README.md, contact_sheet.png, paths.png    the dataset in numbers and in pictures
    DIR/<split>/<source>_<place>/           a SHARD: one town, one imported drive
        shard.json                          the facts of the shard's episodes, and the SHA-256 of its files
        <episode id>.mp4                    the frames, H.264 (crf 16)
        poses.parquet                       driving: the motion in all the shard's episodes
        actions.parquet                     other worlds: the actions in all the shard's episodes
        state.parquet                       if the source tells it: its state, for evaluation (reward, observation)
        camera.json                         the camera of all the shard's frames
        <group>/frame_0000.png ...          if several futures share a start: the shared frames, lossless,
        <episode id>.json                   and each future's poses as `terra.trajectory` reads them

A shard is written under a hidden name (a dot first) and renamed when it is complete. No place is in both splits (train,
held_out). A shard of futures that share starts is named <source>_<place>_futures. Names are made of letters, digits,
dots, underscores and hyphens.

dataset.json: {"format": "terra-driving", "version": 2, "fps", "image_size": [height, width], "frame": "world", "axes":
"x_y_z_up_heading_ccw_pitch_up", "units": {"position": "m", "angle": "rad", "time": "s", "speed": "m/s"}, "sources":
[...], "notices": {source: the license terms of its frames}}. All episodes have this frame rate and size. Where several
cameras share the picture also "views": see `terra.views`; then each shard.json has the same key.

poses.parquet: columns episode (text), frame (int32), time_s, x_m, y_m, z_m, heading_rad, pitch_rad, speed_m_s
(float64). Row k of an episode is the pose of the vehicle when frame k was taken: x, y, z in one frame fixed to the
place, heading counter-clockwise from +x and never wrapped, pitch up positive. Rows are 1 / fps s apart: one per frame,
and then those of 3 s more (30 at 10 frames per second), so that the future path of every frame is known.

Other worlds have {"format": "terra-world", "version": 1, "action_space": see `terra.actions.space`} instead, without
"frame", "axes" and "units".

actions.parquet: columns episode (text), frame (int32), and one (float64) for each column of the action space. Row k of
an episode is the action at frame k, which leads to frame k + 1; that of the last frame leads nowhere.

state.parquet: columns episode (text), frame (int32), and one (float64) for each number that the source tells: of a
Gymnasium environment reward and terminated (1 or 0) of the step that led to the frame (0 at frame 0), and observation_0
and on, where the observation has 1 to 64 numbers. A model is not trained on them.

camera.json: {"frame": "vehicle", "axes": "x_forward_y_left_z_up", "units": {"length": "m", "angle": "rad", "image":
"px", "fov": "deg"}, "fps", "image_size", "mount": the fields of `decoder.camera.Camera` or null, "intrinsics":
{"fx", "fy", "cx", "cy"} of the stored frames or null}. Null stands for a value that the source does not give.

shard.json: {"format": "terra-driving-shard", "version": 2 (or "terra-world-shard", 1), "split", "source", "place",
"fps", "image_size", "recipe": the settings that made the shard, "sha256": {file: its hash, for all files but the
videos}, "episodes": [{"id", "weather", "num_frames", "events": [[frame, event], ...], "group", "maneuver",
"num_context", "sha256" of the video}, ...]}.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from terra.actions import ActionSpace, Waypoints, read_space
from terra.dataset.checks import ImageSize
from terra.errors import DatasetError
from terra.views import Views
from tokenizer.files import read_json
from tokenizer.settings import Settings, checked

DRIVING_FORMAT, WORLD_FORMAT = ("terra-driving", 2), ("terra-world", 1)
SPLITS = ("train", "held_out")
DATASET_FILE, SHARD_FILE, POSES_FILE, CAMERA_FILE = "dataset.json", "shard.json", "poses.parquet", "camera.json"
ACTIONS_FILE, STATE_FILE = "actions.parquet", "state.parquet"
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
    """Number of poses that an episode has after its last frame: those of 3 s."""
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
    """The folders of a split's shards, sorted by name; their content is not checked."""
    found = sorted(path for path in (folder / split).glob("*") if path.is_dir())
    return [path for path in found if not path.name.startswith(".")]


def read_dataset(folder: Path) -> dict[str, Any]:
    """The content of dataset.json, checked; DatasetError if it is missing, or of another format or version."""
    path = folder / DATASET_FILE
    facts = read_json(path, DatasetError, "a dataset of video with actions")
    got = (facts.get("format"), facts.get("version"))
    if got != format_of(dataset_space(facts, path)):
        formats = " or ".join(f"{name} version {version}" for name, version in (DRIVING_FORMAT, WORLD_FORMAT))
        raise DatasetError(f"{path}: expected {formats}, got {got[0]} {got[1]}")
    facts.setdefault("notices", {})  # not every source has terms to tell of
    checked(_Facts, facts, str(path), DatasetError)
    views = dataset_views(facts, path)
    if views is not None and list(views.image_size) != list(facts["image_size"]):
        expected, got = facts["image_size"], list(views.image_size)
        raise DatasetError(f"{path}: views.image_size: expected {expected}, as the frames, got {got}")
    return facts


def dataset_space(facts: Mapping[str, Any], path: Path) -> ActionSpace:
    """The action space of a dataset.json's content; `path` names it in errors. Raises DatasetError."""
    return read_space(facts, str(path), DatasetError)


def dataset_views(facts: Mapping[str, Any], path: Path) -> Views | None:
    """The cameras in the picture of a dataset.json's content; None for one. Raises DatasetError."""
    return Views.read(facts, str(path), DatasetError)


def format_of(space: ActionSpace) -> tuple[str, int]:
    """Name and version of the format that a dataset of an action space has."""
    return DRIVING_FORMAT if isinstance(space, Waypoints) else WORLD_FORMAT


def shard_format_of(space: ActionSpace) -> tuple[str, int]:
    """Name and version of the format of its shards."""
    name, version = format_of(space)
    return f"{name}-shard", version


class _Facts(Settings):
    model_config = ConfigDict(extra="ignore")

    fps: FramesASecond
    image_size: ImageSize
    sources: list[Any]
    notices: dict[str, Any]
