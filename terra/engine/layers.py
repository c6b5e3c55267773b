"""A world model's layers, for engines that compute forward passes themselves: their weights, RMS norm and RoPE."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from terra.errors import CheckpointError
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer: `before` and `after` are the RMS norms before attention and before the MLP."""

    before: Float[Tensor, " hidden"]
    query: Float[Tensor, "query_heads_dim hidden"]
    key: Float[Tensor, "kv_heads_dim hidden"]
    value: Float[Tensor, "kv_heads_dim hidden"]
    output: Float[Tensor, "hidden query_heads_dim"]
    after: Float[Tensor, " hidden"]
    gate: Float[Tensor, "intermediate hidden"]
    up: Float[Tensor, "intermediate hidden"]
    down: Float[Tensor, "hidden intermediate"]

    @property
    def qkv(self) -> Float[Tensor, "heads_dim hidden"]:
        """The projections of queries, keys and values, copied into one matrix; rows: all three kinds of heads."""
        return torch.cat([self.query, self.key, self.value])

    @property
    def gate_up(self) -> Float[Tensor, "twice_intermediate hidden"]:
        """The two input matrices of the SwiGLU MLP, copied into one matrix."""
        return torch.cat([self.gate, self.up])


def rms_norm(
    states: Float[Tensor, "*batch hidden"], weight: Float[Tensor, " hidden"], epsilon: float
) -> Float[Tensor, "*batch hidden"]:
    """States normalized by their root mean square, which is computed in float32; the weight is of the states' type."""
    wide = states.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(states.dtype)


def rotate(
    heads: Float[Tensor, "*batch heads dim"],
    cosine: Float[Tensor, "*batch 1 dim"],
    sine: Float[Tensor, "*batch 1 dim"],
) -> Float[Tensor, "*batch heads dim"]:
    """Rotary position embedding (RoPE) of queries or keys, in Llama's order of a head's halves."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def take_layers(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, engine: str) -> Iterator[LayerWeights]:
    """The model's layers, from the first on; each is deleted from the model when the next one is asked for.

    So weights are held once, but for the copies that the caller makes.

    Args:
        model: a loaded world model, which can't be run afterwards.
        engine: the engine's name, for the error.

    Raises:
        CheckpointError: at the first layer, for biases or an activation other than SiLU (no published checkpoint has
            either).
    """
    config = model.config
    if config.attention_bias or config.mlp_bias:
        raise CheckpointError(f"world_model: expected no biases with engine={engine}, got attention_bias or mlp_bias")
    if config.hidden_act != "silu":
        raise CheckpointError(f"world_model: expected hidden_act silu with engine={engine}, got {config.hidden_act}")
    while len(model.model.layers):
        layer: Any = model.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        yield LayerWeights(
            before=layer.input_layernorm.weight.detach(),
            query=attention.q_proj.weight.detach(),
            key=attention.k_proj.weight.detach(),
            value=attention.v_proj.weight.detach(),
            output=attention.o_proj.weight.detach(),
            after=layer.post_attention_layernorm.weight.detach(),
            gate=mlp.gate_proj.weight.detach(),
            up=mlp.up_proj.weight.detach(),
            down=mlp.down_proj.weight.detach(),
        )
        del model.model.layers[0]
