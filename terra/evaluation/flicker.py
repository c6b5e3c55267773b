"""How much decoded video flickers: what changes from frame to frame that does not change in the recording."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from terra.evaluation.bootstrap import mean_estimates
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


def summarise_flicker(
    clips: Sequence[Mapping[str, Mapping[str, float]]], rival: str, *, num_resamples: int = 5000
) -> dict[str, dict[str, Any]]:
    """Of each video in `compare_flicker`'s results for several clips: means with their intervals, each clip a unit.

    `less_than_rival` is the mean difference of flicker to that of the video named `rival`, above 0 where it flickers
    less, and `won` the share of clips in which it does.
    """
    summary = {}
    for name in clips[0]:
        values = np.array(
            [[c[name]["flicker"], c[name]["psnr"], c[rival]["flicker"] - c[name]["flicker"]] for c in clips]
        )
        estimates = mean_estimates(values, num_resamples=num_resamples)
        summary[name] = {
            key: asdict(estimate)
            for key, estimate in zip(("flicker", "psnr", "less_than_rival"), estimates, strict=True)
        }
        summary[name]["won"] = float((values[:, 2] > 0).mean())
    return summary
