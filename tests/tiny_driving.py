"""Small recorded datasets for tests, without any renderer."""

from pathlib import Path

import numpy as np

from terra.dataset import NUM_FUTURE_POSES, Poses, ShardWriter, create_dataset

FPS = 10.0


def grey(index: int) -> int:
    """The level of all pixels of a recorded episode."""
    return 40 + 20 * index


def record(
    folder: Path,
    split: str = "train",
    shards: tuple[tuple[int, ...], ...] = ((5, 3),),
    size: tuple[int, int] = (16, 32),
) -> None:
    """Shards of drives of so many frames straight ahead, at 1, 2, ... m/s, each in a grey of its own."""
    create_dataset(folder, FPS, size, "grey")
    index = 0
    for place, lengths in enumerate(shards):
        name = f"{split}{place:03d}".replace("_", "-")
        with ShardWriter(
            folder, split=split, source="grey", place=name, fps=FPS, image_size=size, camera=None
        ) as writer:
            for length in lengths:
                time = np.arange(length + NUM_FUTURE_POSES) / FPS
                speed, zero = np.full_like(time, index + 1.0), np.zeros_like(time)
                poses = Poses(time, speed * time, zero, zero, zero, zero, speed)
                frames = np.full((length, *size, 3), grey(index), np.uint8)
                # A bar that moves, so that frames of an episode differ.
                for step, frame in enumerate(frames):
                    frame[:, 2 * step % size[1]] += 60
                writer.add(f"{writer.name_prefix}_{index:02d}", frames, poses)
                index += 1
