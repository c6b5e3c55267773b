"""Lookup-free quantization: a vector's signs are the bits of its token id; there is no table and no parameter.

Source: Yu et al. 2023, "Language Model Beats Diffusion: Tokenizer is Key to Visual Generation" (arXiv 2310.05737).
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tokenizer.config import BitOrder
from tokenizer.types import TokenGrid


def quantize(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The signs of `z` as -1.0 and +1.0 in its dtype; zero counts as negative, as in Open-MAGVIT2."""
    return torch.where(z > 0, torch.ones_like(z), -torch.ones_like(z))


def straight_through(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The signs of `z`, exactly, with the gradient of `z` itself."""
    return quantize(z.detach()) + (z - z.detach())


def tokens_from_signs(signs: Float[Tensor, "frames dim rows cols"], bit_order: BitOrder) -> TokenGrid:
    """Pack signs (or any vectors: only `> 0` is read) into ids in [0, 2**dim)."""
    bits = rearrange(signs > 0, "f dim rows cols -> f rows cols dim").long()
    return (bits << _shifts(bits.shape[-1], bit_order, bits.device)).sum(dim=-1)


def signs_from_tokens(tokens: TokenGrid, dim: int, bit_order: BitOrder) -> Float[Tensor, "frames dim rows cols"]:
    """Unpack ids in [0, 2**dim) into float32 signs; the inverse of `tokens_from_signs`."""
    bits = (tokens.long().unsqueeze(-1) >> _shifts(dim, bit_order, tokens.device)) & 1
    return rearrange(2.0 * bits - 1.0, "f rows cols dim -> f dim rows cols")


def _shifts(dim: int, bit_order: BitOrder, device: torch.device) -> Int[Tensor, " dim"]:
    channels = torch.arange(dim, device=device)
    return channels if bit_order == "lsb_first" else dim - 1 - channels
