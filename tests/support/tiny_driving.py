"""Writes small datasets of synthetic driving for tests, without a renderer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from decoder.camera import Camera
from terra.dataset import NUM_FUTURE_POSES, Poses, ShardWriter, create_dataset

CAMERA = Camera(fov_degrees=75.0, height_meters=1.4, pitch_radians=-0.03)
SIZE = (16, 32)
FPS = 10.0


def drive_poses(num_frames: int, *, turning: float = 0.1, speed: float = 6.0, fps: float = 10.0) -> Poses:
    """A circle driven counter-clockwise at a constant speed (m/s) and turning rate (rad/s), 0 for a straight line."""
    time = np.arange(num_frames + round(NUM_FUTURE_POSES * fps / 10)) / fps
    heading = turning * time
    if turning:
        x, y = speed / turning * np.sin(heading), speed / turning * (1 - np.cos(heading))
    else:
        x, y = speed * time, 0 * time
    return Poses(time, x, y, 0 * time, heading, 0 * time, speed + 0 * time)


def drive_frames(num_frames: int, shift: int = 0, size: tuple[int, int] = SIZE) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Smooth moving pictures, each different from the one before."""
    rows, cols = np.mgrid[: size[0], : size[1]]
    for index in range(num_frames):
        red = 100 + 80 * np.sin((cols + 3 * index + 10 * shift) / 6)
        yield np.stack([red, 4.0 * rows + 40, np.full(size, 60.0 + 5 * shift)], axis=-1).astype(np.uint8)


def write_driving(
    folder: Path, *, shards: int = 1, episodes: int = 2, num_frames: int = 4, held_out: int = 1, source: str = "town"
) -> Path:
    """Write `shards` of split train and `held_out` of split held_out, each with `episodes`."""
    create_dataset(folder, FPS, SIZE, source)
    for split, count, first in (("train", shards, 0), ("held_out", held_out, 900_000)):
        for place in range(first, first + count):
            writer = shard_writer(folder, split, f"{place:06d}", source=source)
            with writer:
                for number in range(episodes):
                    name = f"{writer.name_prefix}_{number:02d}"
                    frames = drive_frames(num_frames, number + place)
                    writer.add(name, frames, drive_poses(num_frames), events=[(2, "left")], weather="day")
    return folder


def shard_writer(folder: Path, split: str, place: str, *, source: str = "town", futures: bool = False) -> ShardWriter:
    """A writer of one shard with the dataset's size and rate."""
    return ShardWriter(
        folder, split=split, source=source, place=place, fps=FPS, image_size=SIZE, camera=CAMERA, futures=futures
    )


def gray(index: int) -> int:
    """The gray level of all pixels of episode number `index` of `record`."""
    return 40 + 20 * index


def record(
    folder: Path, split: str = "train", shards: tuple[tuple[int, ...], ...] = ((5, 3),), size: tuple[int, int] = SIZE
) -> None:
    """Write shards of drives straight ahead at 1, 2, ... m/s, each with a gray level of its own."""
    create_dataset(folder, FPS, size, "gray")
    index = 0
    for place, lengths in enumerate(shards):
        name = f"{split}{place:03d}".replace("_", "-")
        with ShardWriter(
            folder, split=split, source="gray", place=name, fps=FPS, image_size=size, camera=None
        ) as writer:
            for length in lengths:
                frames = np.full((length, *size, 3), gray(index), np.uint8)
                # A bar that moves, so that frames of an episode differ.
                for step, frame in enumerate(frames):
                    frame[:, 2 * step % size[1]] += 60
                writer.add(
                    f"{writer.name_prefix}_{index:02d}", frames, drive_poses(length, turning=0.0, speed=index + 1.0)
                )
                index += 1
