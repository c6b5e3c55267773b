"""LeRobot datasets of versions 2.0, 2.1 and 3.0 by the format's description; pictures and actions have numbers."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from decoder.video import VideoWriter

CAMERA = "observation.images.front"
HEIGHT, WIDTH = 32, 48
_ROWS, _COLUMNS = 2, 8


def coded(number: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    """A picture of 2 x 8 blocks, black or white: the bits of its number."""
    bits = (number >> np.arange(_ROWS * _COLUMNS) & 1).reshape(_ROWS, _COLUMNS)
    blocks = np.where(bits, 235, 20).repeat(size[0] // _ROWS, 0).repeat(size[1] // _COLUMNS, 1)
    return np.repeat(blocks[:, :, None], 3, 2).astype(np.uint8)


def numbers_in(frames: np.ndarray) -> list[int]:
    """The numbers of pictures that `coded` made."""
    count, height, width, _ = frames.shape
    blocks = frames.reshape(count, _ROWS, height // _ROWS, _COLUMNS, width // _COLUMNS, 3).mean(axis=(2, 4, 5))
    return ((blocks.reshape(count, -1) > 127) @ (1 << np.arange(_ROWS * _COLUMNS))).tolist()


def png(number: int) -> bytes:
    """A PNG file of a picture."""
    file = io.BytesIO()
    Image.fromarray(coded(number)).save(file, "PNG")
    return file.getvalue()


def write_dataset(
    root: Path,
    rows: tuple[int, ...] = (12, 9, 14),
    pictures: tuple[int, ...] | None = None,
    *,
    version: str = "v3.0",
    fps: float = 10.0,
    times=None,
    spans=None,
    camera: dict | None = None,
    names: object = ("number",),
    columns: dict | None = None,
    **changes: object,
) -> Path:
    """Write a dataset of which frame k of episode e, and its action, has the number 100 e + k.

    Args:
        root: its folder.
        rows, pictures: rows and frames of each episode.
        version: "v2.0", "v2.1" or "v3.0"; in version 3 all episodes share one file.
        fps: frames a second.
        times: maps (episode, row) to a time stamp; None: row / fps.
        spans: (from_timestamp, to_timestamp) of each episode; None: where its frames are.
        camera: changes to the camera's feature; with "dtype": "image" the rows hold the pictures.
        names: of the action.
        columns: replaces columns of the rows: maps an episode's index to a column's values, by the column's name.
        changes: to info.json.
    """
    pictures = pictures or rows
    is_old = version.startswith("v2")
    feature = {
        "dtype": "video",
        "shape": [HEIGHT, WIDTH, 3],
        "names": ["height", "width", "channels"],
        **(camera or {}),
    }
    episodes, tables, shown, index, first = [], [], [], 0, 0.0
    for episode, (count, num_frames) in enumerate(zip(rows, pictures, strict=True)):
        table = {
            "action": [[float(100 * episode + row)] for row in range(count)],
            "timestamp": np.float32([times(episode, row) if times else row / fps for row in range(count)]),
            "frame_index": np.arange(count),
            "episode_index": [episode] * count,
            "index": index + np.arange(count),
            "task_index": [0] * count,
        }
        if feature["dtype"] == "image":
            table[CAMERA] = [{"bytes": png(100 * episode + row), "path": f"{row}.png"} for row in range(count)]
        table |= {name: values(episode) for name, values in (columns or {}).items()}
        tables.append(pa.table(table))
        facts = {"episode_index": episode, "length": count, "tasks": ["count"]}
        if not is_old:
            span = spans[episode] if spans else (first, first + num_frames / fps)
            places = {f"{kind}/{name}_index": 0 for kind in ("data", f"videos/{CAMERA}") for name in ("chunk", "file")}
            facts |= {"dataset_from_index": index, "dataset_to_index": index + count, **places}
            facts |= {f"videos/{CAMERA}/from_timestamp": span[0], f"videos/{CAMERA}/to_timestamp": span[1]}
        episodes.append(facts)
        shown.append([coded(100 * episode + frame) for frame in range(num_frames)])
        index, first = index + count, first + num_frames / fps
    if is_old:
        data, video = (
            "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
            "episode_{episode_index:06d}.mp4",
        )
        video = "videos/chunk-{episode_chunk:03d}/{video_key}/" + video
    else:
        data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        tables, shown = [pa.concat_tables(tables)], [[frame for episode in shown for frame in episode]]
    for number, (table, frames) in enumerate(zip(tables, shown, strict=True)):
        place = {"episode_chunk": 0, "episode_index": number, "chunk_index": 0, "file_index": 0}
        path = root / data.format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        if feature["dtype"] == "video":
            write_video(root / video.format(video_key=CAMERA, **place), frames, fps)
    action = {"dtype": "float32", "shape": [1], "names": names if isinstance(names, dict | None) else list(names)}
    info = {
        "codebase_version": version,
        "fps": fps,
        "features": {CAMERA: feature, "action": action},
        "chunks_size": 1000,
    }
    info |= {"data_path": data, "video_path": video, "total_episodes": len(rows), **changes}
    (root / "meta").mkdir(exist_ok=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    reach = {"action": {"min": [0.0], "max": [100.0 * len(rows)]}}
    if version != "v2.1":
        (root / "meta" / "stats.json").write_text(json.dumps(reach))
    else:
        lines = [json.dumps({"episode_index": each, "stats": reach}) for each in range(len(rows))]
        (root / "meta" / "episodes_stats.jsonl").write_text("\n".join(lines))
    write_episodes(root, episodes)
    return root


def write_video(path: Path, frames, fps: float) -> None:
    """Write an MP4 whose pictures keep their numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with VideoWriter(path, fps, size=(WIDTH, HEIGHT), crf=12, preset="ultrafast") as writer:
        writer.extend(frames)


def read_episodes(root: Path) -> list[dict]:
    """The rows of meta/ about the episodes."""
    old = root / "meta" / "episodes.jsonl"
    if old.is_file():
        return [json.loads(line) for line in old.read_text().splitlines()]
    return pq.read_table(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()


def write_episodes(root: Path, episodes: list[dict]) -> None:
    """Write the rows of meta/ about the episodes."""
    if json.loads((root / "meta" / "info.json").read_text())["codebase_version"].startswith("v2"):
        (root / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, episodes)))
        return
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(episodes), path)
