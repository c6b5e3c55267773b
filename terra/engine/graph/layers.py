"""The Llama's layers over a KV cache of fixed size, cut into the steps that a GPU has kernels for.

normalised -> project (queries; keys and values into the cache) -> attention -> mix -> states, normalised -> ...
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from terra.engine.graph.matrix import FP8, Matrix, as_it_is, in_fp8, linear
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


@dataclass(frozen=True)
class Norm:
    """Llama's normalisation; `states_by` is that of the matrix behind it."""

    weight: Float[Tensor, " hidden"]
    epsilon: float
    states_by: float | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: those that read the same input stand in one matrix. `norm` is that after attention.

    Rows and columns: (dim of all queries, keys and values, hidden), (hidden, dim of all queries), (2 intermediate,
    hidden), (hidden, intermediate).
    """

    query_key_value: Matrix
    output: Matrix
    norm: Norm
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
        like = model.model.norm.weight
        positions = torch.arange(length, device=like.device)[None]
        cosine, sine = model.model.rotary_emb(like, positions)
        self.cosine, self.sine = cosine[0].contiguous(), sine[0].contiguous()
        # `norms[i]` stands before layer i, the last before the head.
        self.norms: list[Norm] = []
        self.layers: list[Layer] = []
        while len(model.model.layers):
            norm, layer = _taken(model.model.layers[0], config.rms_norm_eps, fp8=fp8_weights)
            self.norms.append(norm)
            self.layers.append(layer)
            del model.model.layers[0]
        head = model.lm_head.weight.detach()[: config.image_vocab_size]
        self.head = in_fp8(head, _largest_normal(like)) if fp8_weights else as_it_is(head)
        self.norms.append(Norm(like.detach(), config.rms_norm_eps, self.head.states_by))
        del model.lm_head
        shape = (len(self.layers), lanes, config.num_key_value_heads or config.num_attention_heads, length, dim)
        self.keys = torch.zeros(shape, dtype=FP8 if fp8_cache else like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys.mT, memory_format=torch.contiguous_format)

    def __call__(
        self,
        states: Float[Tensor, "lanes width hidden"],
        lanes: slice,
        positions: Int[Tensor, "lanes width"],
        attention: Callable[..., Tensor],
        steps: "Steps",
    ) -> Any:
        """The last layer's normalised states of tokens at these positions; keys and values join these lanes' cache.

        `attention` gets the rows' queries and the lanes' cache of one layer, and rounds to 8 bits what a matrix in
        8 bits takes (`round_by`); `steps` do the rest.
        """
        hidden = steps.begin(states, self.norms[0])
        for index, layer in enumerate(self.layers):
            keys, values = self.keys[index, lanes], self.values[index, lanes]
            place = Place(self.cosine, self.sine, positions, keys, values)
            queries = steps.project(hidden, self.norms[index], layer, place)
            attended = attention(queries, keys, values, round_by=layer.output.states_by)
            states, hidden = steps.mix(attended, states, layer, self.norms[index + 1])
        return steps.end(hidden, self.norms[-1])


def project(
    hidden: Float[Tensor, "lanes width hidden"], norm: Norm, layer: Layer, place: Place
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
    next_norm: Norm,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """The states after attention's output and the feed-forward part, and normalised for what comes next."""
    states = states + linear(attended.flatten(2), layer.output)
    gate, up = linear(rms_norm(states, layer.norm), layer.gate_up).chunk(2, dim=-1)
    states = states + linear(F.silu(gate) * up, layer.down)
    return states, rms_norm(states, next_norm)


def rms_norm(states: Float[Tensor, "*batch hidden"], norm: Norm) -> Float[Tensor, "*batch hidden"]:
    """States normalised: the mean square in float32, the weight in the states' type."""
    wide = states.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    return norm.weight * scaled.to(states.dtype)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _taken(layer: Any, epsilon: float, *, fp8: bool) -> tuple[Norm, Layer]:
    """The norm before a layer of the model, and the layer."""
    attention, feed_forward = layer.self_attn, layer.mlp
    before, after = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
    weights = [getattr(attention, f"{name}_proj").weight.detach() for name in "qkvo"]
    weights += [getattr(feed_forward, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")]
    if fp8:
        weights, largest = _levelled(weights, before, after, attention.head_dim)
        matrices = [in_fp8(*each) for each in zip(_joined(weights), largest, strict=True)]
    else:
        matrices = [as_it_is(weight) for weight in _joined(weights)]
    query_key_value, output, gate_up, down = matrices
    norm = Norm(after, epsilon, gate_up.states_by)
    return Norm(before, epsilon, query_key_value.states_by), Layer(query_key_value, output, norm, gate_up, down)


def _joined(weights: Sequence[Tensor]) -> list[Tensor]:
    """Those of queries, keys and values in one; output; gate and up in one; down."""
    query, key, value, output, gate, up, down = weights
    return [torch.cat([query, key, value]), output, torch.cat([gate, up]), down]


def _levelled(
    weights: Sequence[Tensor], before: Tensor, after: Tensor, dim: int
) -> tuple[list[Tensor], tuple[float, float, float, float]]:
    """Weights of the same layer in which no row of values or of up takes the others' bits.

    And what no element of the states exceeds that the four of `_joined` read.
    """
    query, key, value, output, gate, up, down = weights
    # Attention's output is a mean of values, and SiLU makes nothing larger.
    of_values = _largest_products(value, before)
    by = _levelling(of_values)
    heads = output.shape[1] // len(value)  # of the queries, that share one of the values
    by_column = by.unflatten(0, (-1, dim)).repeat_interleave(heads, 0).flatten()
    value, output = (value * by[:, None]).to(value.dtype), (output / by_column).to(output.dtype)
    of_inner = _largest_products(gate, after) * _largest_products(up, after)
    level = _levelling(of_inner)
    up, down = (up * level[:, None]).to(up.dtype), (down / level).to(down.dtype)
    most = (of_values * by).max().item(), (of_inner * level).max().item()
    largest = _largest_normal(before), most[0], _largest_normal(after), most[1]
    return [query, key, value, output, gate, up, down], largest


def _largest_normal(norm: Float[Tensor, " hidden"]) -> float:
    """What no element of normalised states exceeds: without the norm's weight, their length is sqrt(hidden)."""
    return math.sqrt(len(norm)) * norm.abs().max().item()


def _largest_products(weight: Float[Tensor, "rows hidden"], norm: Float[Tensor, " hidden"]) -> Float[Tensor, " rows"]:
    """What no product of a row with normalised states exceeds (Cauchy and Schwarz)."""
    return math.sqrt(len(norm)) * (weight.float() * norm.float()).norm(dim=1)


def _levelling(largest: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Powers of two that bring what rows may give to about their median, so that none takes the others' bits.

    The columns that read them are divided by the same: the result stays what it is.
    """
    median = largest.median()
    wanted = torch.exp2(torch.log2(median / largest).round().clamp(-16, 16))
    return torch.where((largest > 0) & (median > 0), wanted, 1.0)


def _unchanged(hidden: Tensor, norm: Norm) -> Tensor:
    return hidden


@dataclass(frozen=True)
class Steps:
    """What a pass is made of, apart from attention.

    `hidden` goes from one step to the next: the states, normalised where the matrix product behind it does not do that
    itself, and maybe in 8 bits. `begin` makes it of the first states, `end` makes of the last what the head takes.
    `project` makes what attention takes: queries, or what these are to be made of.
    """

    begin: Callable[[Tensor, Norm], Tensor]
    project: Callable[[Tensor, Norm, Layer, Place], Any]
    mix: Callable[[Tensor, Tensor, Layer, Norm], tuple[Tensor, Tensor]]
    end: Callable[[Tensor, Norm], Tensor]


PLAIN = Steps(rms_norm, project, mix, _unchanged)


def gpu_steps(*, single: bool) -> Steps:
    """For passes of a single token, or of any number, on a GPU, by kernels of our own."""
    from terra.engine.graph import many_rows, one_row

    if single:
        return Steps(_unchanged, one_row.project, one_row.mix, many_rows.normalise)
    return Steps(many_rows.normalise, many_rows.project, many_rows.mix, _unchanged)
