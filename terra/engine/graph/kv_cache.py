"""The KV cache of a batch's slots: tensors of fixed size at fixed addresses."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from terra.engine.graph.transfers import fill

LENGTH_MULTIPLE = 128
"""Cache lengths are multiples of this, so that the attention kernel reads whole blocks of keys without bounds checks.

It must be a multiple of the kernel's BLOCK_KEYS, which `terra.engine.graph.kernels.attention` asserts.
"""

SHARED_MULTIPLE = 1024
"""Slots with a common context share its first keys in multiples of this many: whole bundles of the attention kernel."""


def padded_length(min_length: int) -> int:
    """The cache length that holds so many positions."""
    return -(-min_length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class KVCache:
    """Keys and values of all layers and slots, zero at first.

    What attention masks it multiplies by 0, so all values must be finite, also those of positions that no token has
    reached yet: a NaN that another sequence left there would spread.

    Attributes:
        keys: (layers, slots, kv_heads, length, dim).
        values: (layers, slots, kv_heads, dim, length), so that the products with keys and with values both read along
            memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        length: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if length % LENGTH_MULTIPLE:
            raise ValueError(f"length: expected a multiple of {LENGTH_MULTIPLE}, got {length}")
        shape = (num_layers, num_slots, num_kv_heads, length, dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys.mT, memory_format=torch.contiguous_format)

    def copy(self, source: int, slots: Int[Tensor, " n"], begin: int, end: int) -> None:
        """Copy the positions from `begin` to before `end` of one slot to others; `source` is not among them."""
        self.keys[:, slots, :, begin:end] = self.keys[:, source, None, :, begin:end]
        self.values[:, slots, ..., begin:end] = self.values[:, source, None, ..., begin:end]

    def put(self, other: "KVCache", slots: Int[Tensor, " n"], end: int) -> None:
        """Copy the positions before `end` of all slots of another cache to as many slots of this one."""
        self.keys[:, slots, :, :end] = other.keys[:, :, :, :end]
        self.values[:, slots, ..., :end] = other.values[..., :end]

    def clear(self, slots: int | Int64[Tensor, " n"], position: int) -> None:
        """Zero one slot, or several, from a position on."""
        for part in (self.keys[:, :, :, position:], self.values[..., position:]):
            fill(part, 1, slots, 0)


@dataclass(frozen=True)
class SharedKeys:
    """Where the first keys and values of slots stand that share a context with another slot.

    Only the host writes `holder` and `length`, and between two decode steps alone, so that the attention kernel may
    read them before it waits for the kernels ahead of it.

    Attributes:
        holder: for each slot of a batch, the slot that holds them; it may be behind the batch.
        length: how many they are, a multiple of `SHARED_MULTIPLE`; 0 in a slot that has all of its own.
        keys, values: a layer's cache of all slots.
    """

    holder: Int[Tensor, " slots"]
    length: Int[Tensor, " slots"]
    keys: Float[Tensor, "all_slots kv_heads length dim"]
    values: Float[Tensor, "all_slots kv_heads dim length"]


@dataclass(frozen=True)
class KVTarget:
    """Where one layer's tokens of one pass go: their positions, the RoPE tables, and that layer's part of the cache.

    A slot's tokens stand one behind another from its `start` on.

    Attributes:
        cosine, sine: RoPE tables of all positions.
        start: the first token's position in each slot. It is written between two passes alone, so kernels may read it
            before they wait for the kernels ahead of them.
        keys, values: the layer's cache of the batch's slots.
        shared: what of it stands in other slots; None where no slot shares anything.
    """

    cosine: Float[Tensor, "length dim"]
    sine: Float[Tensor, "length dim"]
    start: Int[Tensor, " slots"]
    keys: Float[Tensor, "slots kv_heads length dim"]
    values: Float[Tensor, "slots kv_heads dim length"]
    shared: SharedKeys | None = None

    def positions(self, width: int) -> Int[Tensor, "slots width"]:
        """Positions of so many tokens a slot."""
        return self.start[:, None] + torch.arange(width, device=self.start.device)
