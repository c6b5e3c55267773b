"""Triton kernels for passes of several tokens: matrix products of few rows, and what stands between them.

Such a product is done when its weight has been read. The weight's columns are split over programs, so that all
multiprocessors read at once, and the kernel behind it sums the parts. Rounding is that of the separate steps. Rows of
the weight are rows of the product, tokens its columns: so any number of tokens takes one kind of instruction, and a
token's bits do not depend on how many there are.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from terra.engine.graph.alike import activated, rotated, rotation, scales_to_8_bits, store_pair, summed
from terra.engine.graph.launch import launched_early, processors, shared_memory, wait_for_inputs
from terra.engine.graph.layers import Layer, Place
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
class Rounded:
    """States of this type in 8 bits, each token's to be multiplied by its scale."""

    values: Float[Tensor, "lanes width columns"]
    scales: Float32[Tensor, " tokens"]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the states."""
        return self.values.shape


@dataclass(frozen=True)
class Parts:
    """States times a matrix, in parts that are to be summed, and to be scaled where they were made of 8 bits."""

    sums: Float32[Tensor, "splits tokens rows"]
    token_scales: Float32[Tensor, " tokens"] | None
    row_scales: Float32[Tensor, " rows"] | None

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """A kernel's arguments, with any tensor in the place of what is not there."""
        if self.token_scales is None or self.row_scales is None:
            return self.sums, self.sums, self.sums
        return self.sums, self.token_scales, self.row_scales


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of a token of each lane, in parts: attention sums and rotates them, and keeps the keys
    and values in the cache.
    """

    parts: Parts
    place: Place
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the queries: lanes, a token, heads, dim."""
        lanes, kv_heads, _, dim = self.place.keys.shape
        return torch.Size((lanes, 1, self.parts.sums.shape[-1] // dim - 2 * kv_heads, dim))


@triton.jit
def _product(
    states, token_scales, weight, row_scales, result, tokens, rows,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IMPRECISE: tl.constexpr,
    HELD: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight and a split of SIZE of its columns, times the states.

    A part of the product as it is, or the WHOLE, scaled; with GATED what the weight's upper half gives activates what
    its lower half gives, and half of the rows are of either.
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
    if WHOLE:
        if FP8:
            by_token = tl.load(token_scales + token, mask=token < tokens, other=0.0)
            made = made * by_token[None, :] * tl.load(row_scales + read)[:, None]
        made = made.to(kind)
        if GATED:
            gate, by = tl.split(tl.permute(tl.reshape(made, (2, own, BLOCK_TOKENS)), (1, 2, 0)))
            made = activated(gate, by)
    place = (split * tokens + token).to(tl.int64)
    tl.store(result + place[None, :] * rows + row[:, None], made, mask=used & (row < rows)[:, None])


@triton.jit
def _halves(
    parts, token_scales, row_scales, token, row, used, tokens, rows, half, SPLITS: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """`summed` of rows of heads' first halves, and of those of their second halves."""
    first = summed(parts, token_scales, row_scales, token, row, used, tokens, rows, SPLITS, FP8)
    return first, summed(parts, token_scales, row_scales, token, row + half, used, tokens, rows, SPLITS, FP8)


@triton.jit
def _add_and_normalise(
    states, parts, token_scales, row_scales, norm, added, normalised, scales, tokens, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's states plus a product in parts, if SPLITS is not 0, and these normalised.

    With FP8 the product was made in 8 bits and is to be scaled; what is normalised is rounded to 8 bits again.
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
        made = summed(parts, token_scales, row_scales, token, column, used, tokens, COLUMNS, SPLITS, FP8)
        state += made.to(kind)
        tl.store(added + at, state, mask=used)
    wide = state.to(tl.float32)
    by = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    normal = factors * (wide * by).to(kind)
    if FP8:
        _store_rounded(normal, normalised, scales, token, column, used, COLUMNS)
    else:
        tl.store(normalised + at, normal, mask=used)


@triton.jit
def _store_rounded(state, rounded, scales, token, column, used, COLUMNS: tl.constexpr):
    """One token's states in 8 bits, and their scale (`matrix.round_rows`)."""
    wide = state.to(tl.float32)
    scale, inverse = scales_to_8_bits(tl.max(tl.abs(wide), 0))
    tl.store(rounded + token * COLUMNS + column, (wide * inverse).to(tl.float8e4nv), mask=used)
    tl.store(scales + token, scale)


@triton.jit
def _round_rows(states, rounded, scales, COLUMNS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    state = tl.load(states + token * COLUMNS + column, mask=used, other=0.0)
    _store_rounded(state, rounded, scales, token, column, used, COLUMNS)


@triton.jit
def _rotate_and_store(
    parts, token_scales, row_scales, cosine, sine, positions, queries, keys, values, tokens, width, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_CACHED: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
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
    first, second = _halves(parts, token_scales, row_scales, token, row, used, tokens, rows, half, SPLITS, FP8)
    first, second = rotated(first.to(kind), second.to(kind), angles)
    store_pair(queries + token * (GROUP * HEADS * DIM) + row, first, second, half, used)

    used = cached < HEADS
    row = (GROUP * HEADS + cached) * DIM + low
    first, second = _halves(parts, token_scales, row_scales, token, row, used, tokens, rows, half, SPLITS, FP8)
    first, second = rotated(first.to(kind), second.to(kind), angles)
    store_pair(keys + (of_cache + position) * DIM + low, first, second, half, used)

    row += HEADS * DIM
    first, second = _halves(parts, token_scales, row_scales, token, row, used, tokens, rows, half, SPLITS, FP8)
    store_pair(values + of_cache * DIM + low * length + position, first.to(kind), second.to(kind), half * length, used)


def split_product(states: Float[Tensor, "lanes width columns"] | Rounded, matrix: Matrix) -> Parts:
    """`terra.engine.graph.matrix.linear` in parts."""
    rows, columns = matrix.weight.shape
    tokens = _count(states)
    block = _SPLIT.num_bytes // matrix.weight.element_size()
    wanted = max(1, processors(matrix.weight.device) // triton.cdiv(rows, _SPLIT.rows))
    size = triton.cdiv(triton.cdiv(columns, block), wanted) * block
    sums = torch.empty(triton.cdiv(columns, size), tokens, rows, dtype=torch.float32, device=matrix.weight.device)
    token_scales = _multiply(states, matrix, sums, _tiles(matrix, tokens, _SPLIT), size=size)
    return Parts(sums, token_scales, matrix.scale)


def gated_product(
    states: Float[Tensor, "lanes width columns"] | Rounded, matrix: Matrix
) -> Float[Tensor, "lanes width inner"]:
    """SiLU of the first half of `terra.engine.graph.matrix.linear`, times its second half."""
    inner = torch.empty(*states.shape[:-1], len(matrix.weight) // 2, dtype=states.dtype, device=matrix.weight.device)
    _multiply(states, matrix, inner, _tiles(matrix, _count(states), _GATED), gated=True)
    return inner


def product(
    states: Float[Tensor, "lanes width columns"] | Rounded, matrix: Matrix
) -> Float[Tensor, "lanes width rows"]:
    """`terra.engine.graph.matrix.linear` with a matrix of so many rows that no columns need to be split."""
    result = torch.empty(*states.shape[:-1], len(matrix.weight), dtype=states.dtype, device=matrix.weight.device)
    _multiply(states, matrix, result, _tiles(matrix, _count(states), _HEAD))
    return result


def project(
    hidden: Float[Tensor, "lanes width hidden"] | Rounded,
    norm: Float[Tensor, " hidden"],
    epsilon: float,
    layer: Layer,
    place: Place,
) -> Float[Tensor, "lanes width heads dim"] | Projected:
    """`terra.engine.graph.layers.project`, of which attention does the rest where each lane has one token."""
    parts = split_product(hidden, layer.query_key_value)
    if hidden.shape[1] == 1:
        return Projected(parts, place, hidden.dtype)
    return rotate_and_store(parts, place, hidden.dtype)


def mix(
    attended: Float[Tensor, "lanes width heads dim"],
    states: Float[Tensor, "lanes width hidden"],
    layer: Layer,
    next_norm: Float[Tensor, " hidden"],
    epsilon: float,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"] | Rounded]:
    """`terra.engine.graph.layers.mix`."""
    parts = split_product(attended.flatten(2), layer.output)
    states, hidden = add_and_normalise(states, parts, layer.norm, epsilon)
    parts = split_product(gated_product(hidden, layer.gate_up), layer.down)
    return add_and_normalise(states, parts, next_norm, epsilon)


def product_and_pick(
    states: Float[Tensor, "lanes width hidden"] | Rounded, head: Matrix, draws: Draws, best: Int64[Tensor, " tokens"]
) -> None:
    """Put the best token of each of the states' logits into `best`, see `terra.engine.graph.tokens.pick`."""
    pick(product(states, head).flatten(0, 1), draws, best)


def _multiply(
    states: Tensor | Rounded,
    matrix: Matrix,
    result: Tensor,
    tiles: dict[str, int],
    *,
    size: int | None = None,
    gated: bool = False,
) -> Tensor | None:
    """Fill `result`, in parts of `size` columns or as a whole; the scales of the tokens, if the matrix is in 8 bits."""
    columns, rows = states.shape[-1], result.shape[-1]
    tokens = _count(states)
    splits = triton.cdiv(columns, size or columns)
    if matrix.scale is not None and isinstance(states, Tensor):
        states = round_rows(states)
    values, token_scales = (states.values, states.scales) if isinstance(states, Rounded) else (states, None)
    own = tiles["BLOCK_ROWS"] // (2 if gated else 1)
    _product[(triton.cdiv(rows, own), splits, triton.cdiv(tokens, tiles["BLOCK_TOKENS"]))](
        values, result if token_scales is None else token_scales,
        matrix.weight, result if matrix.scale is None else matrix.scale, result, tokens, rows,
        COLUMNS=columns, SIZE=size or columns, **tiles, IMPRECISE=_IMPRECISE, WHOLE=size is None, GATED=gated,
        FP8=token_scales is not None, PRECISION="ieee", **launched_early(result.device),
    )  # fmt: skip
    return token_scales


def _tiles(matrix: Matrix, tokens: int, shape: _Shape) -> dict[str, int]:
    """What a program takes at once: tokens, rows of the weight, and columns of these; and how it works.

    More tokens than half of the most take room from the weight, and a GPU with less shared memory has fewer blocks.
    """
    block = min(_MAX_BLOCK_TOKENS, max(_MIN_BLOCK_TOKENS, int(triton.next_power_of_2(tokens))))
    many = 2 * block > _MAX_BLOCK_TOKENS
    num_bytes = min(shape.num_bytes, 128) if many else shape.num_bytes
    few = block == _MIN_BLOCK_TOKENS
    held = shape.held if few else 0
    fitting = shared_memory(matrix.weight.device) // ((block + shape.rows) * num_bytes)
    blocks = min(shape.blocks, fitting // (2 if few else shape.programs))
    return {
        "BLOCK_TOKENS": block,
        "BLOCK_ROWS": shape.rows,
        "BLOCK_COLUMNS": num_bytes // matrix.weight.element_size(),
        "num_stages": max(blocks - held, 2),
        "num_warps": shape.warps if many else _WARPS,
        "HELD": held,
    }


def _count(states: Tensor | Rounded) -> int:
    """How many tokens these are of."""
    return states.shape[:-1].numel()


def round_rows(states: Float[Tensor, "lanes width columns"]) -> Rounded:
    """`terra.engine.graph.matrix.round_rows` of each token."""
    rounded = _empty_rounded(states)
    columns = states.shape[-1]
    _round_rows[(_count(states),)](
        states,
        rounded.values,
        rounded.scales,
        COLUMNS=columns,
        PADDED=triton.next_power_of_2(columns),
        **launched_early(states.device),
    )
    return rounded


def _empty_rounded(states: Tensor) -> Rounded:
    scales = torch.empty(_count(states), dtype=torch.float32, device=states.device)
    return Rounded(torch.empty_like(states, dtype=FP8), scales, states.dtype)


def normalise(
    states: Float[Tensor, "lanes width hidden"], norm: Float[Tensor, " hidden"], epsilon: float
) -> Float[Tensor, "lanes width hidden"]:
    """`terra.engine.graph.layers.rms_norm`."""
    normalised = torch.empty_like(states)
    _normalise(states, None, norm, epsilon, states, normalised)
    return normalised


def add_and_normalise(
    states: Float[Tensor, "lanes width hidden"], parts: Parts, norm: Float[Tensor, " hidden"], epsilon: float
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"] | Rounded]:
    """The states plus a product, and these normalised; in 8 bits if the product was made of such."""
    added = torch.empty_like(states)
    normalised = torch.empty_like(states) if parts.token_scales is None else _empty_rounded(states)
    _normalise(states, parts, norm, epsilon, added, normalised)
    return added, normalised


def _normalise(
    states: Tensor, parts: Parts | None, norm: Tensor, epsilon: float, added: Tensor, normalised: Tensor | Rounded
) -> None:
    """Fill `added`, unless there are no parts to add, and `normalised`."""
    in_8_bits = isinstance(normalised, Rounded)
    results = (normalised.values, normalised.scales) if in_8_bits else (normalised, normalised)
    hidden = states.shape[-1]
    tokens = _count(states)
    pointers = 3 * (states,) if parts is None else parts.pointers()
    _add_and_normalise[(tokens,)](
        states, *pointers, norm, added, *results, tokens, epsilon,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), SPLITS=0 if parts is None else len(parts.sums),
        FP8=in_8_bits, num_warps=8, **launched_early(states.device),
    )  # fmt: skip


def rotate_and_store(parts: Parts, place: Place, dtype: torch.dtype) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.layers.place_heads` of a product in this type; `dim` is a power of two."""
    lanes, width = place.positions.shape
    _, kv_heads, length, dim = place.keys.shape
    splits, tokens, rows = parts.sums.shape
    heads = rows // dim - 2 * kv_heads
    queries = torch.empty(lanes, width, heads, dim, dtype=dtype, device=parts.sums.device)
    _rotate_and_store[(tokens,)](
        *parts.pointers(), place.cosine, place.sine, place.positions, queries, place.keys, place.values,
        tokens, width, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PADDED=triton.next_power_of_2(heads),
        PADDED_CACHED=triton.next_power_of_2(kv_heads), SPLITS=splits, FP8=parts.token_scales is not None,
        num_warps=8, **launched_early(parts.sums.device),
    )  # fmt: skip
    return queries
