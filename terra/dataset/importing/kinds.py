"""The kinds of sources by the names that the configuration uses."""

from pathlib import Path

from terra.actions import parse_space, require_table
from terra.dataset.importing.bags import BagSource
from terra.dataset.importing.donkeycar import DonkeycarSource
from terra.dataset.importing.gpx import GpxSource
from terra.dataset.importing.kitti import KittiSource
from terra.dataset.importing.lerobot import LeRobotActions, LeRobotColumns, LeRobotSource
from terra.dataset.importing.nuscenes import NuScenesSource
from terra.dataset.importing.settings import UNSET, SourceSettings
from terra.dataset.importing.source import DriveSource
from terra.dataset.importing.video_actions import VideoActionsSource
from terra.dataset.importing.video_poses import VideoPosesSource
from terra.errors import ConfigError, DatasetError

_EXAMPLES = (
    "'{kind:keys,names:[forward,left,right]}' or "
    "'{kind:vector,names:[steering,throttle],units:[rad,\"\"],low:[-1,0],high:[1,1]}'"
)
KINDS = ("video_poses", "video_actions", "lerobot", "kitti", "nuscenes", "donkeycar", "gpx", "mcap")


def open_source(kind: str, folder: Path, settings: SourceSettings = UNSET) -> DriveSource:
    """Open the source of a kind in a folder.

    Args:
        kind: one of `KINDS`.
        folder: its folder.
        settings: what the source's own files do not tell.

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
    has_actions = kind == "lerobot" and settings.lerobot is not None and "action" in settings.lerobot
    used = {
        "video_actions": {"action_space", "picture_fps", "views"},
        "donkeycar": {"picture_fps", "sections"},
        "gpx": {"picture_fps", "gps"},
        "mcap": {"action_space", "bags"},
    }.get(kind, set())
    used = {"action_space"} if has_actions else used
    for name in ("action_space", "picture_fps", "sections", "gps", "bags", "views"):
        value = getattr(settings, name)
        if value != getattr(UNSET, name) and name not in used:
            given = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}: expected none with kind={kind}, got {given}")
    space = None
    if settings.action_space is not None:
        space = require_table(parse_space(settings.action_space, "action_space", ConfigError), f"kind={kind}")
    if kind == "lerobot":
        columns = settings.lerobot
        named = LeRobotActions.from_dict(columns or {}) if has_actions else LeRobotColumns.from_dict(columns)
        return LeRobotSource(folder, named, space)
    if kind == "mcap":
        return BagSource.open(folder, settings.bags, space)
    if kind == "gpx":
        return GpxSource(folder, settings.picture_fps, settings.gps.offset_seconds, settings.gps.sigma_meters)
    if kind == "donkeycar":
        return DonkeycarSource(folder, settings.picture_fps, settings.sections)
    if kind == "video_actions":
        if space is None:
            raise ConfigError(f"action_space: expected what the columns of actions mean, such as {_EXAMPLES}, got null")
        return VideoActionsSource(folder, space, settings.picture_fps, settings.views or ())
    sources = {"video_poses": VideoPosesSource, "kitti": KittiSource, "nuscenes": NuScenesSource}
    return sources[kind](folder)
