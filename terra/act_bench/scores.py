"""The benchmark's scores: accuracy of the maneuver, and displacement errors of the path."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from terra.act_bench.samples import CLASSES, Sample
from terra.metrics.bootstrap import Estimate, mean_estimates, share_estimate

ALL = "all"


@dataclass(frozen=True, eq=False)
class VideoScores:
    """Scores of each video.

    Attributes:
        wanted, estimated: the instructed and the estimated maneuver, indices into `terra.act_bench.samples.CLASSES`.
        ade: average displacement error: the mean over frames of the distance to the reference, in meters.
        fde: final displacement error: the distance at the last frame, in meters.
        drives: `Sample.drive`, which intervals resample.
    """

    wanted: Int64[np.ndarray, " videos"]
    estimated: Int64[np.ndarray, " videos"]
    ade: Float64[np.ndarray, " videos"]
    fde: Float64[np.ndarray, " videos"]
    drives: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """The means over the videos of a class, or of all: `accuracy` is the instruction-execution consistency."""

    name: str
    accuracy: Estimate
    ade: Estimate
    fde: Estimate

    @property
    def count(self) -> int:
        """Number of videos."""
        return self.accuracy.count


def score_videos(
    samples: Sequence[Sample],
    logits: Float[np.ndarray, "videos classes"],
    waypoints: Float[np.ndarray, "videos frames 2"],
) -> VideoScores:
    """Compare the estimator's logits and waypoints ([right, forward] in meters) of each video with its sample."""
    reference = np.stack([sample.reference for sample in samples])
    distance = np.linalg.norm(waypoints.astype(np.float64) - reference, axis=-1)
    wanted = np.array([sample.class_id for sample in samples], dtype=np.int64)
    estimated = logits.argmax(axis=1).astype(np.int64)
    drives = tuple(sample.drive for sample in samples)
    return VideoScores(wanted, estimated, distance.mean(axis=1), distance[:, -1], drives)


def summarize(scores: VideoScores, num_resamples: int) -> list[Row]:
    """Average all videos (row "all") and each class, with bootstrap intervals over drives; NaN without videos."""
    every = np.ones(len(scores.wanted), dtype=bool)
    rows = [_row(ALL, scores, every, num_resamples)]
    for class_id, name in enumerate(CLASSES):
        rows.append(_row(name, scores, scores.wanted == class_id, num_resamples))
    return rows


def _row(name: str, scores: VideoScores, counted: Bool[np.ndarray, " videos"], num_resamples: int) -> Row:
    units = [drive for drive, counts in zip(scores.drives, counted, strict=True) if counts]
    accuracy = share_estimate((scores.wanted == scores.estimated)[counted], units=units, num_resamples=num_resamples)
    errors = np.stack([scores.ade, scores.fde], axis=1)[counted]
    return Row(name, accuracy, *mean_estimates(errors, units=units, num_resamples=num_resamples))


def confusion(scores: VideoScores) -> Int64[np.ndarray, "wanted estimated"]:
    """Confusion matrix: number of videos of each instructed class (row) and estimated class (column)."""
    counts = np.zeros((len(CLASSES), len(CLASSES)), dtype=np.int64)
    np.add.at(counts, (scores.wanted, scores.estimated), 1)
    return counts
