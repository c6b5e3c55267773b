"""Attention of a pass over the filled part of a KV cache of fixed size."""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

CACHE_STEP = 128
"""Lengths of caches are multiples of this, so that a kernel reads blocks of them without looking for their end."""


def attend(
    queries: Float[Tensor, "lanes width heads dim"],
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads dim length"],
    start: Int[Tensor, " lanes"],
    *,
    invariant: bool = False,
) -> Float[Tensor, "lanes width heads dim"]:
    """Each row attends to its lane's cache up to its own position; a lane's first row is at its `start`.

    On a GPU by a kernel that reads no more of the cache than is filled, and if it is to be `invariant` gives a row the
    same bits in any company; elsewhere by torch.
    """
    if keys.device.type == "cuda":
        from terra.engine.graph.attention_kernel import attend_split
        from terra.engine.graph.launch import processors

        return attend_split(queries, keys, values, start, processors(keys.device), invariant=invariant)
    places = torch.arange(keys.shape[2], device=keys.device)
    own = start[:, None] + torch.arange(queries.shape[1], device=keys.device)
    return _attend(
        queries, keys, values, rearrange(places <= own[..., None], "lanes width length -> lanes 1 width length")
    )


def attend_causally(
    queries: Float[Tensor, "1 length heads dim"],
    keys: Float[Tensor, "1 kv_heads length dim"],
    values: Float[Tensor, "1 kv_heads dim length"],
) -> Float[Tensor, "1 length heads dim"]:
    """Attention of a window's beginning over itself, for the context's pass."""
    return _attend(queries, keys, values, None)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Bool[Tensor, "lanes 1 width length"] | None
) -> Float[Tensor, "lanes width heads dim"]:
    by_head = rearrange(queries, "lanes n heads dim -> lanes heads n dim")
    # The fast kernels ask for values that run along their features: without, a window takes 40 times as long.
    keys, values = keys.to(queries.dtype), values.to(queries.dtype).transpose(2, 3).contiguous()
    mixed = F.scaled_dot_product_attention(
        by_head, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=True
    )
    return rearrange(mixed, "lanes heads n dim -> lanes n heads dim")
