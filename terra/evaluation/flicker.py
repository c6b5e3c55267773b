"""How much decoded video flickers: what changes from frame to frame that does not change in the recording."""

from collections.abc import Mapping

from terra.frame_metrics import psnr
from tokenizer import Frames


def flicker(frames: Frames, truth: Frames) -> float:
    """The mean absolute error of the difference between a frame and the next, in 8-bit levels, from [-1, 1]."""
    return 127.5 * (frames.diff(dim=0) - truth.diff(dim=0)).abs().mean().item()


def compare_flicker(videos: Mapping[str, Frames], truth: Frames) -> dict[str, dict[str, float]]:
    """Of each video, its `flicker` and mean `psnr` (dB) against the recording."""
    return {
        name: {"flicker": flicker(frames, truth), "psnr": psnr(frames, truth).mean().item()}
        for name, frames in videos.items()
    }
