"""The kinds of sources by the names that the configuration uses."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from terra.actions import parse_space, require_table
from terra.dataset.importing.bags import Bags, BagSource
from terra.dataset.importing.donkeycar import DonkeycarSource
from terra.dataset.importing.gpx import GpxSource
from terra.dataset.importing.kitti import KittiSource
from terra.dataset.importing.lerobot import LeRobotActions, LeRobotColumns, LeRobotSource
from terra.dataset.importing.nuscenes import NuScenesSource
from terra.dataset.importing.source import DriveSource
from terra.dataset.importing.video_actions import VideoActionsSource
from terra.dataset.importing.video_poses import VideoPosesSource
from terra.errors import ConfigError, DatasetError
from tokenizer.settings import Settings

_EXAMPLES = (
    "'{kind:keys,names:[forward,left,right]}' or "
    "'{kind:vector,names:[steering,throttle],units:[rad,\"\"],low:[-1,0],high:[1,1]}'"
)
KINDS = ("video_poses", "video_actions", "lerobot", "kitti", "nuscenes", "donkeycar", "gpx", "mcap")


class Gps(Settings):
    """The clock and the noise of GPS tracks: `offset_seconds` from the first fix to the video's first frame."""

    offset_seconds: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0
    sigma_meters: Annotated[float, Field(ge=0.01, le=50)] = 2.0


def open_source(
    kind: str,
    folder: Path,
    *,
    lerobot: dict[str, Any] | None = None,
    action_space: dict[str, Any] | None = None,
    picture_fps: float | None = None,
    sections: int = 1,
    gps: Gps | None = None,
    bags: Bags | None = None,
    views: tuple[str, ...] | None = None,
) -> DriveSource:
    """Open the source of a kind in a folder.

    Args:
        kind: one of `KINDS`.
        folder: its folder.
        lerobot: the columns of a LeRobot dataset, see `LeRobotColumns`; with `action` those of `LeRobotActions`.
        action_space: what the actions of video_actions, LeRobot datasets and bags mean, see `terra.actions.space`.
        picture_fps: pictures a second, where files don't tell: of folders of pictures, and of donkeycar.
        sections: into how many drives each session of a donkeycar tub is cut.
        gps: the clock and the noise of a GPS track, see `GpxSource`.
        bags: topics, fields and clock of bags.
        views: the names of several cameras of video_actions, the main one first.

    Raises:
        ConfigError: an unknown kind, or a setting that the kind needs or doesn't have.
        DatasetError: no such folder.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if not folder.is_dir():
        raise DatasetError(
            f"{folder}: expected a folder with recordings, got {'a file' if folder.exists() else 'nothing'}"
        )
    has_actions = kind == "lerobot" and lerobot is not None and "action" in lerobot
    used = {
        "video_actions": {"action_space", "picture_fps", "views"},
        "donkeycar": {"picture_fps", "sections"},
        "gpx": {"picture_fps", "gps"},
        "mcap": {"action_space", "bags"},
    }.get(kind, set())
    used = {"action_space"} if has_actions else used
    given: dict[str, Any] = {
        "action_space": action_space,
        "picture_fps": picture_fps,
        "sections": None if sections == 1 else sections,
    }
    given |= {"gps": None if gps in (None, Gps()) else gps, "bags": None if bags in (None, Bags()) else bags}
    given["views"] = None if views is None else list(views)
    for name, value in given.items():
        if value is not None and name not in used:
            raise ConfigError(f"{name}: expected none with kind={kind}, got {value}")
    space = None
    if action_space is not None:
        space = require_table(parse_space(action_space, "action_space", ConfigError), f"kind={kind}")
    if kind == "lerobot":
        columns = LeRobotActions.from_dict(lerobot or {}) if has_actions else LeRobotColumns.from_dict(lerobot)
        return LeRobotSource(folder, columns, space)
    if kind == "mcap":
        return BagSource.open(folder, bags or Bags(), space)
    if kind == "gpx":
        gps = gps or Gps()
        return GpxSource(folder, picture_fps, gps.offset_seconds, gps.sigma_meters)
    if kind == "donkeycar":
        return DonkeycarSource(folder, picture_fps, sections)
    if kind == "video_actions":
        if space is None:
            raise ConfigError(f"action_space: expected what the columns of actions mean, such as {_EXAMPLES}, got null")
        return VideoActionsSource(folder, space, picture_fps, views or ())
    sources = {"video_poses": VideoPosesSource, "kitti": KittiSource, "nuscenes": NuScenesSource}
    return sources[kind](folder)
