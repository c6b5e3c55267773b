"""Triton kernels for passes of several tokens: matrix products of few rows, and what stands between them.

Such a product is done when its weight has been read. The weight's columns are split over programs, so that all
multiprocessors read at once, and the kernel behind it sums the parts. Rounding is that of the separate steps, but that
what attention and activation give is rounded once where it goes to 8 bits. Rows of the weight are rows of the product,
tokens its columns: so any number of tokens takes one kind of instruction, and a token's bits do not depend on how many
there are.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from terra.engine.graph.alike import activated, rotated, rotation, store_pair, summed
from terra.engine.graph.launch import launched_early, processors, shared_memory, wait_for_inputs
from terra.engine.graph.layers import Layer, Norm, Place
from terra.engine.graph.matrix import FP8, Matrix
from terra.engine.graph.tokens import Draws, pick

_MIN_BLOCK_TOKENS = 16  # that tl.dot takes
_MAX_BLOCK_TOKENS = 128

_WARPS = 4


@dataclass(frozen=True)
class _Shape:
    """Of a program: rows, bytes of each that it takes at once, how many such blocks at most, warps with many tokens.

    So many programs are to have room on a multiprocessor; two with few tokens, where the next kernel's are to be there
    before these are done, and have so many blocks already when their states come.
    """

    rows: int
    num_bytes: int
    blocks: int
    warps: int
    programs: int = 1
    held: int = 0


# The fastest of those tried on an H200.
_SPLIT = _Shape(rows=64, num_bytes=256, blocks=5, warps=4, held=1)
_GATED = _Shape(rows=64, num_bytes=256, blocks=5, warps=4, programs=2, held=1)
_HEAD = _Shape(rows=128, num_bytes=128, blocks=4, warps=8)

_IMPRECISE = 128
"""Products of 8 bits that are summed before the sum is added in float32: tensor cores keep fewer bits of such sums."""


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of a token of each lane, in parts: attention sums and rotates them, and keeps the keys
    and values in the cache.
    """

    parts: Float32[Tensor, "splits lanes rows"]
    place: Place

    @property
    def shape(self) -> torch.Size:
        """Of the queries: lanes, a token, heads, dim."""
        lanes, kv_heads, _, dim = self.place.keys.shape
        return torch.Size((lanes, 1, self.parts.shape[-1] // dim - 2 * kv_heads, dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries."""
        return self.place.cosine.dtype


@triton.jit
def _product(
    states, weight, row_scales, result, result_by, tokens, rows,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IMPRECISE: tl.constexpr,
    HELD: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight and a split of SIZE of its columns, times the states.

    With GATED what the weight's upper half gives activates what its lower half gives, half of the rows are of either,
    and a result in 8 bits is multiplied by `result_by` first. With FP8 states and weight are of 8 bits, and rows are to
    be scaled.
    """
    own: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    row = tl.program_id(0) * own + tl.arange(0, own)
    local = tl.arange(0, BLOCK_ROWS)
    read = tl.minimum(tl.program_id(0) * own + local % own, rows - 1) + local // own * rows
    split = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_blocks: tl.constexpr = COLUMNS % BLOCK_COLUMNS == 0
    begin = split * SIZE
    column = begin + tl.arange(0, BLOCK_COLUMNS)
    state_at = states + token[None, :] * COLUMNS + column[:, None]
    weight_at = weight + read.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    used = (token < tokens)[None, :]
    made = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    if HELD:
        tile = tl.load(weight_at, mask=(column < COLUMNS)[None, :], other=0.0)
    if FP8:
        scales = tl.load(row_scales + read)
    wait_for_inputs(EARLY)
    if HELD:
        state = tl.load(state_at, mask=used & (column < COLUMNS)[:, None], other=0.0)
        made = tl.dot(tile, state, made, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    for at in range(HELD * BLOCK_COLUMNS, tl.minimum(SIZE, COLUMNS - begin), BLOCK_COLUMNS):
        if in_blocks:
            state = tl.load(state_at + at, mask=used, other=0.0)
            tile = tl.load(weight_at + at)
        else:
            within = column + at < COLUMNS
            state = tl.load(state_at + at, mask=used & within[:, None], other=0.0)
            tile = tl.load(weight_at + at, mask=within[None, :], other=0.0)
        made = tl.dot(tile, state, made, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    kind = result.dtype.element_ty
    narrow: tl.constexpr = kind == tl.float8e4nv
    if FP8:
        made = made * scales[:, None]
    if GATED:
        if not narrow:  # else it is rounded once
            made = made.to(kind)
        gate, by = tl.split(tl.permute(tl.reshape(made, (2, own, BLOCK_TOKENS)), (1, 2, 0)))
        made = activated(gate, by)
        if narrow:
            made = made * result_by
    made = made.to(kind)
    place = (split * tokens + token).to(tl.int64)
    tl.store(result + place[None, :] * rows + row[:, None], made, mask=used & (row < rows)[:, None])


@triton.jit
def _halves(parts, token, row, used, tokens, rows, half, SPLITS: tl.constexpr):
    """`summed` of rows of heads' first halves, and of those of their second halves."""
    first = summed(parts, token, row, used, tokens, rows, SPLITS)
    return first, summed(parts, token, row + half, used, tokens, rows, SPLITS)


@triton.jit
def _add_and_normalise(
    states, parts, norm, added, normalised, normalised_by, tokens, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's states plus a product in parts, if SPLITS is not 0, and these normalised.

    With FP8 what is normalised is multiplied by `normalised_by` and in 8 bits.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    factors = tl.load(norm + column, mask=used, other=0.0)
    wait_for_inputs(EARLY)
    at = token * COLUMNS + column
    state = tl.load(states + at, mask=used, other=0.0)
    kind = state.dtype
    if SPLITS:
        state += summed(parts, token, column, used, tokens, COLUMNS, SPLITS).to(kind)
        tl.store(added + at, state, mask=used)
    wide = state.to(tl.float32)
    by = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    normal = factors * (wide * by).to(kind)
    if FP8:
        normal = normal.to(tl.float32) * normalised_by
    tl.store(normalised + at, normal.to(normalised.dtype.element_ty), mask=used)


@triton.jit
def _rotate_and_store(
    parts, cosine, sine, positions, queries, keys, values, tokens, width, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_CACHED: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All queries, keys and values of one token."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    rows: tl.constexpr = (GROUP + 2) * HEADS * DIM
    low = tl.arange(0, half)[None, :]
    query = tl.arange(0, PADDED)[:, None]
    cached = tl.arange(0, PADDED_CACHED)[:, None]
    position = tl.load(positions + token)
    of_cache = (token // width * HEADS + cached) * length
    angles = rotation(cosine, sine, position * DIM + low, half)
    kind = queries.dtype.element_ty

    used = query < GROUP * HEADS
    row = query * DIM + low
    first, second = _halves(parts, token, row, used, tokens, rows, half, SPLITS)
    first, second = rotated(first.to(kind), second.to(kind), angles)
    store_pair(queries + token * (GROUP * HEADS * DIM) + row, first, second, half, used)

    used = cached < HEADS
    row = (GROUP * HEADS + cached) * DIM + low
    first, second = _halves(parts, token, row, used, tokens, rows, half, SPLITS)
    first, second = rotated(first.to(kind), second.to(kind), angles)
    store_pair(keys + (of_cache + position) * DIM + low, first, second, half, used)

    row += HEADS * DIM
    first, second = _halves(parts, token, row, used, tokens, rows, half, SPLITS)
    store_pair(values + of_cache * DIM + low * length + position, first.to(kind), second.to(kind), half * length, used)


def split_product(
    states: Float[Tensor, "lanes width columns"], matrix: Matrix
) -> Float32[Tensor, "splits tokens rows"]:
    """`terra.engine.graph.matrix.linear`, of states as the matrix takes them, in parts that are to be summed."""
    rows, columns = matrix.weight.shape
    tokens = _count(states)
    at_once = _SPLIT.num_bytes // matrix.weight.element_size()
    wanted = max(1, processors(matrix.weight.device) // triton.cdiv(rows, _SPLIT.rows))
    size = triton.cdiv(triton.cdiv(columns, at_once), wanted) * at_once
    parts = torch.empty(triton.cdiv(columns, size), tokens, rows, dtype=torch.float32, device=states.device)
    _multiply(states, matrix, parts, _tiles(matrix, tokens, _SPLIT), size=size)
    return parts


def gated_product(
    states: Float[Tensor, "lanes width columns"], matrix: Matrix, result_by: float | None = None
) -> Float[Tensor, "lanes width inner"]:
    """SiLU of the first half of `terra.engine.graph.matrix.linear`, times its second half.

    In 8 bits if the result is to be multiplied by something before.
    """
    dtype = matrix.dtype if result_by is None else FP8
    inner = torch.empty(*states.shape[:-1], len(matrix.weight) // 2, dtype=dtype, device=states.device)
    tiles = _tiles(matrix, _count(states), _GATED)
    _multiply(states, matrix, inner, tiles, gated=True, result_by=result_by)
    return inner


def product(states: Float[Tensor, "lanes width columns"], matrix: Matrix) -> Float[Tensor, "lanes width rows"]:
    """`terra.engine.graph.matrix.linear`, of states as the matrix takes them, which has so many rows that no columns
    need to be split.
    """
    result = torch.empty(*states.shape[:-1], len(matrix.weight), dtype=matrix.dtype, device=states.device)
    _multiply(states, matrix, result, _tiles(matrix, _count(states), _HEAD))
    return result


def project(
    hidden: Float[Tensor, "lanes width hidden"], norm: Norm, layer: Layer, place: Place
) -> Float[Tensor, "lanes width heads dim"] | Projected:
    """`terra.engine.graph.layers.project`, of which attention does the rest where each lane has one token."""
    parts = split_product(hidden, layer.query_key_value)
    return Projected(parts, place) if hidden.shape[1] == 1 else rotate_and_store(parts, place)


def mix(
    attended: Float[Tensor, "lanes width heads dim"],
    states: Float[Tensor, "lanes width hidden"],
    layer: Layer,
    next_norm: Norm,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """`terra.engine.graph.layers.mix`; what is normalised is as the matrix behind it takes it."""
    parts = split_product(attended.flatten(2), layer.output)
    states, hidden = add_and_normalise(states, parts, layer.norm)
    parts = split_product(gated_product(hidden, layer.gate_up, layer.down.states_by), layer.down)
    return add_and_normalise(states, parts, next_norm)


def product_and_pick(
    states: Float[Tensor, "lanes width hidden"], head: Matrix, draws: Draws, best: Int64[Tensor, " tokens"]
) -> None:
    """Put the best token of each of the states' logits into `best`, see `terra.engine.graph.tokens.pick`."""
    pick(product(states, head).flatten(0, 1), draws, best)


def _multiply(
    states: Tensor,
    matrix: Matrix,
    result: Tensor,
    tiles: dict[str, int],
    *,
    size: int | None = None,
    gated: bool = False,
    result_by: float | None = None,
) -> None:
    """Fill `result`, in parts of `size` columns or as a whole."""
    columns, rows = states.shape[-1], result.shape[-1]
    tokens = _count(states)
    splits = triton.cdiv(columns, size or columns)
    own = tiles["BLOCK_ROWS"] // (2 if gated else 1)
    _product[(triton.cdiv(rows, own), splits, triton.cdiv(tokens, tiles["BLOCK_TOKENS"]))](
        states, matrix.weight, result if matrix.scale is None else matrix.scale, result, result_by or 1.0,
        tokens, rows,
        COLUMNS=columns, SIZE=size or columns, **tiles, IMPRECISE=_IMPRECISE, GATED=gated,
        FP8=matrix.scale is not None, PRECISION="ieee", **launched_early(result.device),
    )  # fmt: skip


def _tiles(matrix: Matrix, tokens: int, shape: _Shape) -> dict[str, int]:
    """What a program takes at once: tokens, rows of the weight, and columns of these; and how it works.

    More tokens than half of the most take room from the weight, and a GPU with less shared memory has fewer blocks.
    """
    at_once = min(_MAX_BLOCK_TOKENS, max(_MIN_BLOCK_TOKENS, int(triton.next_power_of_2(tokens))))
    many = 2 * at_once > _MAX_BLOCK_TOKENS
    num_bytes = min(shape.num_bytes, 128) if many else shape.num_bytes
    few = at_once == _MIN_BLOCK_TOKENS
    held = shape.held if few else 0
    fitting = shared_memory(matrix.weight.device) // ((at_once + shape.rows) * num_bytes)
    blocks = min(shape.blocks, fitting // (2 if few else shape.programs))
    return {
        "BLOCK_TOKENS": at_once,
        "BLOCK_ROWS": shape.rows,
        "BLOCK_COLUMNS": num_bytes // matrix.weight.element_size(),
        "num_stages": max(blocks - held, 2),
        "num_warps": shape.warps if many else _WARPS,
        "HELD": held,
    }


def _count(states: Tensor) -> int:
    """How many tokens these are of."""
    return states.shape[:-1].numel()


def normalise(states: Float[Tensor, "lanes width hidden"], norm: Norm) -> Float[Tensor, "lanes width hidden"]:
    """`terra.engine.graph.layers.rms_norm`, as the matrix behind it takes it."""
    return _normalise(states, None, norm, states)


def add_and_normalise(
    states: Float[Tensor, "lanes width hidden"], parts: Float32[Tensor, "splits tokens hidden"], norm: Norm
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """The states plus a product, and these normalised, as the matrix behind them takes it."""
    added = torch.empty_like(states)
    return added, _normalise(states, parts, norm, added)


def _normalise(states: Tensor, parts: Tensor | None, norm: Norm, added: Tensor) -> Tensor:
    """What is normalised; `added` is filled unless there are no parts to add."""
    normalised = torch.empty_like(states, dtype=states.dtype if norm.states_by is None else FP8)
    hidden = states.shape[-1]
    tokens = _count(states)
    _add_and_normalise[(tokens,)](
        states, states if parts is None else parts, norm.weight, added, normalised, norm.states_by or 1.0, tokens,
        norm.epsilon,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), SPLITS=0 if parts is None else len(parts),
        FP8=norm.states_by is not None, num_warps=8, **launched_early(states.device),
    )  # fmt: skip
    return normalised


def rotate_and_store(
    parts: Float32[Tensor, "splits tokens rows"], place: Place
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.layers.place_heads` of a product; `dim` is a power of two."""
    lanes, width = place.positions.shape
    _, kv_heads, length, dim = place.keys.shape
    splits, tokens, rows = parts.shape
    heads = rows // dim - 2 * kv_heads
    queries = torch.empty(lanes, width, heads, dim, dtype=place.cosine.dtype, device=parts.device)
    _rotate_and_store[(tokens,)](
        parts, place.cosine, place.sine, place.positions, queries, place.keys, place.values, tokens, width, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PADDED=triton.next_power_of_2(heads),
        PADDED_CACHED=triton.next_power_of_2(kv_heads), SPLITS=splits, num_warps=8, **launched_early(parts.device),
    )  # fmt: skip
    return queries
