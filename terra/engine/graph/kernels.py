"""Triton kernels for a pass: what becomes of queries, keys and values, and attention over the filled part of the cache.

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

_BLOCK_KEYS = 64
_MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 16  # that tl.dot takes
_MAX_SPLITS = 32


@triton.jit
def _attend_part(
    queries, keys, values, start, parts, sums,
    scale, lane_size, width, total_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a lane, a head of the cache, some rows and a split of the keys: weighted mean, log of the weights' sum.

    HEADS are the cache's; GROUP heads of the queries share each.
    """
    lane, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = row // GROUP
    used = (place < width)[:, None]
    first = tl.load(start + lane)
    sees = first + place  # the last key that a row attends to: its own
    dim = tl.arange(0, DIM)
    # Rows of (lane, place, head of the cache, head of its group), as the projection gives them.
    row_at = ((lane * width + place) * HEADS + head) * GROUP + row % GROUP
    query = tl.load(queries + row_at[:, None] * DIM + dim[None, :], mask=used, other=0.0)
    total = first + width
    size = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = split * size
    end = tl.minimum(begin + size, total)
    base = lane.to(tl.int64) * lane_size + head * DIM
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    mean = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    for at in range(begin, end, BLOCK_KEYS):
        place_of_key = at + tl.arange(0, BLOCK_KEYS)
        filled = place_of_key < end
        key_at = base + place_of_key * (HEADS * DIM)
        key = tl.load(keys + key_at[None, :] + dim[:, None], mask=filled[None, :], other=0.0)
        score = tl.dot(query, key, input_precision=PRECISION) * scale
        score = tl.where(filled[None, :] & (place_of_key[None, :] <= sees[:, None]), score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen nothing yet stays at weight 0.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(score - reference[:, None])
        fade = tl.exp(highest - reference)
        weight = weight * fade + tl.sum(share, 1)
        value = tl.load(values + key_at[:, None] + dim[None, :], mask=filled[:, None], other=0.0)
        mean = mean * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        highest = higher
    empty = weight == 0.0
    mean = mean / tl.where(empty, 1.0, weight)[:, None]
    log_sum = tl.where(empty, float("-inf"), highest + tl.log(tl.where(empty, 1.0, weight)))
    part_at = split * total_rows + row_at
    tl.store(parts + part_at[:, None] * DIM + dim[None, :], mean, mask=used)
    tl.store(sums + part_at, log_sum, mask=place < width)


@triton.jit
def _combine(parts, sums, attended, total_rows, DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    """The splits' means of one row, weighted."""
    row = tl.program_id(0)
    split = tl.arange(0, PADDED)
    dim = tl.arange(0, DIM)
    log_sum = tl.load(sums + split * total_rows + row, mask=split < SPLITS, other=float("-inf"))
    share = tl.exp(log_sum - tl.max(log_sum, 0))
    at = (split * total_rows + row)[:, None] * DIM + dim[None, :]
    part = tl.load(parts + at, mask=(split < SPLITS)[:, None], other=0.0)
    mean = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(attended + row * DIM + dim, mean)


def attend_split(
    queries: Float[Tensor, "lanes width heads dim"],
    keys: Float[Tensor, "lanes length kv_heads dim"],
    values: Float[Tensor, "lanes length kv_heads dim"],
    start: Int[Tensor, " lanes"],
    programs: int,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.attention.attend` by about so many `programs` at once; `dim` is a power of two."""
    lanes, width, heads, dim = queries.shape
    length, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    block = min(_MAX_BLOCK_ROWS, max(_MIN_BLOCK_ROWS, triton.next_power_of_2(width * group)))
    blocks = triton.cdiv(width * group, block)
    most = min(_MAX_SPLITS, triton.cdiv(length, _BLOCK_KEYS))
    splits = max(1, min(programs // (lanes * kv_heads * blocks), most))
    rows = lanes * width * heads
    parts = torch.empty(splits, rows, dim, dtype=torch.float32, device=queries.device)
    sums = torch.empty(splits, rows, dtype=torch.float32, device=queries.device)
    attended = torch.empty_like(queries)
    _attend_part[(lanes * kv_heads, blocks, splits)](
        queries, keys, values, start, parts, sums,
        dim**-0.5, length * kv_heads * dim, width, rows,
        HEADS=kv_heads, GROUP=group, DIM=dim, SPLITS=splits,
        BLOCK_ROWS=block, BLOCK_KEYS=_BLOCK_KEYS, PRECISION="ieee",
    )  # fmt: skip
    _combine[(rows,)](parts, sums, attended, rows, DIM=dim, SPLITS=splits, PADDED=triton.next_power_of_2(splits))
    return attended


@triton.jit
def _rotate_and_store(
    mixed, cosine, sine, positions, queries, keys, values,
    width, lane_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query, a key or a value of what the projection gave."""
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    low = tl.arange(0, half)
    position = tl.load(positions + row)
    source = mixed + (row.to(tl.int64) * ((GROUP + 2) * HEADS) + head) * DIM
    first, second = tl.load(source + low), tl.load(source + half + low)
    number = head - GROUP * HEADS  # of the cache's head, keys first
    if number < HEADS:
        table = position * DIM + low
        cosine_low, cosine_high = tl.load(cosine + table), tl.load(cosine + table + half)
        sine_low, sine_high = tl.load(sine + table), tl.load(sine + table + half)
        # Rounded after each product, as torch does it in half precision.
        turned = (first * cosine_low) - (second * sine_low)
        second = (second * cosine_high) + (first * sine_high)
        first = turned
    cached = (row // width).to(tl.int64) * lane_size + (position * HEADS + number % HEADS) * DIM
    if number < 0:
        target = queries + (row.to(tl.int64) * (GROUP * HEADS) + head) * DIM
    elif number < HEADS:
        target = keys + cached
    else:
        target = values + cached
    tl.store(target + low, first)
    tl.store(target + half + low, second)


def rotate_and_store(
    mixed: Float[Tensor, "lanes width heads_dim"],
    cosine: Float[Tensor, "length dim"],
    sine: Float[Tensor, "length dim"],
    positions: Int[Tensor, "lanes width"],
    keys: Float[Tensor, "lanes length kv_heads dim"],
    values: Float[Tensor, "lanes length kv_heads dim"],
) -> Float[Tensor, "lanes width heads dim"]:
    """What `terra.engine.graph.layers.project` does after its matrix product; `dim` is a power of two."""
    lanes, width, size = mixed.shape
    _, length, kv_heads, dim = keys.shape
    heads = size // dim - 2 * kv_heads
    queries = torch.empty(lanes, width, heads, dim, dtype=mixed.dtype, device=mixed.device)
    _rotate_and_store[(lanes * width, heads + 2 * kv_heads)](
        mixed, cosine, sine, positions, queries, keys, values,
        width, length * kv_heads * dim,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, num_warps=1,
    )  # fmt: skip
    return queries
