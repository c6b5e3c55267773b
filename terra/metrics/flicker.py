"""Flicker of decoded video: changes from frame to frame that the recording does not have."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from terra.metrics.bootstrap import mean_estimates
from terra.metrics.frames import psnr
from tokenizer import Frames


def flicker(frames: Frames, truth: Frames) -> float:
    """The mean absolute error, in 8-bit levels, of the difference between consecutive frames; frames are in [-1, 1]."""
    return 127.5 * (frames.diff(dim=0) - truth.diff(dim=0)).abs().mean().item()


def compare_flicker(videos: Mapping[str, Frames], truth: Frames) -> dict[str, dict[str, float]]:
    """Measure each video's `flicker` (8-bit levels) and mean `psnr` (dB) against the recording."""
    return {
        name: {"flicker": flicker(frames, truth), "psnr": psnr(frames, truth).mean().item()}
        for name, frames in videos.items()
    }


def summarize_flicker(
    clips: Sequence[Mapping[str, Mapping[str, float]]], baseline: str, *, num_resamples: int = 5000
) -> dict[str, dict[str, Any]]:
    """Average `compare_flicker`'s results over clips: for each video the means with 95 % intervals.

    `less_than_baseline` is the flicker of the video named `baseline` minus that of this video (positive: this video
    flickers less); `won` is the share of clips in which that difference is positive.
    """
    summary = {}
    for name in clips[0]:
        values = np.array(
            [[c[name]["flicker"], c[name]["psnr"], c[baseline]["flicker"] - c[name]["flicker"]] for c in clips]
        )
        estimates = mean_estimates(values, num_resamples=num_resamples)
        summary[name] = {
            key: asdict(estimate)
            for key, estimate in zip(("flicker", "psnr", "less_than_baseline"), estimates, strict=True)
        }
        summary[name]["won"] = float((values[:, 2] > 0).mean())
    return summary
