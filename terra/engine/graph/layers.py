"""The Llama's layers over a KV cache of fixed size, cut where attention stands, so that torch.compile fuses the rest.

normalised -> project (queries; keys and values into the cache) -> attention -> mix -> states, normalised -> ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: those that read the same input stand in one matrix. `norm` is that after attention."""

    query_key_value: Float[Tensor, "heads_dim hidden"]
    output: Float[Tensor, "hidden heads_dim"]
    norm: Float[Tensor, " hidden"]
    gate_up: Float[Tensor, "2_intermediate hidden"]
    down: Float[Tensor, "hidden intermediate"]


class Layers:
    """The weights, the tables and the KV cache of some windows, in the model's element type on its device.

    Args:
        model: gives its layers' weights away: they are taken out of it, so that they are held once.
        lanes: windows side by side.
        length: positions of the cache of each.

    Attributes:
        keys, values: (layers, lanes, length, kv_heads, dim).

    Raises:
        ValueError: biases or another activation than SiLU, which no Llama of this kind has.
    """

    def __init__(self, model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, lanes: int, length: int) -> None:
        config = model.config
        if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
            raise ValueError("model: expected no biases and hidden_act silu")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.epsilon = config.rms_norm_eps
        like = model.model.norm.weight
        positions = torch.arange(length, device=like.device)[None]
        cosine, sine = model.model.rotary_emb(like, positions)
        self.cosine, self.sine = cosine[0].contiguous(), sine[0].contiguous()
        # `norms[i]` stands before layer i, the last before the head.
        self.norms = [layer.input_layernorm.weight.detach() for layer in model.model.layers]
        self.norms.append(like.detach())
        self.layers: list[Layer] = []
        while len(model.model.layers):
            self.layers.append(_joined(model.model.layers[0]))
            del model.model.layers[0]
        shape = (len(self.layers), lanes, length, self.kv_heads, self.dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)

    def __call__(
        self,
        states: Float[Tensor, "lanes width hidden"],
        lanes: slice,
        positions: Int[Tensor, "lanes width"],
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        steps: "Steps",
    ) -> Float[Tensor, "lanes width hidden"]:
        """The last layer's normalised states of tokens at these positions, whose keys and values join these lanes' cache.

        `attention` gets the rows' queries and the lanes' cache of one layer; `steps` do the rest.
        """
        hidden = rms_norm(states, self.norms[0], self.epsilon)
        for index, layer in enumerate(self.layers):
            keys, values = self.keys[index, lanes], self.values[index, lanes]
            queries = steps.project(
                hidden, layer.query_key_value, self.cosine, self.sine, positions, keys, values, self.heads
            )
            attended = attention(queries, keys, values)
            states, hidden = steps.mix(attended, states, layer, self.norms[index + 1], self.epsilon)
        return hidden


def project(
    hidden: Float[Tensor, "lanes width hidden"],
    weight: Float[Tensor, "heads_dim hidden"],
    cosine: Float[Tensor, "length dim"],
    sine: Float[Tensor, "length dim"],
    positions: Int[Tensor, "lanes width"],
    keys: Float[Tensor, "lanes length kv_heads dim"],
    values: Float[Tensor, "lanes length kv_heads dim"],
    heads: int,
) -> Float[Tensor, "lanes width heads dim"]:
    """Queries, rotated; keys (rotated) and values are written into the cache at `positions`."""
    lanes, _, kv_heads, dim = keys.shape
    mixed = rearrange(F.linear(hidden, weight), "lanes width (heads dim) -> lanes width heads dim", dim=dim)
    turned = _rotate(mixed[:, :, : heads + kv_heads], cosine[positions][:, :, None], sine[positions][:, :, None])
    lane = torch.arange(lanes, device=keys.device)[:, None]
    keys[lane, positions] = turned[:, :, heads:]
    values[lane, positions] = mixed[:, :, heads + kv_heads :]
    return turned[:, :, :heads].contiguous()


def mix(
    attended: Float[Tensor, "lanes width heads dim"],
    states: Float[Tensor, "lanes width hidden"],
    layer: Layer,
    next_norm: Float[Tensor, " hidden"],
    epsilon: float,
) -> tuple[Float[Tensor, "lanes width hidden"], Float[Tensor, "lanes width hidden"]]:
    """The states after attention's output and the feed-forward part, and normalised for what comes next."""
    states = states + F.linear(attended.flatten(2), layer.output)
    gate, up = F.linear(rms_norm(states, layer.norm, epsilon), layer.gate_up).chunk(2, dim=-1)
    states = states + F.linear(F.silu(gate) * up, layer.down)
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


def _joined(layer: nn.Module) -> Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    return Layer(
        query_key_value=_stacked([attention.q_proj, attention.k_proj, attention.v_proj]),  # pyright: ignore
        output=attention.o_proj.weight.detach(),  # pyright: ignore
        norm=layer.post_attention_layernorm.weight.detach(),  # pyright: ignore
        gate_up=_stacked([feed_forward.gate_proj, feed_forward.up_proj]),  # pyright: ignore
        down=feed_forward.down_proj.weight.detach(),  # pyright: ignore
    )


def _stacked(linears: Sequence[nn.Linear]) -> Tensor:
    return torch.cat([linear.weight.detach() for linear in linears])


@dataclass(frozen=True)
class Steps:
    """`project` and `mix`, as they are or compiled."""

    project: Callable[..., Tensor]
    mix: Callable[..., tuple[Tensor, Tensor]]


PLAIN = Steps(project, mix)


def fused_steps() -> Steps:
    """For a GPU: one kernel behind the projection, and the rest compiled once for all layers and a number of rows."""
    from terra.engine.graph.kernels import rotate_and_store

    def project_fused(
        hidden: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor,
        positions: Tensor, keys: Tensor, values: Tensor, heads: int,
    ) -> Tensor:  # fmt: skip
        return rotate_and_store(F.linear(hidden, weight), cosine, sine, positions, keys, values)

    return Steps(project_fused, torch.compile(mix, dynamic=False, fullgraph=True))
