"""Rows of numbers in 8 bits, each with a scale: weights of 8-bit products, their activations, and stored weights."""

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

_INT8_MAX = 127.0


def quantize_rows(
    rows: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float32[Tensor, "rows 1"]]:
    """Quantize each row symmetrically, its amax to 127; returns the integers and the rows' scales.

    A row is its integers times its scale, up to half a scale. A row of zeros stays one.
    """
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _INT8_MAX
    return (rows / scales).round().to(torch.int8), scales
