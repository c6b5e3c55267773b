"""Computes Gumbel noise that depends only on (seed, position, token id).

The numbers equal those of vLLM 0.26's GPU sampler: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3") gives a key from (seed, position) and a uniform number u from (key, token id); the noise is
-log(-log(1 - u)). On a CPU, NumPy computes the Philox words in pieces that stay in a core's cache; torch computes the
logarithms on every device.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int, UInt64
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_UNIFORM_STEP = float(np.float32(4.6566127342e-10))  # just below 2**-31, so that the largest product stays under 1

# 256 KiB of 64-bit words, so that the few buffers fit a core's L2 cache. Twice the size is half as fast.
_PIECE = 1 << 15
_MAX_AHEAD = 64
_PIECES_KEPT = 256  # 128 KiB each: 32 MiB at most


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


def position_key(seed: int, position: int) -> int:
    """The 32-bit key of a seed and position: `_philox` on Python integers, for few keys faster than on arrays."""
    c0, c1, c2, c3 = position & _MASK, 0, 0, 0
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0


def _token_words(
    keys: UInt64[np.ndarray, "rows 1"], ids: UInt64[np.ndarray, "#rows n"]
) -> UInt64[np.ndarray, "rows n"]:
    """`_philox(ids, keys, 0)` with NumPy; terms of the first two rounds in `ids` or `keys` alone are computed once."""
    first, second = (np.uint64(multiplier) for multiplier in _MULTIPLIERS)
    mask, half = np.uint64(_MASK), np.uint64(32)
    round_keys = [
        ((keys + np.uint64(r * _KEY_STEPS[0] & _MASK)) & mask, np.uint64(r * _KEY_STEPS[1] & _MASK))
        for r in range(_ROUNDS)
    ]
    by_id, by_key = first * ids, first * keys
    high = second * (by_id >> half)
    c0 = (high >> half) ^ round_keys[1][0]
    c2 = (by_id & mask) ^ ((by_key >> half) ^ round_keys[1][1])
    c1, c3 = np.broadcast_to(high & mask, c0.shape), np.broadcast_to(by_key & mask, c0.shape)
    low, high, kept_1, kept_3 = (np.empty_like(c0) for _ in range(4))
    for k0, k1 in round_keys[2:-1]:
        np.multiply(c0, first, out=low)
        np.multiply(c2, second, out=high)
        np.right_shift(high, half, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(low, half, out=c2)
        c2 ^= c3
        c2 ^= k1
        c1, c3 = np.bitwise_and(high, mask, out=kept_1), np.bitwise_and(low, mask, out=kept_3)
    np.multiply(c2, second, out=high)
    np.right_shift(high, half, out=c0)
    c0 ^= c1
    c0 ^= round_keys[-1][0]
    return c0


def _noise_of_words(words: Int[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Gumbel noise of 32-bit words held as signed integers."""
    folded = torch.where(words < 0, -words - 1, words)
    uniform = folded.float().mul_(_UNIFORM_STEP).clamp_(min=_UNIFORM_STEP)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _cpu_noise(keys: Sequence[int], ids: UInt64[np.ndarray, "#rows n"]) -> Float32[Tensor, "rows n"]:
    """The noise of each key at each id, computed piece by piece."""
    rows, length = len(keys), ids.shape[1]
    noise = torch.empty(rows, length)
    column = np.array(keys, np.uint64)[:, None]
    height, width = max(1, _PIECE // max(length, 1)), _PIECE
    for top in range(0, rows, height):
        taken = slice(top, top + height)
        own = ids if ids.shape[0] == 1 else ids[taken]
        for left in range(0, length, width):
            words = _token_words(column[taken], own[:, left : left + width])
            signed = torch.from_numpy(words.astype(np.uint32).view(np.int32))
            noise[taken, left : left + width] = _noise_of_words(signed)
    return noise


def gumbel_noise(
    seeds: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], token_ids: Int[Tensor, "rows candidates"]
) -> Float32[Tensor, "rows candidates"]:
    """Standard Gumbel noise of (seed, position, token id), each row with its own seed and position.

    A position is the index in the window of the token before the one to be sampled.
    """
    if token_ids.device.type == "cpu":
        return _cpu_noise(_keys(seeds, positions), token_ids.numpy().astype(np.uint64))
    return _tensor_noise(seeds, positions, token_ids)


def _tensor_noise(
    seeds: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], token_ids: Int[Tensor, "rows candidates"]
) -> Float32[Tensor, "rows candidates"]:
    """`gumbel_noise` on any device, in integers of 64 bits."""
    keys = _philox(positions & _MASK, seeds & _MASK, (seeds >> 32) & _MASK)
    words = _philox(token_ids, keys[:, None], torch.zeros_like(keys)[:, None])
    return _noise_of_words(torch.where(words >= 1 << 31, words - (1 << 32), words))


def vocabulary_noise(
    seeds: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], vocab_size: int
) -> Float32[Tensor, "rows vocab"]:
    """`gumbel_noise` of all token ids; callers must not write to the result.

    On a CPU, the noise of a small vocabulary for few seeds is computed for several consecutive positions at once and
    cached, so that many tokens share the overhead of some hundred array operations.
    """
    if seeds.device.type != "cpu":
        every = torch.arange(vocab_size, device=seeds.device)
        return gumbel_noise(seeds, positions, every.expand(len(seeds), -1))
    ahead = min(_PIECE // vocab_size, _MAX_AHEAD)
    if len(seeds.unique()) >= max(ahead, 1):
        return _cpu_noise(_keys(seeds, positions), np.arange(vocab_size, dtype=np.uint64)[None])
    rows = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        start = position // ahead * ahead
        rows.append(_run_of_noise(seed, start, ahead, vocab_size)[position - start])
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


@functools.lru_cache(maxsize=_PIECES_KEPT)
def _run_of_noise(seed: int, start: int, count: int, vocab_size: int) -> Float32[Tensor, "count vocab"]:
    keys = [position_key(seed, position) for position in range(start, start + count)]
    return _cpu_noise(keys, np.arange(vocab_size, dtype=np.uint64)[None])


def _keys(seeds: Tensor, positions: Tensor) -> list[int]:
    return [position_key(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
