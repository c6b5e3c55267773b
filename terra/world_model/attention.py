"""The attention of training, which runs over whole windows and needs no mask."""

from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

CAUSAL_ATTENTION = "terra_causal"


def use_causal_attention(model: PreTrainedModel) -> None:
    """Let the model attend by `scaled_dot_product_attention(is_causal=True)`, whatever surrounds it.

    Under torch.compile transformers' own "sdpa" builds a mask of length x length (before torch 2.14), which rules out
    the flash kernels. For an attention that has no mask function registered it builds none.
    """
    AttentionInterface.register(CAUSAL_ATTENTION, _causal_attention)
    model.set_attn_implementation(CAUSAL_ATTENTION)


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention over a whole window (batch, heads, length, head_dim), with fewer key and value heads than queries."""
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=kwargs["scaling"]
    )
    return rearrange(attended, "batch heads length dim -> batch length heads dim"), None
