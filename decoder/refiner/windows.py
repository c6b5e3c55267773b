"""The windows of frames that are refined together, and the noise that their refinement starts from."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class RefinedWindow:
    """Frames `start` to `stop` are refined together; those from `keep_from` on are kept."""

    start: int
    stop: int
    keep_from: int


def refined_windows(num_frames: int, size: int, overlap: int) -> list[RefinedWindow]:
    """Split a video into windows of `size` frames, each sharing `overlap` frames with the previous window.

    The last window shares more frames if needed to have full size, so only a video shorter than `size` has a shorter
    window. Frames in an overlap are kept from the earlier window, as in the published code.
    """
    windows = [RefinedWindow(0, min(size, num_frames), 0)]
    while (stop := windows[-1].stop) < num_frames:
        start = min(stop - overlap, num_frames - size)
        windows.append(RefinedWindow(start, start + size, stop))
    return windows


def frame_noise(seed: int, frames: range, shape: tuple[int, ...]) -> Float[Tensor, "frames channels rows cols"]:
    """Standard normal noise, float32 on the CPU, that depends on the seed and each frame's index alone.

    The generator is NumPy's Philox with the key (seed, frame), so a frame has the same noise in every window and on
    every device.
    """
    draws = [
        np.random.Generator(np.random.Philox(key=[seed, frame])).standard_normal(shape, np.float32) for frame in frames
    ]
    return torch.from_numpy(np.stack(draws))
