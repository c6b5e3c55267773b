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
    """A weight; in 8 bits its rows are to be multiplied by `scale`."""

    weight: Float[Tensor, "rows columns"]
    scale: Float32[Tensor, " rows"] | None = None


def in_fp8(weight: Float[Tensor, "rows columns"]) -> Matrix:
    """The weight in 8 bits (E4M3), each row scaled so that its largest element is the largest number."""
    rounded, scale = round_rows(weight)
    return Matrix(rounded, scale[:, 0].contiguous())


def round_rows(values: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, "rows n"], Float32[Tensor, "rows 1"]]:
    """Rows in 8 bits and their scales."""
    wide = values.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (wide * (_LARGEST / largest)).to(FP8), largest / _LARGEST


def linear(states: Float[Tensor, "*batch columns"], matrix: Matrix) -> Float[Tensor, "*batch rows"]:
    """States times the matrix; where that is in 8 bits, each row of the states is rounded to 8 bits too (W8A8).

    On a GPU rows and columns of a matrix in 8 bits must be multiples of 16.
    """
    if matrix.scale is None:
        return F.linear(states, matrix.weight)
    rounded, scale = round_rows(states.flatten(0, -2))
    if states.is_cuda:
        # A scale of all with scales of rows and columns behind it: twice as fast here as scales of rows within.
        one = torch.ones((), device=states.device)
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        made = multiply(rounded, matrix.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    else:
        made = F.linear(rounded.float(), matrix.weight.float())
    return (made * scale * matrix.scale).to(states.dtype).unflatten(0, states.shape[:-1])
