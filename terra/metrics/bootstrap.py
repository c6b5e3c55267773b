"""Confidence intervals by the bootstrap over clips, because the frames of one clip are not independent samples."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and the number of clips that it comes from; NaN if that number is 0."""

    value: float
    low: float
    high: float
    count: int


def resample(num_clips: int, num_resamples: int, seed: int) -> Int[np.ndarray, "resamples clips"]:
    """Draw `num_clips` indices of clips with replacement, `num_resamples` times; the seed fixes the draws."""
    return np.random.default_rng(seed).integers(num_clips, size=(num_resamples, num_clips))


def mean_estimates(values: Float[np.ndarray, "clips points"], *, num_resamples: int, seed: int = 0) -> list[Estimate]:
    """The mean over clips at each point, with its percentile interval (Efron and Tibshirani 1993, chapter 13).

    Each resample draws the same clips for all points, so that the points of a curve stay correlated.
    """
    num_clips, num_points = values.shape
    if num_clips == 0:
        return [Estimate(np.nan, np.nan, np.nan, 0)] * num_points
    means = np.stack([values[chosen].mean(axis=0) for chosen in resample(num_clips, num_resamples, seed)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [
        Estimate(float(mean), float(a), float(b), num_clips)
        for mean, a, b in zip(values.mean(axis=0), low, high, strict=True)
    ]


def mean_estimate(values: Float[np.ndarray, " clips"], *, num_resamples: int, seed: int = 0) -> Estimate:
    """The mean over clips with its percentile interval."""
    return mean_estimates(values[:, None], num_resamples=num_resamples, seed=seed)[0]
