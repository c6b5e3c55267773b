"""Triton kernels for passes of one token: matrix-vector products that read their weights as fast as memory gives them.

A product takes the normalisation before it and what follows it along: activation, sum, or rotation and cache. So a
layer is six kernels. A program reads whole rows of the weight, a tile of them at a time. Weights depend on nothing, so
on a GPU that can launch a kernel before the one ahead of it is done, the first tile is read before that one's result is
waited for. Rounding is that of `terra.engine.graph.many_rows`.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

from terra.engine.graph.alike import activated, rotated, rotation, store_pair
from terra.engine.graph.launch import launched_early, processors, wait_for_inputs
from terra.engine.graph.layers import Layer, Norm, Place
from terra.engine.graph.matrix import FP8, Matrix, linear
from terra.engine.graph.tokens import Draws, pick

_ELEMENTS = 12288
"""Of the weight in a tile, at most; a few programs fill a multiprocessor's share of the memory's bandwidth times its
latency."""

_TILES, _TILES_IN_8_BITS = 2, 3
"""Of a program, at most: the vector is made ready once for all of them."""

_PROGRAMS = 3
"""For each multiprocessor, that are left at least if each is to read more than one tile."""

_WARPS = 4


@triton.jit
def _columns(FIRST: tl.constexpr, REST: tl.constexpr):
    """The columns' numbers in one piece, or in two of which the second is padded."""
    columns = (tl.arange(0, FIRST),)
    if REST:
        columns = columns + (FIRST + tl.arange(0, REST),)  # noqa: RUF005
    return columns


@triton.jit
def _vector(start, columns, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    """A vector in pieces."""
    parts = ()
    for piece in tl.static_range(PIECES):
        at = columns[piece]
        parts = parts + (tl.load(start + at, mask=at < COLUMNS, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def _rows(weight, row, rows, columns, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    """Whole rows of the weight, in pieces."""
    tiles = ()
    start = weight + row.to(tl.int64)[:, None] * COLUMNS
    for piece in tl.static_range(PIECES):
        at = columns[piece][None, :]
        tiles = tiles + (tl.load(start + at, mask=(row < rows)[:, None] & (at < COLUMNS), other=0.0),)  # noqa: RUF005
    return tiles


@triton.jit
def _input(
    vector, factors, epsilon, states_by, columns,
    NORM: tl.constexpr, FP8: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The vector as float32; with NORM normalised, and with FP8 rounded to 8 bits behind that."""
    parts = _vector(vector, columns, COLUMNS, PIECES)
    by = 1.0
    if NORM:
        squares = 0.0
        for piece in tl.static_range(PIECES):
            squares += tl.sum(parts[piece].to(tl.float32) * parts[piece].to(tl.float32), 0)
        by = tl.rsqrt(squares / COLUMNS + epsilon)
    wide = ()
    for piece in tl.static_range(PIECES):
        part = parts[piece]
        if NORM:
            part = factors[piece] * (part.to(tl.float32) * by).to(part.dtype)
            if FP8:
                part = (part.to(tl.float32) * states_by).to(tl.float8e4nv)
        wide = wide + (part.to(tl.float32),)  # noqa: RUF005
    return wide


@triton.jit
def _scales(scales, row, rows, FP8: tl.constexpr):
    """Of rows of the weight; 1 where it is as it is."""
    factors = 1.0
    if FP8:
        factors = tl.load(scales + row, mask=row < rows, other=0.0)
    return factors


@triton.jit
def _read(weight, scales, row, rows, columns, FP8: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    """A tile of the weight and the scales of its rows."""
    return _rows(weight, row, rows, columns, COLUMNS, PIECES), _scales(scales, row, rows, FP8)


@triton.jit
def _dot(tile, wide, PIECES: tl.constexpr):
    """Of each row of a tile (see `_read`) the product with the vector, scaled."""
    rows, scales = tile
    made = tl.sum(rows[0].to(tl.float32) * wide[0][None, :], 1)
    for piece in tl.static_range(1, PIECES):
        made += tl.sum(rows[piece].to(tl.float32) * wide[piece][None, :], 1)
    return made * scales


@triton.jit
def _product(
    vector, norm, weight, scales, states, result, rows, epsilon, states_by, result_by,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, SUM: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of weight times vector; with GATED those of its upper half activate those of its lower half.

    A result in 8 bits is multiplied by `result_by` first.
    """
    row = tl.program_id(0) * (BLOCK_ROWS * TILES) + tl.arange(0, BLOCK_ROWS)
    columns = _columns(FIRST, REST)
    pieces: tl.constexpr = 2 if REST else 1
    below, scales_below = weight + rows.to(tl.int64) * COLUMNS, scales + rows
    tile = _read(weight, scales, row, rows, columns, FP8, COLUMNS, pieces)
    lower = tile
    if GATED:
        lower = _read(below, scales_below, row, rows, columns, FP8, COLUMNS, pieces)
    factors = ()
    if NORM:
        factors = _vector(norm, columns, COLUMNS, pieces)
    wait_for_inputs(EARLY)
    added = ()
    if SUM:  # on its way while the rest is computed
        for number in tl.static_range(TILES):
            at = row + number * BLOCK_ROWS
            added = added + (tl.load(states + at, mask=at < rows),)  # noqa: RUF005
    wide = _input(vector, factors, epsilon, states_by, columns, NORM, FP8, COLUMNS, pieces)
    kind = result.dtype.element_ty
    narrow: tl.constexpr = kind == tl.float8e4nv
    for number in tl.static_range(TILES):
        at = row + number * BLOCK_ROWS
        next_tile, next_lower = tile, lower
        if number + 1 < TILES:
            next_tile = _read(weight, scales, at + BLOCK_ROWS, rows, columns, FP8, COLUMNS, pieces)
            if GATED:
                next_lower = _read(below, scales_below, at + BLOCK_ROWS, rows, columns, FP8, COLUMNS, pieces)
        made = _dot(tile, wide, pieces)
        if not narrow:  # else it is rounded once
            made = made.to(kind)
        if GATED:
            by = _dot(lower, wide, pieces)
            if not narrow:
                by = by.to(kind)
            made = activated(made, by)
        if narrow:
            made = (made * result_by).to(kind)
        if SUM:
            made = added[number] + made
        tl.store(result + at, made, mask=at < rows)
        tile, lower = next_tile, next_lower


@triton.jit
def _project(
    vector, norm, weight, scales, cosine, sine, position, queries, keys, values, rows, epsilon, states_by, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some pairs of elements that rotate together, of one head: of a query, a key or a value."""
    half: tl.constexpr = DIM // 2
    head = tl.program_id(0) * BLOCK_PAIRS // half
    low = tl.program_id(0) * BLOCK_PAIRS % half + tl.arange(0, BLOCK_PAIRS)
    row = head * DIM + low
    columns = _columns(FIRST, REST)
    pieces: tl.constexpr = 2 if REST else 1
    first_tile = _read(weight, scales, row, rows, columns, FP8, COLUMNS, pieces)
    second_tile = _read(weight, scales, row + half, rows, columns, FP8, COLUMNS, pieces)
    factors = _vector(norm, columns, COLUMNS, pieces)
    wait_for_inputs(EARLY)
    place = tl.load(position)
    angles = rotation(cosine, sine, place * DIM + low, half)  # on its way while the rest is computed
    wide = _input(vector, factors, epsilon, states_by, columns, True, FP8, COLUMNS, pieces)
    kind = queries.dtype.element_ty
    first = _dot(first_tile, wide, pieces).to(kind)
    second = _dot(second_tile, wide, pieces).to(kind)
    number = head - GROUP * HEADS  # of the cache's head, keys first
    if number < HEADS:
        first, second = rotated(first, second, angles)
    if number < 0:
        store_pair(queries + head * DIM + low, first, second, half)
    elif number < HEADS:
        store_pair(keys + (number * length + place) * DIM + low, first, second, half)
    else:
        at = ((number - HEADS) * DIM + low) * length + place
        store_pair(values + at, first, second, half * length)


def product(
    vector: Float[Tensor, "1 1 columns"],
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    states: Float[Tensor, "1 1 rows"] | None = None,
    result_by: float | None = None,
) -> Float[Tensor, "1 1 rows"]:
    """`terra.engine.graph.matrix.linear`, with what stands before and behind it.

    Args:
        vector: as the matrix takes it, or with `norm` the states before that.
        norm: the vector is normalised first, by `terra.engine.graph.layers.rms_norm`.
        gated: the result is SiLU of its first half times its second half.
        states: the result is added to them.
        result_by: the result is multiplied by it and rounded to 8 bits.
    """
    weight, scales = matrix.weight, matrix.scale
    rows = len(weight) // (2 if gated else 1)
    block_rows = _height(weight, 2 if gated else 1)
    most = _TILES if scales is None else _TILES_IN_8_BITS
    tiles = min(most, max(1, rows // (block_rows * _PROGRAMS * processors(vector.device))))
    dtype = matrix.dtype if result_by is None else FP8
    result = torch.empty(1, 1, rows, dtype=dtype, device=vector.device)
    _product[(triton.cdiv(rows, block_rows * tiles),)](
        vector, result if norm is None else norm.weight, weight, result if scales is None else scales,
        result if states is None else states, result, rows, norm.epsilon if norm else 0.0, matrix.states_by or 1.0,
        result_by or 1.0,
        **_pieces(weight.shape[1]), BLOCK_ROWS=block_rows, TILES=tiles,
        NORM=norm is not None, GATED=gated, SUM=states is not None, FP8=scales is not None,
        num_warps=_WARPS, **launched_early(vector.device),
    )  # fmt: skip
    return result


def project(
    vector: Float[Tensor, "1 1 columns"], norm: Norm, layer: Layer, place: Place
) -> Float[Tensor, "1 1 heads dim"]:
    """`terra.engine.graph.layers.project` of one row that is not normalised yet; `dim` is a power of two."""
    _, kv_heads, length, dim = place.keys.shape
    weight, scales = layer.query_key_value.weight, layer.query_key_value.scale
    heads = len(weight) // dim - 2 * kv_heads
    block_pairs = min(_height(weight, 2), dim // 2)
    queries = torch.empty(1, 1, heads, dim, dtype=vector.dtype, device=vector.device)
    _project[(len(weight) // 2 // block_pairs,)](
        vector, norm.weight, weight, queries if scales is None else scales, place.cosine, place.sine, place.positions,
        queries, place.keys, place.values, len(weight), norm.epsilon, layer.query_key_value.states_by or 1.0, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, **_pieces(weight.shape[1]),
        BLOCK_PAIRS=block_pairs, FP8=scales is not None, num_warps=_WARPS, **launched_early(vector.device),
    )  # fmt: skip
    return queries


def mix(
    attended: Float[Tensor, "1 1 heads dim"],
    states: Float[Tensor, "1 1 hidden"],
    layer: Layer,
    next_norm: Norm,
) -> tuple[Float[Tensor, "1 1 hidden"], Float[Tensor, "1 1 hidden"]]:
    """`terra.engine.graph.layers.mix`; the states for what comes next are not normalised."""
    states = product(attended.flatten(2), layer.output, states=states)
    inner = product(states, layer.gate_up, norm=layer.norm, gated=True, result_by=layer.down.states_by)
    states = product(inner, layer.down, states=states)
    return states, states


def product_and_pick(
    vector: Float[Tensor, "1 1 columns"], head: Matrix, draws: Draws, best: Int64[Tensor, " 1"]
) -> None:
    """Put the best token of the vector's logits into `best`, see `terra.engine.graph.tokens.pick`."""
    # The library reads a large matrix as fast as can be.
    logits = linear(vector, head) if head.scale is None else product(vector, head)
    pick(logits.flatten(0, 1), draws, best)


def _pieces(columns: int) -> dict[str, int]:
    """Sizes of the pieces that a row is read in: powers of two, of which the second may reach over its end."""
    first = 1 << columns.bit_length() - 1
    rest = columns - first
    return {"COLUMNS": columns, "FIRST": first, "REST": 1 << (rest - 1).bit_length() if rest else 0}


def _height(weight: Tensor, parts: int) -> int:
    """Rows of a tile of so many parts, in each."""
    most = max(1, _ELEMENTS // parts // weight.shape[1])
    return 1 << most.bit_length() - 1
