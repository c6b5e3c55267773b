"""The operations of prefill and decode steps in torch: what a CPU runs, and what the Triton kernels must equal."""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from terra.engine import layers
from terra.engine.graph.kv_cache import KVTarget
from terra.engine.graph.quantization import linear, quantize_fp8
from terra.engine.graph.weights import DecoderWeights, Layer, Norm
from terra.sampling import SamplingParams, sample_tokens


def embed(
    weights: DecoderWeights,
    ids: Int64[Tensor, "slots length"],
    action_embeddings: Float[Tensor, "slots action_slots hidden"],
    positions: Int[Tensor, "slots width"],
) -> Float[Tensor, "slots width hidden"]:
    """The states at these positions: token or action embeddings, plus those of the positions."""
    layout = weights.layout
    pos_in_block = positions % layout.block
    action_slot = (pos_in_block - layout.image_tokens).clamp(min=0)
    action_slot = positions // layout.block * layout.action_slots + action_slot
    slot = torch.arange(len(ids), device=ids.device)[:, None]
    actions = action_embeddings[slot, action_slot.clamp(max=action_embeddings.shape[1] - 1)]
    tokens = F.embedding(ids[slot, positions], weights.token_embedding)
    embeds = torch.where((pos_in_block >= layout.image_tokens)[..., None], actions, tokens)
    return embeds + weights.position_embeddings(positions)


def rms_norm(states: Float[Tensor, "*batch hidden"], norm: Norm) -> Float[Tensor, "*batch hidden"]:
    """See `terra.engine.layers.rms_norm`."""
    return layers.rms_norm(states, norm.weight, norm.epsilon)


def rope_and_store(
    qkv: Float[Tensor, "slots width heads_dim"], target: KVTarget
) -> Float[Tensor, "slots width heads dim"]:
    """Queries after RoPE; keys after RoPE and values go into the cache."""
    slots, kv_heads, _, dim = target.keys.shape
    positions = target.positions(qkv.shape[1])
    by_head = rearrange(qkv, "slots width (heads dim) -> slots width heads dim", dim=dim)
    heads = by_head.shape[2] - 2 * kv_heads
    cosine, sine = target.cosine[positions], target.sine[positions]
    rotated = layers.rotate(by_head[:, :, : heads + kv_heads], cosine[:, :, None], sine[:, :, None])
    slot = torch.arange(slots, device=qkv.device)[:, None]
    target.keys[slot, :, positions] = rotated[:, :, heads:].to(target.keys.dtype)
    target.values[slot, :, :, positions] = by_head[:, :, heads + kv_heads :].to(target.values.dtype)
    return rotated[:, :, :heads].contiguous()


def cached_attention(
    queries: Float[Tensor, "slots width heads dim"], target: KVTarget, output_scale: float | None = None
) -> Float[Tensor, "slots width heads dim"]:
    """Each token attends to its slot's cache up to its own position; with `output_scale` the result is quantized."""
    key_pos = torch.arange(target.keys.shape[2], device=target.keys.device)
    own = target.positions(queries.shape[1])
    visible = rearrange(key_pos <= own[..., None], "slots width length -> slots 1 width length")
    keys, values = target.keys, target.values
    if target.shared is not None:
        shared = target.shared
        elsewhere = key_pos < shared.length[:, None, None, None]  # slots 1 1 length
        there_keys, there_values = shared.keys[shared.holder], shared.values[shared.holder]
        keys = torch.where(elsewhere.mT, there_keys.to(queries.dtype), keys.to(queries.dtype))
        values = torch.where(elsewhere, there_values.to(queries.dtype), values.to(queries.dtype))
    return _attention(queries, keys, values, visible, output_scale)


def causal_attention(
    queries: Float[Tensor, "slots length heads dim"],
    keys: Float[Tensor, "slots kv_heads length dim"],
    values: Float[Tensor, "slots kv_heads dim length"],
    output_scale: float | None = None,
) -> Float[Tensor, "slots length heads dim"]:
    """Attention of a whole prefix over itself, for prefill; with `output_scale` the result is quantized."""
    return _attention(queries, keys, values, None, output_scale)


def _attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Bool[Tensor, "slots 1 width length"] | None,
    output_scale: float | None,
) -> Tensor:
    by_head = rearrange(queries, "slots n heads dim -> slots heads n dim")
    # torch's fast attention kernels need values that are contiguous along `dim`: without, prefill of a window takes 40
    # times as long.
    keys, values = keys.to(queries.dtype), values.to(queries.dtype).transpose(2, 3).contiguous()
    mixed = F.scaled_dot_product_attention(
        by_head, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )
    mixed = rearrange(mixed, "slots heads n dim -> slots n heads dim")
    return mixed if output_scale is None else quantize_fp8(mixed, output_scale)


def attention_output_and_mlp(
    attended: Float[Tensor, "slots width heads dim"],
    states: Float[Tensor, "slots width hidden"],
    layer: Layer,
    next_norm: Norm,
) -> tuple[Float[Tensor, "slots width hidden"], Float[Tensor, "slots width hidden"]]:
    """Output projection, residual, norm, SwiGLU MLP, residual: the states, and normalized by the next norm."""
    states = states + linear(attended.flatten(2), layer.output)
    gate, up = linear(rms_norm(states, layer.norm), layer.gate_up).chunk(2, dim=-1)
    states = states + linear(F.silu(gate) * up, layer.down)
    return states, rms_norm(states, next_norm)


class PrefillOps:
    """Layer operations of a pass over a whole prefix, which starts at position 0: causal attention without a mask."""

    rms_norm = staticmethod(rms_norm)
    attention_output_and_mlp = staticmethod(attention_output_and_mlp)

    @staticmethod
    def attention(hidden: Tensor, layer: Layer, target: KVTarget) -> Tensor:
        """Attention over the prefix's own keys and values, read back from the cache in the cache's type."""
        queries = rope_and_store(linear(hidden, layer.qkv), target)
        length = queries.shape[1]
        keys, values = target.keys[:, :, :length], target.values[..., :length]
        return causal_attention(queries, keys, values, layer.output.input_scale)


def sample(
    logits: Float[Tensor, "tokens vocab"],
    temperature: Float32[Tensor, " slots"],
    seed: Int64[Tensor, " slots"],
    start: Int64[Tensor, " slots"],
) -> Int64[Tensor, " tokens"]:
    """Unfiltered samples at the slots' temperatures; the tokens of a slot are consecutive, from its `start` on."""
    width = len(logits) // len(start)
    positions = (start[:, None] + torch.arange(width, device=start.device)).flatten()
    seeds = seed.repeat_interleave(width)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for value in temperature.unique().tolist():
        same = (temperature == value).repeat_interleave(width)
        tokens[same] = sample_tokens(logits[same], SamplingParams(temperature=value), seeds[same], positions[same])
    return tokens


def accept(
    ids: Int64[Tensor, "slots length"],
    start: Int64[Tensor, " slots"],
    last: Int64[Tensor, " slots"],
    passes: Int64[Tensor, " counts"],
    concerned: Bool[Tensor, " slots"],
    sampled: Int64[Tensor, "slots width"],
    block: int,
    image_tokens: int,
) -> None:
    """Accept drafts as far as they equal the sampled tokens; what was sampled behind that becomes the next drafts.

    `sampled[:, i]` is the token for position `start + 1 + i`. It is written to `ids`; and to the same place of the next
    frame, as a first draft, unless that is sampled here, too. `start` moves on to the last token that is certain now,
    at most to `last`. All this only in slots that are `concerned`. An action slot needs no token, so it counts as
    accepted and nothing is written there. `passes[n]` counts those slots that lacked tokens and got n of them.
    """
    following = start[:, None] + 1 + torch.arange(sampled.shape[1], device=ids.device)
    slot = torch.arange(len(ids), device=ids.device)[:, None]
    drafts = ids[slot, following]
    is_image = following % block < image_tokens
    right = ~is_image | (drafts == sampled)
    num_accepted = right[:, :-1].long().cumprod(1).sum(1)
    written = concerned[:, None] & is_image & (following <= last[:, None])
    ids[slot, following] = torch.where(written, sampled, drafts)
    in_next = following[:, -block:] + block
    ids[slot, in_next] = torch.where(written[:, -block:], sampled[:, -block:], ids[slot, in_next])
    end = torch.minimum(start + num_accepted + 1, last)
    num_tokens = (is_image & (following <= end[:, None])).sum(1)
    passes.index_add_(0, num_tokens, (concerned & (start < last)).long())
    start.copy_(torch.where(concerned, end, start))
