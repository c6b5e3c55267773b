"""Attention over the filled part of the KV cache, split over its keys (Dao et al. 2023, "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/).

Only the device knows how much of a cache is filled. The cache's keys are split over CTAs, so that all SMs read at once,
and the partial results are combined afterwards. The number of CTAs depends on the number of queries; the bits of a
query's result must not depend on it (batch invariance). So each block of keys gives one partial result of the online
softmax, and the partial results are merged one after the other in the order of the keys: by the one CTA that has all
blocks, or by a second kernel after many CTAs. Merging scales by powers of two, which rounds nothing.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from terra.engine.graph.kernels.epilogues import sum_split_k
from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.kernels.rope import load_rotated
from terra.engine.graph.kv_cache import KVTarget
from terra.engine.graph.quantization import FP8

_MAX_BLOCK_QUERIES = 64
_MIN_BLOCK_QUERIES = 8  # the least that tl.dot takes
_MAX_SPLITS = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionConfig:
    """Blocks of keys, and how they are shared out.

    Attributes:
        ctas_per_sm: CTAs that the keys are split over, for each SM.
        block_keys: keys of a block; part of the reduction order, so the same for every number of queries.
        stages: blocks under way in a CTA, at most.
        num_warps: warps of a CTA.
    """

    ctas_per_sm: int
    block_keys: int
    stages: int
    num_warps: int


_CONFIG = AttentionConfig(ctas_per_sm=2, block_keys=128, stages=3, num_warps=8)
"""With a cache in 16 or 32 bits."""

_CONFIG_FP8 = AttentionConfig(ctas_per_sm=2, block_keys=128, stages=6, num_warps=4)
"""With a cache in 8 bits. The stages leave no room for a third CTA beside two on an SM: so CTAs that begin early (PDL)
do not crowd on the SMs that happen to be free.
"""

_PARTIALS_AHEAD = 32
"""Partial results that are loaded together, before they are added one after the other."""


@triton.jit
def _load_kv(keys, values, base, key_pos, length, DIM: tl.constexpr, wanted=True, key=None, value=None):
    """Keys as rows and values as columns of these positions; where not `wanted`, the given ones.

    Positions that are not filled yet are loaded too: the cache's length is a multiple of BLOCK_KEYS, and what is there
    is finite (`terra.engine.graph.kv_cache.KVCache`), so that its softmax weight of 0 takes it out.
    """
    dim = tl.arange(0, DIM)
    key = tl.load(keys + base + key_pos[:, None] * DIM + dim[None, :], mask=wanted, other=key)
    return key, tl.load(values + base + dim[:, None] * length + key_pos[None, :], mask=wanted, other=value)


@triton.jit
def _scores(query, key, key_pos, causal_limit, scale, PRECISION: tl.constexpr):
    """Scores in units of log 2, of keys (rows) for queries (columns); -inf behind each query's `causal_limit`."""
    score = tl.dot(key.to(query.dtype), query, input_precision=PRECISION) * scale
    return tl.where(key_pos[:, None] <= causal_limit[None, :], score, float("-inf"))


@triton.jit
def _softmax_weights(score, max_log2):
    """Unnormalized softmax weights relative to 2 ** max_log2, which is -inf for a query that has seen no key yet."""
    return tl.exp2(score - tl.where(max_log2 == float("-inf"), 0.0, max_log2)[None, :])


@triton.jit
def _pv(value, weights, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of values by their softmax weights: rows are a head's elements, columns are queries."""
    return tl.dot(value.to(kind), weights.to(kind), input_precision=PRECISION)


@triton.jit
def _partial(query, key, value, key_pos, causal_limit, scale, PRECISION: tl.constexpr):
    """A block's partial result for each query: weighted sum of values, max_log2, sum of softmax weights.

    `max_log2` is the largest score rounded up to a whole number.
    """
    score = _scores(query, key, key_pos, causal_limit, scale, PRECISION)
    max_log2 = tl.ceil(tl.max(score, 0))
    weights = _softmax_weights(score, max_log2)
    return _pv(value, weights, query.dtype, PRECISION), max_log2, tl.sum(weights, 0)


@triton.jit
def _power_of_2(exponent):
    """2 to whole numbers up to 127, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _merge_online_softmax(mixed, max_log2, weight, next_mixed, next_max_log2, next_weight):
    """Two partial results in one (Milakov & Gimelshein 2018, arXiv 1805.02867).

    Scales are powers of two, so that no factor rounds: bits depend on nothing but the order of the partial results.
    """
    higher = tl.maximum(max_log2, next_max_log2)
    own, other = _power_of_2(max_log2 - higher), _power_of_2(next_max_log2 - higher)
    weight = weight * own + next_weight * other
    return mixed * own[None, :] + next_mixed * other[None, :], higher, weight


@triton.jit
def _split_size(total, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys of each split; the last ones may have none."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _attend(
    queries, cosine, sine, keys, values, start, partials, sums,
    scale, output_scale, length, width, num_queries, slots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTIALS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    QKV_SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA: a slot, a head of its cache, a block of queries and a split of the keys.

    HEADS are the cache's, each shared by GROUP query heads. With PARTIALS == 1 this CTA has all keys and stores the
    result times `output_scale`, else it stores a partial result for each of its blocks. With QKV_SPLITS the queries are
    still split-K parts of the QKV projection, one token a slot: the CTA sums them and applies RoPE, and the one with
    the last key stores the new key and value in the cache. A cache in 8 bits is multiplied as float16, which has room
    for E4M3, or with queries in float32 as float32.
    """
    slot, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(2)
    query_idx = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    token_idx = query_idx // GROUP  # of the slot's tokens in this pass: the first one, then drafts
    used = token_idx < width
    # Read before the wait: `start` is written by `accept` at the end of the PREVIOUS graph replay, never in this pass.
    first = tl.load(start + slot)
    causal_limit = first + token_idx  # the last key that a query attends to: its own
    dim = tl.arange(0, DIM)
    total = first + width
    size = _split_size(total, SPLITS, BLOCK_KEYS)
    begin = split * size
    if begin >= total:
        wait_for_inputs(PDL)
        return
    end = tl.minimum(begin + size, total)
    base = (slot * HEADS + head).to(tl.int64) * length * DIM
    key_pos = begin + tl.arange(0, BLOCK_KEYS)
    # Read before the wait: keys and values below `first` are from earlier passes. What this pass writes at `first` and
    # behind may not be there yet; a block that reaches so far is loaded again after the wait.
    key, value = _load_kv(keys, values, base, key_pos, length, DIM)
    # Queries as the QKV projection gives them: slot, token, head of the cache, head of its group.
    query_at = ((slot * width + token_idx) * HEADS + head) * GROUP + query_idx % GROUP
    wait_for_inputs(PDL)
    if QKV_SPLITS:
        features: tl.constexpr = (GROUP + 2) * HEADS * DIM
        if end == total:
            own = (GROUP * HEADS + head) * DIM + dim
            new_key = load_rotated(
                queries, cosine, sine, slot, GROUP * HEADS + head, dim, dim < DIM, first, slots, features, DIM,
                QKV_SPLITS,
            )  # fmt: skip
            new_value = sum_split_k(queries, slot, own + HEADS * DIM, dim < DIM, slots, features, QKV_SPLITS)
            new_value = new_value.to(cosine.dtype.element_ty)
            tl.store(keys + base + first * DIM + dim, new_key.to(keys.dtype.element_ty))
            tl.store(values + base + dim * length + first, new_value.to(values.dtype.element_ty))
            tl.debug_barrier()  # before other threads read them
        query = load_rotated(
            queries, cosine, sine, slot, (head * GROUP + query_idx % GROUP)[None, :], dim[:, None], used[None, :],
            first, slots, features, DIM, QKV_SPLITS,
        )  # fmt: skip
    else:
        query = tl.load(queries + query_at[None, :] * DIM + dim[:, None], mask=used[None, :], other=0.0)
    # Masked loads instead of an `if`, which would hide from the compiler that these are of 8 bits: it would sum this
    # block in another order than the next ones.
    key, value = _load_kv(keys, values, base, key_pos, length, DIM, begin + BLOCK_KEYS > first, key, value)
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype != tl.float32:
        query = query.to(tl.float16)
    mixed, max_log2, weight = _partial(query, key, value, key_pos, causal_limit, scale, PRECISION)
    if begin + BLOCK_KEYS < end:  # the loop's pipeline begins to load only if there is a block left
        for at in range(begin + BLOCK_KEYS, end, BLOCK_KEYS):
            key_pos = at + tl.arange(0, BLOCK_KEYS)
            key, value = _load_kv(keys, values, base, key_pos, length, DIM)
            next_mixed, next_max_log2, next_weight = _partial(
                query, key, value, key_pos, causal_limit, scale, PRECISION
            )
            if PARTIALS == 1:
                mixed, max_log2, weight = _merge_online_softmax(
                    mixed, max_log2, weight, next_mixed, next_max_log2, next_weight
                )
            else:
                partial_at = (at // BLOCK_KEYS - 1) * num_queries + query_at
                _store_partial(partials, sums, partial_at, used, mixed, max_log2, weight, num_queries, PARTIALS, DIM)
                mixed, max_log2, weight = next_mixed, next_max_log2, next_weight
    if PARTIALS == 1:
        mean = (mixed / weight[None, :] * output_scale).to(partials.dtype.element_ty)
        tl.store(partials + query_at[None, :] * DIM + dim[:, None], mean, mask=used[None, :])
    else:
        partial_at = (end - 1) // BLOCK_KEYS * num_queries + query_at
        _store_partial(partials, sums, partial_at, used, mixed, max_log2, weight, num_queries, PARTIALS, DIM)


@triton.jit
def _store_partial(
    partials, sums, at, used, mixed, max_log2, weight, num_queries, PARTIALS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    tl.store(partials + at[None, :] * DIM + tl.arange(0, DIM)[:, None], mixed, mask=used[None, :])
    tl.store(sums + at, max_log2, mask=used)
    tl.store(sums + PARTIALS * num_queries + at, weight, mask=used)


@triton.jit
def _combine(
    partials, sums, attended, start, output_scale, width, num_queries, queries_per_token,
    DIM: tl.constexpr, PARTIALS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query's result times `output_scale`, merged from its partial results in the order of the keys.

    The bits are those of a CTA that merges all blocks as it goes: powers of two round nothing, so it does not matter
    whether partial results are scaled to the running maximum or at once to the final one.
    """
    query = tl.program_id(0)
    # Read before the wait: `start` is written by `accept` at the end of the PREVIOUS graph replay, never in this pass.
    total = tl.load(start + query // queries_per_token // width).to(tl.int32) + width
    count = tl.cdiv(total, BLOCK_KEYS)
    partial = tl.arange(0, PADDED)
    dim = tl.arange(0, DIM)
    wait_for_inputs(PDL)
    at = partial * num_queries + query
    max_log2 = tl.max(tl.load(sums + at, mask=partial < count, other=float("-inf")), 0)
    mixed = tl.zeros([DIM], tl.float32)
    weight = 0.0
    for first in range(0, count, AHEAD):
        loaded = ()
        for step in tl.static_range(AHEAD):
            used = first + step < count
            partial_at = (first + step) * num_queries + query
            loaded = loaded + (  # noqa: RUF005
                tl.load(partials + partial_at * DIM + dim, mask=used, other=0.0),
                tl.load(sums + partial_at, mask=used, other=float("-inf")),
                tl.load(sums + PARTIALS * num_queries + partial_at, mask=used, other=0.0),
            )
        for step in tl.static_range(AHEAD):
            by = _power_of_2(loaded[3 * step + 1] - max_log2)
            mixed += loaded[3 * step] * by
            weight += loaded[3 * step + 2] * by
    tl.store(attended + query * DIM + dim, (mixed / weight * output_scale).to(attended.dtype.element_ty))


def cached_attention(
    queries: Float[Tensor, "slots width heads dim"],
    target: KVTarget,
    limits: DeviceLimits,
    output_scale: float | None = None,
) -> Float[Tensor, "slots width heads dim"]:
    """`terra.engine.graph.reference.cached_attention`; `dim` is a power of two, and what the cache holds is finite.

    A query's bits do not depend on how many slots there are and how many tokens each has.
    """
    return _launch(3 * (queries,), 0, queries.shape, queries.dtype, target, limits, output_scale)


def rope_store_attention(
    qkv_parts: Float32[Tensor, "splits slots features"],
    target: KVTarget,
    limits: DeviceLimits,
    output_scale: float | None = None,
) -> Float[Tensor, "slots 1 heads dim"]:
    """`terra.engine.graph.kernels.rope.rope_and_store` and `cached_attention` in one kernel, for one token a slot."""
    slots, kv_heads, _, dim = target.keys.shape
    shape = torch.Size((slots, 1, qkv_parts.shape[-1] // dim - 2 * kv_heads, dim))
    inputs = qkv_parts, target.cosine, target.sine
    return _launch(inputs, len(qkv_parts), shape, target.cosine.dtype, target, limits, output_scale)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    qkv_splits: int,
    shape: torch.Size,
    dtype: torch.dtype,
    target: KVTarget,
    limits: DeviceLimits,
    output_scale: float | None,
) -> Tensor:
    """Attention of queries of this shape and type, which are the first input or are made from the inputs."""
    keys, values, start = target.keys, target.values, target.start
    slots, width, heads, dim = shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    config = _CONFIG if keys.element_size() > 1 else _CONFIG_FP8
    if length % config.block_keys:
        raise ValueError(f"cache length: expected a multiple of BLOCK_KEYS = {config.block_keys}, got {length}")
    block = min(_MAX_BLOCK_QUERIES, max(_MIN_BLOCK_QUERIES, triton.next_power_of_2(width * group)))
    if keys.element_size() == 1 or dtype == torch.float32:
        block = _MIN_BLOCK_QUERIES  # wider tiles reduce in another order, except in 16 bits (batch invariance)
    blocks = triton.cdiv(width * group, block)
    max_splits = min(_MAX_SPLITS, triton.cdiv(length, config.block_keys))
    splits = max(1, min(config.ctas_per_sm * limits.num_sms // (slots * kv_heads * blocks), max_splits))
    num_partials = triton.cdiv(length, config.block_keys) if splits > 1 else 1
    num_queries = slots * width * heads
    attended = torch.empty(shape, dtype=dtype if output_scale is None else FP8, device=keys.device)
    partials = sums = attended
    if num_partials > 1:
        partials = torch.empty(num_partials, num_queries, dim, dtype=torch.float32, device=keys.device)
        sums = torch.empty(2, num_partials, num_queries, dtype=torch.float32, device=keys.device)
    element_size = max(keys.element_size(), dtype.itemsize)
    fitting = limits.shared_memory // (2 * config.block_keys * dim * element_size)
    shapes = {"DIM": dim, "PARTIALS": num_partials, "BLOCK_KEYS": config.block_keys}
    _attend[(slots * kv_heads, blocks, splits)](
        *inputs, keys, values, start, partials, sums,
        dim**-0.5 * _LOG2_E, output_scale or 1.0, length, width, num_queries, slots,
        HEADS=kv_heads, GROUP=group, SPLITS=splits, BLOCK_QUERIES=block, PRECISION="ieee", QKV_SPLITS=qkv_splits,
        **shapes, num_warps=config.num_warps, num_stages=max(1, min(config.stages, fitting)), **limits.launch_options,
    )  # fmt: skip
    if num_partials > 1:
        _combine[(num_queries,)](
            partials, sums, attended, start, output_scale or 1.0, width, num_queries, heads,
            PADDED=triton.next_power_of_2(num_partials), AHEAD=_PARTIALS_AHEAD, **shapes,
            num_warps=2, **limits.launch_options,
        )  # fmt: skip
    return attended
