"""Triton kernels for passes of one token: matrix-vector products that read their weights as fast as memory gives them.

A product takes the normalisation before it and the activation or the sum behind it along, so that a layer is seven
kernels. Rounding is that of the separate steps.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_CONFIGS = [
    triton.Config({"BLOCK_ROWS": rows, "BLOCK": block}, num_warps=warps, num_stages=stages)
    for rows, block, warps, stages in [
        (4, 1024, 4, 3), (8, 512, 4, 3), (8, 1024, 4, 3), (8, 1024, 8, 3), (8, 2048, 8, 2), (16, 512, 4, 4),
        (16, 512, 8, 3), (16, 1024, 8, 2), (16, 256, 4, 4), (4, 2048, 4, 2), (2, 2048, 4, 2), (32, 256, 8, 4),
    ]
]  # fmt: skip


@triton.autotune(_CONFIGS, key=["rows", "columns", "NORM", "GATED", "SUM"])
@triton.jit
def _product(
    vector, norm, weight, states, result, rows, columns, epsilon,
    NORM: tl.constexpr, GATED: tl.constexpr, SUM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Some rows of weight times vector; with GATED those rows of its lower half activate those of its upper half."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    used = (row < rows)[:, None]
    kind = result.dtype.element_ty
    scale = 1.0
    if NORM:
        every = tl.arange(0, PADDED)
        whole = tl.load(vector + every, mask=every < columns, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / columns + epsilon)
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    upper = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    start = weight + row.to(tl.int64)[:, None] * columns
    for at in tl.range(0, columns, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = (column < columns)[None, :]
        part = tl.load(vector + column, mask=column < columns, other=0.0)
        if NORM:
            by = tl.load(norm + column, mask=column < columns, other=0.0)
            part = by * (part.to(tl.float32) * scale).to(kind)
        wide = part.to(tl.float32)[None, :]
        total += tl.load(start + column[None, :], mask=used & inside, other=0.0).to(tl.float32) * wide
        if GATED:
            lower = start + rows.to(tl.int64) * columns + column[None, :]
            upper += tl.load(lower, mask=used & inside, other=0.0).to(tl.float32) * wide
    made = tl.sum(total, 1).to(kind)
    if GATED:
        gate = made.to(tl.float32)
        made = (gate / (1.0 + tl.exp(-gate))).to(kind) * tl.sum(upper, 1).to(kind)
    if SUM:
        made = tl.load(states + row, mask=row < rows) + made
    tl.store(result + row, made, mask=row < rows)


def product(
    vector: Float[Tensor, "1 1 columns"],
    weight: Float[Tensor, "rows columns"],
    *,
    norm: Float[Tensor, " columns"] | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    states: Float[Tensor, "1 1 rows"] | None = None,
) -> Float[Tensor, "1 1 rows"]:
    """`F.linear(vector, weight)`, with what stands before and behind it.

    Args:
        norm: the vector is normalised first, by `terra.engine.graph.layers.rms_norm`.
        gated: the result is SiLU of its first half times its second half.
        states: the result is added to them.
    """
    rows, columns = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    result = torch.empty(1, 1, rows, dtype=vector.dtype, device=vector.device)
    _product[lambda chosen: (triton.cdiv(rows, chosen["BLOCK_ROWS"]),)](
        vector, weight if norm is None else norm, weight, result if states is None else states, result,
        rows, columns, epsilon,
        NORM=norm is not None, GATED=gated, SUM=states is not None, PADDED=triton.next_power_of_2(columns),
    )  # fmt: skip
    return result
