"""The world model for Hugging Face transformers: training forward with labels, cached generation.

    image ids --embed_tokens--\
                               (+ spatio-temporal positions) -> Llama -> logits of the next token
    actions --action_projection--/   (in the slots)
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, Cache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from terra.world_model.actions import linear_projection, mlp_projection
from terra.world_model.config import LlamaActionConfig
from terra.world_model.positions import SpatioTemporalPositions

IGNORED_LABEL = -100
"""A label that the loss does not count."""

_MAX_LOGITS = 2**30
"""Logits held at once in training (2 GiB in bfloat16); more are computed in parts, and again in the backward pass."""


class _LlamaAction(LlamaForCausalLM):
    """The world model without its action projection, in which v1 and v2 differ.

    Attributes:
        checkpoint_layers: whether the backward pass recomputes each layer from its input (activation checkpointing).
    """

    checkpoint_layers = False

    config_class = LlamaActionConfig
    config: LlamaActionConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: LlamaActionConfig, action_projection: nn.Module) -> None:
        super().__init__(config)
        self.pos_embedding_spatio_temporal = SpatioTemporalPositions(
            config.num_spatio_embeddings, config.num_temporal_embeddings, config.hidden_size
        )
        self.action_projection = action_projection
        self.post_init()

    def embed(
        self,
        input_ids: Int[Tensor, "batch length"],
        actions: Float32[Tensor, "batch steps slots action_dim"] | None,
        positions: Int[Tensor, " length"],
    ) -> Float[Tensor, "batch length hidden"]:
        """Embeddings of a chunk of the window: tokens, and actions in the slots.

        Args:
            input_ids: token ids; those at slots are ignored.
            actions: the actions whose slots are among `positions`, in order.
            positions: the tokens' positions in the window, in any order; on the CPU, so that no device is waited for.

        Raises:
            ValueError: the chunk's slots are not filled by exactly the actions given.
        """
        slots = (positions % self.config.layout.block >= self.config.layout.image_tokens).nonzero()[:, 0]
        given = 0 if actions is None else actions.shape[1] * actions.shape[2]
        if given != len(slots):
            raise ValueError(
                f"actions: expected {len(slots)} rows for the slots, got {given} "
                f"({len(positions)} positions from {int(positions[0])} on)"
            )
        device = input_ids.device
        embeds = self.model.embed_tokens(input_ids)
        if actions is not None and given:
            rows = rearrange(actions, "batch steps slots action_dim -> batch (steps slots) action_dim").to(device)
            projected = self.action_projection(rows.to(self.action_projection_dtype))
            embeds = embeds.index_copy(1, slots.to(device), projected.to(embeds.dtype))
        return embeds + self.pos_embedding_spatio_temporal(positions.to(device))

    @property
    def action_projection_dtype(self) -> torch.dtype:
        """Data type of the projection's weights."""
        return next(self.action_projection.parameters()).dtype

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Int[Tensor, "batch length"],
        actions: Float32[Tensor, "batch steps slots action_dim"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        z_loss: float = 0.0,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position.

        Args:
            input_ids: a chunk of the interleaved context, continuing where `past_key_values` ends; ids in action
                slots are ignored.
            actions: the actions whose slots lie in this chunk, in order; whole blocks of slots only.
            past_key_values: the cache of everything before the chunk.
            labels: the ids to predict, for training on whole blocks from the window's start; usually `input_ids`
                itself. The loss is the mean cross-entropy, over the image vocabulary, of the image tokens that a
                position before them predicts. Labels at slots, and -100, do not count. No logits are returned.
            z_loss: with labels, the weight of the mean squared log-normalizer in the loss, which keeps the logits from
                drifting (Chowdhery et al. 2022, "PaLM", section 5: 1e-4).
            logits_to_keep: compute logits of the last positions only; 0 means all.
        """
        if labels is not None:
            return CausalLMOutputWithPast(loss=self._loss(input_ids, actions, labels, z_loss))  # pyright: ignore[reportArgumentType]
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden = self.model(
            inputs_embeds=self.embed(input_ids, actions, torch.arange(start, start + input_ids.shape[1])),
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        states = hidden.last_hidden_state
        logits = self.lm_head(states[:, -logits_to_keep:] if logits_to_keep else states)
        return CausalLMOutputWithPast(logits=logits, past_key_values=hidden.past_key_values)  # pyright: ignore[reportArgumentType]

    def predicting_states(
        self, input_ids: Int[Tensor, "batch length"], actions: Float32[Tensor, "batch steps slots action_dim"]
    ) -> Float[Tensor, "batch steps image_tokens hidden"]:
        """The last layer's states that predict each image token of whole blocks; `image_logits` turns them into logits.

        No state predicts the window's first token, so its entry is zero. This method calls the layers one by one,
        without a mask, because transformers' own loop builds a mask of length x length under torch.compile, which rules
        out the fused attention kernels.

        Raises:
            ValueError: a length that is not whole blocks, or an attention other than "sdpa", which needs the mask.
        """
        layout = self.config.layout
        blocks, rest = divmod(input_ids.shape[1], layout.block)
        if rest:
            raise ValueError(
                f"input_ids: expected whole blocks of {layout.block}, got a length of {input_ids.shape[1]}"
            )
        if actions.shape[1:3] != (blocks, layout.action_slots):
            expected = (blocks, layout.action_slots)
            raise ValueError(f"actions: expected {expected} steps and slots, got {tuple(actions.shape[1:3])}")
        if self.config._attn_implementation != "sdpa":
            raise ValueError(f"attention: expected sdpa for training, got {self.config._attn_implementation!r}")
        states = self._embed_blocks(input_ids, actions)
        rotary = self.model.rotary_emb(states, torch.arange(input_ids.shape[1], device=states.device)[None])
        kind = states.device.type
        if torch.is_autocast_enabled(kind):
            # The residual stream is in half precision, which halves the memory traffic of all but the matmuls.
            states = states.to(torch.get_autocast_dtype(kind))
        for layer in self.model.layers:
            if self.checkpoint_layers and self.training:
                states = checkpoint(layer, states, position_embeddings=rotary, use_reentrant=False)
            else:
                states = layer(states, position_embeddings=rotary)
        predicting = F.pad(self.model.norm(states)[:, :-1], (0, 0, 1, 0))
        return self._image_parts(predicting)

    def _embed_blocks(self, input_ids: Tensor, actions: Tensor) -> Float[Tensor, "batch length hidden"]:
        """Compute `embed` of whole blocks by concatenation, so that training compiles to one graph."""
        image = self.model.embed_tokens(self._image_parts(input_ids))
        slots = self.action_projection(actions.to(self.action_projection_dtype)).to(image.dtype)
        embeds = rearrange(torch.cat([image, slots], dim=2), "batch steps block hidden -> batch (steps block) hidden")
        return embeds + self.pos_embedding_spatio_temporal(torch.arange(embeds.shape[1], device=embeds.device))

    def _image_parts(self, positions: Tensor) -> Tensor:
        """Select the image tokens of each block: (batch, length, ...) becomes (batch, steps, image_tokens, ...)."""
        layout = self.config.layout
        return rearrange(positions, "batch (steps block) ... -> batch steps block ...", block=layout.block)[
            :, :, : layout.image_tokens
        ]

    def image_logits(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch image_vocabulary"]:
        """Logits over the image tokens; the special token behind them is never predicted."""
        return F.linear(states, self.lm_head.weight[: self.config.image_vocab_size])

    def _loss(self, input_ids: Tensor, actions: Tensor | None, labels: Tensor, z_loss: float) -> Tensor:
        if actions is None:
            raise ValueError("actions: expected those of all slots with labels, got none")
        states = self.predicting_states(input_ids, actions).flatten(0, 2)
        targets = self._image_parts(labels).flatten(1)
        first = torch.arange(targets.shape[1], device=labels.device) == 0
        targets = targets.masked_fill(first, IGNORED_LABEL).flatten()
        num_parts = -(-len(targets) * self.config.image_vocab_size // _MAX_LOGITS)
        part = -(-len(targets) // num_parts)
        sums = []
        for some, theirs in zip(states.split(part), targets.split(part), strict=True):
            if num_parts == 1:
                sums.append(self._summed_loss(some, theirs, z_loss))
            else:
                sums.append(checkpoint(self._summed_loss, some, theirs, z_loss, use_reentrant=False))
        return torch.stack(sums).sum() / (targets != IGNORED_LABEL).sum()

    def _summed_loss(self, states: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        logits = self.image_logits(states).float()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
        if z_loss:
            squared = logits.logsumexp(dim=-1).square()
            loss = loss + z_loss * squared.masked_fill(targets == IGNORED_LABEL, 0.0).sum()
        return loss


class LlamaActionForCausalLM(_LlamaAction):
    """Terra v1: actions enter through one linear layer. 205 tensors, 2,043,973,632 parameters as published."""

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__(config, linear_projection(config.action_dim, config.hidden_size))


class LlamaActionV2ForCausalLM(_LlamaAction):
    """Terra v2: actions enter through a three-layer MLP. 209 tensors, 2,052,366,336 parameters as published."""

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__(config, mlp_projection(config.action_dim, config.hidden_size))


for _auto in (AutoModel, AutoModelForCausalLM):
    # A tuple: transformers then chooses by the config's `architectures`.
    _both = (LlamaActionForCausalLM, LlamaActionV2ForCausalLM)
    _auto.register(LlamaActionConfig, _both, exist_ok=True)  # pyright: ignore[reportArgumentType]
