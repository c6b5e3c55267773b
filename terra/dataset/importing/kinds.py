"""The kinds of sources by the names that the configuration uses."""

from pathlib import Path
from typing import Any

from terra.dataset.importing.kitti import KittiSource
from terra.dataset.importing.lerobot import LeRobotColumns, LeRobotSource
from terra.dataset.importing.nuscenes import NuScenesSource
from terra.dataset.importing.source import DriveSource
from terra.dataset.importing.video_poses import VideoPosesSource
from terra.errors import ConfigError, DatasetError

KINDS = ("video_poses", "lerobot", "kitti", "nuscenes")


def open_source(kind: str, folder: Path, lerobot: dict[str, Any] | None = None) -> DriveSource:
    """Open the source of a kind in a folder; `lerobot` declares the columns of a LeRobot dataset (`LeRobotColumns`).

    Raises:
        ConfigError: an unknown kind, or columns that are not declared in full.
        DatasetError: no such folder.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if not folder.is_dir():
        raise DatasetError(
            f"{folder}: expected a folder with driving, got {'a file' if folder.exists() else 'nothing'}"
        )
    if kind == "lerobot":
        return LeRobotSource(folder, LeRobotColumns.from_dict(lerobot))
    sources = {"video_poses": VideoPosesSource, "kitti": KittiSource, "nuscenes": NuScenesSource}
    return sources[kind](folder)
