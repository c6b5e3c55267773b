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

from terra.engine.graph.launch import launched_early, wait_for_inputs
from terra.engine.graph.layers import Place

_BLOCK_KEYS = 64
_MAX_BLOCK_ROWS = 64
_MIN_BLOCK_ROWS = 16  # that tl.dot takes
_MAX_SPLITS = 32


@triton.jit
def _attend_part(
    queries, keys, values, start, parts, sums,
    scale, length, width, total_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a lane, a head of the cache, some rows and a split of the keys: weighted mean, log of the weights' sum.

    HEADS are the cache's; GROUP heads of the queries share each. A single split has no use for the sum.
    """
    wait_for_inputs(EARLY)
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
    base = (lane * HEADS + head).to(tl.int64) * length * DIM
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    mean = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    for at in range(begin, end, BLOCK_KEYS):
        place_of_key = at + tl.arange(0, BLOCK_KEYS)
        filled = place_of_key < end
        key_at = base + place_of_key * DIM
        key = tl.load(keys + key_at[None, :] + dim[:, None], mask=filled[None, :], other=0.0).to(query.dtype)
        score = tl.dot(query, key, input_precision=PRECISION) * scale
        score = tl.where(filled[None, :] & (place_of_key[None, :] <= sees[:, None]), score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen nothing yet stays at weight 0.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(score - reference[:, None])
        fade = tl.exp(highest - reference)
        weight = weight * fade + tl.sum(share, 1)
        value = tl.load(values + key_at[:, None] + dim[None, :], mask=filled[:, None], other=0.0)
        value = value.to(query.dtype)
        mean = mean * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        highest = higher
    empty = weight == 0.0
    mean = mean / tl.where(empty, 1.0, weight)[:, None]
    part_at = split * total_rows + row_at
    tl.store(parts + part_at[:, None] * DIM + dim[None, :], mean, mask=used)
    if SPLITS > 1:
        log_sum = tl.where(empty, float("-inf"), highest + tl.log(tl.where(empty, 1.0, weight)))
        tl.store(sums + part_at, log_sum, mask=place < width)


@triton.jit
def _combine(
    parts, sums, attended, total_rows,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The splits' means of one row, weighted."""
    wait_for_inputs(EARLY)
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
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads length dim"],
    start: Int[Tensor, " lanes"],
    programs: int,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.attention.attend` by about so many `programs` at once; `dim` is a power of two."""
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
    _attend_part[(lanes * kv_heads, blocks, splits)](
        queries, keys, values, start, parts, sums,
        dim**-0.5, length, width, rows,
        HEADS=kv_heads, GROUP=group, DIM=dim, SPLITS=splits,
        BLOCK_ROWS=block, BLOCK_KEYS=_BLOCK_KEYS, PRECISION="ieee", EARLY=bool(early), **early,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _combine[(rows,)](
            parts, sums, attended, rows, DIM=dim, SPLITS=splits, PADDED=padded, EARLY=bool(early), **early
        )
    return attended


@triton.jit
def rotated(first, second, cosine, sine, at, half):
    """Elements of a head's first half and those of its second half, rotated; `at` is where the tables have the first.

    Rounded after each product, as torch does it in half precision.
    """
    turned = first * tl.load(cosine + at) - second * tl.load(sine + at)
    return turned, second * tl.load(cosine + at + half) + first * tl.load(sine + at + half)


@triton.jit
def store_pair(target, first, second, half):
    """Elements of a head's two halves, in the target's type."""
    kind = target.dtype.element_ty
    tl.store(target, first.to(kind))
    tl.store(target + half, second.to(kind))


@triton.jit
def _rotate_and_store(
    mixed, cosine, sine, positions, queries, keys, values,
    width, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query, a key or a value of what the projection gave."""
    wait_for_inputs(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    low = tl.arange(0, half)
    position = tl.load(positions + row)
    source = mixed + (row.to(tl.int64) * ((GROUP + 2) * HEADS) + head) * DIM
    first, second = tl.load(source + low), tl.load(source + half + low)
    number = head - GROUP * HEADS  # of the cache's head, keys first
    if number < HEADS:
        first, second = rotated(first, second, cosine, sine, position * DIM + low, half)
    cached = ((row // width * HEADS + number % HEADS).to(tl.int64) * length + position) * DIM + low
    if number < 0:
        store_pair(queries + (row.to(tl.int64) * (GROUP * HEADS) + head) * DIM + low, first, second, half)
    elif number < HEADS:
        store_pair(keys + cached, first, second, half)
    else:
        store_pair(values + cached, first, second, half)


def rotate_and_store(
    mixed: Float[Tensor, "lanes width heads_dim"], place: Place
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.layers.place_heads`; `dim` is a power of two."""
    lanes, width, size = mixed.shape
    _, kv_heads, length, dim = place.keys.shape
    heads = size // dim - 2 * kv_heads
    queries = torch.empty(lanes, width, heads, dim, dtype=mixed.dtype, device=mixed.device)
    early = launched_early(mixed.device)
    _rotate_and_store[(lanes * width, heads + 2 * kv_heads)](
        mixed, place.cosine, place.sine, place.positions, queries, place.keys, place.values,
        width, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, EARLY=bool(early), num_warps=1, **early,
    )  # fmt: skip
    return queries
