"""GEMMs of a weight with tokens: few tokens, where reading the weight from memory takes the time, or many.

The weight's rows are the M dimension and tokens are N, so that all tensor core instructions sum along K in one order,
and a token's bits do not depend on how many tokens there are (batch invariance). In `split_k_gemm` K is split over
CTAs, so that all SMs read at once; the next kernel sums the parts. From 256 tokens on tiles are larger, and from 1,024
on one CTA takes all parts of a tile and sums them itself, in the same order. How K is split depends on the weight's
shape and the number of SMs alone, never on the number of tokens.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from terra.engine.graph.kernels.epilogues import silu_mul
from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.quantization import FP8, Matrix

_MIN_BLOCK_N = 16  # the least that tl.dot takes
_MAX_BLOCK_N = 128
_MAX_FULL_K_FP8 = 32  # tokens up to which tiles in 8 bits have all of `block_k_bytes`; measured on an H200

_WARPS = 4


@dataclass(frozen=True)
class TileConfig:
    """Tiles of the weight, and how many of them a CTA has under way; see `choose_tiles`.

    Attributes:
        block_m: rows of a tile.
        block_k_bytes: bytes of each row in a tile; at most 128 bytes with more than 64 tokens, in 8 bits with more than
            32 tokens.
        stages: tiles of the software pipeline, as far as they find room in shared memory, but two at least. Where 33 to
            64 tokens in 8 bits halve the bytes of a tile, the pipeline has twice as many stages.
        warps_wide: warps of a CTA where there are more than 64 tokens.
        ctas_per_sm: CTAs that must find room on an SM. With the fewest tokens it is always two, since the next kernel's
            CTAs are to be there before this kernel is done (PDL).
        prefetch_k: 1: with the fewest tokens the weight's first tile is read before the wait for the activations.
    """

    block_m: int
    block_k_bytes: int
    stages: int
    warps_wide: int
    ctas_per_sm: int = 1
    prefetch_k: int = 0


# The fastest of those tried on an H200.
_SPLIT_K = TileConfig(block_m=64, block_k_bytes=256, stages=5, warps_wide=4, prefetch_k=1)
_GATED = TileConfig(block_m=64, block_k_bytes=256, stages=5, warps_wide=4, ctas_per_sm=2, prefetch_k=1)
_LM_HEAD = TileConfig(block_m=128, block_k_bytes=128, stages=4, warps_wide=8)
_MIN_MANY_TOKENS, _MIN_TWO_CTAS_TOKENS = 256, 512
"""Tokens from which on all GEMMs take the lm head's tiles, and from which on two such CTAs share an SM where they find
room. With so many tokens reads from L2 are the limit, and with larger tiles fewer CTAs read the same rows and tokens.
Measured on an H100."""

_MIN_SUMMED_TOKENS = 1024
"""Tokens from which on one CTA takes all splits of K and sums them: so many tiles of tokens keep the SMs busy, and the
parts of all tokens would be more to write and read than the weight. Measured on an H200."""

_FP8_CHUNK = 128
"""Products of 8 bits along K that tensor cores sum, with fewer bits than float32 has, before the sum is added in
float32. BLOCK_K must be a multiple: else the chunks, and so the bits, would follow the tile size."""


@triton.jit
def _multiply_add(weight, state, made, FP8: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """`made` plus the product of CHUNK columns of the weight with the states'."""
    if FP8:
        # A sum of its own for each chunk, so that its `wgmma` are issued back to back, with one wait behind them. With
        # `made` as the dot's accumulator and `max_num_imprecise_acc` below the columns ptxas waits for each `wgmma`;
        # with 0 Triton would fold the addition into the dot's accumulator, which has fewer bits than float32.
        return made + tl.dot(weight, state, input_precision=PRECISION, max_num_imprecise_acc=CHUNK)
    else:
        return tl.dot(weight, state, made, input_precision=PRECISION)


@triton.jit
def _gemm(
    states, weight, row_scales, result, output_scale, tokens, rows,
    COLUMNS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    PREFETCH_K: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr, SUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the result: BLOCK_M rows of the weight times BLOCK_N tokens, over a split of SPLIT_SIZE columns.

    With SUM_SPLITS the CTA goes over all splits and adds them up.

    With GATED half of the tile's rows are of the weight's upper half (gate), half of its lower half (up), and the
    epilogue is SiLU(gate) * up; a result in 8 bits is multiplied by `output_scale` first. With FP8 states and weight
    are of 8 bits, and the result's rows are scaled.
    """
    own: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    # CTAs that run together have the same rows, as far as there are tokens: the weight is read from memory once.
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * own + tl.arange(0, own)
    local = tl.arange(0, BLOCK_M)
    read = tl.minimum(tl.program_id(1) * own + local % own, rows - 1) + local // own * rows
    split = tl.program_id(2)
    whole_blocks: tl.constexpr = COLUMNS % BLOCK_K == 0
    begin = split * SPLIT_SIZE
    column = begin + tl.arange(0, CHUNK)
    state_at = states + token[None, :] * COLUMNS + column[:, None]
    weight_at = weight + read.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    used = (token < tokens)[None, :]
    made = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = made
    prefetched = ()
    if PREFETCH_K:
        for chunk in tl.static_range(0, BLOCK_K, CHUNK):
            first = tl.load(weight_at + chunk, mask=(column + chunk < COLUMNS)[None, :], other=0.0)
            prefetched = prefetched + (first,)  # noqa: RUF005
    if FP8:
        scales = tl.load(row_scales + read)
    # Weights and scales are constants, so they may be read before.
    wait_for_inputs(PDL)
    if PREFETCH_K:
        for chunk in tl.static_range(0, BLOCK_K, CHUNK):
            state = tl.load(state_at + chunk, mask=used & (column + chunk < COLUMNS)[:, None], other=0.0)
            made = _multiply_add(prefetched[chunk // CHUNK], state, made, FP8, CHUNK, PRECISION)
    end = COLUMNS if SUM_SPLITS else tl.minimum(SPLIT_SIZE, COLUMNS - begin)
    for block in range(PREFETCH_K * BLOCK_K, end, BLOCK_K):
        for chunk in tl.static_range(0, BLOCK_K, CHUNK):
            at = block + chunk
            if whole_blocks:
                state = tl.load(state_at + at, mask=used, other=0.0)
                tile = tl.load(weight_at + at)
            else:
                within = column + at < COLUMNS
                state = tl.load(state_at + at, mask=used & within[:, None], other=0.0)
                tile = tl.load(weight_at + at, mask=within[None, :], other=0.0)
            made = _multiply_add(tile, state, made, FP8, CHUNK, PRECISION)
        if SUM_SPLITS:
            complete = ((block + BLOCK_K) % SPLIT_SIZE == 0) | (block + BLOCK_K >= COLUMNS)
            total += tl.where(complete, made * scales[:, None] if FP8 else made, 0.0)
            made = tl.where(complete, 0.0, made)
    kind = result.dtype.element_ty
    narrow: tl.constexpr = kind == tl.float8e4nv
    if SUM_SPLITS:
        made = total
    elif FP8:
        made = made * scales[:, None]
    if GATED:
        if not narrow:  # else it is rounded once
            made = made.to(kind)
        gate, up = tl.split(tl.permute(tl.reshape(made, (2, own, BLOCK_N)), (1, 2, 0)))
        made = silu_mul(gate, up)
        if narrow:
            made = made * output_scale
    made = made.to(kind)
    result_row = (split * tokens + token).to(tl.int64)
    tl.store(result + result_row[None, :] * rows + row[:, None], made, mask=used & (row < rows)[:, None])


def split_k_gemm(
    states: Float[Tensor, "slots width columns"], matrix: Matrix, limits: DeviceLimits
) -> Float32[Tensor, "splits tokens rows"]:
    """`terra.engine.graph.quantization.linear` of states as the matrix takes them, in split-K parts to be summed.

    With `_MIN_SUMMED_TOKENS` tokens or more there is one part, the sum.
    """
    rows, columns = matrix.weight.shape
    tokens = _num_tokens(states)
    block_k = _SPLIT_K.block_k_bytes // matrix.weight.element_size()
    # By the weight's shape and the number of SMs alone: if it followed the tokens, so would the order of the sum.
    wanted = max(1, limits.num_sms // triton.cdiv(rows, _SPLIT_K.block_m))
    size = triton.cdiv(triton.cdiv(columns, block_k), wanted) * block_k
    sum_splits = tokens >= _MIN_SUMMED_TOKENS and columns > size
    splits = 1 if sum_splits else triton.cdiv(columns, size)
    parts = torch.empty(splits, tokens, rows, dtype=torch.float32, device=states.device)
    _launch(states, matrix, parts, _SPLIT_K, limits, split_size=size, sum_splits=sum_splits)
    return parts


def gated_gemm(
    states: Float[Tensor, "slots width columns"], matrix: Matrix, limits: DeviceLimits, output_scale: float | None
) -> Float[Tensor, "slots width inner"]:
    """SwiGLU: SiLU of the first half of `terra.engine.graph.quantization.linear`, times its second half.

    With `output_scale` the result is multiplied by it and rounded to 8 bits.
    """
    dtype = matrix.dtype if output_scale is None else FP8
    inner = torch.empty(*states.shape[:-1], len(matrix.weight) // 2, dtype=dtype, device=states.device)
    _launch(states, matrix, inner, _GATED, limits, gated=True, output_scale=output_scale)
    return inner


def lm_head_gemm(
    states: Float[Tensor, "slots width columns"], matrix: Matrix, limits: DeviceLimits
) -> Float[Tensor, "slots width rows"]:
    """`terra.engine.graph.quantization.linear` of states as the matrix takes them, without split-K.

    The lm head has so many rows that their tiles alone keep all SMs busy.
    """
    result = torch.empty(*states.shape[:-1], len(matrix.weight), dtype=matrix.dtype, device=states.device)
    _launch(states, matrix, result, _LM_HEAD, limits)
    return result


def _launch(
    states: Tensor,
    matrix: Matrix,
    result: Tensor,
    config: TileConfig,
    limits: DeviceLimits,
    *,
    split_size: int | None = None,
    sum_splits: bool = False,
    gated: bool = False,
    output_scale: float | None = None,
) -> None:
    """Fill `result`, over splits of `split_size` columns or over all columns at once; with `sum_splits` their sum."""
    columns, rows = states.shape[-1], result.shape[-1]
    tokens = _num_tokens(states)
    splits = 1 if sum_splits else triton.cdiv(columns, split_size or columns)
    tiles = choose_tiles(config, matrix, tokens, limits, sum_splits=sum_splits)
    own = tiles["BLOCK_M"] // (2 if gated else 1)
    _gemm[(triton.cdiv(tokens, tiles["BLOCK_N"]), triton.cdiv(rows, own), splits)](
        states, matrix.weight, result if matrix.scale is None else matrix.scale, result, output_scale or 1.0,
        tokens, rows,
        COLUMNS=columns, SPLIT_SIZE=split_size or columns, **tiles, GATED=gated,
        FP8=matrix.scale is not None, SUM_SPLITS=sum_splits, PRECISION="ieee",
        # The product with a scale is rounded before it is added, as it is in a part.
        enable_fp_fusion=not sum_splits, **limits.launch_options,
    )  # fmt: skip


def choose_tiles(
    config: TileConfig, matrix: Matrix, tokens: int, limits: DeviceLimits, *, sum_splits: bool = False
) -> dict[str, int]:
    """Tile sizes, stages and warps that fit the GPU's shared memory.

    More tokens than half of `_MAX_BLOCK_N` take shared memory from the weight's tiles; in 8 bits tiles are smaller
    from 33 tokens on, which was faster. A GPU with less shared memory has fewer stages. From `_MIN_MANY_TOKENS` on
    the lm head's tiles replace those of `config`.
    """
    fp8 = matrix.weight.dtype == FP8
    if tokens >= _MIN_MANY_TOKENS:
        config = _LM_HEAD
        # In 8 bits and with `sum_splits` there are two accumulators: registers for one CTA alone.
        if tokens >= _MIN_TWO_CTAS_TOKENS and not fp8 and not sum_splits:
            config = replace(config, ctas_per_sm=2)
    block_n = min(_MAX_BLOCK_N, max(_MIN_BLOCK_N, int(triton.next_power_of_2(tokens))))
    wide = 2 * block_n > _MAX_BLOCK_N
    halved = wide or (fp8 and block_n > _MAX_FULL_K_FP8)
    block_k_bytes = min(config.block_k_bytes, 128) if halved else config.block_k_bytes
    narrow = block_n == _MIN_BLOCK_N
    prefetch_k = config.prefetch_k if narrow else 0
    fitting = limits.shared_memory // ((block_n + config.block_m) * block_k_bytes)
    stages = config.stages if wide else config.stages * config.block_k_bytes // block_k_bytes
    stages = min(stages, fitting // (2 if narrow else config.ctas_per_sm))
    block_k = block_k_bytes // matrix.weight.element_size()
    if fp8 and block_k % _FP8_CHUNK:
        raise ValueError(f"BLOCK_K: expected a multiple of {_FP8_CHUNK} in 8 bits (batch invariance), got {block_k}")
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": config.block_m,
        "BLOCK_K": block_k,
        "CHUNK": _FP8_CHUNK if fp8 else block_k,
        "num_stages": max(stages - prefetch_k, 2),
        "num_warps": config.warps_wide if wide else _WARPS,
        "PREFETCH_K": prefetch_k,
    }


def _num_tokens(states: Tensor) -> int:
    return states.shape[:-1].numel()
