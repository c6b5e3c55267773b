"""Frechet distances between the feature distributions of two sets of frames or clips (Heusel et al. 2017)."""

from collections.abc import Iterator

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from terra.metrics.bootstrap import LEVEL, Estimate, resample
from terra.metrics.networks import Features, frechet_distance

ClipFeatures = Float[Tensor, "clips frames features"]


def frechet_estimate(ours: ClipFeatures, theirs: ClipFeatures, *, num_resamples: int, seed: int = 0) -> Estimate:
    """The Frechet distance between two sets, with a bootstrap interval; a resample draws the same clips in both sets.

    A resample has fewer distinct clips, which biases its distance upwards; the interval is therefore the estimate plus
    the resamples' deviations from their own mean. `count` is the number of samples, clips x frames, in each set.
    """
    value = frechet_distance(_samples(ours), _samples(theirs))
    draws = [
        frechet_distance(_samples(ours[chosen]), _samples(theirs[chosen]))
        for chosen in _distinct_draws(len(ours), num_resamples, seed)
    ]
    low, high = np.quantile(np.array(draws) - np.mean(draws), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, max(value + low, 0.0), value + high, ours.shape[0] * ours.shape[1])


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


def _distinct_draws(num_clips: int, num_resamples: int, seed: int) -> Iterator[Tensor]:
    """Draw resamples with at least two different clips, because one clip alone has no covariance."""
    for chosen in resample(num_clips, num_resamples, seed):
        if len(np.unique(chosen)) > 1:
            yield torch.from_numpy(chosen)


def _samples(features: ClipFeatures) -> Features:
    return rearrange(features, "clips frames features -> (clips frames) features")
