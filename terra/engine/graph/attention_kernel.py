"""Triton kernels of attention over the filled part of the cache.

How much of a cache is filled is known to the device alone. Its keys are split over programs, so that all
multiprocessors read at once, and the parts are put together afterwards (Dao et al. 2023, "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/). How many programs there are depends on the rows; where a row's result must
not, the parts are spans of keys of one length, of which a program makes as many as it has.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.graph.launch import launched_early, shared_memory, wait_for_inputs

_MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 8  # that tl.dot takes
# With fewer, another instruction multiplies; in float32, whose sums are the threads', they would share keys otherwise.
_MIN_BLOCK_ROWS_FOR_ALL = {2: 16, 4: _MAX_BLOCK_ROWS}
_MAX_SPLITS = 128


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

_SPAN = 128
"""Keys of a part that does not depend on the number of programs: a multiple of `_FOR_ALL`'s block."""


@triton.jit
def _cached(keys, values, base, place, length, DIM: tl.constexpr):
    """Keys as rows and values as columns of these places. What is not filled is finite, and masked later."""
    dim = tl.arange(0, DIM)
    key = tl.load(keys + base + place[:, None] * DIM + dim[None, :])
    return key, tl.load(values + base + dim[:, None] * length + place[None, :])


@triton.jit
def _scores(query, key, place, sees, scale, PRECISION: tl.constexpr):
    """Of each place (rows) for each query (columns), which attends as far as it `sees`."""
    score = tl.dot(key.to(query.dtype), query, input_precision=PRECISION) * scale
    return tl.where(place[:, None] <= sees[None, :], score, float("-inf"))


@triton.jit
def _reference(highest):
    """What scores are taken relative to: the highest, or 0 for a query that has seen nothing yet."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _weighed(value, share, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The values' sum by their shares: rows are elements, columns are queries."""
    return tl.dot(value.to(kind), share.to(kind), input_precision=PRECISION)


@triton.jit
def _split_size(total, SPLITS: tl.constexpr, UNIT: tl.constexpr):
    """Keys of each split, whole units of them; the last ones may have none."""
    return tl.cdiv(tl.cdiv(total, SPLITS), UNIT) * UNIT


@triton.jit
def _attend_part(
    queries, keys, values, start, parts, sums,
    scale, length, width, total_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a lane, a head of the cache, some rows and a split of the keys: weighted sum, highest score, sum of weights.

    Of the split as a whole (SPAN 0; of a single one the weighted mean alone), or of each span of it. HEADS are the
    cache's; GROUP heads of the queries share each. What the cache holds from before this pass is read before the
    queries are waited for. 8 bits are multiplied as float16, which has room for them, or with queries in float32 as
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
    size = _split_size(total, SPLITS, SPAN if SPAN else BLOCK_KEYS)
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
    query = tl.load(queries + row_at[None, :] * DIM + dim[:, None], mask=used[None, :], other=0.0)
    if end > first:  # what this pass has added is here
        key, value = _cached(keys, values, base, place, length, DIM)
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype != tl.float32:
        query = query.to(tl.float16)
    score = _scores(query, key, place, sees, scale, PRECISION)
    highest = tl.max(score, 0)
    share = tl.exp(score - _reference(highest)[None, :])
    weight = tl.sum(share, 0)
    mixed = _weighed(value, share, query.dtype, PRECISION)
    if begin + BLOCK_KEYS < end:  # blocks are asked for ahead of the loop only if there are some
        for at in range(begin + BLOCK_KEYS, end, BLOCK_KEYS):
            # Milakov & Gimelshein 2018, arXiv 1805.02867.
            place = at + tl.arange(0, BLOCK_KEYS)
            key, value = _cached(keys, values, base, place, length, DIM)
            if SPAN:
                ended = at % SPAN == 0
                part_at = (at // SPAN - 1) * total_rows + row_at
                _store_part(parts, sums, part_at, used & ended, mixed, highest, weight, total_rows, PARTS, DIM)
                highest = tl.where(ended, float("-inf"), highest)  # and what it was of fades to nothing
            score = _scores(query, key, place, sees, scale, PRECISION)
            higher = tl.maximum(highest, tl.max(score, 0))
            share = tl.exp(score - _reference(higher)[None, :])
            fade = tl.exp(highest - _reference(higher))
            weight = weight * fade + tl.sum(share, 0)
            mixed = mixed * fade[None, :] + _weighed(value, share, query.dtype, PRECISION)
            highest = higher
    if PARTS == 1:
        tl.store(parts + row_at[None, :] * DIM + dim[:, None], mixed / weight[None, :], mask=used[None, :])
    else:
        part = (end - 1) // SPAN if SPAN else split
        part_at = part * total_rows + row_at
        _store_part(parts, sums, part_at, used, mixed, highest, weight, total_rows, PARTS, DIM)


@triton.jit
def _store_part(
    parts, sums, part_at, used, mixed, highest, weight, total_rows, PARTS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    dim = tl.arange(0, DIM)
    tl.store(parts + part_at[None, :] * DIM + dim[:, None], mixed, mask=used[None, :])
    tl.store(sums + part_at, highest, mask=used)
    tl.store(sums + PARTS * total_rows + part_at, weight, mask=used)


@triton.jit
def _combine(
    parts, sums, attended, start, width, total_rows, rows_of_place,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of one row, of its parts' weighted sums."""
    row = tl.program_id(0)
    total = tl.load(start + row // rows_of_place // width) + width
    part = tl.arange(0, PADDED)
    filled = part < tl.cdiv(total, SPAN if SPAN else _split_size(total, SPLITS, BLOCK_KEYS))
    dim = tl.arange(0, DIM)
    wait_for_inputs(EARLY)
    highest = tl.load(sums + part * total_rows + row, mask=filled, other=float("-inf"))
    weight = tl.load(sums + (PARTS + part) * total_rows + row, mask=filled, other=0.0)
    at = (part * total_rows + row)[:, None] * DIM + dim[None, :]
    mixed = tl.load(parts + at, mask=filled[:, None], other=0.0)
    share = tl.exp(highest - tl.max(highest, 0))
    mean = tl.sum(mixed * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(attended + row * DIM + dim, mean)


def attend_split(
    queries: Float[Tensor, "lanes width heads dim"],
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads dim length"],
    start: Int[Tensor, " lanes"],
    processors: int,
    *,
    invariant: bool = False,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.attention.attend` on so many multiprocessors.

    `dim` is a power of two, `length` a multiple of `CACHE_STEP`; what the cache holds is finite. `invariant`: a row's
    bits do not depend on how many lanes there are and how wide they are.
    """
    lanes, width, heads, dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    fewest = _MIN_BLOCK_ROWS_FOR_ALL[queries.element_size()] if invariant else _MIN_BLOCK_ROWS
    block = min(_MAX_BLOCK_ROWS, max(fewest, triton.next_power_of_2(width * group)))
    blocks = triton.cdiv(width * group, block)
    how = _FOR_ALL if invariant else _FOR_DRAFTS if width > 1 else _FOR_LANES if lanes > 1 else _FOR_ONE
    span = _SPAN if invariant else 0
    most = min(_MAX_SPLITS, triton.cdiv(length, span or how.block_keys))
    splits = max(1, min(how.programs * processors // (lanes * kv_heads * blocks), most))
    num_parts = triton.cdiv(length, span) if invariant else splits
    rows = lanes * width * heads
    attended = torch.empty_like(queries)
    parts = sums = attended
    if num_parts > 1:
        parts = torch.empty(num_parts, rows, dim, dtype=torch.float32, device=queries.device)
        sums = torch.empty(2, num_parts, rows, dtype=torch.float32, device=queries.device)
    early = launched_early(queries.device)
    element_size = max(keys.element_size(), queries.element_size())
    room = shared_memory(queries.device) // (2 * how.block_keys * dim * element_size)
    shared_out = {"DIM": dim, "SPLITS": splits, "PARTS": num_parts, "SPAN": span, "BLOCK_KEYS": how.block_keys}
    _attend_part[(lanes * kv_heads, blocks, splits)](
        queries, keys, values, start, parts, sums,
        dim**-0.5, length, width, rows,
        HEADS=kv_heads, GROUP=group, BLOCK_ROWS=block, PRECISION="ieee", **shared_out,
        num_warps=how.num_warps, num_stages=min(how.stages, room), **early,
    )  # fmt: skip
    if num_parts > 1:
        _combine[(rows,)](
            parts, sums, attended, start, width, rows, heads,
            PADDED=triton.next_power_of_2(num_parts), **shared_out, **early,
        )  # fmt: skip
    return attended
