"""Triton kernels for passes of one token: matrix-vector products that read their weights as fast as memory gives them.

A product takes the normalisation before it and what follows it along: activation, sum, or rotation and cache. So a
layer is six kernels. A program reads whole rows of the weight at once. Weights depend on nothing, so on a GPU that can
launch a kernel before the one ahead of it is done, they are read before that one's result is waited for. Rounding is
that of the separate steps.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from terra.engine.graph.kernels import rotated, store_pair
from terra.engine.graph.launch import launched_early, wait_for_inputs
from terra.engine.graph.layers import Place
from terra.engine.graph.matrix import Matrix

_BYTES = 32768
"""Of the weight, read by a program at once; a few programs fill a multiprocessor's share of the memory's bandwidth
times its latency."""

_WARPS = 4


@triton.jit
def _rows(weight, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whole rows of the weight."""
    at = weight + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(at, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _normalised(part, weight, epsilon, COLUMNS: tl.constexpr):
    """The vector, normalised."""
    wide = part.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    return weight * (wide * scale).to(part.dtype)


@triton.jit
def _rounded(part, FP8: tl.constexpr):
    """The vector as float32 and its scale; with FP8 rounded to 8 bits by `terra.engine.graph.matrix.round_rows`."""
    wide = part.to(tl.float32)
    scale = 1.0
    if FP8:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), 0), 1e-12), 448.0)
        wide = tl.div_rn(wide, scale).to(tl.float8e4nv).to(tl.float32)
    return wide[None, :], scale


@triton.jit
def _dot(tile, wide, by, scales, row, rows, FP8: tl.constexpr):
    """Of each row of the tile the product with the vector."""
    made = tl.sum(tile.to(tl.float32) * wide, 1)
    if FP8:
        made = made * by * tl.load(scales + row, mask=row < rows, other=0.0)
    return made


@triton.jit
def _product(
    vector, norm, weight, scales, states, result, epsilon,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, SUM: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of weight times vector; with GATED those of its upper half activate those of its lower half."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, PADDED)
    inside = column < COLUMNS
    tile = _rows(weight, row, column, ROWS, COLUMNS)
    if GATED:
        lower = _rows(weight + ROWS * COLUMNS, row, column, ROWS, COLUMNS)
    if NORM:
        factors = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    part = tl.load(vector + column, mask=inside, other=0.0)
    if NORM:
        part = _normalised(part, factors, epsilon, COLUMNS)
    kind = result.dtype.element_ty
    wide, by = _rounded(part, FP8)
    made = _dot(tile, wide, by, scales, row, ROWS, FP8).to(kind)
    if GATED:
        gate = made.to(tl.float32)
        made = (gate / (1.0 + tl.exp(-gate))).to(kind) * _dot(lower, wide, by, scales + ROWS, row, ROWS, FP8).to(kind)
    if SUM:
        made = tl.load(states + row, mask=row < ROWS) + made
    tl.store(result + row, made, mask=row < ROWS)


@triton.jit
def _project(
    vector, norm, weight, scales, cosine, sine, position, queries, keys, values, epsilon, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some pairs of elements that rotate together, of one head: of a query, a key or a value."""
    half: tl.constexpr = DIM // 2
    head = tl.program_id(0) * BLOCK_PAIRS // half
    low = tl.program_id(0) * BLOCK_PAIRS % half + tl.arange(0, BLOCK_PAIRS)
    column = tl.arange(0, PADDED)
    inside = column < COLUMNS
    rows: tl.constexpr = (GROUP + 2) * HEADS * DIM
    low_row = head * DIM + low
    low_tile = _rows(weight, low_row, column, rows, COLUMNS)
    high_tile = _rows(weight, low_row + half, column, rows, COLUMNS)
    factors = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_inputs(EARLY)
    part = _normalised(tl.load(vector + column, mask=inside, other=0.0), factors, epsilon, COLUMNS)
    kind = queries.dtype.element_ty
    wide, by = _rounded(part, FP8)
    first = _dot(low_tile, wide, by, scales, low_row, rows, FP8).to(kind)
    second = _dot(high_tile, wide, by, scales, low_row + half, rows, FP8).to(kind)
    place = tl.load(position)
    number = head - GROUP * HEADS  # of the cache's head, keys first
    if number < HEADS:
        first, second = rotated(first, second, cosine, sine, place * DIM + low, half)
    cached = ((number % HEADS) * length + place) * DIM + low
    if number < 0:
        store_pair(queries + head * DIM + low, first, second, half)
    elif number < HEADS:
        store_pair(keys + cached, first, second, half)
    else:
        store_pair(values + cached, first, second, half)


def product(
    vector: Float[Tensor, "1 1 columns"],
    matrix: Matrix,
    *,
    norm: Float[Tensor, " columns"] | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    states: Float[Tensor, "1 1 rows"] | None = None,
) -> Float[Tensor, "1 1 rows"]:
    """`terra.engine.graph.matrix.linear`, with what stands before and behind it.

    Args:
        norm: the vector is normalised first, by `terra.engine.graph.layers.rms_norm`.
        gated: the result is SiLU of its first half times its second half.
        states: the result is added to them.
    """
    weight, scales = matrix.weight, matrix.scale
    rows, columns = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    padded, block = _block(weight, 2 if gated else 1)
    result = torch.empty(1, 1, rows, dtype=vector.dtype, device=vector.device)
    early = launched_early(vector.device)
    _product[(triton.cdiv(rows, block),)](
        vector, result if norm is None else norm, weight, result if scales is None else scales,
        result if states is None else states, result, epsilon,
        ROWS=rows, COLUMNS=columns, PADDED=padded, BLOCK_ROWS=block,
        NORM=norm is not None, GATED=gated, SUM=states is not None, FP8=scales is not None, EARLY=bool(early),
        num_warps=_WARPS, **early,
    )  # fmt: skip
    return result


def project(
    vector: Float[Tensor, "1 1 columns"],
    norm: Float[Tensor, " columns"],
    epsilon: float,
    matrix: Matrix,
    place: Place,
) -> Float[Tensor, "1 1 heads dim"]:
    """`terra.engine.graph.layers.project` of one row that is not normalised yet; `dim` is a power of two."""
    _, kv_heads, length, dim = place.keys.shape
    weight, scales = matrix.weight, matrix.scale
    heads = len(weight) // dim - 2 * kv_heads
    padded, block = _block(weight, 2)
    block = min(block, dim // 2)
    queries = torch.empty(1, 1, heads, dim, dtype=vector.dtype, device=vector.device)
    early = launched_early(vector.device)
    _project[(len(weight) // 2 // block,)](
        vector, norm, weight, queries if scales is None else scales, place.cosine, place.sine, place.positions,
        queries, place.keys, place.values, epsilon, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, COLUMNS=weight.shape[1], PADDED=padded,
        BLOCK_PAIRS=block, FP8=scales is not None, EARLY=bool(early), num_warps=_WARPS, **early,
    )  # fmt: skip
    return queries


def _block(weight: Tensor, tiles: int) -> tuple[int, int]:
    """Columns of a tile, and its rows where a program reads so many tiles."""
    padded = int(triton.next_power_of_2(weight.shape[1]))
    return padded, max(1, _BYTES // weight.element_size() // tiles // padded)
