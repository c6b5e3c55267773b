"""A world model that reads one window token by token, at any positions, with a KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache

from terra.prompt import SLOT_FILLER, Layout
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

Sight = Callable[[Int[Tensor, " cached_and_new"], int], Bool[Tensor, "new cached_and_new"]]
"""Which tokens each of the last `new` ones may attend to, from the positions of all in the order they were fed."""


def sees_all_fed(positions: Int[Tensor, " cached_and_new"], num_new: int) -> Bool[Tensor, "new cached_and_new"]:
    """A token attends to all that were fed before it: what a causal kernel over an append-only KV cache does."""
    total = len(positions)
    return torch.ones(num_new, total, dtype=torch.bool, device=positions.device).tril(total - num_new)


def sees_earlier_places(positions: Int[Tensor, " cached_and_new"], num_new: int) -> Bool[Tensor, "new cached_and_new"]:
    """A token attends to those of them that stand before it in the window, as it did in training."""
    return sees_all_fed(positions, num_new) & (positions <= positions[-num_new:, None])


class WindowReader:
    """A world model with the KV cache of one window, fed with tokens at explicit positions, in any order.

    Several windows can be read side by side, as rows of a batch; they share positions.
    """

    def __init__(self, model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, sight: Sight = sees_all_fed) -> None:
        self.model = model
        self._sight = sight
        self._cache = DynamicCache(config=model.config)
        self._positions = torch.empty(0, dtype=torch.int64, device=model.device)

    @property
    def layout(self) -> Layout:
        """The model's window."""
        return self.model.config.layout

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self._positions)

    @torch.inference_mode()
    def feed(
        self,
        ids: Int[Tensor, "batch n"],
        positions: Int[Tensor, " n"],
        actions: Float32[Tensor, "batch steps slots action_dim"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch last vocab"]:
        """Logits over the image tokens behind each of `ids`, which join the cache.

        Args:
            ids: tokens; those at slots are ignored.
            positions: their places in the window.
            actions: what fills the slots among them, in order.
            last: give the logits behind so many of the last ones alone; None gives all.

        Raises:
            ValueError: the slots are not filled by exactly the actions given.
        """
        model, device = self.model, self.model.device
        positions = positions.to(device)
        self._positions = torch.cat([self._positions, positions])
        mask = self._sight(self._positions, len(positions))
        hidden = model.model(
            inputs_embeds=self._embed(ids.to(device), positions, actions),
            position_ids=positions[None],
            # Without a mask, grouped heads share keys instead of each copying them.
            attention_mask=None if bool(mask.all()) else mask[None, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        states = hidden.last_hidden_state
        return model.image_logits(states if last is None else states[:, -last:])

    def drop(self, count: int) -> None:
        """Forget the tokens that were fed last."""
        if count:
            self._cache.crop(-count)
            self._positions = self._positions[:-count]

    def _embed(self, ids: Tensor, positions: Tensor, actions: Tensor | None) -> Float[Tensor, "batch n hidden"]:
        model = self.model
        embeds = model.model.embed_tokens(ids)
        at_slots = positions % self.layout.block >= self.layout.image_tokens
        given = 0 if actions is None else actions.shape[1] * actions.shape[2]
        if given != int(at_slots.sum()):
            raise ValueError(f"actions: expected {int(at_slots.sum())} rows for the slots, got {given}")
        if actions is not None and given:
            rows = rearrange(actions, "batch steps slots action_dim -> batch (steps slots) action_dim").to(
                embeds.device
            )
            embeds[:, at_slots] = model.action_projection(rows.to(model.action_projection_dtype)).to(embeds.dtype)
        return embeds + model.pos_embedding_spatio_temporal(positions)


@dataclass(frozen=True)
class Head:
    """What stands before a frame's first token and is not in the cache yet; the last of it predicts that token."""

    ids: Int[Tensor, "batch n"]
    positions: Int[Tensor, " n"]
    actions: Float32[Tensor, "batch steps slots action_dim"]

    @classmethod
    def after_frame(
        cls, last: Int[Tensor, " batch"], action: Float32[Tensor, "batch slots action_dim"], frame: int, layout: Layout
    ) -> "Head":
        """The last token of frame number `frame` of the window, and that frame's action."""
        slots = torch.full((len(last), layout.action_slots), SLOT_FILLER)
        start = layout.slot_start(frame)
        positions = torch.arange(start - 1, start + layout.action_slots)
        return cls(torch.cat([last.cpu()[:, None], slots], dim=1), positions, action[:, None])
