"""Quantizes the weights of an archive to int8, symmetrically with a scale for each row, and dequantizes them.

A row holds the weights of one output of a layer (the first axis), so that a large weight costs precision in its own row
alone. Vectors and small tensors are not quantized.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from terra.engine.int8 import quantize_rows
from terra.errors import CheckpointError

SCALE = ".scale"
"""The end of the name of a tensor of scales, float32; its beginning is the name of the rounded tensor, int8."""

_LEAST = 4096  # numbers of a tensor that is worth rounding


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of floats with the large ones in 8 bits, each beside its scales."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.numel() < _LEAST:
            stored[name] = tensor
            continue
        integers, scales = quantize_rows(tensor.float().flatten(1))
        stored[name] = integers.view(tensor.shape)
        stored[name + SCALE] = scales[:, 0]
    return stored


def restored(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What `rounded` made, as floats of a type; the tensors that it left alone keep their own.

    Raises:
        CheckpointError: scales of a tensor that is not there or has other rows.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            continue
        scales = stored.get(name + SCALE)
        if scales is None:
            tensors[name] = tensor
            continue
        if tensor.dtype != torch.int8 or scales.shape != tensor.shape[:1]:
            got = f"{tensor.dtype} {tuple(tensor.shape)} and {tuple(scales.shape)}"
            raise CheckpointError(f"{name}: expected int8 with a scale for each row, got {got}")
        rows = tensor.float().flatten(1) * scales[:, None]
        tensors[name] = rows.view(tensor.shape).to(dtype)
    return tensors
