"""Which frames are refined together, and the noise that they start from."""

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
    """Windows of `size` frames that share `overlap` with the one before; the last shares more, to be as long.

    So only a video shorter than `size` has a window that is shorter. An overlap's frames are kept from the window that
    came first, as the published code keeps them.
    """
    windows = [RefinedWindow(0, min(size, num_frames), 0)]
    while (stop := windows[-1].stop) < num_frames:
        start = min(stop - overlap, num_frames - size)
        windows.append(RefinedWindow(start, start + size, stop))
    return windows


def frame_noise(seed: int, frames: range, shape: tuple[int, ...]) -> Float[Tensor, "frames channels rows cols"]:
    """Standard normal noise, float32 on the CPU, that depends on the seed and each frame's index alone.

    NumPy's Philox with the key (seed, frame): a frame has the same noise in whichever window, and on any device.
    """
    draws = [
        np.random.Generator(np.random.Philox(key=[seed, frame])).standard_normal(shape, np.float32) for frame in frames
    ]
    return torch.from_numpy(np.stack(draws))
