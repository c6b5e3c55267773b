"""Attention of a pass over the filled part of a KV cache of fixed size."""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from terra.engine.graph.matrix import rounded

CACHE_STEP = 128
"""Lengths of caches are multiples of this, so that a kernel reads blocks of them without looking for their end."""


def attend(
    queries: Float[Tensor, "lanes width heads dim"],
    keys: Float[Tensor, "lanes kv_heads length dim"],
    values: Float[Tensor, "lanes kv_heads dim length"],
    start: Int[Tensor, " lanes"],
    *,
    round_by: float | None = None,
    invariant: bool = False,
) -> Float[Tensor, "lanes width heads dim"]:
    """Each row attends to its lane's cache up to its own position; a lane's first row is at its `start`.

    With `round_by` the result is multiplied by it and in 8 bits, else of the queries' type. On a GPU by a kernel that
    reads no more blocks of the cache than are filled, and if it is to be `invariant` gives a row the same bits in any
    company; elsewhere by torch.
    """
    if keys.device.type == "cuda":
        from terra.engine.graph.attention_kernel import attend_split
        from terra.engine.graph.launch import processors

        return attend_split(
            queries, keys, values, start, processors(keys.device), round_by=round_by, invariant=invariant
        )
    places = torch.arange(keys.shape[2], device=keys.device)
    own = start[:, None] + torch.arange(queries.shape[1], device=keys.device)
    seen = rearrange(places <= own[..., None], "lanes width length -> lanes 1 width length")
    return _attend(queries, keys, values, seen, round_by)


def attend_causally(
    queries: Float[Tensor, "1 length heads dim"],
    keys: Float[Tensor, "1 kv_heads length dim"],
    values: Float[Tensor, "1 kv_heads dim length"],
    *,
    round_by: float | None = None,
) -> Float[Tensor, "1 length heads dim"]:
    """Attention of a window's beginning over itself, for the context's pass; `round_by` as of `attend`."""
    return _attend(queries, keys, values, None, round_by)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Bool[Tensor, "lanes 1 width length"] | None,
    round_by: float | None,
) -> Float[Tensor, "lanes width heads dim"]:
    by_head = rearrange(queries, "lanes n heads dim -> lanes heads n dim")
    # The fast kernels ask for values that run along their features: without, a window takes 40 times as long.
    keys, values = keys.to(queries.dtype), values.to(queries.dtype).transpose(2, 3).contiguous()
    mixed = F.scaled_dot_product_attention(
        by_head, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=True
    )
    mixed = rearrange(mixed, "lanes heads n dim -> lanes n heads dim")
    return mixed if round_by is None else rounded(mixed, round_by)
