"""Position-keyed sampling: the noise for a token depends on nothing but (seed, position, token id).

So a rollout's tokens are the same alone or in a batch, on every engine, and after a restart. The Gumbel-max rule
picks `argmax(logits / temperature + noise)` among the tokens that top-k and top-p leave. The noise comes from
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed as in the GPU sampler of
vLLM 0.26: a key from (seed, position), a uniform number from (key, token id), noise = -log(-log(1 - u)).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_UNIFORM_STEP = float(np.float32(4.6566127342e-10))  # just below 2**-31, so that the largest product stays under 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token (greedy); 1 samples the model's distribution. The released Terra
            samples at 0.9.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum; 1 keeps all.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise ValueError(f"temperature: expected 0 to 100, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 (all tokens) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected above 0, up to 1, got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether the choice is without noise."""
        return self.temperature == 0.0


def window_seed(seed: int, window: int) -> int:
    """The seed of one window of a rollout, below 2**63, so that windows don't repeat each other's noise.

    Raises:
        ValueError: a negative seed or window.
    """
    if seed < 0 or window < 0:
        raise ValueError(f"seed and window: expected 0 or more, got {seed = }, {window = }")
    return int(np.random.SeedSequence([seed, window]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _philox(counter: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """First output word of Philox4x32-10 for counters (counter, 0, 0, 0); all int64 holding 32-bit words.

    Products of two 32-bit words wrap in int64, which keeps every bit.
    """
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero, zero, zero
    k0, k1 = key_low, key_high
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = ((high >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((low >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = high & _MASK, low & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0


def gumbel_noise(
    seeds: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], token_ids: Int[Tensor, "rows candidates"]
) -> Float32[Tensor, "rows candidates"]:
    """Standard Gumbel noise of (seed, position, token id), each row with its own seed and position.

    `positions` is the place in the window of the token that was fed, the one before the token to be chosen.
    """
    keys = _philox(positions & _MASK, seeds & _MASK, (seeds >> 32) & _MASK)
    words = _philox(token_ids, keys[:, None], torch.zeros_like(keys)[:, None])
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    folded = torch.where(signed < 0, -signed - 1, signed)
    uniform = (folded.float() * _UNIFORM_STEP).clamp(min=_UNIFORM_STEP)
    return -torch.log(-torch.log1p(-uniform))


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    params: SamplingParams,
    seeds: Int[Tensor, " rows"],
    positions: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Choose a token in each row; rows share `params` and have their own seed and position.

    Noise is computed for the candidates alone that top-k and top-p leave.
    """
    logits = logits.float()
    if params.greedy:
        return logits.argmax(-1)
    scaled = logits / params.temperature
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab or params.top_p < 1.0:
        scaled, candidates = scaled.topk(params.top_k or vocab, dim=-1)
        before = scaled.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        scaled = scaled.masked_fill(before >= params.top_p, -math.inf)
    else:
        candidates = rearrange(torch.arange(vocab, device=logits.device), "vocab -> 1 vocab").expand_as(scaled)
    best = (scaled + gumbel_noise(seeds, positions, candidates)).argmax(-1, keepdim=True)
    return rearrange(candidates.gather(-1, best), "rows 1 -> rows")
