"""Estimation over many videos: threads decode videos ahead, and the estimator takes them in batches."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32

from terra.act_bench.estimator import FPS, ActEstimator
from terra.act_bench.samples import Sample
from terra.act_bench.videos import Clip, read_clips
from terra.context import RATE_TOLERANCE
from terra.progress import ProgressLine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Estimated:
    """The estimator's outputs.

    Attributes:
        samples: the samples whose videos could be read, in the order of `logits` and `waypoints`.
        failed: sample id -> why its video could not be read.
        other_rates: declared frame rate -> number of videos, for rates that are not the benchmark's.
    """

    samples: list[Sample]
    logits: Float32[np.ndarray, "videos classes"]
    waypoints: Float32[np.ndarray, "videos frames 2"]
    failed: dict[int, str]
    other_rates: dict[str, int]


def estimate_videos(
    estimator: ActEstimator,
    samples: Sequence[Sample],
    videos: Mapping[int, Path],
    *,
    dtype: torch.dtype,
    batch_size: int,
    workers: int,
) -> Estimated:
    """Run the estimator on the samples' videos, `batch_size` at a time, while `workers` threads decode.

    Every video counts as 10 frames per second, whatever its file declares, as in the published scorer.
    """
    shape = estimator.config
    seen: list[Sample] = []
    failed: dict[int, str] = {}
    rates: Counter[str] = Counter()
    logits = [np.zeros((0, shape.num_classes), np.float32)]
    waypoints = [np.zeros((0, shape.num_frames, 2), np.float32)]
    clips = read_clips([videos[sample.sample_id] for sample in samples], shape.num_frames, shape.side, workers)
    pairs, done, started = zip(samples, clips, strict=True), 0, time.monotonic()
    with ProgressLine("videos", len(samples)) as line:
        while part := list(islice(pairs, batch_size)):
            read = [(sample, clip) for sample, clip in part if isinstance(clip, Clip)]
            failed |= {sample.sample_id: clip for sample, clip in part if isinstance(clip, str)}
            if read:
                seen += [sample for sample, _ in read]
                rates.update(f"{clip.fps:g}" for _, clip in read if abs(clip.fps / FPS - 1) > RATE_TOLERANCE)
                estimates = estimator.estimate(torch.stack([clip.frames for _, clip in read]), dtype)
                logits.append(estimates.commands.numpy())
                waypoints.append(estimates.waypoints.numpy())
            done += len(part)
            rate = done / (time.monotonic() - started)
            line.show(done, f"{done} of {len(samples)} videos, {rate:.1f} a second")
    for why in failed.values():
        logger.warning("left out: %s", why)
    for fps, count in rates.items():
        logger.warning("videos that say %s frames a second: %d; scored as %g", fps, count, FPS)
    return Estimated(seen, np.concatenate(logits), np.concatenate(waypoints), failed, dict(rates))
