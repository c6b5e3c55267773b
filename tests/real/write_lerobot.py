"""Write LeRobot datasets with the lerobot package itself: `python write_lerobot.py FOLDER`, in an environment with it.

Frame k of the e-th recorded episode shows the number 100 e + k, black and white, and its action is that number. The
file FOLDER/expected.json gives the numbers of each episode of each dataset, by what the tools are said to do: versions
0.4 and later write and edit version 3.0 of the format, earlier ones write version 2.1.
"""

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HEIGHT, WIDTH, ROWS, COLUMNS = 96, 128, 2, 8
CAMERA = "observation.images.front"
LENGTHS = (40, 37, 52, 33, 61)
IS_NEW = tuple(map(int, importlib.metadata.version("lerobot").split(".")[:2])) >= (0, 4)


def coded(number: int) -> np.ndarray:
    """A picture of the 16 bits of a number: blocks that are white or black."""
    bits = (number >> np.arange(ROWS * COLUMNS) & 1).reshape(ROWS, COLUMNS)
    blocks = np.where(bits, 235, 20).repeat(HEIGHT // ROWS, 0).repeat(WIDTH // COLUMNS, 1)
    return np.repeat(blocks[:, :, None], 3, 2).astype(np.uint8)


def numbers(episodes, lengths=LENGTHS, first=0):
    """The numbers of these episodes of a recording whose first episode is number `first`."""
    return [[100 * (first + episode) + frame for frame in range(lengths[episode])] for episode in episodes]


def add_episodes(dataset: LeRobotDataset, wanted) -> None:
    """Record episodes that show these numbers."""
    for episode in wanted:
        for number in episode:
            frame = {CAMERA: coded(number), "action": np.float32([number, -number]), "task": "count"}
            # Before 0.3.4 the task was an argument of its own.
            dataset.add_frame(frame) if IS_NEW else dataset.add_frame(
                {CAMERA: frame[CAMERA], "action": frame["action"]}, "count"
            )
        dataset.save_episode()


def record(folder: Path, name: str, wanted, *, fps=30, use_videos=True, settings=None, **more) -> LeRobotDataset:
    """Record a dataset as lerobot-record does."""
    kind = "video" if use_videos else "image"
    features = {
        CAMERA: {"dtype": kind, "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["up", "down"]},
    }
    dataset = LeRobotDataset.create(name, fps, features, root=folder / name, use_videos=use_videos, **more)
    if settings:
        dataset.meta.update_chunk_settings(**settings)
    add_episodes(dataset, wanted)
    if IS_NEW:
        dataset.finalize()
    return LeRobotDataset(name, root=folder / name)


def write_old(folder: Path) -> dict[str, list[list[int]]]:
    """Version 2.1, with videos and with pictures."""
    every = numbers(range(5))
    record(folder, "v21_video", every)
    record(folder, "v21_image", every, use_videos=False)
    return {"v21_video": every, "v21_image": every}


def write_new(folder: Path) -> dict[str, list[list[int]]]:
    """Version 3.0: recorded, resumed, edited, converted."""
    from lerobot.datasets.dataset_tools import (
        convert_image_to_video_dataset,
        delete_episodes,
        merge_datasets,
        split_dataset,
    )

    every = numbers(range(5))
    expected = {"video": every, "image": every}
    video = record(folder, "video", every)
    image = record(folder, "image", every, use_videos=False)
    for name, more in {
        "h264": {"vcodec": "h264"},
        "streamed": {"streaming_encoding": True},
        "fps_50": {"fps": 50},
    }.items():
        record(folder, name, every, **more)
        expected[name] = every
    # Files of few episodes each.
    small = {"video_files_size_in_mb": 0.008, "data_files_size_in_mb": 0.008}
    files = record(folder, "many_files", every, settings=small)
    for kind in ("videos/*", "data"):
        assert 1 < len([*(folder / "many_files").glob(f"{kind}/*/file-*")]) < len(every), kind
    expected["many_files"] = every
    more = numbers((0, 1), (30, 45), first=5)
    shutil.copytree(folder / "video", folder / "resumed")
    resumed = LeRobotDataset("resumed", root=folder / "resumed")
    add_episodes(resumed, more)
    resumed.finalize()
    expected["resumed"] = every + more
    other = record(folder, "other", more)
    for name, source in {"video": video, "image": image, "many_files": files}.items():
        delete_episodes(source, [1, 3], folder / f"{name}_deleted", f"{name}_deleted")
        expected[f"{name}_deleted"] = numbers((0, 2, 4))
        split_dataset(source, {"one": [0, 3], "two": [1, 2, 4]}, folder / f"{name}_split")
        for path in (folder / f"{name}_split").iterdir():
            path.rename(folder / f"{name}_split_{path.name}")
        (folder / f"{name}_split").rmdir()
        expected[f"{name}_split_one"], expected[f"{name}_split_two"] = numbers((0, 3)), numbers((1, 2, 4))
    deleted = LeRobotDataset("video_deleted", root=folder / "video_deleted")
    merge_datasets([deleted, other, video, files], "merged", folder / "merged")
    expected["merged"] = numbers((0, 2, 4)) + more + every + every
    images = LeRobotDataset("image_deleted", root=folder / "image_deleted")
    merge_datasets([images, image], "image_merged", folder / "image_merged")
    expected["image_merged"] = numbers((0, 2, 4)) + every
    convert_image_to_video_dataset(image, folder / "image_to_video", "image_to_video", num_workers=1)
    expected["image_to_video"] = every
    return expected


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    written = write_new(target) if IS_NEW else write_old(target)
    if IS_NEW and len(sys.argv) > 2:
        from lerobot.datasets.v30.convert_dataset_v21_to_v30 import convert_dataset

        for dataset in ("v21_video", "v21_image"):
            shutil.copytree(Path(sys.argv[2]) / dataset, target / f"{dataset}_converted")
            convert_dataset(f"{dataset}_converted", root=target, push_to_hub=False)
            shutil.rmtree(target / f"{dataset}_converted_old")
            written[f"{dataset}_converted"] = numbers(range(5))
    (target / "expected.json").write_text(json.dumps(written))
