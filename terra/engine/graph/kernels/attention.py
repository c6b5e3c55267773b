"""Attention over the filled part of the KV cache, split over its keys (Dao et al. 2023, "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/).

Only the device knows how much of a cache is filled. The cache's keys are split over CTAs, so that all SMs read at once,
and the partial results are combined afterwards. The number of CTAs depends on the number of queries; the bits of a
query's result must not depend on it (batch invariance). So each block of keys gives one partial result of the online
softmax. Those of a bundle of consecutive blocks (a KV chunk) are merged one after the other in the order of the keys,
and then the bundles' results. Who merges makes no difference, since merging scales by powers of two, which rounds
nothing: one CTA that has all blocks (many slots), `_combine` behind CTAs that wrote a result for each block (few
queries, or few keys), or one CTA for each bundle and `_combine` for the bundles (many queries).

Few queries of a head (`_attend`) are the N dimension of the MMA, so that 8 of them fill it. Many (`_attend_wide`) are
the M dimension: softmax weights stay in registers (Dao 2023, "FlashAttention-2", arXiv 2307.08691). In float32
all passes take `_attend`.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from terra.engine.graph.kernels.epilogues import sum_split_k
from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.kernels.rope import load_rotated
from terra.engine.graph.kv_cache import SHARED_MULTIPLE, KVTarget
from terra.engine.graph.quantization import FP8

_MAX_BLOCK_QUERIES = 64  # of the kernel of few queries
_MIN_BLOCK_QUERIES = 8  # the least that tl.dot takes
_MAX_SPLITS = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionConfig:
    """Blocks of keys, and how they are shared out.

    Attributes:
        ctas_per_sm: CTAs that the keys are split over, for each SM.
        block_keys: keys of a block; part of the reduction order, so the same for every number of queries, here and in
            `_attend_wide`.
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


@dataclass(frozen=True)
class WideConfig:
    """How many queries that share a head of the cache are attended to by one CTA.

    Attributes:
        block_queries: queries of a CTA.
        ctas_per_sm: up to so many CTAs for each SM, a CTA has one block of keys; with more keys, or where slots share
            keys, it has a bundle.
        stages: blocks under way in a CTA, at most.
        num_warps: warps of a CTA.
    """

    block_queries: int
    ctas_per_sm: int
    stages: int
    num_warps: int


_WIDE = WideConfig(block_queries=64, ctas_per_sm=2, stages=3, num_warps=4)
"""Where no slots share keys, passes with fewer than 64 queries for a head of the cache take the other kernel."""

_WIDER = WideConfig(block_queries=128, ctas_per_sm=2, stages=3, num_warps=8)
"""For several slots: each key is read by half as many CTAs. Each warp has 16 queries as in `_WIDE`, and so the same
bits (compared on an H200). A slot alone has too few CTAs then."""

_MIN_WIDER_BLOCKS = 16
"""Whole blocks of `_WIDER`, over all slots and heads of the cache, from which on it is faster; measured on an H200."""

_BUNDLE = SHARED_MULTIPLE // _CONFIG.block_keys  # slots share whole bundles
"""Blocks of keys whose partial results are added up before they are added to those of other bundles; part of the
reduction order, so the same for every number of queries.
"""

_FINE_BUNDLE, _FINE_BLOCKS = 4, 16
"""The first `_FINE_BLOCKS` blocks of keys are in smaller bundles, of `_FINE_BUNDLE` blocks: where keys are few, one
slot's bundles would be too few CTAs, each with a long chain of blocks. `_FINE_BLOCKS` is a multiple of both sizes, and
`_BUNDLE` of the smaller, so that a shared prefix (a multiple of SHARED_MULTIPLE keys) ends where a bundle ends.
"""

_BLOCKS_AHEAD, _WIDE_BLOCKS_AHEAD = 32, 8
"""Blocks' partial results that `_combine` loads together before it adds them. Behind `_attend_wide` they are fewer: a
masked load takes its time, too, and other queries hide the latency.
"""

_WIDE_AHEAD = 16
"""Partial results of whole bundles that `_combine` loads together before it adds them; half as many for queries that
have no more. Measured on an H100.
"""

_COMBINED_ELEMENTS = 128
"""Elements, at most, of the queries that a CTA of `_combine` has behind `_attend_wide` (one query at least): each
thread of its warp reads 16 bytes.
"""


@triton.jit
def _load_keys(keys, base, key_pos, DIM: tl.constexpr, wanted=True, other=None):
    """Keys of these positions as rows; where not `wanted`, the others.

    Positions that are not filled yet are loaded too: the cache's length is a multiple of BLOCK_KEYS, and what is there
    is finite (`terra.engine.graph.kv_cache.KVCache`), so that its softmax weight of 0 takes it out.
    """
    return tl.load(keys + base + key_pos[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=wanted, other=other)


@triton.jit
def _load_values(values, base, key_pos, length, DIM: tl.constexpr, wanted=True, other=None):
    """Values of these positions as columns, see `_load_keys`."""
    return tl.load(values + base + tl.arange(0, DIM)[:, None] * length + key_pos[None, :], mask=wanted, other=other)


@triton.jit
def _dot(rows, columns, COLUMNS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """The products of `rows` with `columns`, which are rows, too; COLUMNS_FIRST makes them the MMA's M dimension."""
    if COLUMNS_FIRST:
        return tl.trans(tl.dot(columns, tl.trans(rows), input_precision=PRECISION))
    return tl.dot(rows, tl.trans(columns), input_precision=PRECISION)


@triton.jit
def _partial(
    query, key, value, key_pos, causal_limit, scale,
    MASKED: tl.constexpr, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's partial result for each query (row): weighted sum of values, max_log2, sum of softmax weights.

    `max_log2` is the largest score in units of log 2, rounded up to a whole number. With MASKED each query's keys end
    at its `causal_limit`. KEYS_FIRST takes few queries (the MMA's N dimension); otherwise softmax weights stay in
    registers. Both give the same bits: weights are a fused multiply-add, called by name, and are summed in units of
    2 ** -23 as integers, so that the order of that sum, which follows from the layout, does not matter.
    """
    score = _dot(query, key.to(query.dtype), KEYS_FIRST, PRECISION)
    if MASKED:
        score = tl.where(key_pos[None, :] <= causal_limit[:, None], score, float("-inf"))
    max_log2 = tl.ceil(tl.max(score, 1) * scale)
    reference = tl.where(max_log2 == float("-inf"), 0.0, max_log2)  # -inf: this query sees no key
    weights = tl.exp2(tl.math.fma(score, scale, tl.broadcast_to(-reference[:, None], score.shape)))
    one: tl.constexpr = 0x3F800000  # the bits of 1.0; between 1.0 and 2.0 bits are linear
    weight = tl.sum((weights + 1.0).to(tl.int32, bitcast=True) - one, 1).to(tl.float32) * 2.0**-23
    kind: tl.constexpr = query.dtype
    return _dot(weights.to(kind), value.to(kind), KEYS_FIRST, PRECISION), max_log2, weight


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
    return mixed * own[:, None] + next_mixed * other[:, None], higher, weight


@triton.jit
def _split_size(total, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys of each split; the last ones may have none."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _begins_bundle(block, BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr):
    """Whether a block of keys is the first one of its bundle."""
    coarse = block - FINE_BLOCKS
    return tl.where(coarse < 0, block % FINE_BUNDLE, coarse % BUNDLE) == 0


@triton.jit
def _first_block(bundle, BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr):
    """The first block of keys of a bundle."""
    fine: tl.constexpr = FINE_BLOCKS // FINE_BUNDLE
    return tl.where(bundle < fine, bundle * FINE_BUNDLE, FINE_BLOCKS + (bundle - fine) * BUNDLE)


@triton.jit
def _num_bundles(blocks, BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr):
    """How many bundles so many blocks of keys are."""
    of_fine = tl.cdiv(tl.minimum(blocks, FINE_BLOCKS), FINE_BUNDLE)
    return of_fine + tl.cdiv(tl.maximum(blocks - FINE_BLOCKS, 0), BUNDLE)


@triton.jit
def _cache_of(slot, holder, shared, SHARED: tl.constexpr):
    """The slot that has the first keys of this one, and how many these are; see `SharedKeys`."""
    if SHARED:
        return tl.load(holder + slot).to(tl.int32), tl.load(shared + slot).to(tl.int32)
    else:
        return slot, 0


@triton.jit
def _attend(
    queries, cosine, sine, keys, values, start, holder, shared, partials, sums,
    scale, output_scale, length, width, num_queries, slots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTIALS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr,
    QKV_SPLITS: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA: a slot, a head of its cache, a block of few queries and a split of the keys.

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
    first_slot, num_first = _cache_of(slot, holder, shared, SHARED)
    base_of_first = (first_slot * HEADS + head).to(tl.int64) * length * DIM
    block_base = tl.where(begin < num_first, base_of_first, base)
    key_pos = begin + tl.arange(0, BLOCK_KEYS)
    # Read before the wait: keys and values below `first` are from earlier passes. What this pass writes at `first` and
    # behind may not be there yet; a block that reaches so far is loaded again after the wait.
    key = _load_keys(keys, block_base, key_pos, DIM)
    value = _load_values(values, block_base, key_pos, length, DIM)
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
            queries, cosine, sine, slot, (head * GROUP + query_idx % GROUP)[:, None], dim[None, :], used[:, None],
            first, slots, features, DIM, QKV_SPLITS,
        )  # fmt: skip
    else:
        query = tl.load(queries + query_at[:, None] * DIM + dim[None, :], mask=used[:, None], other=0.0)
    # Masked loads instead of an `if`, which would hide from the compiler that these are of 8 bits: it would sum this
    # block in another order than the next ones.
    again = begin + BLOCK_KEYS > first
    key = _load_keys(keys, block_base, key_pos, DIM, again, key)
    value = _load_values(values, block_base, key_pos, length, DIM, again, value)
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype != tl.float32:
        query = query.to(tl.float16)
    mixed, max_log2, weight = _partial(query, key, value, key_pos, causal_limit, scale, True, True, PRECISION)
    all_mixed, all_max_log2, all_weight = mixed, max_log2, weight  # of whole bundles; the first of them follows
    if PARTIALS == 1:
        all_mixed, all_weight = tl.zeros_like(mixed), tl.zeros_like(weight)
        all_max_log2 = tl.full(max_log2.shape, float("-inf"), tl.float32)
    if begin + BLOCK_KEYS < end:  # the loop's pipeline begins to load only if there is a block left
        for at in range(begin + BLOCK_KEYS, end, BLOCK_KEYS):
            key_pos = at + tl.arange(0, BLOCK_KEYS)
            block_base = tl.where(at < num_first, base_of_first, base)
            key = _load_keys(keys, block_base, key_pos, DIM)
            value = _load_values(values, block_base, key_pos, length, DIM)
            next_mixed, next_max_log2, next_weight = _partial(
                query, key, value, key_pos, causal_limit, scale, True, True, PRECISION
            )
            if PARTIALS == 1:
                # A bundle that is complete is merged into the others. A partial result with the maximum -inf adds 0:
                # this way there is no branch.
                complete = _begins_bundle(at // BLOCK_KEYS, BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
                all_mixed, all_max_log2, all_weight = _merge_online_softmax(
                    all_mixed, all_max_log2, all_weight, mixed, tl.where(complete, max_log2, float("-inf")), weight
                )
                mixed, max_log2, weight = _merge_online_softmax(
                    mixed, tl.where(complete, float("-inf"), max_log2), weight,
                    next_mixed, next_max_log2, next_weight,
                )  # fmt: skip
            else:
                partial_at = (at // BLOCK_KEYS - 1) * num_queries + query_at
                _store_partial(partials, sums, partial_at, used, mixed, max_log2, weight, num_queries, PARTIALS, DIM)
                mixed, max_log2, weight = next_mixed, next_max_log2, next_weight
    if PARTIALS == 1:
        mixed, max_log2, weight = _merge_online_softmax(all_mixed, all_max_log2, all_weight, mixed, max_log2, weight)
        mean = (mixed / weight[:, None] * output_scale).to(partials.dtype.element_ty)
        tl.store(partials + query_at[:, None] * DIM + dim[None, :], mean, mask=used[:, None])
    else:
        partial_at = (end - 1) // BLOCK_KEYS * num_queries + query_at
        _store_partial(partials, sums, partial_at, used, mixed, max_log2, weight, num_queries, PARTIALS, DIM)


@triton.jit
def _mma_order(position):
    """Which element of 32 stands at each position where an MMA of few queries takes operands from 8 bits.

    It reads words of four values, and multiplies the first two of each word in one instruction along K, the others in
    the next. What is multiplied in one instruction determines the bits.
    """
    in_16 = position % 16
    return position // 32 * 32 + in_16 // 2 * 4 + position // 16 % 2 * 2 + in_16 % 2


@triton.jit
def _in_mma_order(tile):
    """A tile of two dimensions with the second one in `_mma_order`; no value leaves its thread."""
    words = tile.reshape(tile.shape[0], tile.shape[1] // 32, 8, 2, 2)
    return words.permute(0, 1, 3, 2, 4).reshape(tile.shape[0], tile.shape[1])


@triton.jit
def _merge_blocks(
    mixed, max_log2, weight, query, keys, values, row, begin, end, causal_limit, scale,
    MASKED: tl.constexpr, LENGTH: tl.constexpr, DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, FP8: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A partial result, merged with those of the blocks from `begin` to `end`.

    `row` numbers the slot's head. With TMA `keys` and `values` are descriptors of the cache as matrices, of which it
    reads tiles; otherwise they are pointers. LENGTH is a constant, so that addresses take few instructions and
    registers.
    """
    order = tl.arange(0, BLOCK_KEYS)
    if FP8:
        order = _mma_order(order)
    for at in range(begin, end, BLOCK_KEYS):
        if TMA:
            key, value = keys.load([row * LENGTH + at, 0]), values.load([row * DIM, at])
        else:
            base = row.to(tl.int64) * (LENGTH * DIM)
            key = _load_keys(keys, base + at * DIM, order, DIM)
            value = _load_values(values, base + at, tl.arange(0, BLOCK_KEYS), LENGTH, DIM)
        if FP8:
            key, value = _in_mma_order(key.to(query.dtype)), _in_mma_order(value.to(query.dtype))
        next_mixed, next_max_log2, next_weight = _partial(
            query, key, value, order, causal_limit - at, scale, MASKED, False, "ieee"
        )
        mixed, max_log2, weight = _merge_online_softmax(mixed, max_log2, weight, next_mixed, next_max_log2, next_weight)
    return mixed, max_log2, weight


@triton.jit
def _shared_prefix(group, holder, shared, slots, SLOTS: tl.constexpr):
    """Keys of the prefix that all slots of a group have in one holder's cache; 0 if they have several holders."""
    # Scalar loads, not a reduction over a vector: the compiler must see that all threads have the same number.
    first = group * SLOTS
    common, of_first = tl.load(shared + first), tl.load(holder + first)
    for step in tl.static_range(1, SLOTS):
        slot = tl.minimum(first + step, slots - 1)
        common = tl.where(tl.load(holder + slot) == of_first, tl.minimum(common, tl.load(shared + slot)), 0)
    return common.to(tl.int32)


@triton.jit
def _attend_wide(
    queries, keys, values, start, holder, shared, partials, sums, scale, width, num_queries, slots,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PARTIALS: tl.constexpr, SINGLES: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA: a slot, a head of its cache, a block of many queries, and one partial result; in 16 or 8 bits.

    A partial result is a bundle's, or a block's where keys are few (SINGLES). With SHARED slots may have their first
    keys in another slot. With SLOTS > 1 the first CTAs are those of groups of so many slots: if all of a group have
    their first keys in common, such a CTA takes the queries of all of them for a bundle of these keys, and the CTAs of
    single slots leave these bundles out.
    """
    place, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    partial = tl.program_id(2)
    query_idx = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    # `start` is read before the wait, as in `_attend`.
    if SLOTS > 1:
        groups = tl.cdiv(slots, SLOTS)
        of_group = place < groups
        slot = tl.where(of_group, place * SLOTS, place - groups)
        slot_of_query = slot + query_idx // (width * GROUP)
        token_idx = query_idx // GROUP % width
        used = (query_idx < tl.where(of_group, SLOTS, 1) * width * GROUP) & (slot_of_query < slots)
        common = _shared_prefix(slot // SLOTS, holder, shared, slots, SLOTS)
        first = tl.load(start + slot).to(tl.int32)
        total = tl.where(of_group, common, first + width)
        first = tl.where(of_group, common, first)  # all queries see all the keys that they have in common
        elsewhere = tl.where(of_group, 0, common)
    else:
        slot, slot_of_query = place, place
        token_idx = query_idx // GROUP
        used = token_idx < width
        first = tl.load(start + slot).to(tl.int32)
        total = first + width
        elsewhere = 0
    if _are_single(total, SINGLES, BLOCK_KEYS):
        first_block, behind = partial, partial + 1
    else:
        # The small bundles usually start last (CTAs start in the grid's order), on the SMs that are free first.
        count = _num_bundles(tl.cdiv(total, BLOCK_KEYS), BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
        partial = tl.where(partial < count, count - 1 - partial, partial)
        first_block = _first_block(partial, BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
        behind = _first_block(partial + 1, BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
    begin, behind = first_block * BLOCK_KEYS, behind * BLOCK_KEYS
    end = tl.minimum(behind, total)
    first_slot, num_first = _cache_of(slot, holder, shared, SHARED)
    row = tl.where(begin < num_first, first_slot, slot) * HEADS + head
    wait_for_inputs(PDL)
    if (begin >= total) | (begin < elsewhere):
        return
    query_at = ((slot_of_query * width + token_idx) * HEADS + head) * GROUP + query_idx % GROUP
    dim = tl.arange(0, DIM)
    if FP8:
        dim = _mma_order(dim)
    query = tl.load(queries + query_at[:, None] * DIM + dim[None, :], mask=used[:, None], other=0.0)
    if FP8:
        query = query.to(tl.float16)
    mixed = tl.zeros([BLOCK_QUERIES, DIM], tl.float32)
    max_log2 = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], tl.float32)
    # Blocks below `first` are seen by all queries. The compiler must see that blocks begin at multiples of BLOCK_KEYS:
    # so not `end`.
    seen_by_all = tl.maximum(begin, tl.minimum(behind, first // BLOCK_KEYS * BLOCK_KEYS))
    mixed, max_log2, weight = _merge_blocks(
        mixed, max_log2, weight, query, keys, values, row, begin, seen_by_all, first + token_idx, scale,
        False, LENGTH, DIM, BLOCK_KEYS, FP8, TMA,
    )  # fmt: skip
    mixed, max_log2, weight = _merge_blocks(
        mixed, max_log2, weight, query, keys, values, row, seen_by_all, end, first + token_idx, scale,
        True, LENGTH, DIM, BLOCK_KEYS, FP8, TMA,
    )  # fmt: skip
    partial_at = partial * num_queries + query_at
    _store_partial(partials, sums, partial_at, used, mixed, max_log2, weight, num_queries, PARTIALS, DIM)


@triton.jit
def _are_single(total, SINGLES: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Whether each partial result of a slot with `total` keys is a block's: up to SINGLES blocks; None: always."""
    if SINGLES is None:
        return True
    elif SINGLES == 0:
        return False
    else:  # the compiler takes no code behind a return
        return total <= SINGLES * BLOCK_KEYS


@triton.jit
def _store_partial(
    partials, sums, at, used, mixed, max_log2, weight, num_queries, PARTIALS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    tl.store(partials + at[:, None] * DIM + tl.arange(0, DIM)[None, :], mixed, mask=used[:, None])
    tl.store(sums + at, max_log2, mask=used)
    tl.store(sums + PARTIALS * num_queries + at, weight, mask=used)


@triton.jit
def _combine(
    partials, sums, attended, start, output_scale, width, num_queries, queries_per_token,
    QUERIES: tl.constexpr, DIM: tl.constexpr, PARTIALS: tl.constexpr, PADDED: tl.constexpr, SINGLES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr,
    BLOCKS_AHEAD: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The results of QUERIES queries of one token times `output_scale`, merged from their partial results in the order
    of the keys.

    The bits are those of a CTA that merges all blocks as it goes: powers of two round nothing, so it does not matter
    whether partial results are scaled to the running maximum or at once to the final one.
    """
    first = tl.program_id(0) * QUERIES
    # Read before the wait: `start` is written by `accept` at the end of the PREVIOUS graph replay, never in this pass.
    total = tl.load(start + first // queries_per_token // width).to(tl.int32) + width
    blocks = tl.cdiv(total, BLOCK_KEYS)
    single = _are_single(total, SINGLES, BLOCK_KEYS)
    count = blocks
    if not single:
        count = _num_bundles(blocks, BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
    partial = tl.arange(0, PADDED)[:, None]
    query = first + tl.arange(0, QUERIES)
    wait_for_inputs(PDL)
    at = partial * num_queries + query[None, :]
    max_log2 = tl.max(tl.load(sums + at, mask=partial < count, other=float("-inf")), 0)
    if single:
        mixed, weight = _add_partials(
            partials, sums, query, num_queries, count, max_log2,
            DIM, PARTIALS, BUNDLE, FINE_BUNDLE, FINE_BLOCKS, BLOCKS_AHEAD,
        )  # fmt: skip
    elif count <= AHEAD // 2:
        mixed, weight = _add_partials(
            partials, sums, query, num_queries, count, max_log2, DIM, PARTIALS, 1, 1, 0, AHEAD // 2
        )
    else:
        mixed, weight = _add_partials(
            partials, sums, query, num_queries, count, max_log2, DIM, PARTIALS, 1, 1, 0, AHEAD
        )
    mean = (mixed / weight[:, None] * output_scale).to(attended.dtype.element_ty)
    tl.store(attended + query[:, None] * DIM + tl.arange(0, DIM)[None, :], mean)


@triton.jit
def _add_partials(
    partials, sums, query, num_queries, count, max_log2,
    DIM: tl.constexpr, PARTIALS: tl.constexpr,
    BUNDLE: tl.constexpr, FINE_BUNDLE: tl.constexpr, FINE_BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Weighted values and sums of weights of the queries, scaled to `max_log2`: summed in bundles, then over bundles.

    AHEAD partial results are loaded together. BUNDLE is 1 where each is already a bundle's.
    """
    dim = tl.arange(0, DIM)
    mixed = tl.zeros([query.shape[0], DIM], tl.float32)
    weight = tl.zeros([query.shape[0]], tl.float32)
    of_bundle, weight_of_bundle = mixed, weight
    for first in range(0, count, AHEAD):
        loaded = ()
        for step in tl.static_range(AHEAD):
            used = first + step < count
            partial_at = (first + step) * num_queries + query
            loaded = loaded + (  # noqa: RUF005
                tl.load(partials + partial_at[:, None] * DIM + dim[None, :], mask=used, other=0.0),
                tl.load(sums + partial_at, mask=used, other=float("-inf")),
                tl.load(sums + PARTIALS * num_queries + partial_at, mask=used, other=0.0),
            )
        for step in tl.static_range(AHEAD):
            begins = _begins_bundle(first + step, BUNDLE, FINE_BUNDLE, FINE_BLOCKS)
            mixed += tl.where(begins, of_bundle, 0.0)
            weight += tl.where(begins, weight_of_bundle, 0.0)
            by = _power_of_2(loaded[3 * step + 1] - max_log2)
            of_bundle = tl.where(begins, 0.0, of_bundle) + loaded[3 * step] * by[:, None]
            weight_of_bundle = tl.where(begins, 0.0, weight_of_bundle) + loaded[3 * step + 2] * by
    return mixed + of_bundle, weight + weight_of_bundle


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


def choose_wide(slots: int, kv_heads: int, queries: int) -> WideConfig:
    """How many queries a CTA takes of slots that share no keys, each with so many queries for a head of the cache."""
    blocks = slots * kv_heads * (queries // _WIDER.block_queries)
    return _WIDER if slots > 1 and blocks >= _MIN_WIDER_BLOCKS else _WIDE


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
    shared = target.shared
    # In float32 both kernels would reduce in another order; the order of operands in 8 bits takes words of 32 elements.
    in_order = dtype != torch.float32 and (keys.element_size() > 1 or dim >= 32)
    wide = in_order and not qkv_splits and (width * group >= _WIDE.block_queries or shared is not None)
    wide_config = _WIDE if shared is not None else choose_wide(slots, kv_heads, width * group)
    if length % config.block_keys:
        raise ValueError(f"cache length: expected a multiple of BLOCK_KEYS = {config.block_keys}, got {length}")
    max_blocks = triton.cdiv(length, config.block_keys)
    block = wide_config.block_queries
    if not wide:
        block = min(_MAX_BLOCK_QUERIES, max(_MIN_BLOCK_QUERIES, triton.next_power_of_2(width * group)))
        if keys.element_size() == 1 or dtype == torch.float32:
            block = _MIN_BLOCK_QUERIES  # wider tiles reduce in another order, except in 16 bits (batch invariance)
    blocks = triton.cdiv(width * group, block)
    splits = max(1, min(config.ctas_per_sm * limits.num_sms // (slots * kv_heads * blocks), _MAX_SPLITS, max_blocks))
    singles = None
    num_partials = max_blocks if splits > 1 else 1
    if wide:
        singles = 0 if shared is not None else wide_config.ctas_per_sm * limits.num_sms // (slots * kv_heads * blocks)
        fine = triton.cdiv(min(max_blocks, _FINE_BLOCKS), _FINE_BUNDLE)  # as `_num_bundles` counts on the device
        bundles = fine + triton.cdiv(max(0, max_blocks - _FINE_BLOCKS), _BUNDLE)
        num_partials = min(max_blocks, max(singles, bundles))
    num_queries = slots * width * heads
    attended = torch.empty(shape, dtype=dtype if output_scale is None else FP8, device=keys.device)
    partials = sums = attended
    if wide or num_partials > 1:
        partials = torch.empty(num_partials, num_queries, dim, dtype=torch.float32, device=keys.device)
        sums = torch.empty(2, num_partials, num_queries, dtype=torch.float32, device=keys.device)
    scale = dim**-0.5 * _LOG2_E
    element_size = max(keys.element_size(), dtype.itemsize)
    shapes = {
        "DIM": dim,
        "PARTIALS": num_partials,
        "BLOCK_KEYS": config.block_keys,
        "BUNDLE": _BUNDLE,
        "FINE_BUNDLE": _FINE_BUNDLE,
        "FINE_BLOCKS": _FINE_BLOCKS,
    }
    # Where no slot shares keys, the kernels read neither.
    holder, lengths = (start, start) if shared is None else (shared.holder, shared.length)
    if wide:
        fitting = (limits.shared_memory // dim // element_size - block) // (2 * config.block_keys)
        fit = 1 if shared is None else max(1, min(slots, block // (width * group)))  # slots with one CTA's queries
        together = triton.next_power_of_2(fit + 1) // 2  # as many of them as a power of two
        places = slots + (triton.cdiv(slots, together) if together > 1 else 0)
        fp8 = keys.element_size() == 1
        tma = limits.tma and not fp8  # in 8 bits keys are read in another order (`_mma_order`)
        if shared is not None:
            keys, values = shared.keys, shared.values  # of all slots: a holder may be behind the batch
        if tma:
            keys = TensorDescriptor.from_tensor(keys.view(-1, dim), [config.block_keys, dim])
            values = TensorDescriptor.from_tensor(values.view(-1, length), [dim, config.block_keys])
        _attend_wide[(places * kv_heads, blocks, num_partials)](
            inputs[0], keys, values, start, holder, lengths, partials, sums, scale, width, num_queries, slots,
            LENGTH=length, HEADS=kv_heads, GROUP=group, SINGLES=singles, BLOCK_QUERIES=block, SHARED=shared is not None,
            SLOTS=together, FP8=fp8, TMA=tma, **shapes,
            num_warps=wide_config.num_warps, num_stages=max(1, min(wide_config.stages, fitting)),
            **limits.launch_options,
        )  # fmt: skip
    else:
        fitting = limits.shared_memory // (2 * config.block_keys * dim * element_size)
        _attend[(slots * kv_heads, blocks, splits)](
            *inputs, keys, values, start, holder, lengths, partials, sums,
            scale, output_scale or 1.0, length, width, num_queries, slots,
            HEADS=kv_heads, GROUP=group, SPLITS=splits, BLOCK_QUERIES=block, PRECISION="ieee", QKV_SPLITS=qkv_splits,
            SHARED=shared is not None,
            **shapes, num_warps=config.num_warps, num_stages=max(1, min(config.stages, fitting)),
            **limits.launch_options,
        )  # fmt: skip
    if wide or num_partials > 1:
        combined = math.gcd(heads, max(1, _COMBINED_ELEMENTS // dim)) if wide else 1
        _combine[(num_queries // combined,)](
            partials, sums, attended, start, output_scale or 1.0, width, num_queries, heads,
            QUERIES=combined, PADDED=triton.next_power_of_2(num_partials), SINGLES=singles,
            BLOCKS_AHEAD=_WIDE_BLOCKS_AHEAD if wide else _BLOCKS_AHEAD, AHEAD=_WIDE_AHEAD, **shapes,
            num_warps=1, **limits.launch_options,
        )  # fmt: skip
    return attended
