"""Import of recordings from other formats: each source opens its drives, and `run` writes them in Terra's format.

{VideoPoses, VideoActions, Bag, Gpx, Donkeycar, Kitti, LeRobot, NuScenes}Source --open_drive--> SourceDrive
                                                                      --align, fit_picture--> ShardWriter
"""

from terra.dataset.importing.bags import Bags, BagSource
from terra.dataset.importing.donkeycar import DonkeycarSource
from terra.dataset.importing.gpx import GpxSource
from terra.dataset.importing.kitti import KittiSource
from terra.dataset.importing.lerobot import LeRobotActions, LeRobotColumns, LeRobotSource
from terra.dataset.importing.nuscenes import NuScenesSource
from terra.dataset.importing.run import ImportSettings, Mount, import_drives
from terra.dataset.importing.source import DriveSource, SourceDrive
from terra.dataset.importing.video_actions import VideoActionsSource
from terra.dataset.importing.video_poses import VideoPosesSource

__all__ = [
    "BagSource",
    "Bags",
    "DonkeycarSource",
    "DriveSource",
    "GpxSource",
    "ImportSettings",
    "KittiSource",
    "LeRobotActions",
    "LeRobotColumns",
    "LeRobotSource",
    "Mount",
    "NuScenesSource",
    "SourceDrive",
    "VideoActionsSource",
    "VideoPosesSource",
    "import_drives",
]
