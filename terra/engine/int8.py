"""Rows of numbers in 8 bits, each with a scale: weights of 8-bit products, their activations, and stored weights."""

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor
from torch.nn import functional as F

_INT8_MAX = 127.0
_EXACT_COLUMNS = 1024  # float32 holds every integer up to 2**24, and 127 * 127 * 1024 is less
_INTEGER_GEMM = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Whether torch's product of integers is fast on this CPU; with AVX2 alone float32's is 20 times as fast, or more."""


def quantize_rows(
    rows: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float32[Tensor, "rows 1"]]:
    """Quantize each row symmetrically, its amax to 127; returns the integers and the rows' scales.

    A row is its integers times its scale, to within half its scale. An all-zero row stays all zero.
    """
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _INT8_MAX
    return (rows / scales).round().to(torch.int8), scales


class Int8Weight:
    """A layer's weight in 8 bits, for activations in 8 bits (W8A8): sums of integers, exact in any order.

    The integers are held in the form that torch multiplies fastest: int8 on a GPU and on a CPU with AVX-512, else
    float32.

    Args:
        rows: the integers, a row for each output.
        scales: the factor of each row; see `quantize_rows`.
    """

    def __init__(self, rows: Int8[Tensor, "rows columns"], scales: Float32[Tensor, "rows 1"]) -> None:
        self._scales = scales[:, 0]
        self._integers = rows.is_cuda or _INTEGER_GEMM
        self._held = (rows.t(),) if self._integers else rows.float().split(_EXACT_COLUMNS, dim=1)

    def linear(self, states: Float[Tensor, "n columns"]) -> Float32[Tensor, "n rows"]:
        """The layer's outputs, of activations that are quantized token by token."""
        narrow, scales = quantize_rows(states)
        return self.product(narrow).float().mul_(scales).mul_(self._scales)

    def product(self, states: Int8[Tensor, "n columns"]) -> Int32[Tensor, "n rows"]:
        """`states` times the transposed integers, without scales."""
        if self._integers:
            return torch._int_mm(states, self._held[0])  # pyright: ignore[reportPrivateImportUsage]
        parts = states.float().split(_EXACT_COLUMNS, dim=1)
        products = [F.linear(part, held).int() for part, held in zip(parts, self._held, strict=True)]
        return torch.stack(products).sum(0, dtype=torch.int32)
