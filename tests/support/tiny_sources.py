"""Writes a tiny source of each kind that `terra import` reads, at 10 frames a second."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tiny_driving import drive_frames, drive_poses

from decoder.video import VideoWriter
from terra.trajectory import save_poses

SIZE = (48, 64)
FPS = 10.0


def write_video(path: Path, num_frames: int, fps: float = FPS, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with VideoWriter(path, fps, size=(size[1], size[0]), crf=30, preset="ultrafast") as writer:
        writer.extend(drive_frames(num_frames, size=size))


def write_pictures(folder: Path, num_frames: int, name: str = "{:03d}.jpg", size: tuple[int, int] = SIZE) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, frame in enumerate(drive_frames(num_frames, size=size)):
        Image.fromarray(frame).save(folder / name.format(index))


def write_video_poses(folder: Path, names: Sequence[str] = ("monday", "sunday"), fps: float = FPS) -> Path:
    """Videos of 6 s with poses."""
    for name in names:
        num_frames = round(6 * fps)
        write_video(folder / f"{name}.mp4", num_frames, fps)
        poses = drive_poses(num_frames, fps=fps)
        rows = slice(0, num_frames)
        places = np.column_stack([poses.x, poses.y])[rows]
        save_poses(folder / f"{name}.json", poses.time[rows], places, poses.heading[rows], fps)
    return folder


def write_gps(folder: Path, names: Sequence[str] = ("monday", "sunday"), *, as_csv: bool = False) -> Path:
    """Videos of 8 s with a fix each second, to the north at 6 m/s."""
    for name in names:
        write_video(folder / f"{name}.mp4", 80)
        fixes = [(second, 48 + second * 6 / 111_200, 11.0) for second in range(12)]
        if as_csv:
            lines = ["time,lat,lon", *(f"{time},{north:.7f},{east:.7f}" for time, north, east in fixes)]
            (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
            continue
        points = "".join(
            f'<trkpt lat="{north:.7f}" lon="{east:.7f}"><time>2026-05-01T12:00:{time:02d}Z</time></trkpt>'
            for time, north, east in fixes
        )
        (folder / f"{name}.gpx").write_text(f"<gpx><trk><trkseg>{points}</trkseg></trk></gpx>")
    return folder


def write_table(path: Path, columns: dict[str, Sequence[object]], fps: float = FPS) -> None:
    """Actions as CSV; a row for each frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(("time_s", *columns))]
    lines += [",".join((f"{index / fps:.4f}", *map(str, row))) for index, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")


def write_kitti(root: Path, names: Sequence[str] = ("00", "01"), num_frames: int = 60) -> Path:
    """Straight ahead at 6 m/s, in KITTI's axes, with an image_2 and an image_3."""
    (root / "poses").mkdir(parents=True)
    for name in names:
        for camera in ("image_2", "image_3"):
            write_pictures(root / "sequences" / name / camera, num_frames, "{:06d}.png")
        matrices = [f"1 0 0 0 0 1 0 0 0 0 1 {0.6 * index:.3f}" for index in range(num_frames)]
        (root / "poses" / f"{name}.txt").write_text("\n".join(matrices) + "\n")
        times = "\n".join(f"{index / FPS:.6e}" for index in range(num_frames))
        (root / "sequences" / name / "times.txt").write_text(times + "\n")
    return root


def write_nuscenes(root: Path, version: str = "v1.0-mini", num_frames: int = 60) -> Path:
    """Two scenes of two logs at 10 frames a second, straight ahead, with CAM_FRONT and CAM_BACK."""
    tables: dict[str, list[dict[str, object]]] = {
        name: [] for name in ("scene", "log", "sample", "sensor", "calibrated_sensor", "sample_data", "ego_pose")
    }
    for channel in ("CAM_BACK", "CAM_FRONT", "LIDAR_TOP"):
        tables["sensor"].append({"token": f"s-{channel}", "channel": channel})
        matrix = [[50.0, 0, 32.0], [0, 50.0, 24.0], [0, 0, 1]] if channel.startswith("CAM") else []
        sensor = {"token": f"c-{channel}", "sensor_token": f"s-{channel}", "camera_intrinsic": matrix}
        tables["calibrated_sensor"].append(sensor)
    for number in (1, 2):
        scene = f"scene-{number:04d}"
        tables["log"].append({"token": f"t-log-{number}", "logfile": f"log-{number}"})
        tables["scene"].append({"token": f"t-{scene}", "name": scene, "log_token": f"t-log-{number}"})
        tables["sample"].append({"token": f"{scene}-sample", "scene_token": f"t-{scene}"})
        write_pictures(root / "samples" / "CAM_FRONT", num_frames, scene + "-{:03d}.jpg")
        for index in range(num_frames):
            pose = {
                "token": f"pose-{scene}-{index}",
                "translation": [0.6 * index, 0.0, 0.0],
                "rotation": [1.0, 0, 0, 0],
            }
            row = {"token": f"{scene}-{index}", "sample_token": f"{scene}-sample", "ego_pose_token": pose["token"]}
            row |= {"timestamp": 1_530_000_000_000_000 + 100_000 * index, "calibrated_sensor_token": "c-CAM_FRONT"}
            row["filename"] = f"samples/CAM_FRONT/{scene}-{index:03d}.jpg"
            tables["sample_data"].append(row)
            tables["ego_pose"].append(pose)
    (root / version).mkdir(parents=True)
    for name, rows in tables.items():
        (root / version / f"{name}.json").write_text(json.dumps(rows))
    return root


def write_tub(folder: Path, num_records: int = 40, step_ms: float = 50) -> Path:
    """A donkeycar tub of version 2."""
    write_pictures(folder / "images", num_records, "{}_cam_image_array_.jpg")
    lines = []
    for index in range(num_records):
        record = {"_index": index, "_timestamp_ms": 1000 + step_ms * index}
        record |= {"cam/image_array": f"{index}_cam_image_array_.jpg", "user/mode": "user"}
        record |= {"user/angle": round(index / num_records - 0.5, 3), "user/throttle": 0.5}
        lines.append(json.dumps(record))
    (folder / "catalog_0.catalog").write_text("\n".join(lines) + "\n")
    last = {"paths": ["catalog_0.catalog"], "current_index": num_records, "deleted_indexes": []}
    (folder / "manifest.json").write_text("\n".join(["[]", "[]", "{}", "{}", json.dumps(last)]) + "\n")
    return folder


def write_lerobot(
    root: Path,
    version: str = "v2.1",
    *,
    num_episodes: int = 2,
    length: int = 30,
    cameras: Sequence[str] = ("observation.images.top",),
    statistics: bool = True,
    splits: dict[str, str] | None = None,
    features: dict[str, list[str]] | None = None,
) -> Path:
    """A LeRobot dataset of version 2.0, 2.1 or 3.0; `features` are names of numbers, by default an action of two."""
    numbers = features or {"action": ["pan", "grip"]}
    described: dict[str, object] = {
        name: {"dtype": "float32", "shape": [len(names)], "names": names} for name, names in numbers.items()
    }
    described |= {name: {"dtype": "video", "shape": [*SIZE, 3], "names": None} for name in cameras}
    info = {"codebase_version": version, "fps": 10, "robot_type": "arm", "features": described, "chunks_size": 1000}
    info |= {"total_episodes": num_episodes, "total_frames": num_episodes * length}
    info |= {"splits": splits or {"train": f"0:{num_episodes}"}}
    (root / "meta").mkdir(parents=True)
    data = root / "data" / "chunk-000"
    data.mkdir(parents=True)
    rows = [
        {"timestamp": frame / FPS, "frame_index": frame, "episode_index": episode}
        | {name: [math.sin(frame / 9 + at) for at in range(len(names))] for name, names in numbers.items()}
        for episode in range(num_episodes)
        for frame in range(length)
    ]
    reach = {name: {"min": [-1.0] * len(names), "max": [1.0] * len(names)} for name, names in numbers.items()}
    if version == "v3.0":
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        pq.write_table(pa.Table.from_pylist(rows), data / "file-000.parquet")
        episodes = []
        for episode in range(num_episodes):
            row = {"episode_index": episode, "length": length, "data/chunk_index": 0, "data/file_index": 0}
            for name in cameras:
                row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": 0}
                row |= {f"videos/{name}/from_timestamp": episode * length / FPS}
                row |= {f"videos/{name}/to_timestamp": (episode + 1) * length / FPS}
            episodes.append(row)
        (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(episodes), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
        for name in cameras:
            write_video(root / "videos" / name / "chunk-000" / "file-000.mp4", num_episodes * length)
    else:
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        lines = [{"episode_index": episode, "length": length, "tasks": ["push"]} for episode in range(num_episodes)]
        (root / "meta" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for episode in range(num_episodes):
            own = [row for row in rows if row["episode_index"] == episode]
            pq.write_table(pa.Table.from_pylist(own), data / f"episode_{episode:06d}.parquet")
            for name in cameras:
                write_video(root / "videos" / "chunk-000" / name / f"episode_{episode:06d}.mp4", length)
    if statistics and version == "v2.1":
        lines = [{"episode_index": episode, "stats": reach} for episode in range(num_episodes)]
        (root / "meta" / "episodes_stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif statistics:
        (root / "meta" / "stats.json").write_text(json.dumps(reach))
    (root / "meta" / "info.json").write_text(json.dumps(info))
    return root
