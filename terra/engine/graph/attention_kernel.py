"""Triton kernels of attention over the filled part of the cache.

How much of a cache is filled is known to the device alone. Its keys are split over programs, so that all
multiprocessors read at once, and the parts are put together afterwards (Dao et al. 2023, "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/).
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.graph.launch import launched_early, shared_memory, wait_for_inputs

_BLOCK_KEYS = 128
_STAGES = 3
_MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 16  # that tl.dot takes
_MAX_SPLITS = 64


@triton.jit
def _cached(keys, values, base, place, length, DIM: tl.constexpr):
    """Keys and values of these places, as columns. What is not filled is finite, and masked later."""
    dim = tl.arange(0, DIM)[:, None]
    return tl.load(keys + base + place[None, :] * DIM + dim), tl.load(values + base + dim * length + place[None, :])


@triton.jit
def _attend_block(
    query, key, value, place, end, sees, scale, highest, weight, mean, PRECISION: tl.constexpr
):  # fmt: skip
    """Take a block of keys and values into the mean of those before (Milakov & Gimelshein 2018, arXiv 1805.02867)."""
    kind = query.dtype
    score = tl.dot(query, key.to(kind), input_precision=PRECISION) * scale
    score = tl.where((place < end)[None, :] & (place[None, :] <= sees[:, None]), score, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, 1))
    # A row that has seen nothing yet stays at weight 0.
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp(score - reference[:, None])
    fade = tl.exp(highest - reference)
    weight = weight * fade + tl.sum(share, 1)
    mean = mean * fade[:, None] + tl.dot(share.to(kind), tl.trans(value.to(kind)), input_precision=PRECISION)
    return higher, weight, mean


@triton.jit
def _split_size(total, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys of each split; the last ones may have none."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _attend_part(
    queries, keys, values, start, parts, sums,
    scale, length, width, total_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a lane, a head of the cache, some rows and a split of the keys: weighted mean, log of the weights' sum.

    HEADS are the cache's; GROUP heads of the queries share each. A single split has no use for the sum. What the cache
    holds from before this pass is read before the queries are waited for. 8 bits are multiplied as float16, which has
    room for them. The length of the cache is a multiple of BLOCK_KEYS.
    """
    lane, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place_of_row = row // GROUP
    used = (place_of_row < width)[:, None]
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
    wait_for_inputs(EARLY)
    if end > first:  # what this pass has added is here
        key, value = _cached(keys, values, base, place, length, DIM)
    # Rows of (lane, place, head of the cache, head of its group), as the projection gives them.
    row_at = ((lane * width + place_of_row) * HEADS + head) * GROUP + row % GROUP
    query = tl.load(queries + row_at[:, None] * DIM + dim[None, :], mask=used, other=0.0)
    if keys.dtype.element_ty == tl.float8e4nv:
        query = query.to(tl.float16)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    mean = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    highest, weight, mean = _attend_block(
        query, key, value, place, end, sees, scale, highest, weight, mean, PRECISION
    )  # fmt: skip
    for at in range(begin + BLOCK_KEYS, end, BLOCK_KEYS):
        place = at + tl.arange(0, BLOCK_KEYS)
        key, value = _cached(keys, values, base, place, length, DIM)
        highest, weight, mean = _attend_block(
            query, key, value, place, end, sees, scale, highest, weight, mean, PRECISION
        )  # fmt: skip
    empty = weight == 0.0
    mean = mean / tl.where(empty, 1.0, weight)[:, None]
    part_at = split * total_rows + row_at
    tl.store(parts + part_at[:, None] * DIM + dim[None, :], mean, mask=used)
    if SPLITS > 1:
        log_sum = tl.where(empty, float("-inf"), highest + tl.log(tl.where(empty, 1.0, weight)))
        tl.store(sums + part_at, log_sum, mask=place_of_row < width)


@triton.jit
def _combine(
    parts, sums, attended, start, width, total_rows, rows_of_place,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, BLOCK_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits' means of one row, weighted."""
    row = tl.program_id(0)
    total = tl.load(start + row // rows_of_place // width) + width
    split = tl.arange(0, PADDED)
    filled = split < tl.cdiv(total, _split_size(total, SPLITS, BLOCK_KEYS))
    dim = tl.arange(0, DIM)
    wait_for_inputs(EARLY)
    log_sum = tl.load(sums + split * total_rows + row, mask=filled, other=float("-inf"))
    share = tl.exp(log_sum - tl.max(log_sum, 0))
    at = (split * total_rows + row)[:, None] * DIM + dim[None, :]
    part = tl.load(parts + at, mask=filled[:, None], other=0.0)
    mean = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(attended + row * DIM + dim, mean)


def attend_split(
    queries: Float[Tensor, "lanes width heads dim"],
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads dim length"],
    start: Int[Tensor, " lanes"],
    programs: int,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.attention.attend` by about so many `programs` at once.

    `dim` is a power of two, `length` a multiple of `CACHE_STEP`; what the cache holds is finite.
    """
    lanes, width, heads, dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    block = min(_MAX_BLOCK_ROWS, max(_MIN_BLOCK_ROWS, triton.next_power_of_2(width * group)))
    blocks = triton.cdiv(width * group, block)
    most = min(_MAX_SPLITS, triton.cdiv(length, _BLOCK_KEYS))
    splits = max(1, min(programs // (lanes * kv_heads * blocks), most))
    rows = lanes * width * heads
    attended = torch.empty_like(queries)
    parts = sums = attended
    if splits > 1:
        parts = torch.empty(splits, rows, dim, dtype=torch.float32, device=queries.device)
        sums = torch.empty(splits, rows, dtype=torch.float32, device=queries.device)
    early = launched_early(queries.device)
    stages = min(_STAGES, shared_memory(queries.device) // (2 * _BLOCK_KEYS * dim * keys.element_size()))
    _attend_part[(lanes * kv_heads, blocks, splits)](
        queries, keys, values, start, parts, sums,
        dim**-0.5, length, width, rows,
        HEADS=kv_heads, GROUP=group, DIM=dim, SPLITS=splits,
        BLOCK_ROWS=block, BLOCK_KEYS=_BLOCK_KEYS, PRECISION="ieee", num_stages=stages, **early,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows,)](
            parts, sums, attended, start, width, rows, heads,
            DIM=dim, SPLITS=splits, PADDED=triton.next_power_of_2(splits), BLOCK_KEYS=_BLOCK_KEYS, **early,
        )  # fmt: skip
    return attended
