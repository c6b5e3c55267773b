"""What follows a GEMM: the sum of its split-K parts, SwiGLU's activation, the residual sum and RMS norm.

Values are rounded where the separate operations of torch round them.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.quantization import FP8
from terra.engine.graph.weights import Norm


@triton.jit
def sum_split_k(parts, token, feature, used, tokens, features, SPLITS: tl.constexpr):
    """Some features of tokens from a GEMM's split-K parts (SPLITS, tokens, features), summed in one fixed order."""
    total = tl.load(parts + token * features + feature, mask=used, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * tokens + token) * features + feature, mask=used, other=0.0)
    return total


@triton.jit
def store_pair(target, first, second, distance, used=None):
    """Store elements of a head's two halves, which lie `distance` elements apart, in the target's type."""
    kind = target.dtype.element_ty
    tl.store(target, first.to(kind), mask=used)
    tl.store(target + distance, second.to(kind), mask=used)


@triton.jit
def silu_mul(gate, up):
    """SwiGLU's activation, SiLU(gate) * up; SiLU is rounded to the gate's type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def _add_rms_norm(
    states, parts, norm, added, normalized, output_scale, tokens, epsilon,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's states plus a GEMM's split-K parts (if SPLITS is not 0), and their RMS norm.

    With FP8 the normalized states are multiplied by `output_scale` and rounded to 8 bits. The arithmetic is the same
    for every number of tokens (batch invariance).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    factors = tl.load(norm + column, mask=used, other=0.0)
    wait_for_inputs(PDL)
    at = token * COLUMNS + column
    state = tl.load(states + at, mask=used, other=0.0)
    kind = state.dtype
    if SPLITS:
        state += sum_split_k(parts, token, column, used, tokens, COLUMNS, SPLITS).to(kind)
        tl.store(added + at, state, mask=used)
    wide = state.to(tl.float32)
    by = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    normal = factors * (wide * by).to(kind)
    if FP8:
        normal = normal.to(tl.float32) * output_scale
    tl.store(normalized + at, normal.to(normalized.dtype.element_ty), mask=used)


def rms_norm(
    states: Float[Tensor, "slots width hidden"], norm: Norm, limits: DeviceLimits
) -> Float[Tensor, "slots width hidden"]:
    """`terra.engine.graph.reference.rms_norm`, quantized if the norm has an `output_scale`."""
    return _launch(states, None, norm, states, limits)


def add_rms_norm(
    states: Float[Tensor, "slots width hidden"],
    parts: Float32[Tensor, "splits tokens hidden"],
    norm: Norm,
    limits: DeviceLimits,
) -> tuple[Float[Tensor, "slots width hidden"], Float[Tensor, "slots width hidden"]]:
    """The states plus a GEMM's split-K parts, and `rms_norm` of these."""
    added = torch.empty_like(states)
    return added, _launch(states, parts, norm, added, limits)


def _launch(states: Tensor, parts: Tensor | None, norm: Norm, added: Tensor, limits: DeviceLimits) -> Tensor:
    normalized = torch.empty_like(states, dtype=states.dtype if norm.output_scale is None else FP8)
    hidden = states.shape[-1]
    tokens = states.shape[:-1].numel()
    _add_rms_norm[(tokens,)](
        states, states if parts is None else parts, norm.weight, added, normalized, norm.output_scale or 1.0, tokens,
        norm.epsilon,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), SPLITS=0 if parts is None else len(parts),
        FP8=norm.output_scale is not None, num_warps=8, **limits.launch_options,
    )  # fmt: skip
    return normalized
