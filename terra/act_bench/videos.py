"""The scored videos: finding them in a folder, and reading them in the estimator's format."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from decoder.video import probe_video, stream_video
from terra.errors import ConfigError, VideoError

_NAME = re.compile(r"_(\d+)\.mp4")


@dataclass(frozen=True, eq=False)
class Clip:
    """The last frames of a video, and the frame rate that its file declares."""

    frames: UInt8[Tensor, "3 frames side side"]
    fps: float


def find_videos(folder: Path) -> dict[int, Path]:
    """Find a folder's MP4s by sample id, the number after the last "_" of a name: NUSCENES_ACTION_000012.mp4.

    Raises:
        ConfigError: no such folder, no such video in it, or two videos with one id.
    """
    if not folder.is_dir():
        raise ConfigError(f"videos={folder}: expected a folder, got {'a file' if folder.exists() else 'none'}")
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*.mp4")):
        match = _NAME.search(path.name)
        if match is not None:
            other = found.setdefault(int(match[1]), path)
            if other != path:
                raise ConfigError(f"videos={folder}: expected one video a sample, got {other.name} and {path.name}")
    if not found:
        raise ConfigError(f"videos={folder}: expected videos such as NUSCENES_ACTION_000012.mp4, got none")
    return found


def read_clips(paths: Sequence[Path], num_frames: int, side: int, workers: int) -> Iterator[Clip | str]:
    """Read the videos in order; a video that can't be read yields one line that says why instead of its clip.

    `workers` videos are decoded at once, and one more decoded clip may wait.
    """
    waiting: deque[Future[Clip | str]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="terra-videos") as pool:
        try:
            for path in paths:
                waiting.append(pool.submit(_read, path, num_frames, side))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def read_clip(path: Path, num_frames: int, side: int) -> Clip:
    """Read the last `num_frames` frames with the preprocessing of the published scorer.

    Each frame is resized to a square an eighth larger than `side` (256 for 224), whatever its aspect ratio, by
    torchvision's antialiased bilinear filter, rounded to 8 bits, and cropped to its middle. The published scorer
    decodes with torchvision's reader, whose colors may differ by one step of rounding.

    Raises:
        VideoError: the video can't be read, or has fewer frames.
    """
    from torchvision.transforms import functional as pictures

    fps = probe_video(path).fps
    last = deque(stream_video(path), maxlen=num_frames)
    if len(last) < num_frames:
        raise VideoError(f"{path}: expected {num_frames} frames or more, got {len(last)}")
    frames = torch.from_numpy(np.stack(last))
    square = side * 8 // 7
    resized = pictures.resize(frames.permute(0, 3, 1, 2), [square, square], antialias=True)
    return Clip(pictures.center_crop(resized, [side, side]).transpose(0, 1).contiguous(), fps)


def _read(path: Path, num_frames: int, side: int) -> Clip | str:
    try:
        return read_clip(path, num_frames, side)
    except VideoError as error:
        return str(error)
