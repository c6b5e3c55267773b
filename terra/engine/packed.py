"""The forward pass over several tokens on a CPU: fused projections, grouped-query attention, optional 8-bit weights.

With one token a pass the memory's bandwidth bounds Hugging Face's model. With 32 the processor should bound it, but
keys and values are copied to every query head, and the projections q, k and v (gate and up) are computed one by one.
Here those projections are one matrix product, and query heads that share keys are rows of one attention.

In 8 bits (W8A8) weights have a scale for each row, activations one for each token, and products are sums of integers,
exact in any order; attention computes in bfloat16 on a CPU that multiplies it (else in float32), all else in float32.
In bfloat16 a matrix product reads `CHUNK` tokens. In all types attention reads `CHUNK` queries, a shorter pass being
padded, and in bfloat16 and in 8 bits whole blocks of `KEY_BLOCK` keys. So in these a token's logits are the same to the
bit whether it is read alone, after drafts or in a prefill. In float32 matrix products are not cut into chunks, nor keys
into whole blocks: the library may sum passes of different lengths in different orders, and logits differ by rounding,
as those of `terra.engine.hf` do. On a CPU with AVX, oneDNN multiplies float32, and bfloat16 where it can; weights are
held in the order that it reads.
"""

from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int
from torch import Tensor
from torch.nn import functional as F

from terra.engine.int8 import Int8Weight, quantize_rows
from terra.engine.layers import rms_norm, rotate, take_layers
from terra.prompt import Actions, Layout
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

CHUNK = 32
"""Tokens that a matrix product reads at once; the last chunk of a pass is padded."""

KEY_BLOCK = 256
"""The cache's length is a multiple: in bfloat16 and in 8 bits attention sums such blocks of keys in order."""


_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
_ONEDNN_TYPES = {torch.float32: _ONEDNN, torch.bfloat16: _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()}
"""The types that oneDNN multiplies here: in float32 torch would call MKL, which is slower."""


def _by_onednn(states: Tensor) -> bool:
    return states.device.type == "cpu" and _ONEDNN_TYPES.get(states.dtype, False)


def _held(weight: Float[Tensor, "rows columns"], *, int8: bool) -> Tensor | Int8Weight:
    """A weight in the form that the decoder multiplies; for oneDNN in the order that it reads."""
    if int8:
        return Int8Weight(*quantize_rows(weight))
    return torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK) if _by_onednn(weight) else weight


def _product(states: Float[Tensor, "n columns"], weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "n rows"]:
    if _by_onednn(states):
        return torch.ops.mkldnn._linear_pointwise(states, weight, None, "none", [], "")
    return F.linear(states, weight)


def _linear(states: Float[Tensor, "n columns"], weight: Tensor | Int8Weight) -> Float[Tensor, "n rows"]:
    if isinstance(weight, Int8Weight):
        return weight.linear(states)
    if states.dtype == torch.float32 or len(states) == CHUNK:
        return _product(states, weight)
    return torch.cat([_product(chunk, weight) for chunk in states.split(CHUNK)])


@dataclass(frozen=True)
class _Layer:
    before: Float[Tensor, " hidden"]
    qkv: Tensor | Int8Weight
    output: Tensor | Int8Weight
    after: Float[Tensor, " hidden"]
    gate_up: Tensor | Int8Weight
    down: Tensor | Int8Weight


class PackedDecoder:
    """A world model's forward pass over several tokens, from fused weights; embeddings are still the model's.

    Args:
        model: its layers and lm head are taken out of it, so that they are held once.
        int8: hold the layers and the lm head in 8 bits, and compute in float32 what is not in 8 bits, see the module.

    Raises:
        CheckpointError: see `terra.engine.layers.take_layers`.
    """

    def __init__(self, model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, *, int8: bool) -> None:
        config = model.config
        if int8:
            model.float()
        self._model, self.layout = model, config.layout
        self._epsilon = config.rms_norm_eps
        self._kv_heads = config.num_key_value_heads or config.num_attention_heads
        self._dim = config.head_dim or config.hidden_size // config.num_attention_heads
        # In float32 passes of different lengths need not agree to the bit.
        self._key_block = KEY_BLOCK if int8 or model.dtype != torch.float32 else CHUNK
        narrow = int8 and model.device.type == "cpu" and _ONEDNN_TYPES[torch.bfloat16]
        self._kv_dtype = torch.bfloat16 if narrow else model.dtype
        hold = partial(_held, int8=int8)
        length = -(-config.layout.max_length // CHUNK) * CHUNK + CHUNK
        final_norm = model.model.norm.weight.detach()
        cosine, sine = model.model.rotary_emb(final_norm, torch.arange(length, device=model.device)[None])
        self._cosine, self._sine = cosine[0], sine[0]
        self._layers = [
            _Layer(each.before, hold(each.qkv), hold(each.output), each.after, hold(each.gate_up), hold(each.down))
            for each in take_layers(model, "jacobi")
        ]
        self._norm, self._lm_head = final_norm, hold(model.lm_head.weight.detach()[: config.image_vocab_size])
        del model.lm_head

    def empty_cache(self, length: int) -> Float[Tensor, "layers two kv_heads length dim"]:
        """A zeroed cache for the keys and values of `length` tokens."""
        shape = len(self._layers), 2, self._kv_heads, length, self._dim
        return torch.zeros(shape, dtype=self._kv_dtype, device=self._norm.device)

    def free(self) -> None:
        """Free the layers and the lm head; nothing can be computed afterwards. A second call does nothing."""
        if self._layers:
            self._layers.clear()
            del self._lm_head

    def forward(
        self,
        ids: Int[Tensor, " n"],
        positions: Int[Tensor, " n"],
        actions: Actions | None,
        cache: Float[Tensor, "layers two kv_heads length dim"],
        start: int,
        last: int,
    ) -> Float[Tensor, "last vocab"]:
        """Logits that predict the image token after each of the last `last` tokens.

        Args:
            ids: tokens; those at slots are ignored.
            positions: their positions in the window, on the CPU.
            actions: the actions whose slots are among `positions`, in order.
            cache: keys and values join it at `start`. It has whole blocks of `KEY_BLOCK` tokens, and room for the
                padding of the last chunk, which overwrites what stands after the tokens.
            start: tokens that the cache holds.
            last: 1 to the number of tokens.
        """
        count, device = len(ids), self._norm.device
        given = None if actions is None else actions[None]
        states = self._model.embed(ids[None].to(device), given, positions)[0]
        padding = -count % CHUNK
        states = F.pad(states, (0, 0, 0, padding))
        rope = F.pad(positions, (0, padding)).to(device)
        cosine, sine = self._cosine[rope, None], self._sine[rope, None]
        masks = [self._mask(start + first) for first in range(0, len(states), CHUNK)]
        for layer, keys_values in zip(self._layers, cache, strict=True):
            qkv = _linear(rms_norm(states, layer.before, self._epsilon), layer.qkv)
            attended = self._attention(qkv, cosine, sine, keys_values, start, masks)
            states = states + _linear(attended, layer.output)
            gate, up = _linear(rms_norm(states, layer.after, self._epsilon), layer.gate_up).chunk(2, dim=-1)
            states = states + _linear(F.silu(gate).mul_(up), layer.down)
        # As many rows as can be read in whole chunks: an RMS norm of fewer may sum in another order.
        first = (count - last) // CHUNK * CHUNK
        logits = _linear(rms_norm(states[first:], self._norm, self._epsilon), self._lm_head)
        return logits[count - last - first : count - first]

    def _mask(self, first: int) -> Float[Tensor, "queries rest"]:
        """What is added to a chunk's scores from key `first` on, the chunk's own first, to the last block's end."""
        length = -(-(first + CHUNK) // self._key_block) * self._key_block
        mask = torch.full((CHUNK, length - first), -torch.inf, dtype=self._kv_dtype, device=self._norm.device)
        return mask.triu_(1).repeat(self._group, 1)

    @property
    def _group(self) -> int:
        """Query heads that share a head of keys and values."""
        return self._model.config.num_attention_heads // self._kv_heads

    def _attention(
        self,
        qkv: Float[Tensor, "n heads_dim"],
        cosine: Float[Tensor, "n 1 dim"],
        sine: Float[Tensor, "n 1 dim"],
        keys_values: Float[Tensor, "two kv_heads length dim"],
        start: int,
        masks: list[Float[Tensor, "queries rest"]],
    ) -> Float[Tensor, "n query_heads_dim"]:
        by_head = rearrange(qkv, "n (heads dim) -> n heads dim", dim=self._dim)
        queries = self._kv_heads * self._group
        rotated = rotate(by_head[:, : queries + self._kv_heads], cosine, sine)
        stored = slice(start, start + len(qkv))
        keys_values[0, :, stored] = rotated[:, queries:].transpose(0, 1)
        keys_values[1, :, stored] = by_head[:, queries + self._kv_heads :].transpose(0, 1)
        # One head of keys and values, and all the queries of a chunk that read it.
        chunks = rearrange(
            rotated[:, :queries].to(self._kv_dtype),
            "(chunks n) (kv group) dim -> chunks kv (group n) dim",
            n=CHUNK,
            kv=self._kv_heads,
        )
        attended = [
            self._attend(chunk, keys_values[:, :, : start + index * CHUNK + mask.shape[1]], mask)
            for index, (chunk, mask) in enumerate(zip(chunks, masks, strict=True))
        ]
        return rearrange(
            torch.stack(attended).to(qkv.dtype),
            "chunks kv (group n) dim -> (chunks n) (kv group dim)",
            group=self._group,
        )

    def _attend(
        self,
        queries: Float[Tensor, "kv_heads queries dim"],
        keys_values: Float[Tensor, "two kv_heads length dim"],
        mask: Float[Tensor, "queries rest"],
    ) -> Float[Tensor, "kv_heads queries dim"]:
        if queries.is_cuda:
            whole = F.pad(mask, (keys_values.shape[2] - mask.shape[1], 0))
            return F.scaled_dot_product_attention(queries[None], *keys_values[:, None], attn_mask=whole)[0]
        # Two products and a softmax: torch's attention takes two to three times as long.
        attended = []
        for head, keys, values in zip(queries * self._dim**-0.5, *keys_values, strict=True):
            scores = _product(head, keys)
            scores[:, -mask.shape[1] :] += mask
            weights = scores.softmax(-1)
            if self._key_block < KEY_BLOCK:
                attended.append(_product(weights, values.t()))
            else:
                blocks = rearrange(weights, "queries (blocks keys) -> blocks queries keys", keys=KEY_BLOCK)
                attended.append((blocks @ values.unflatten(0, (-1, KEY_BLOCK))).sum(0))
        return torch.stack(attended)


class PackedReader:
    """The `terra.world_model.window.TokenReader` over a `PackedDecoder`."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder, self._cache, self._length = decoder, decoder.empty_cache(0), 0

    @property
    def layout(self) -> Layout:
        """See `TokenReader.layout`."""
        return self._decoder.layout

    @property
    def length(self) -> int:
        """See `TokenReader.length`."""
        return self._length

    @torch.inference_mode()
    def feed(
        self,
        ids: Int[Tensor, "1 n"],
        positions: Int[Tensor, " n"],
        actions: Float32[Tensor, "1 steps slots action_dim"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "1 last vocab"]:
        """See `TokenReader.feed`."""
        count = len(positions)
        needed = -(-(self._length + count + CHUNK) // KEY_BLOCK) * KEY_BLOCK
        if needed > self._cache.shape[3]:
            grown = self._decoder.empty_cache(needed)
            grown[:, :, :, : self._length] = self._cache[:, :, :, : self._length]
            self._cache = grown
        given = None if actions is None else actions[0]
        wanted = count if last is None else last
        logits = self._decoder.forward(ids[0], positions, given, self._cache, self._length, wanted)
        self._length += count
        return logits[None]

    def drop(self, count: int) -> None:
        """See `TokenReader.drop`."""
        self._length -= count
