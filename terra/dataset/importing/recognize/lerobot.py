"""Recognition of LeRobot datasets by meta/info.json: version, cameras, features of actions, splits."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from terra.dataset.importing.lerobot import LeRobotActions, LeRobotSource, entry_names
from terra.dataset.importing.lerobot_files import CAMERAS, camera_fault, picture_shape, read_info
from terra.dataset.importing.recognize.columns import vector_of
from terra.dataset.importing.recognize.found import Camera, Found, Listing, counted, some
from terra.errors import DatasetError, TerraError
from tokenizer.files import read_json

_NUMBERS = ("float", "int", "uint", "bool")
_MOST_FILES = 50  # of which ranges are read where the dataset has no statistics
_ACTION = re.compile(r"actions?([._].*)?")
_AXES = {
    "x": re.compile(r"(pos(ition)?_?)?x(_m)?|pos(ition)?\.x", re.IGNORECASE),
    "y": re.compile(r"(pos(ition)?_?)?y(_m)?|pos(ition)?\.y", re.IGNORECASE),
    "heading": re.compile(r"yaw|heading|theta", re.IGNORECASE),
}
L2D = {
    "video": "observation.images.front_left",
    "x": None,
    "y": None,
    "position_unit": "m",
    "heading": "observation.state.vehicle[1]",
    "heading_unit": "deg",
    "heading_from": "north_cw",
    "speed": "observation.state.vehicle[0]",
    "speed_unit": "km/h",
}
"""The columns of conf/lerobot/l2d.yaml."""


def recognize(listing: Listing) -> Found | None:
    """A LeRobot dataset of version 2 or 3. Raises DatasetError for another version, or damaged metadata."""
    if (listing.folder / "meta_data" / "info.json").is_file():
        raise DatasetError(f"{listing.folder}: {_convert('1')}")
    path = listing.folder / "meta" / "info.json"
    if not path.is_file():
        return None
    stated = read_json(path, DatasetError, "the metadata of a LeRobot dataset")
    version = stated.get("codebase_version")
    if version is None and "features" not in stated:
        return None
    if not isinstance(version, str) or not version.startswith(("v2.", "v3.")):
        raise DatasetError(f"{path}: {_convert(str(version).removeprefix('v'))}")
    info = read_info(listing.folder)
    if not isinstance(info.get("splits"), dict | None):
        raise DatasetError(f"{path}: splits: expected an object, got {str(info['splits'])[:80]}")
    features = info["features"]
    videos = {name: each for name, each in features.items() if each.get("dtype") in CAMERAS}
    shown = [name for name, each in videos.items() if camera_fault(each) is None]
    if not shown:
        raise DatasetError(f"{path}: expected a feature with pictures (dtype video or image), got {some(features)}")
    taken = shown[0]
    settings, arguments, comments = _columns(listing.folder, features, taken)
    if len(shown) > 1:
        others = [name for name in shown if name != settings["lerobot"]["video"]]
        several = f"up to four in one picture: lerobot.video=[{taken},{others[0]}]"
        comments = (f"other cameras: lerobot.video={' | '.join(others)}; {several}", *comments)
    rate = f"{info['fps']:g} frames a second"
    return Found(
        kind="lerobot",
        title=f"LeRobot dataset, version {version.removeprefix('v')}",
        folder=listing.folder,
        settings=settings,
        arguments=arguments,
        cameras=tuple(
            Camera(name, _size(each), _camera_note(each, rate), name == settings["lerobot"]["video"])
            for name, each in videos.items()
        ),
        facts=_facts(info),
        comments=comments,
        held_out=tuple(name for name in info.get("splits") or () if name != "train"),
        driving="action" not in settings["lerobot"],
    )


def _convert(version: str) -> str:
    return f"expected LeRobot 2.x or 3.x, got version {version[:20]}: convert it with LeRobot's own scripts first"


def _columns(
    folder: Path, features: dict[str, dict[str, Any]], video: str
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """The columns to propose: (settings, arguments, comments)."""
    if "observation.state.vehicle" in features and L2D["video"] in features:
        return {"lerobot": L2D}, {"lerobot": "l2d"}, ("any actions instead: lerobot=actions",)
    numbers = [name for name, each in features.items() if str(each.get("dtype", "")).startswith(_NUMBERS)]
    actions = list(filter(_ACTION.fullmatch, numbers))
    state = _state(features)
    if not actions and state is not None:
        columns = {**L2D, **state, "video": video, "heading_unit": "rad", "heading_from": "x_ccw", "speed": None}
        columns["speed_unit"] = "m/s"
        lines = ("LeRobot declares no units: m, rad and counter-clockwise are assumed; lerobot.heading_unit=deg and",)
        lines += ("lerobot.heading_from=north_cw say otherwise. Doubts about axes, above, tell whether they agree.",)
        return {"lerobot": columns}, {"lerobot": "state", **_dotted({**state, "video": video})}, lines
    if not actions:
        other = [name for name in numbers if name.startswith("observation")]
        if not other:
            raise DatasetError(f"{folder / 'meta' / 'info.json'}: expected a feature of actions, got {some(features)}")
        actions = other
    actions.sort(key=lambda name: (name not in ("action", "actions"), len(name)))
    columns = {"video": video, "action": actions[0]}
    comments: list[str] = []
    if len(actions) > 1:
        comments.append(f"other actions: lerobot.action={' | '.join(actions[1:])}")
    if state is not None:
        comments.append("driving? lerobot=state takes the path instead; see conf/lerobot/state.yaml")
    settings: dict[str, Any] = {"lerobot": columns}
    if (space := _missing_space(folder, columns, features[actions[0]])) is not None:
        settings["action_space"] = space
        comments.append("the dataset has no statistics: the ranges are those that were read; fill in the units")
    return settings, {"lerobot": "actions", **_dotted(columns)}, tuple(comments)


def _dotted(columns: dict[str, Any]) -> dict[str, Any]:
    return {f"lerobot.{name}": value for name, value in columns.items()}


def _state(features: dict[str, dict[str, Any]]) -> dict[str, str] | None:
    """The columns of a state that has x, y and a heading by its names."""
    for feature, facts in features.items():
        if not feature.startswith("observation.state"):
            continue
        names = entry_names(facts.get("names"))
        found = {axis: [name for name in names if pattern.fullmatch(name)] for axis, pattern in _AXES.items()}
        if all(len(each) == 1 for each in found.values()):
            return {axis: f"{feature}[{each[0]}]" for axis, each in found.items()}
    return None


def _missing_space(folder: Path, columns: dict[str, str], facts: dict[str, Any]) -> dict[str, Any] | None:
    """A space as its numbers were read, where the dataset itself does not tell one; None where it does."""
    try:
        LeRobotSource(folder, LeRobotActions(**columns)).space  # noqa: B018 (raises)
    except TerraError:
        low: np.ndarray | None = None
        high: np.ndarray | None = None
        for path in sorted(folder.glob("data/*/*.parquet"))[:_MOST_FILES]:
            try:
                column = pq.read_table(path, columns=[columns["action"]], use_threads=False)[columns["action"]]
                values = np.array(column.to_pylist(), np.float64)
            except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
                continue
            values = values[:, None] if values.ndim == 1 else values
            if values.ndim != 2 or not len(values) or (low is not None and len(low) != values.shape[1]):
                continue
            low = values.min(axis=0) if low is None else np.minimum(low, values.min(axis=0))
            high = values.max(axis=0) if high is None else np.maximum(high, values.max(axis=0))
        if low is None or high is None or not np.isfinite([low, high]).all():
            return None
        return vector_of(entry_names(facts.get("names")), low, high)
    return None


def _camera_note(facts: dict[str, Any], rate: str) -> str:
    words = [rate, "pictures in the tables" if facts["dtype"] == "image" else "", camera_fault(facts)]
    return ", ".join(word for word in words if word)


def _size(facts: dict[str, Any]) -> tuple[int, int] | None:
    height, width, _ = picture_shape(facts)
    return (height, width) if type(height) is int and type(width) is int else None


def _facts(info: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    lines = []
    totals: list[Any] = [info.get(name) for name in ("total_episodes", "total_frames")]
    if all(type(total) is int for total in totals):
        words = [counted(total, word) for total, word in zip(totals, ("episode", "frame"), strict=True)]
        lines.append(("stated", ", ".join(words)))
    if isinstance(info.get("robot_type"), str):
        lines.append(("robot", info["robot_type"][:80]))
    if isinstance(splits := info.get("splits"), dict) and splits:
        lines.append(("splits", ", ".join(f"{name} {value}" for name, value in splits.items())[:120]))
    return tuple(lines)
