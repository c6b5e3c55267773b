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
from transformers import Cache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from terra.world_model.actions import linear_projection, mlp_projection
from terra.world_model.config import LlamaActionConfig
from terra.world_model.positions import SpatioTemporalPositions


class _LlamaAction(LlamaForCausalLM):
    """What v1 and v2 share; they differ in the action projection."""

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
        start: int,
    ) -> Float[Tensor, "batch length hidden"]:
        """Embeddings of a chunk of the window that begins at position `start`.

        Raises:
            ValueError: the chunk's slots are not filled by exactly the actions given.
        """
        layout = self.config.layout
        length = input_ids.shape[1]
        first_slot = layout.slots_before(start)
        num_slots = layout.slots_before(start + length) - first_slot
        given = 0 if actions is None else actions.shape[1] * actions.shape[2]
        if given != num_slots:
            raise ValueError(
                f"actions: expected {num_slots} rows for the slots at {start = }, {length = }, got {given}"
            )
        positions = torch.arange(start, start + length, device=input_ids.device)
        embeds = self.model.embed_tokens(input_ids)
        if actions is not None and num_slots:
            # Fixed shapes only (a gather and a select), so that the forward compiles to one graph.
            rows = rearrange(actions, "batch steps slots action_dim -> batch (steps slots) action_dim")
            projected = self.action_projection(rows.to(self.action_projection_dtype))
            within = positions % layout.block - layout.image_tokens
            row = positions // layout.block * layout.action_slots + within.clamp(min=0) - first_slot
            row = row.clamp(0, num_slots - 1)
            embeds = torch.where((within >= 0)[:, None], projected[:, row].to(embeds.dtype), embeds)
        return embeds + self.pos_embedding_spatio_temporal(positions)

    @property
    def action_projection_dtype(self) -> torch.dtype:
        """Element type of the projection's weights."""
        return next(self.action_projection.parameters()).dtype

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Int[Tensor, "batch length"],
        actions: Float32[Tensor, "batch steps slots action_dim"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
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
            labels: usually `input_ids` itself; the loss is the mean cross-entropy over image tokens, wherever a
                position before them predicts them. Labels at slots, and -100, do not count.
            logits_to_keep: compute logits of the last positions only; 0 means all.
        """
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden = self.model(
            inputs_embeds=self.embed(input_ids, actions, start),
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        states = hidden.last_hidden_state
        logits = self.lm_head(states[:, -logits_to_keep:] if logits_to_keep else states)
        loss = None if labels is None else self._loss(logits, labels, start)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=hidden.past_key_values)  # pyright: ignore[reportArgumentType]

    def _loss(self, logits: Tensor, labels: Tensor, start: int) -> Tensor:
        layout = self.config.layout
        positions = torch.arange(start, start + labels.shape[1], device=labels.device)
        targets = torch.where(positions % layout.block < layout.image_tokens, labels, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())


class LlamaActionForCausalLM(_LlamaAction):
    """Terra v1: actions enter through one linear layer. 205 tensors, 2,043,973,632 parameters as published."""

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__(config, linear_projection(config.action_dim, config.hidden_size))


class LlamaActionV2ForCausalLM(_LlamaAction):
    """Terra v2: actions enter through a three-layer MLP. 209 tensors, 2,052,366,336 parameters as published."""

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__(config, mlp_projection(config.action_dim, config.hidden_size))
