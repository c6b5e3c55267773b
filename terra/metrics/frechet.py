"""Frechet distances between the feature distributions of two sets of frames or clips (Heusel et al. 2017)."""

from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import NormalDist

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from terra.metrics.bootstrap import LEVEL, Estimate, draw_units, unit_members
from terra.metrics.networks import Features, Moments, frechet_distance, moments, moments_distance

ClipFeatures = Float[Tensor, "clips frames features"]

NORMAL_QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)
"""Standard deviations from a normal distribution's mean to either end of its central 95 %: 1.96."""


def frechet_estimate(
    ours: ClipFeatures,
    theirs: ClipFeatures,
    *,
    units: Sequence[str] | None = None,
    num_resamples: int,
    seed: int = 0,
) -> Estimate:
    """The distance of all clips' frames, with an interval by the bootstrap of `terra.metrics.bootstrap`.

    Both sets have the same clips, and each resample takes the same ones of both. The interval is the bootstrap's
    standard normal one (Efron and Tibshirani 1993, section 12.5): 1.96 standard deviations of the resamples' distances
    around the estimate, since a distance takes too long for the many resamples that quantiles need, and since a
    resample's fewer distinct clips bias its distance upwards, which the standard deviation does not see.
    The estimate's `count` is the number of samples, clips x frames, in each set.

    Args:
        ours, theirs: features of the same clips, in the same order.
        units: the name of each clip's independent unit; None: each clip is a unit by itself.
        num_resamples: how many.
        seed: of the draws.
    """
    value = frechet_distance(_samples(ours), _samples(theirs))
    members = unit_members(len(ours), units)
    distances = [
        frechet_distance(_samples(ours[clips]), _samples(theirs[clips]))
        for clips in _distinct_draws(members, num_resamples, seed)
    ]
    return normal_estimate([value, *distances], ours.shape[0] * ours.shape[1], len(members))


def reference_distances(
    ours: ClipFeatures, reference: Moments, *, units: Sequence[str] | None = None, num_resamples: int, seed: int = 0
) -> list[float]:
    """The distance of all clips' frames to a reference, then that of each resample of the clips; the reference stays.

    The same units and seed draw the same clips, so that distances of several sets can be combined draw by draw; see
    `normal_estimate`.

    Args:
        ours: features of the clips.
        reference: moments of other frames' features, which belong to no clip.
        units, num_resamples, seed: as those of `frechet_estimate`.
    """
    draws = _distinct_draws(unit_members(len(ours), units), num_resamples, seed)
    sets = chain([ours], (ours[clips] for clips in draws))
    return [moments_distance(moments(_samples(each)), reference) for each in sets]


def normal_estimate(draws: Sequence[float], count: int, units: int) -> Estimate:
    """A number of 0 or more with its standard normal interval, see `frechet_estimate`.

    Args:
        draws: the number itself, then that of each resample; with fewer than two of these the interval is unknown.
        count, units: as in `Estimate`.
    """
    value, *resampled = draws
    low = high = np.nan
    if len(resampled) > 1:
        margin = NORMAL_QUANTILE * float(np.std(resampled, ddof=1))
        low, high = max(value - margin, 0.0), value + margin
    return Estimate(value, low, high, count, units)


def frechet_difference(
    ours: ClipFeatures,
    base: ClipFeatures,
    theirs: ClipFeatures,
    *,
    units: Sequence[str] | None = None,
    num_resamples: int,
    seed: int = 0,
) -> Estimate:
    """The distance of `ours` to `theirs` minus that of `base`; each resample takes the same clips of all three.

    Arguments and the interval are as those of `frechet_estimate`.
    """

    def difference(clips: Tensor) -> float:
        to = _samples(theirs[clips])
        return frechet_distance(_samples(ours[clips]), to) - frechet_distance(_samples(base[clips]), to)

    value = difference(torch.arange(len(ours)))
    members = unit_members(len(ours), units)
    differences = [difference(clips) for clips in _distinct_draws(members, num_resamples, seed)]
    low = high = np.nan
    if len(differences) > 1:
        margin = NORMAL_QUANTILE * float(np.std(differences, ddof=1))
        low, high = value - margin, value + margin
    return Estimate(value, low, high, ours.shape[0] * ours.shape[1], len(members))


def halves_distance(features: ClipFeatures, seed: int = 0) -> float:
    """The distance between two random halves of one set's clips: a floor for any generator at that number of samples.

    Raises:
        ValueError: too few clips for two halves of two samples.
    """
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(features)))
    half = len(features) // 2
    return frechet_distance(_samples(features[order[:half]]), _samples(features[order[half : 2 * half]]))


def clip_features(frames: ClipFeatures) -> ClipFeatures:
    """Reduce each clip to one sample of 2 d numbers: [mean of frames, mean absolute difference of consecutive frames].

    The differences measure flicker and standstill, which no single frame shows.
    """
    return torch.cat([frames.mean(dim=1), frames.diff(dim=1).abs().mean(dim=1)], dim=-1)[:, None]


def _distinct_draws(members: Sequence[Int[np.ndarray, " members"]], num_resamples: int, seed: int) -> Iterator[Tensor]:
    """The clips of resamples that hold two units or more: what one unit varies by is not what units vary by."""
    for drawn in draw_units(len(members), num_resamples, seed):
        if len(np.unique(drawn)) > 1:
            yield torch.from_numpy(np.concatenate([members[unit] for unit in drawn]))


def _samples(features: ClipFeatures) -> Features:
    return rearrange(features, "clips frames features -> (clips frames) features")
