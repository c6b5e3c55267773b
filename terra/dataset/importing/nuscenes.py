"""Import of nuScenes (nuscenes.org): the front camera's frames and the car's poses, scene by scene, from its tables."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from terra.dataset.format import check_name
from terra.dataset.importing.nuscenes_tables import Row, Table, read_table
from terra.dataset.importing.source import Intrinsics, PoseFiles, SourceDrive, motion, picture_footage
from terra.errors import DatasetError

CHANNEL = "CAM_FRONT"


@dataclass(frozen=True)
class NuScenesSource(PoseFiles):
    """ROOT/v1.0-*/ with the tables beside ROOT/samples and ROOT/sweeps; drives are scenes, recordings are logs.

    `folder` is ROOT, or the tables' folder if ROOT has several. Frames are key frames and sweeps, about 12 per second.
    A frame's pose is that of the ego frame (x forward, y left, z up, origin between the rear wheels) in the map at the
    time of the frame. The camera sits 1.70 m ahead of the ego frame's origin and 1.51 m above the ground.
    """

    folder: Path

    @property
    def recordings(self) -> dict[str, tuple[str, ...]]:
        """The scenes of each log."""
        logs: dict[str, tuple[str, ...]] = {}
        for name, scene in _read_scenes(_table_folder(self.folder)).items():
            logs[scene.log] = (*logs.get(scene.log, ()), name)
        return logs

    def list_drives(self) -> tuple[str, ...]:
        """The names of the scenes, such as scene-0061."""
        return tuple(_read_scenes(_table_folder(self.folder)))

    def open_drive(self, name: str) -> SourceDrive:
        """Open one scene; the header and the end of each picture are looked at, and bad ones are left out."""
        folder = _table_folder(self.folder)
        frames, ego_poses, calibrations = _read_frames(folder)
        origin = f"{folder / 'sample_data.json'}: {name}"
        every = sorted(frames[_read_scenes(folder)[name].token], key=lambda row: row["timestamp"])
        rows = list({row["timestamp"]: row for row in every}.values())
        if not rows:
            raise DatasetError(f"{origin}: expected the pictures of {CHANNEL}, got no row of it")
        # Times count from the first frame, because microseconds since 1970 need most of a float64's digits.
        times = np.array([row["timestamp"] - rows[0]["timestamp"] for row in rows]) / 1e6
        poses = [ego_poses[row["ego_pose_token"]] for row in rows]
        ahead = _forward(np.array([pose["rotation"] for pose in poses], np.float64))
        # A frame that is left out is a gap of the times: the car and its clock went on.
        footage = picture_footage([folder.parent / row["filename"] for row in rows], times)
        left_out = Counter(footage.left_out)
        left_out["frames at the time of the one before"] = len(every) - len(rows)

        return SourceDrive(
            name=name,
            track=motion(
                times,
                np.array([pose["translation"] for pose in poses], np.float64),
                np.arctan2(ahead[:, 1], ahead[:, 0]),
                np.arcsin(np.clip(ahead[:, 2], -1.0, 1.0)),
            ),
            frame_times=footage.times,
            frames=footage.frames,
            intrinsics=_intrinsics(calibrations[rows[0]["calibrated_sensor_token"]], calibrations.path),
            origin=origin,
            left_out=+left_out,
        )


@dataclass(frozen=True)
class _Scene:
    token: str
    log: str


def _table_folder(folder: Path) -> Path:
    """The folder with the tables: `folder` itself, or its only subfolder v1.0-*."""
    if (folder / "scene.json").is_file():
        return folder
    found = sorted(path.parent for path in folder.glob("v*/scene.json"))
    if len(found) != 1:
        got = f"{len(found)}: name one ({', '.join(path.name for path in found)})" if found else "none"
        raise DatasetError(f"{folder}: expected nuScenes with one folder of tables (v1.0-.../scene.json), got {got}")
    return found[0]


@lru_cache(maxsize=2)
def _read_scenes(folder: Path) -> dict[str, _Scene]:
    """The scenes by name, in order."""
    scenes, logs = read_table(folder, "scene"), read_table(folder, "log")
    by_name: dict[str, _Scene] = {}
    for row in sorted(scenes.rows.values(), key=lambda row: row["name"]):
        name = check_name(row["name"], f"{scenes.path}: name")
        if name in by_name:
            raise DatasetError(f"{scenes.path}: expected scenes of different names, got {name} again")
        by_name[name] = _Scene(row["token"], logs[row["log_token"]]["logfile"])
    if not by_name:
        raise DatasetError(f"{scenes.path}: expected scenes, got an empty table")
    return by_name


@lru_cache(maxsize=2)
def _read_frames(folder: Path) -> tuple[dict[str, list[Row]], Table, Table]:
    """Read the front camera's rows of sample_data by scene token, and the tables of ego poses and calibrations."""
    sensors, samples = read_table(folder, "sensor"), read_table(folder, "sample")
    calibrations = read_table(
        folder, "calibrated_sensor", lambda row: sensors[row["sensor_token"]]["channel"] == CHANNEL
    )
    data = read_table(folder, "sample_data", lambda row: row["calibrated_sensor_token"] in calibrations.rows)
    wanted = {row["ego_pose_token"] for row in data.rows.values()}
    frames = defaultdict(list)
    for row in data.rows.values():
        frames[samples[row["sample_token"]]["scene_token"]].append(row)
    return frames, read_table(folder, "ego_pose", lambda row: row["token"] in wanted), calibrations


def _forward(rotations: Float[np.ndarray, "poses 4"]) -> Float[np.ndarray, "poses 3"]:
    """The direction of the x axis after rotation by unit quaternions [w, x, y, z]."""
    w, x, y, z = (rotations / np.linalg.norm(rotations, axis=1, keepdims=True)).T
    return np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=1)


def _intrinsics(calibration: Row, path: Path) -> Intrinsics:
    matrix = calibration["camera_intrinsic"]
    if not matrix or not matrix[0][0] > 0 or not math.isclose(matrix[0][0], matrix[1][1], rel_tol=0.01):
        where = f"{path}: {calibration['token']}: camera_intrinsic"
        raise DatasetError(f"{where}: expected a camera with square pixels, got {matrix}")
    return Intrinsics(matrix[0][0], matrix[0][2], matrix[1][2])
