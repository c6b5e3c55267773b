"""The world model's weights as decode steps read them: matrices that read the same input joined, maybe in 8 bits."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from terra.engine.graph.kv_cache import KVCache, KVTarget, SharedKeys
from terra.engine.graph.quantization import (
    Matrix,
    max_normalized,
    max_products,
    migrate_scales,
    quantize_weight,
    unquantized,
)
from terra.engine.graph.transfers import to_device
from terra.engine.layers import LayerWeights, take_layers
from terra.prompt import Actions
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

_ACTION_BLOCK = 32
"""Actions that one GEMM embeds; many slots may begin a frame in one turn of the scheduler."""


@dataclass(frozen=True)
class Norm:
    """The weight of an RMS norm; `output_scale` is the `input_scale` of the matrix that reads the normalized states."""

    weight: Float[Tensor, " hidden"]
    epsilon: float
    output_scale: float | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer.

    Attributes:
        qkv: projections of all queries, keys and values: (heads_dim, hidden).
        output: projection of attention's output: (hidden, query_heads_dim).
        norm: the norm between attention and MLP.
        gate_up: both input matrices of the SwiGLU MLP: (2 intermediate, hidden).
        down: the MLP's output matrix: (hidden, intermediate).
    """

    qkv: Matrix
    output: Matrix
    norm: Norm
    gate_up: Matrix
    down: Matrix


class LayerOps(Protocol):
    """The operations of a decoder layer. `hidden` stands for normalized states, in 8 bits where a matrix needs that."""

    def rms_norm(self, states: Float[Tensor, "slots width hidden"], norm: Norm) -> Tensor:
        """Normalize states for the matrix that reads them."""
        ...

    def attention(self, hidden: Tensor, layer: Layer, target: KVTarget) -> Tensor:
        """QKV projection, RoPE, storing of keys and values, and attention: (slots, width, heads, dim)."""
        ...

    def attention_output_and_mlp(
        self, attended: Tensor, states: Tensor, layer: Layer, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer, both residual sums included: states, and states normalized by the next norm."""
        ...


class DecoderWeights:
    """All that a pass through the decoder reads, on the model's device.

    What is not in 8 bits has the model's element type.

    Args:
        model: its layers and lm head are taken out of it, so that they are held once.
        length: positions of the RoPE tables.
        fp8: hold the layers and the lm head in 8 bits.

    Attributes:
        norms: `norms[i]` stands before layer i, the last one before the lm head.
        lm_head: the rows of the lm head's weight that predict image tokens.
        kv_shape: number of layers, key and value heads of each, elements of a head.

    Raises:
        CheckpointError: see `terra.engine.layers.take_layers`.
    """

    def __init__(
        self, model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, length: int, *, fp8: bool = False
    ) -> None:
        config = model.config
        final_norm = model.model.norm.weight
        cosine, sine = model.model.rotary_emb(final_norm, torch.arange(length, device=final_norm.device)[None])
        self.cosine, self.sine = cosine[0].contiguous(), sine[0].contiguous()
        self.norms: list[Norm] = []
        self.layers: list[Layer] = []
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        for weights in take_layers(model, "graph"):
            norm, layer = _build_layer(weights, config.rms_norm_eps, dim, fp8=fp8)
            self.norms.append(norm)
            self.layers.append(layer)
        head = model.lm_head.weight.detach()[: config.image_vocab_size]
        self.lm_head = quantize_weight(head, max_normalized(final_norm)) if fp8 else unquantized(head)
        self.norms.append(Norm(final_norm.detach(), config.rms_norm_eps, self.lm_head.input_scale))
        del model.lm_head
        self.kv_shape = len(self.layers), config.num_key_value_heads or config.num_attention_heads, dim
        self.layout, self.vocab_size = config.layout, config.image_vocab_size
        self.hidden_size, self.dtype, self.device = config.hidden_size, model.dtype, model.device
        self.token_embedding = model.model.embed_tokens.weight.detach()
        self.position_embeddings = model.pos_embedding_spatio_temporal
        self._action_projection, self._action_dtype = model.action_projection, model.action_projection_dtype

    def project_actions(self, actions: Actions) -> Float[Tensor, "n slots hidden"]:
        """The embeddings of actions, `_ACTION_BLOCK` at a time, the last block padded.

        A library's GEMM may sum in another order if it has another number of rows. With blocks of one size an action's
        embedding depends on the action alone.
        """
        padded = F.pad(actions.to(self._action_dtype), (0, 0, 0, 0, 0, -len(actions) % _ACTION_BLOCK))
        blocks = [self._action_projection(block) for block in to_device(padded, self.device).split(_ACTION_BLOCK)]
        projected = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return projected[: len(actions)].to(self.dtype)

    def forward(
        self,
        states: Float[Tensor, "slots width hidden"],
        cache: KVCache,
        slots: slice,
        start: Int[Tensor, " slots"],
        ops: LayerOps,
        sharing: tuple[Int[Tensor, " slots"], Int[Tensor, " slots"]] | None = None,
    ) -> Tensor:
        """The last layer's normalized states of the tokens from `start` on; their keys and values join the cache.

        `sharing` has `holder` and `length` of `terra.engine.graph.kv_cache.SharedKeys`.
        """
        hidden = ops.rms_norm(states, self.norms[0])
        for index, layer in enumerate(self.layers):
            keys, values = cache.keys[index, slots], cache.values[index, slots]
            shared = None if sharing is None else SharedKeys(*sharing, cache.keys[index], cache.values[index])
            target = KVTarget(self.cosine, self.sine, start, keys, values, shared)
            attended = ops.attention(hidden, layer, target)
            states, hidden = ops.attention_output_and_mlp(attended, states, layer, self.norms[index + 1])
        return hidden


def _build_layer(weights: LayerWeights, epsilon: float, dim: int, *, fp8: bool) -> tuple[Norm, Layer]:
    """The norm before a layer of the model, and the layer, whose heads have `dim` elements."""
    if fp8:
        weights, max_inputs = _migrate(weights, dim)
        matrices = [quantize_weight(*each) for each in zip(_matrices(weights), max_inputs, strict=True)]
    else:
        matrices = [unquantized(weight) for weight in _matrices(weights)]
    qkv, output, gate_up, down = matrices
    norm = Norm(weights.after, epsilon, gate_up.input_scale)
    return Norm(weights.before, epsilon, qkv.input_scale), Layer(qkv, output, norm, gate_up, down)


def _matrices(weights: LayerWeights) -> list[Tensor]:
    """The matrices of a `Layer`."""
    return [weights.qkv, weights.output, weights.gate_up, weights.down]


def _migrate(weights: LayerWeights, dim: int) -> tuple[LayerWeights, tuple[float, float, float, float]]:
    """A layer's projections with migrated scales, and bounds of the inputs of the four matrices of a `Layer`.

    Scales migrate from rows of v to columns of o, and from rows of up to columns of down.
    """
    value, output, gate, up, down = weights.value, weights.output, weights.gate, weights.up, weights.down
    before, after = weights.before, weights.after
    # Attention's output is a mean of values, and SiLU(x) is at most |x|: neither exceeds what the projections give.
    max_values = max_products(value, before)
    factors = migrate_scales(max_values)
    group = output.shape[1] // len(value)  # query heads that share a head of values
    by_column = factors.unflatten(0, (-1, dim)).repeat_interleave(group, 0).flatten()
    value, output = (value * factors[:, None]).to(value.dtype), (output / by_column).to(output.dtype)
    max_inner = max_products(gate, after) * max_products(up, after)
    inner_factors = migrate_scales(max_inner)
    up, down = (up * inner_factors[:, None]).to(up.dtype), (down / inner_factors).to(down.dtype)
    max_attended, max_gated = (max_values * factors).max().item(), (max_inner * inner_factors).max().item()
    max_inputs = max_normalized(before), max_attended, max_normalized(after), max_gated
    return replace(weights, value=value, output=output, up=up, down=down), max_inputs
