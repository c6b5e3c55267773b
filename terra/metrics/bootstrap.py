"""95 % confidence intervals of means over clips, by a bootstrap that resamples independent units.

Clips of one town share its streets and its weather, so that they are no independent samples of driving; towns are. A
resample therefore draws units (towns, drives) with replacement and takes all clips of each (Davison and Hinkley 1997,
section 3.8); the interval goes from the 2.5 to the 97.5 % quantile of the resamples' means (Efron and Tibshirani 1993,
chapter 13). A single unit says nothing about how units differ, so its interval is unknown: NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

LEVEL = 0.95
QUANTILES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        value: NaN where no clip counts.
        low, high: the interval's ends; NaN where it is unknown, as with a single unit.
        count: clips (of a Frechet distance: samples) behind the value.
        units: independent units (towns, drives) among the clips, which the interval resamples.
    """

    value: float
    low: float
    high: float
    count: int
    units: int


def unit_members(num_clips: int, units: Sequence[str] | None) -> list[Int[np.ndarray, " members"]]:
    """The indices of each unit's clips, from the name of each clip's unit; None: each clip is a unit by itself.

    Raises:
        ValueError: not one name a clip.
    """
    if units is None:
        return list(np.arange(num_clips)[:, None])
    if len(units) != num_clips:
        raise ValueError(f"expected the unit of each of {num_clips} clips, got {len(units)} names")
    return [np.array([index for index, each in enumerate(units) if each == unit]) for unit in dict.fromkeys(units)]


def draw_units(num_units: int, num_resamples: int, seed: int) -> Int[np.ndarray, "resamples units"]:
    """Units drawn with replacement, in each resample as many as there are; the same for a seed."""
    return np.random.default_rng(seed).integers(num_units, size=(num_resamples, num_units))


def mean_estimates(
    values: Float[np.ndarray, "clips points"],
    *,
    units: Sequence[str] | None = None,
    num_resamples: int,
    seed: int = 0,
) -> list[Estimate]:
    """For each point the mean over clips with its interval.

    One draw of units serves all points, so that a curve's points move together.

    Args:
        values: a row for each clip.
        units: the name of each clip's unit; None: each clip is a unit by itself.
        num_resamples: how many.
        seed: of the draws.
    """
    num_clips, num_points = values.shape
    if num_clips == 0:
        return [Estimate(np.nan, np.nan, np.nan, 0, 0)] * num_points
    members = unit_members(num_clips, units)
    low = high = np.full(num_points, np.nan)
    if len(members) > 1:
        sums = np.stack([values[clips].sum(axis=0) for clips in members])
        sizes = np.array([len(clips) for clips in members])
        draws = draw_units(len(members), num_resamples, seed)
        low, high = np.quantile([sums[drawn].sum(axis=0) / sizes[drawn].sum() for drawn in draws], QUANTILES, axis=0)
    return [
        Estimate(float(mean), float(a), float(b), num_clips, len(members))
        for mean, a, b in zip(values.mean(axis=0), low, high, strict=True)
    ]


def mean_estimate(
    values: Float[np.ndarray, " clips"], *, units: Sequence[str] | None = None, num_resamples: int, seed: int = 0
) -> Estimate:
    """`mean_estimates` of one number a clip."""
    return mean_estimates(values[:, None], units=units, num_resamples=num_resamples, seed=seed)[0]


def share_estimate(
    holds: Bool[np.ndarray, " clips"], *, units: Sequence[str] | None = None, num_resamples: int, seed: int = 0
) -> Estimate:
    """The share of clips for which something holds, with its interval; arguments as those of `mean_estimates`.

    Where it holds for all clips, or for none, so it does in every resample, as if the share were certain. The interval
    is then the exact binomial one (Clopper and Pearson 1934), with the n units as trials: from 0.025 ** (1 / n) to 1 if
    it holds for all, from 0 to 1 - 0.025 ** (1 / n) if for none.
    """
    estimate = mean_estimate(holds.astype(np.float64), units=units, num_resamples=num_resamples, seed=seed)
    if not len(holds) or holds.any() != holds.all():
        return estimate
    bound = QUANTILES[0] ** (1 / estimate.units)
    low, high = (bound, 1.0) if holds.all() else (0.0, 1.0 - bound)
    return replace(estimate, low=low, high=high)
