"""Weight matrices in their own element type or in 8 bits (FP8 E4M3), and the scales of both factors of a GEMM.

A matrix in 8 bits is multiplied with activations in 8 bits (W8A8). Each of its rows has a scale from that row's amax.
Activations have one scale for all of them, `input_scale`, which is fixed when the weights are loaded: a bound that no
activation can exceed follows from the weights (`max_normalized`, `max_products`), so that nothing has to be calibrated
and no amax has to be found while decoding.

One outlier row would make that bound, and so the error of all other rows, larger. `migrate_scales` moves such a factor
into the matrix that reads the row's result, as SmoothQuant does (Xiao et al. 2023, arXiv 2211.10438), but by powers of
two, which round nothing.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn

_FP8_MAX = torch.finfo(FP8).max
_MIN_AMAX = 1e-12
_MAX_MIGRATION_LOG2 = 16


@dataclass(frozen=True)
class Matrix:
    """A weight in its own element type or in 8 bits.

    Attributes:
        dtype: element type of its products.
        scale: in 8 bits, the factor of each row of a product of activations in 8 bits.
        input_scale: in 8 bits, the factor of activations before they are rounded to 8 bits.
    """

    weight: Float[Tensor, "rows columns"]
    dtype: torch.dtype
    scale: Float32[Tensor, " rows"] | None = None
    input_scale: float | None = None


def unquantized(weight: Float[Tensor, "rows columns"]) -> Matrix:
    """The weight in its own element type."""
    return Matrix(weight, weight.dtype)


def quantize_weight(weight: Float[Tensor, "rows columns"], max_input: float) -> Matrix:
    """The weight in 8 bits, for activations whose magnitudes are `max_input` at most.

    Each row is scaled so that its amax is the largest number of E4M3, and activations so that `max_input` is. Most
    activations are much smaller, which costs no precision: the format has 3 bits behind the point over 15 powers of 2.
    """
    wide = weight.float()
    amax = wide.abs().amax(-1, keepdim=True).clamp(min=_MIN_AMAX)
    max_input = max(max_input, _MIN_AMAX)
    scale = amax[:, 0] / _FP8_MAX * (max_input / _FP8_MAX)
    return Matrix((wide * (_FP8_MAX / amax)).to(FP8), weight.dtype, scale, _FP8_MAX / max_input)


def quantize_fp8(states: Float[Tensor, "*shape"], scale: float) -> Float[Tensor, "*shape"]:
    """Activations times `scale` (`Matrix.input_scale`), rounded to 8 bits; what exceeds the format is clamped."""
    return (states.float() * scale).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)


def linear(states: Float[Tensor, "*batch columns"], matrix: Matrix) -> Float[Tensor, "*batch rows"]:
    """Activations times the transposed matrix; a matrix in 8 bits quantizes activations that are not yet in 8 bits.

    On a GPU rows and columns of a matrix in 8 bits must be multiples of 16.
    """
    if matrix.scale is None or matrix.input_scale is None:
        return F.linear(states, matrix.weight)
    narrow = states if states.dtype == FP8 else quantize_fp8(states, matrix.input_scale)
    if states.is_cuda:
        # One scale for the whole product and the rows' scales applied afterwards: twice as fast here as rows' scales
        # within the library's GEMM.
        one = torch.ones((), device=states.device)
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        made = multiply(
            narrow.flatten(0, -2), matrix.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32
        ).unflatten(0, states.shape[:-1])
    else:
        made = F.linear(narrow.float(), matrix.weight.float())
    return (made * matrix.scale).to(matrix.dtype)


def max_normalized(norm: Float[Tensor, " hidden"]) -> float:
    """A bound of the elements of RMS-normalized states: without the norm's weight, their length is sqrt(hidden)."""
    return math.sqrt(len(norm)) * norm.abs().max().item()


def max_products(weight: Float[Tensor, "rows hidden"], norm: Float[Tensor, " hidden"]) -> Float[Tensor, " rows"]:
    """A bound of each row's product with RMS-normalized states, by the inequality of Cauchy and Schwarz."""
    return math.sqrt(len(norm)) * (weight.float() * norm.float()).norm(dim=1)


def migrate_scales(max_outputs: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Powers of two that bring the rows' bounds to about their median, so that no outlier row costs the others bits.

    The rows are multiplied by these factors, and the columns of the matrix that reads the rows' results are divided by
    the same factors: the product of both stays what it is.
    """
    median = max_outputs.median()
    limit = _MAX_MIGRATION_LOG2
    factors = torch.exp2(torch.log2(median / max_outputs).round().clamp(-limit, limit))
    return torch.where((max_outputs > 0) & (median > 0), factors, 1.0)
