"""Samples tokens with position-keyed noise: the noise depends on nothing but (seed, position, token id).

So a rollout's tokens are the same alone or in a batch, on every engine, and after a restart. The Gumbel-max rule
picks `argmax(logits / temperature + noise)` among the tokens that top-k and top-p leave; `terra.noise` draws.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    # Settings hold `SamplingParams`, and are checked before torch is imported.
    from torch import Tensor

_TOP_P_CANDIDATES = 1024
"""Number of likeliest tokens of a large vocabulary that top-p examines before it sorts the whole vocabulary."""

_LEAST_TEMPERATURE = 1e-6
"""The lowest temperature above 0: logits divided by a much lower one overflow float32."""

_SUM_TOLERANCE = 1e-5
"""A bound far above the rounding differences of float32 sums of probabilities in different orders."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token (greedy); 1 samples the model's distribution. The released Terra
            samples at 0.9. 0, or 1e-6 to 100.
        top_k: keep the k likeliest tokens; 0 keeps all. Below 2**31.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum; above 0, and 1 keeps all.

    Raises:
        ValueError: a value of another type or out of its range.
    """

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _check_type("temperature", self.temperature, Real, "a number")
        _check_type("top_k", self.top_k, Integral, "a whole number")
        _check_type("top_p", self.top_p, Real, "a number")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature: expected 0 to 100, got {reprlib.repr(self.temperature)}")
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"temperature: expected 0 (greedy) or at least 1e-6, got {self.temperature}")
        if not 0 <= self.top_k < 1 << 31:
            expected = "0 (all tokens) or more" if self.top_k < 0 else "a number below 2**31"
            raise ValueError(f"top_k: expected {expected}, got {reprlib.repr(self.top_k)}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected above 0, up to 1, got {reprlib.repr(self.top_p)}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p may exclude tokens; they have no effect on a greedy choice."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)


def _check_type(name: str, value: object, kind: type, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}: expected {expected}, got {reprlib.repr(value)}")


def window_seed(seed: int, window: int) -> int:
    """The seed of one window of a rollout, below 2**63, so that windows don't repeat each other's noise.

    For seeds below 2**32 it is numpy's of the two numbers, and for larger ones of the window's spawn key: numpy pads
    entropy with zeros, so that seed + 2**32 of window 0 would have that of the seed's window 1.

    Raises:
        ValueError: a negative seed or window.
    """
    if seed < 0 or window < 0:
        raise ValueError(f"seed and window: expected 0 or more, got {seed = }, {window = }")
    small = seed < 1 << 32 and window < 1 << 32
    sequence = np.random.SeedSequence([seed, window]) if small else np.random.SeedSequence(seed, spawn_key=(window,))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    params: SamplingParams,
    seeds: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Sample a token in each row; rows share `params` and have their own seed and position.

    Noise is computed only for the candidates that top-k and top-p leave.
    """
    from terra.noise import vocabulary_noise

    logits = logits.float()
    if params.greedy:
        return logits.argmax(-1)
    scaled = logits / params.temperature
    vocab = scaled.shape[-1]
    if not (0 < params.top_k < vocab or params.top_p < 1.0):
        return scaled.add_(vocabulary_noise(seeds, positions, vocab)).argmax(-1)
    if params.top_k or vocab < 2 * _TOP_P_CANDIDATES:
        return _sample_candidates(*_sorted(scaled, params), seeds, positions)
    values, candidates = scaled.topk(_TOP_P_CANDIDATES, dim=-1)
    highest = values[:, :1]
    before = _before((values - highest).exp() / (scaled - highest).exp().sum(-1, keepdim=True))
    chosen = _sample_candidates(values.masked_fill(before >= params.top_p, -math.inf), candidates, seeds, positions)
    left = ~_candidates_decide(values, before, params.top_p)
    if left.any():
        chosen[left] = _sample_candidates(*_sorted(scaled[left], params), seeds[left], positions[left])
    return chosen


def _sample_candidates(
    values: Float[Tensor, "rows candidates"],
    candidates: Int[Tensor, "rows candidates"],
    seeds: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    from terra.noise import gumbel_noise

    best = (values + gumbel_noise(seeds, positions, candidates)).argmax(-1, keepdim=True)
    return rearrange(candidates.gather(-1, best), "rows 1 -> rows")


def _sorted(
    scaled: Float[Tensor, "rows vocab"], params: SamplingParams
) -> tuple[Float[Tensor, "rows candidates"], Int[Tensor, "rows candidates"]]:
    """Candidates, likeliest first, with their ids; those outside top-p are -inf."""
    vocab = scaled.shape[-1]
    values, candidates = scaled.topk(min(params.top_k or vocab, vocab), dim=-1)
    return values.masked_fill(_before(values.softmax(-1)) >= params.top_p, -math.inf), candidates


def _before(probabilities: Float[Tensor, "rows candidates"]) -> Float[Tensor, "rows candidates"]:
    """The sum of the probabilities of all likelier candidates, for each candidate."""
    before = probabilities.cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    return before


def _candidates_decide(
    values: Float[Tensor, "rows candidates"], before: Float[Tensor, "rows candidates"], top_p: float
) -> Bool[Tensor, " rows"]:
    """Whether the set of tokens that reaches `top_p` ends within the candidates, whatever the rounding.

    It does not if a sum comes too close to `top_p`, or if tokens on both sides of the cut are equally likely.
    """
    kept = (before < top_p).sum(-1, keepdim=True)
    last, first_out = values.gather(-1, kept - 1), values.gather(-1, kept.clamp(max=values.shape[-1] - 1))
    clear = ((before - top_p).abs() >= _SUM_TOLERANCE).all(-1, keepdim=True)
    return rearrange((kept < values.shape[-1]) & (last > first_out) & clear, "rows 1 -> rows")
