"""Triton kernels of attention over the filled part of the cache.

How much of a cache is filled is known to the device alone. Its keys are split over programs, so that all
multiprocessors read at once, and the parts are put together afterwards (Dao et al. 2023, "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/). How many programs there are depends on the rows; where a row's result must
not, each block of keys is a part, and parts are merged one after the other, wherever that is done.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.graph.alike import summed, turned
from terra.engine.graph.launch import launched_early, shared_memory, wait_for_inputs
from terra.engine.graph.many_rows import Projected
from terra.engine.graph.matrix import FP8

_MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 8  # that tl.dot takes
_MAX_SPLITS = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class _Launch:
    """How the keys are shared out: to so many programs a multiprocessor, which read them in blocks, some ahead."""

    programs: int
    block_keys: int
    stages: int
    num_warps: int


_FOR_ONE = _Launch(programs=4, block_keys=64, stages=2, num_warps=4)
"""A pass of one token, in which latency counts: a program has a block or two."""

_FOR_LANES = _Launch(programs=2, block_keys=128, stages=3, num_warps=8)
"""One token of each lane."""

_FOR_DRAFTS = _Launch(programs=2, block_keys=64, stages=2, num_warps=4)
"""Several tokens of a lane, in which a block of keys is multiplied with many queries."""

_FOR_ALL = _Launch(programs=2, block_keys=128, stages=3, num_warps=8)
"""Any tokens, by one and the same sums."""

_FOR_ALL_IN_8_BITS = _Launch(programs=2, block_keys=128, stages=6, num_warps=4)
"""The same with a cache in 8 bits. The blocks ahead leave no room for a third program beside two, so that programs that
begin early do not crowd on the multiprocessors that happen to be free.
"""

_AHEAD = 32
"""Parts that are on their way together, before they are added one after the other."""


@triton.jit
def _cached(keys, values, base, place, length, DIM: tl.constexpr, wanted=True, key=None, value=None):
    """Keys as rows and values as columns of these places, or those given if they are not wanted.

    What is not filled is finite, and masked later.
    """
    dim = tl.arange(0, DIM)
    key = tl.load(keys + base + place[:, None] * DIM + dim[None, :], mask=wanted, other=key)
    return key, tl.load(values + base + dim[:, None] * length + place[None, :], mask=wanted, other=value)


@triton.jit
def _rotated_row(
    parts, cosine, sine, token, head, dim, used, position, tokens, rows, DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Of a token, elements of heads of a projection in parts, rotated as `alike.rotated` does it by halves."""
    kind = cosine.dtype.element_ty
    row, other = head * DIM + dim, head * DIM + (dim + DIM // 2) % DIM
    own = summed(parts, token, row, used, tokens, rows, SPLITS).to(kind)
    other = summed(parts, token, other, used, tokens, rows, SPLITS).to(kind)
    other = tl.where(dim < DIM // 2, -other, other)
    cosines, sines = tl.load(cosine + position * DIM + dim), tl.load(sine + position * DIM + dim)
    return turned(own, other, tl.broadcast_to(cosines, own.shape), tl.broadcast_to(sines, own.shape))


@triton.jit
def _scores(query, key, place, sees, scale, PRECISION: tl.constexpr):
    """Of each place (rows) for each query (columns), which attends as far as it `sees`; what 2 is raised to by them."""
    score = tl.dot(key.to(query.dtype), query, input_precision=PRECISION) * scale
    return tl.where(place[:, None] <= sees[None, :], score, float("-inf"))


@triton.jit
def _shares(score, reference):
    """Weights of keys relative to 2 ** reference, which is -inf for a query that has seen nothing yet."""
    return tl.exp2(score - tl.where(reference == float("-inf"), 0.0, reference)[None, :])


@triton.jit
def _weighed(value, share, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The values' sum by their shares: rows are elements, columns are queries."""
    return tl.dot(value.to(kind), share.to(kind), input_precision=PRECISION)


@triton.jit
def _part(query, key, value, place, sees, scale, PRECISION: tl.constexpr):
    """Of a block of keys, for each query: the weighted sum of values, what it is relative to, the sum of weights."""
    score = _scores(query, key, place, sees, scale, PRECISION)
    reference = tl.ceil(tl.max(score, 0))
    share = _shares(score, reference)
    return _weighed(value, share, query.dtype, PRECISION), reference, tl.sum(share, 0)


@triton.jit
def _power_of_2(exponent):
    """Of whole numbers up to 127, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _merged(mixed, reference, weight, more, their_reference, their_weight):
    """Two parts in one (Milakov & Gimelshein 2018, arXiv 1805.02867).

    References are whole numbers, so that no factor rounds: bits depend on nothing but the order of the parts.
    """
    higher = tl.maximum(reference, their_reference)
    own, other = _power_of_2(reference - higher), _power_of_2(their_reference - higher)
    weight = weight * own + their_weight * other
    return mixed * own[None, :] + more * other[None, :], higher, weight


@triton.jit
def _split_size(total, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys of each split; the last ones may have none."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _attend_part(
    queries, cosine, sine, keys, values, start, parts, sums,
    scale, round_by, length, width, total_rows, lanes,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, IN_ORDER: tl.constexpr,
    PROJECTED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a lane, a head of the cache, some rows and a split of the keys: weighted sum, its reference, sum of weights.

    Of a single split the weighted mean times `round_by` alone, of several the split as a whole or, IN_ORDER, each of
    its blocks. HEADS are the cache's; GROUP heads of the queries share each. What the cache holds from before this pass
    is read before the queries are waited for; these may be PROJECTED, in so many parts, and keys and values with them
    (`many_rows.Projected`). 8 bits are multiplied as float16, which has room for them, or with queries in float32 as
    that. The length of the cache is a multiple of BLOCK_KEYS.
    """
    lane, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place_of_row = row // GROUP
    used = place_of_row < width
    first = tl.load(start + lane)
    sees = first + place_of_row  # the last key that a row attends to: its own
    dim = tl.arange(0, DIM)
    total = first + width
    size = _split_size(total, SPLITS, BLOCK_KEYS)
    begin = split * size
    if begin >= total:
        wait_for_inputs(EARLY)
        return
    end = tl.minimum(begin + size, total)
    base = (lane * HEADS + head).to(tl.int64) * length * DIM
    place = begin + tl.arange(0, BLOCK_KEYS)
    key, value = _cached(keys, values, base, place, length, DIM)
    # Rows of (lane, place, head of the cache, head of its group), as the projection gives them.
    row_at = ((lane * width + place_of_row) * HEADS + head) * GROUP + row % GROUP
    wait_for_inputs(EARLY)
    if PROJECTED:
        rows: tl.constexpr = (GROUP + 2) * HEADS * DIM
        if end == total:
            own = (GROUP * HEADS + head) * DIM + dim
            new_key = _rotated_row(
                queries, cosine, sine, lane, GROUP * HEADS + head, dim, dim < DIM, first, lanes, rows, DIM, PROJECTED
            )
            new_value = summed(queries, lane, own + HEADS * DIM, dim < DIM, lanes, rows, PROJECTED)
            new_value = new_value.to(cosine.dtype.element_ty)
            tl.store(keys + base + first * DIM + dim, new_key.to(keys.dtype.element_ty))
            tl.store(values + base + dim * length + first, new_value.to(values.dtype.element_ty))
            tl.debug_barrier()  # before other threads read them
        query = _rotated_row(
            queries, cosine, sine, lane, (head * GROUP + row % GROUP)[None, :], dim[:, None], used[None, :],
            first, lanes, rows, DIM, PROJECTED,
        )  # fmt: skip
    else:
        query = tl.load(queries + row_at[None, :] * DIM + dim[:, None], mask=used[None, :], other=0.0)
    # What this pass has added may be here. An `if` hides from the compiler that these are of 8 bits, and it sums this
    # block in another order than the next ones.
    if IN_ORDER:
        key, value = _cached(keys, values, base, place, length, DIM, begin + BLOCK_KEYS > first, key, value)
    elif begin + BLOCK_KEYS > first:
        key, value = _cached(keys, values, base, place, length, DIM)
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype != tl.float32:
        query = query.to(tl.float16)
    mixed, reference, weight = _part(query, key, value, place, sees, scale, PRECISION)
    if begin + BLOCK_KEYS < end:  # blocks are asked for ahead of the loop only if there are some
        for at in range(begin + BLOCK_KEYS, end, BLOCK_KEYS):
            place = at + tl.arange(0, BLOCK_KEYS)
            key, value = _cached(keys, values, base, place, length, DIM)
            if IN_ORDER:
                more, theirs, their_weight = _part(query, key, value, place, sees, scale, PRECISION)
                if PARTS == 1:
                    mixed, reference, weight = _merged(mixed, reference, weight, more, theirs, their_weight)
                else:
                    part_at = (at // BLOCK_KEYS - 1) * total_rows + row_at
                    _store_part(parts, sums, part_at, used, mixed, reference, weight, total_rows, PARTS, DIM)
                    mixed, reference, weight = more, theirs, their_weight
            else:
                # As `_merged`, but shares are relative to what is the highest by now.
                score = _scores(query, key, place, sees, scale, PRECISION)
                higher = tl.maximum(reference, tl.ceil(tl.max(score, 0)))
                share = _shares(score, higher)
                fade = _power_of_2(reference - higher)
                weight = weight * fade + tl.sum(share, 0)
                mixed = mixed * fade[None, :] + _weighed(value, share, query.dtype, PRECISION)
                reference = higher
    if PARTS == 1:
        mean = (mixed / weight[None, :] * round_by).to(parts.dtype.element_ty)
        tl.store(parts + row_at[None, :] * DIM + dim[:, None], mean, mask=used[None, :])
    else:
        part = (end - 1) // BLOCK_KEYS if IN_ORDER else split
        part_at = part * total_rows + row_at
        _store_part(parts, sums, part_at, used, mixed, reference, weight, total_rows, PARTS, DIM)


@triton.jit
def _store_part(
    parts, sums, at, used, mixed, reference, weight, total_rows, PARTS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    tl.store(parts + at[None, :] * DIM + tl.arange(0, DIM)[:, None], mixed, mask=used[None, :])
    tl.store(sums + at, reference, mask=used)
    tl.store(sums + PARTS * total_rows + at, weight, mask=used)


@triton.jit
def _combine(
    parts, sums, attended, start, round_by, width, total_rows, rows_of_place,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, IN_ORDER: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of one row times `round_by`, of its parts' weighted sums.

    IN_ORDER as a program that has all parts makes it.
    """
    row = tl.program_id(0)
    total = tl.load(start + row // rows_of_place // width).to(tl.int32) + width
    count = tl.cdiv(total, BLOCK_KEYS if IN_ORDER else _split_size(total, SPLITS, BLOCK_KEYS))
    part = tl.arange(0, PADDED)
    dim = tl.arange(0, DIM)
    wait_for_inputs(EARLY)
    at = part * total_rows + row
    highest = tl.max(tl.load(sums + at, mask=part < count, other=float("-inf")), 0)
    if IN_ORDER:
        mixed = tl.zeros([DIM], tl.float32)
        weight = 0.0
        for first in range(0, count, AHEAD):
            of_parts = ()
            for step in tl.static_range(AHEAD):
                used = first + step < count
                of_part = (first + step) * total_rows + row
                of_parts = of_parts + (  # noqa: RUF005
                    tl.load(parts + of_part * DIM + dim, mask=used, other=0.0),
                    tl.load(sums + of_part, mask=used, other=float("-inf")),
                    tl.load(sums + PARTS * total_rows + of_part, mask=used, other=0.0),
                )
            for step in tl.static_range(AHEAD):
                by = _power_of_2(of_parts[3 * step + 1] - highest)
                mixed += of_parts[3 * step] * by
                weight += of_parts[3 * step + 2] * by
    else:
        filled = part < count
        by = _power_of_2(tl.load(sums + at, mask=filled, other=float("-inf")) - highest)
        weight = tl.sum(tl.load(sums + PARTS * total_rows + at, mask=filled, other=0.0) * by, 0)
        place = at[:, None] * DIM + dim[None, :]
        mixed = tl.sum(tl.load(parts + place, mask=filled[:, None], other=0.0) * by[:, None], 0)
    tl.store(attended + row * DIM + dim, (mixed / weight * round_by).to(attended.dtype.element_ty))


def attend_split(
    queries: Float[Tensor, "lanes width heads dim"] | Projected,
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads dim length"],
    start: Int[Tensor, " lanes"],
    processors: int,
    *,
    round_by: float | None = None,
    invariant: bool = False,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.attention.attend` on so many multiprocessors.

    `dim` is a power of two, `length` a multiple of `CACHE_STEP`; what the cache holds is finite. `invariant`: a row's
    bits do not depend on how many lanes there are and how wide they are.
    """
    lanes, width, heads, dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    block = min(_MAX_BLOCK_ROWS, max(_MIN_BLOCK_ROWS, triton.next_power_of_2(width * group)))
    if invariant and (keys.element_size() == 1 or queries.dtype == torch.float32):
        block = _MIN_BLOCK_ROWS  # more rows at once are summed in another order, except in 16 bits
    blocks = triton.cdiv(width * group, block)
    for_all = _FOR_ALL if keys.element_size() > 1 else _FOR_ALL_IN_8_BITS
    how = for_all if invariant else _FOR_DRAFTS if width > 1 else _FOR_LANES if lanes > 1 else _FOR_ONE
    most = min(_MAX_SPLITS, triton.cdiv(length, how.block_keys))
    splits = max(1, min(how.programs * processors // (lanes * kv_heads * blocks), most))
    num_parts = triton.cdiv(length, how.block_keys) if invariant and splits > 1 else splits
    rows = lanes * width * heads
    dtype = queries.dtype if round_by is None else FP8
    attended = torch.empty(queries.shape, dtype=dtype, device=keys.device)
    parts = sums = attended
    if num_parts > 1:
        parts = torch.empty(num_parts, rows, dim, dtype=torch.float32, device=keys.device)
        sums = torch.empty(2, num_parts, rows, dtype=torch.float32, device=keys.device)
    early = launched_early(keys.device)
    if isinstance(queries, Projected):
        inputs, projected = (queries.parts, queries.place.cosine, queries.place.sine), len(queries.parts)
    else:
        inputs, projected = 3 * (queries,), 0
    element_size = max(keys.element_size(), queries.dtype.itemsize)
    room = shared_memory(keys.device) // (2 * how.block_keys * dim * element_size)
    shapes = {"DIM": dim, "PARTS": num_parts, "BLOCK_KEYS": how.block_keys}
    _attend_part[(lanes * kv_heads, blocks, splits)](
        *inputs, keys, values, start, parts, sums,
        dim**-0.5 * _LOG2_E, round_by or 1.0, length, width, rows, lanes,
        HEADS=kv_heads, GROUP=group, SPLITS=splits, BLOCK_ROWS=block, IN_ORDER=invariant, PRECISION="ieee",
        PROJECTED=projected, **shapes,
        num_warps=how.num_warps, num_stages=max(1, min(how.stages, room)), **early,
    )  # fmt: skip
    if num_parts > 1:
        _combine[(rows,)](
            parts, sums, attended, start, round_by or 1.0, width, rows, heads,
            SPLITS=splits, PADDED=triton.next_power_of_2(num_parts), IN_ORDER=invariant, AHEAD=_AHEAD, **shapes,
            num_warps=2 if invariant else 4, **early,
        )  # fmt: skip
    return attended
