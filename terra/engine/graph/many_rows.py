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

from terra.engine.graph.alike import activated, rotated, rotation, scales_to_8_bits, store_pair
from terra.engine.graph.launch import launched_early, processors, shared_memory, wait_for_inputs
from terra.engine.graph.layers import Layer, Place
from terra.engine.graph.matrix import FP8, Matrix
from terra.engine.graph.tokens import Draws, pick

_MIN_BLOCK_TOKENS = 16  # that tl.dot takes
_MAX_BLOCK_TOKENS = 128

# Rows of a program, bytes of each that it takes at once, stages of its loop, and warps where there are many tokens: the
# fastest of those tried on an H200.
_SPLIT = 64, 256, 5, 4
_GATED = 64, 256, 4, 8
_HEAD = 128, 128, 4, 8
_WARPS = 4

_IMPRECISE = 128
"""Products of 8 bits that are summed before the sum is added in float32: tensor cores keep fewer bits of such sums."""


@dataclass(frozen=True)
class Parts:
    """States times a matrix, in parts that are to be summed, and to be scaled where they were made of 8 bits."""

    sums: Float32[Tensor, "splits tokens rows"]
    token_scales: Float32[Tensor, " tokens"] | None
    row_scales: Float32[Tensor, " rows"] | None


@triton.jit
def _product(
    states, token_scales, weight, row_scales, result, tokens, rows,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, IMPRECISE: tl.constexpr,
    WHOLE: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight and a split of SIZE of its columns, times the states.

    A part of the product as it is, or the WHOLE, scaled; with GATED what the weight's upper half gives activates what
    its lower half gives.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_blocks: tl.constexpr = COLUMNS % BLOCK_COLUMNS == 0
    begin = split * SIZE
    column = begin + tl.arange(0, BLOCK_COLUMNS)
    state_at = states + token[None, :] * COLUMNS + column[:, None]
    weight_at = weight + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * COLUMNS + column[None, :]
    lower_at = weight_at + rows.to(tl.int64) * COLUMNS
    used = (token < tokens)[None, :]
    made = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    by = made
    wait_for_inputs(EARLY)
    for at in range(0, tl.minimum(SIZE, COLUMNS - begin), BLOCK_COLUMNS):
        if in_blocks:
            state = tl.load(state_at + at, mask=used, other=0.0)
            tile = tl.load(weight_at + at)
        else:
            within = column + at < COLUMNS
            state = tl.load(state_at + at, mask=used & within[:, None], other=0.0)
            tile = tl.load(weight_at + at, mask=within[None, :], other=0.0)
        made = tl.dot(tile, state, made, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        if GATED:
            if in_blocks:
                tile = tl.load(lower_at + at)
            else:
                tile = tl.load(lower_at + at, mask=(column + at < COLUMNS)[None, :], other=0.0)
            by = tl.dot(tile, state, by, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    kind = result.dtype.element_ty
    if WHOLE:
        made = _scaled(made, token, row, tokens, rows, token_scales, row_scales, FP8).to(kind)
        if GATED:
            by = _scaled(by, token, row, tokens, rows, token_scales, row_scales + rows, FP8).to(kind)
            made = activated(made, by)
    place = (split * tokens + token).to(tl.int64)
    tl.store(result + place[None, :] * rows + row[:, None], made, mask=used & (row < rows)[:, None])


@triton.jit
def _scaled(made, token, row, tokens, rows, token_scales, row_scales, FP8: tl.constexpr):
    if FP8:
        by_token = tl.load(token_scales + token, mask=token < tokens, other=0.0)
        by_row = tl.load(row_scales + row, mask=row < rows, other=0.0)
        made = made * by_token[None, :] * by_row[:, None]
    return made


@triton.jit
def _summed(parts, token_scales, row_scales, token, row, used, tokens, rows, SPLITS: tl.constexpr, FP8: tl.constexpr):
    """Of a token, these rows of a product in parts."""
    made = tl.load(parts + token * rows + row, mask=used, other=0.0)
    for split in tl.static_range(1, SPLITS):
        made += tl.load(parts + (split * tokens + token) * rows + row, mask=used, other=0.0)
    if FP8:
        made = made * tl.load(token_scales + token) * tl.load(row_scales + row, mask=used, other=0.0)
    return made


@triton.jit
def _halves(
    parts, token_scales, row_scales, token, row, used, tokens, rows, half, SPLITS: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """`_summed` of rows of heads' first halves, and of those of their second halves."""
    first = _summed(parts, token_scales, row_scales, token, row, used, tokens, rows, SPLITS, FP8)
    return first, _summed(parts, token_scales, row_scales, token, row + half, used, tokens, rows, SPLITS, FP8)


@triton.jit
def _add_and_normalise(
    states, parts, token_scales, row_scales, norm, added, normalised, tokens, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's states plus a product in parts, if SPLITS is not 0, and these normalised."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    factors = tl.load(norm + column, mask=used, other=0.0)
    wait_for_inputs(EARLY)
    at = token * COLUMNS + column
    state = tl.load(states + at, mask=used, other=0.0)
    kind = state.dtype
    if SPLITS:
        made = _summed(parts, token_scales, row_scales, token, column, used, tokens, COLUMNS, SPLITS, FP8)
        state += made.to(kind)
        tl.store(added + at, state, mask=used)
    wide = state.to(tl.float32)
    by = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    tl.store(normalised + at, factors * (wide * by).to(kind), mask=used)


@triton.jit
def _round_rows(states, rounded, scales, COLUMNS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    """One token's states in 8 bits, and their scale (`matrix.round_rows`)."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    wide = tl.load(states + token * COLUMNS + column, mask=used, other=0.0).to(tl.float32)
    scale, inverse = scales_to_8_bits(tl.max(tl.abs(wide), 0))
    tl.store(rounded + token * COLUMNS + column, (wide * inverse).to(tl.float8e4nv), mask=used)
    tl.store(scales + token, scale)


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


def split_product(states: Float[Tensor, "lanes width columns"], matrix: Matrix) -> Parts:
    """`terra.engine.graph.matrix.linear` in parts."""
    rows, columns = matrix.weight.shape
    tokens = states.numel() // columns
    block = _SPLIT[1] // matrix.weight.element_size()
    wanted = max(1, processors(states.device) // triton.cdiv(rows, _SPLIT[0]))
    size = triton.cdiv(triton.cdiv(columns, block), wanted) * block
    sums = torch.empty(triton.cdiv(columns, size), tokens, rows, dtype=torch.float32, device=states.device)
    token_scales = _multiply(states, matrix, sums, _tiles(matrix, tokens, _SPLIT), size=size)
    return Parts(sums, token_scales, matrix.scale)


def gated_product(states: Float[Tensor, "lanes width columns"], matrix: Matrix) -> Float[Tensor, "lanes width inner"]:
    """SiLU of the first half of `terra.engine.graph.matrix.linear`, times its second half."""
    inner = torch.empty(*states.shape[:-1], len(matrix.weight) // 2, dtype=states.dtype, device=states.device)
    tiles = _tiles(matrix, states.numel() // states.shape[-1], _GATED, halves=2)
    _multiply(states, matrix, inner, tiles, gated=True)
    return inner


def product(states: Float[Tensor, "lanes width columns"], matrix: Matrix) -> Float[Tensor, "lanes width rows"]:
    """`terra.engine.graph.matrix.linear` with a matrix of so many rows that no columns need to be split."""
    result = torch.empty(*states.shape[:-1], len(matrix.weight), dtype=states.dtype, device=states.device)
    _multiply(states, matrix, result, _tiles(matrix, states.numel() // states.shape[-1], _HEAD))
    return result


def project(
    hidden: Float[Tensor, "lanes width hidden"],
    norm: Float[Tensor, " hidden"],
    epsilon: float,
    layer: Layer,
    place: Place,
) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.layers.project`."""
    return rotate_and_store(split_product(hidden, layer.query_key_value), place, hidden.dtype)


def mix(
    attended: Float[Tensor, "lanes width heads dim"],
    states: Float[Tensor, "lanes width hidden"],
    layer: Layer,
    next_norm: Float[Tensor, " hidden"],
    epsilon: float,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """`terra.engine.graph.layers.mix`."""
    parts = split_product(attended.flatten(2), layer.output)
    states, hidden = add_and_normalise(states, parts, layer.norm, epsilon)
    parts = split_product(gated_product(hidden, layer.gate_up), layer.down)
    return add_and_normalise(states, parts, next_norm, epsilon)


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
) -> Tensor | None:
    """Fill `result`, in parts of `size` columns or as a whole; the scales of the tokens, if the matrix is in 8 bits."""
    columns, rows = states.shape[-1], result.shape[-1]
    tokens = states.numel() // columns
    splits = triton.cdiv(columns, size or columns)
    token_scales = None
    if matrix.scale is not None:
        states, token_scales = round_rows(states)
    _product[(triton.cdiv(rows, tiles["BLOCK_ROWS"]), splits, triton.cdiv(tokens, tiles["BLOCK_TOKENS"]))](
        states, result if token_scales is None else token_scales,
        matrix.weight, result if matrix.scale is None else matrix.scale, result, tokens, rows,
        COLUMNS=columns, SIZE=size or columns, **tiles, IMPRECISE=_IMPRECISE, WHOLE=size is None, GATED=gated,
        FP8=token_scales is not None, PRECISION="ieee", **launched_early(states.device),
    )  # fmt: skip
    return token_scales


def _tiles(matrix: Matrix, tokens: int, shape: tuple[int, int, int, int], *, halves: int = 1) -> dict[str, int]:
    """What a program takes at once: tokens, rows of each half of the weight, and so many bytes of a row; how it works.

    More tokens than half of the most take room from the weight, and a GPU with less shared memory has fewer stages.
    """
    rows, num_bytes, stages, warps = shape
    block = min(_MAX_BLOCK_TOKENS, max(_MIN_BLOCK_TOKENS, int(triton.next_power_of_2(tokens))))
    many = 2 * block > _MAX_BLOCK_TOKENS
    num_bytes = min(num_bytes, 128) if many else num_bytes
    fitting = shared_memory(matrix.weight.device) // ((block + halves * rows) * num_bytes)
    return {
        "BLOCK_TOKENS": block,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": num_bytes // matrix.weight.element_size(),
        "num_stages": min(stages, fitting),
        "num_warps": warps if many else _WARPS,
    }


def round_rows(
    states: Float[Tensor, "lanes width columns"],
) -> tuple[Float[Tensor, "lanes width columns"], Float32[Tensor, " tokens"]]:
    """`terra.engine.graph.matrix.round_rows` of each token."""
    columns = states.shape[-1]
    tokens = states.numel() // columns
    rounded = torch.empty_like(states, dtype=FP8)
    scales = torch.empty(tokens, dtype=torch.float32, device=states.device)
    _round_rows[(tokens,)](
        states,
        rounded,
        scales,
        COLUMNS=columns,
        PADDED=triton.next_power_of_2(columns),
        **launched_early(states.device),
    )
    return rounded, scales


def normalise(
    states: Float[Tensor, "lanes width hidden"], norm: Float[Tensor, " hidden"], epsilon: float
) -> Float[Tensor, "lanes width hidden"]:
    """`terra.engine.graph.layers.rms_norm`."""
    return _normalise(states, None, norm, epsilon)[1]


def add_and_normalise(
    states: Float[Tensor, "lanes width hidden"], parts: Parts, norm: Float[Tensor, " hidden"], epsilon: float
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """The states plus a product, and these normalised."""
    return _normalise(states, parts, norm, epsilon)


def _normalise(states: Tensor, parts: Parts | None, norm: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    hidden = states.shape[-1]
    tokens = states.numel() // hidden
    normalised = torch.empty_like(states)
    added = states if parts is None else torch.empty_like(states)
    _add_and_normalise[(tokens,)](
        states, *_of_parts(parts, states), norm, added, normalised, tokens, epsilon,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), SPLITS=0 if parts is None else len(parts.sums),
        FP8=parts is not None and parts.token_scales is not None, num_warps=8, **launched_early(states.device),
    )  # fmt: skip
    return added, normalised


def rotate_and_store(parts: Parts, place: Place, dtype: torch.dtype) -> Float[Tensor, "lanes width heads dim"]:
    """`terra.engine.graph.layers.place_heads` of a product in this type; `dim` is a power of two."""
    lanes, width = place.positions.shape
    _, kv_heads, length, dim = place.keys.shape
    splits, tokens, rows = parts.sums.shape
    heads = rows // dim - 2 * kv_heads
    queries = torch.empty(lanes, width, heads, dim, dtype=dtype, device=parts.sums.device)
    _rotate_and_store[(tokens,)](
        *_of_parts(parts, queries), place.cosine, place.sine, place.positions, queries, place.keys, place.values,
        tokens, width, length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PADDED=triton.next_power_of_2(heads),
        PADDED_CACHED=triton.next_power_of_2(kv_heads), SPLITS=splits, FP8=parts.token_scales is not None,
        num_warps=8, **launched_early(parts.sums.device),
    )  # fmt: skip
    return queries


def _of_parts(parts: Parts | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A kernel's arguments, with any tensor in the place of what is not there."""
    if parts is None:
        return unused, unused, unused
    token_scales, row_scales = parts.token_scales, parts.row_scales
    return parts.sums, unused if token_scales is None else token_scales, unused if row_scales is None else row_scales
