"""The Llama's layers over a KV cache of fixed size, cut into the steps that a GPU has kernels for.

normalised -> project (queries; keys and values into the cache) -> attention -> mix -> states, normalised -> ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from terra.engine.graph.matrix import FP8, Matrix, in_fp8, linear
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: those that read the same input stand in one matrix. `norm` is that after attention.

    Rows and columns: (heads_dim, hidden), (hidden, heads_dim), (2 intermediate, hidden), (hidden, intermediate).
    """

    query_key_value: Matrix
    output: Matrix
    norm: Float[Tensor, " hidden"]
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Place:
    """Where rows stand: the tables of all positions, the rows' own, and the cache of a layer that they go into."""

    cosine: Float[Tensor, "length dim"]
    sine: Float[Tensor, "length dim"]
    positions: Int[Tensor, "lanes width"]
    keys: Float[Tensor, "lanes kv_heads length dim"]
    values: Float[Tensor, "lanes kv_heads dim length"]


class Layers:
    """The weights, the tables and the KV cache of some windows, in the model's element type on its device.

    Args:
        model: gives its layers' weights away: they are taken out of it, so that they are held once.
        lanes: windows side by side.
        length: positions of the cache of each.
        fp8_weights: layers and head are held in 8 bits, see `terra.engine.graph.matrix`.
        fp8_cache: keys and values are held in 8 bits (E4M3), as they are.

    Attributes:
        keys: (layers, lanes, kv_heads, length, dim).
        values: (layers, lanes, kv_heads, dim, length), so that products with either run along memory.
        head: logits of the image tokens.

    Raises:
        ValueError: biases or another activation than SiLU, which no Llama of this kind has.
    """

    def __init__(
        self,
        model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
        lanes: int,
        length: int,
        *,
        fp8_weights: bool = False,
        fp8_cache: bool = False,
    ) -> None:
        config = model.config
        if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
            raise ValueError("model: expected no biases and hidden_act silu")
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.epsilon = config.rms_norm_eps
        like = model.model.norm.weight
        positions = torch.arange(length, device=like.device)[None]
        cosine, sine = model.model.rotary_emb(like, positions)
        self.cosine, self.sine = cosine[0].contiguous(), sine[0].contiguous()
        # `norms[i]` stands before layer i, the last before the head.
        self.norms = [layer.input_layernorm.weight.detach() for layer in model.model.layers]  # pyright: ignore
        self.norms.append(like.detach())
        held = in_fp8 if fp8_weights else Matrix
        self.layers: list[Layer] = []
        while len(model.model.layers):
            self.layers.append(_joined(model.model.layers[0], held))
            del model.model.layers[0]
        self.head = held(model.lm_head.weight.detach()[: config.image_vocab_size])
        del model.lm_head
        shape = (len(self.layers), lanes, config.num_key_value_heads or config.num_attention_heads, length, dim)
        self.keys = torch.zeros(shape, dtype=FP8 if fp8_cache else like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys.mT, memory_format=torch.contiguous_format)

    def __call__(
        self,
        states: Float[Tensor, "lanes width hidden"],
        lanes: slice,
        positions: Int[Tensor, "lanes width"],
        attention: Callable[[Any, Tensor, Tensor], Tensor],
        steps: "Steps",
    ) -> Any:
        """The last layer's normalised states of tokens at these positions; keys and values join these lanes' cache.

        `attention` gets the rows' queries and the lanes' cache of one layer; `steps` do the rest.
        """
        epsilon = self.epsilon
        hidden = steps.begin(states, self.norms[0], epsilon)
        for index, layer in enumerate(self.layers):
            keys, values = self.keys[index, lanes], self.values[index, lanes]
            place = Place(self.cosine, self.sine, positions, keys, values)
            queries = steps.project(hidden, self.norms[index], epsilon, layer, place)
            attended = attention(queries, keys, values)
            states, hidden = steps.mix(attended, states, layer, self.norms[index + 1], epsilon)
        return steps.end(hidden, self.norms[-1], epsilon)


def project(
    hidden: Float[Tensor, "lanes width hidden"],
    norm: Float[Tensor, " hidden"],
    epsilon: float,
    layer: Layer,
    place: Place,
) -> Float[Tensor, "lanes width heads dim"]:
    """Queries, rotated, from states that are normalised; keys (rotated) and values are written into the cache."""
    return place_heads(linear(hidden, layer.query_key_value), place)


def place_heads(mixed: Float[Tensor, "lanes width heads_dim"], place: Place) -> Float[Tensor, "lanes width heads dim"]:
    """Of heads of queries, keys and values: the queries, rotated; keys (rotated) and values go into the cache."""
    lanes, kv_heads, _, dim = place.keys.shape
    by_head = rearrange(mixed, "lanes width (heads dim) -> lanes width heads dim", dim=dim)
    heads = by_head.shape[2] - 2 * kv_heads
    cosine, sine = place.cosine[place.positions], place.sine[place.positions]
    turned = _rotate(by_head[:, :, : heads + kv_heads], cosine[:, :, None], sine[:, :, None])
    lane = torch.arange(lanes, device=mixed.device)[:, None]
    place.keys[lane, :, place.positions] = turned[:, :, heads:].to(place.keys.dtype)
    place.values[lane, :, :, place.positions] = by_head[:, :, heads + kv_heads :].to(place.values.dtype)
    return turned[:, :, :heads].contiguous()


def mix(
    attended: Float[Tensor, "lanes width heads dim"],
    states: Float[Tensor, "lanes width hidden"],
    layer: Layer,
    next_norm: Float[Tensor, " hidden"],
    epsilon: float,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """The states after attention's output and the feed-forward part, and normalised for what comes next."""
    states = states + linear(attended.flatten(2), layer.output)
    gate, up = linear(rms_norm(states, layer.norm, epsilon), layer.gate_up).chunk(2, dim=-1)
    states = states + linear(F.silu(gate) * up, layer.down)
    return states, rms_norm(states, next_norm, epsilon)


def rms_norm(
    states: Float[Tensor, "*batch hidden"], weight: Float[Tensor, " hidden"], epsilon: float
) -> Float[Tensor, "*batch hidden"]:
    """Llama's normalisation: the mean square in float32, the weight in the states' type."""
    wide = states.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(states.dtype)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _joined(layer: nn.Module, held: Callable[[Tensor], Matrix]) -> Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    return Layer(
        query_key_value=held(_stacked([attention.q_proj, attention.k_proj, attention.v_proj])),  # pyright: ignore
        output=held(attention.o_proj.weight.detach()),  # pyright: ignore
        norm=layer.post_attention_layernorm.weight.detach(),  # pyright: ignore
        gate_up=held(_stacked([feed_forward.gate_proj, feed_forward.up_proj])),  # pyright: ignore
        down=held(feed_forward.down_proj.weight.detach()),  # pyright: ignore
    )


def _stacked(linears: Sequence[nn.Linear]) -> Tensor:
    return torch.cat([linear.weight.detach() for linear in linears])


def _unchanged(hidden: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    return hidden


@dataclass(frozen=True)
class Steps:
    """What a pass is made of, apart from attention.

    `hidden` goes from one step to the next: the states, normalised where the matrix product behind it does not do that
    itself, and maybe in 8 bits. `begin` makes it of the first states, `end` makes of the last what the head takes.
    `project` makes what attention takes: queries, or what these are to be made of.
    """

    begin: Callable[[Tensor, Tensor, float], Any]
    project: Callable[[Any, Tensor, float, Layer, Place], Any]
    mix: Callable[[Tensor, Tensor, Layer, Tensor, float], tuple[Tensor, Any]]
    end: Callable[[Any, Tensor, float], Any]


PLAIN = Steps(rms_norm, project, mix, _unchanged)


def gpu_steps(*, single: bool) -> Steps:
    """For passes of a single token, or of any number, on a GPU, by kernels of our own."""
    from terra.engine.graph import many_rows, one_row

    if single:
        return Steps(_unchanged, one_row.project, one_row.mix, many_rows.normalise)
    return Steps(many_rows.normalise, many_rows.project, many_rows.mix, _unchanged)
