"""A layer's weight matrix, as it is or in 8 bits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn

_LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Matrix:
    """A weight, as it is or in 8 bits.

    Attributes:
        dtype: of its products.
        scale: in 8 bits, what each row of a product of states in 8 bits is multiplied by.
        states_by: in 8 bits, what states are multiplied by before they are rounded to 8 bits.
    """

    weight: Float[Tensor, "rows columns"]
    dtype: torch.dtype
    scale: Float32[Tensor, " rows"] | None = None
    states_by: float | None = None


def as_it_is(weight: Float[Tensor, "rows columns"]) -> Matrix:
    """The weight in its own element type."""
    return Matrix(weight, weight.dtype)


def in_fp8(weight: Float[Tensor, "rows columns"], largest: float) -> Matrix:
    """The weight in 8 bits (E4M3), for states whose elements' magnitudes are `largest` at most.

    Each row is scaled so that its largest element is the largest number, states so that `largest` is. That states are
    mostly much smaller costs nothing: their 3 bits behind the point are the same over 15 powers of two.
    """
    wide = weight.float()
    largest_of_row = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    largest = max(largest, 1e-12)
    scale = largest_of_row[:, 0] / _LARGEST * (largest / _LARGEST)
    return Matrix((wide * (_LARGEST / largest_of_row)).to(FP8), weight.dtype, scale, _LARGEST / largest)


def rounded(states: Float[Tensor, "*shape"], by: float) -> Float[Tensor, "*shape"]:
    """States in 8 bits, multiplied by this before (`Matrix.states_by`); what is too large then is cut off."""
    return (states.float() * by).clamp(-_LARGEST, _LARGEST).to(FP8)


def linear(states: Float[Tensor, "*batch columns"], matrix: Matrix) -> Float[Tensor, "*batch rows"]:
    """States times the matrix; where that is in 8 bits, states that are not yet are rounded to 8 bits too (W8A8).

    On a GPU rows and columns of a matrix in 8 bits must be multiples of 16.
    """
    if matrix.scale is None or matrix.states_by is None:
        return F.linear(states, matrix.weight)
    narrow = states if states.dtype == FP8 else rounded(states, matrix.states_by)
    if states.is_cuda:
        # A scale of all with scales of rows behind it: twice as fast here as scales of rows within.
        one = torch.ones((), device=states.device)
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        made = multiply(
            narrow.flatten(0, -2), matrix.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32
        ).unflatten(0, states.shape[:-1])
    else:
        made = F.linear(narrow.float(), matrix.weight.float())
    return (made * matrix.scale).to(matrix.dtype)
