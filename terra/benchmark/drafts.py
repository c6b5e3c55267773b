"""Several tokens from one pass of the world model, losslessly: drafts are kept as far as the pass itself picks them.

With position-keyed noise a pick depends on nothing but the tokens before it, so a draft is right exactly when it equals
the pick at its place, and the frame is the one that sequential decoding makes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache

from terra.noise import vocabulary_noise
from terra.prompt import SLOT_FILLER, Layout, Prompt, interleave
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

Sight = Callable[[Int[Tensor, " cached_and_new"], int], Bool[Tensor, "new cached_and_new"]]
"""Which tokens each of the last `new` ones may attend to, from the positions of all in the order they were fed."""

Pick = Callable[[Float[Tensor, "batch n vocab"], Sequence[int]], Int[Tensor, "batch n"]]
"""The tokens for some places of a frame, from the logits that predict them."""

Drafter = Callable[[Sequence[int], Mapping[int, int], range], list[int]]
"""Drafts for a range of places, from the frame's tokens so far and the last pass's picks by place."""


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
    ) -> Float[Tensor, "batch n vocab"]:
        """Logits over the image tokens behind each of `ids`, which join the cache.

        Args:
            ids: tokens; those at slots are ignored.
            positions: their places in the window.
            actions: what fills the slots among them, in order.

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
        return model.image_logits(hidden.last_hidden_state)

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


def read_prompts(reader: WindowReader, prompts: Sequence[Prompt]) -> None:
    """Feed prompts of equal length, a row of the batch each, but for their last token, which the first head has."""
    count, layout = prompts[0].num_frames, reader.layout
    rows = [interleave(list(each.tokens), layout.action_slots, num_actions=count - 1)[:-1] for each in prompts]
    reader.feed(torch.tensor(rows), torch.arange(len(rows[0])), torch.stack([each.actions for each in prompts]))


class FramePicks:
    """Picks tokens of one frame as `terra.sampling.sample_tokens` does, with all of the frame's noise drawn before.

    Args:
        temperature: 0 for the likeliest token.
        seeds: the window's seed of each row of the batch.
        frame: the frame's number in the window.
    """

    def __init__(self, temperature: float, seeds: Sequence[int], frame: int, layout: Layout, vocab_size: int) -> None:
        self._temperature = temperature
        self._noise: list[Tensor] = []
        if temperature:
            # The noise of a token is that of the position before it.
            positions = torch.arange(layout.image_tokens) + frame * layout.block - 1
            self._noise = [vocabulary_noise(torch.full_like(positions, s), positions, vocab_size) for s in seeds]

    def __call__(self, logits: Float[Tensor, "batch n vocab"], places: Sequence[int]) -> Int[Tensor, "batch n"]:
        """See `Pick`."""
        return self.scores(logits, places).argmax(-1)

    def scores(self, logits: Float[Tensor, "batch n vocab"], places: Sequence[int]) -> Float[Tensor, "batch n vocab"]:
        """What the pick is the arg-max of."""
        logits = logits.float().cpu()
        if not self._temperature:
            return logits
        return logits / self._temperature + torch.stack([noise[list(places)] for noise in self._noise])


def from_previous_frame(previous: Sequence[int]) -> Drafter:
    """Drafts: the previous frame's tokens at the same places."""

    def draft(made: Sequence[int], own: Mapping[int, int], places: range) -> list[int]:
        return [previous[place] for place in places]

    return draft


def from_own_picks(before: int) -> Drafter:
    """Drafts: what the last pass picked at these places, though from drafts that were wrong (Jacobi decoding).

    Places that it did not reach get the newest token of the frame, or `before` at its start.
    """

    def draft(made: Sequence[int], own: Mapping[int, int], places: range) -> list[int]:
        newest = made[-1] if made else before
        return [own.get(place, newest) for place in places]

    return draft


def from_both(previous: Sequence[int]) -> Drafter:
    """Drafts: the last pass's own picks, and the previous frame's tokens at places that it did not reach."""

    def draft(made: Sequence[int], own: Mapping[int, int], places: range) -> list[int]:
        return [own.get(place, previous[place]) for place in places]

    return draft


def decode_frame(
    reader: WindowReader, head: Head, pick: Pick, drafter: Drafter, num_drafts: int
) -> tuple[Int[Tensor, " image_tokens"], list[int]]:
    """One frame, and how many tokens each pass gave.

    A pass feeds what is not in the cache yet (at first `head`, then the last token) and up to `num_drafts` drafts, none
    beyond the frame's end. Its first pick is always kept; the next ones as long as the draft before equals its pick.
    The frame's last token is left for the next head. With no drafts this is sequential decoding.

    Args:
        reader: of one window (a batch of one), which holds everything before `head`.
    """
    total = reader.layout.image_tokens
    start = int(head.positions[-1]) + 1
    ids, positions, actions = head.ids, head.positions, head.actions
    made: list[int] = []
    lengths: list[int] = []
    own: dict[int, int] = {}
    while len(made) < total:
        done = len(made)
        drafted = range(done, min(done + num_drafts, total - 1))
        drafts = drafter(made, own, drafted)
        fed = torch.cat([ids, torch.tensor([drafts], dtype=torch.int64)], dim=1)
        where = torch.cat([positions, torch.tensor(drafted, dtype=torch.int64) + start])
        places = range(done, done + len(drafts) + 1)
        picks = pick(reader.feed(fed, where, actions)[:, -len(places) :], places)[0].tolist()
        right = num_right(drafts, picks)
        reader.drop(len(drafts) - right)
        made += picks[: right + 1]
        lengths.append(right + 1)
        own = dict(zip(places[right + 1 :], picks[right + 1 :], strict=True))
        ids, positions, actions = torch.tensor([made[-1:]]), torch.tensor([start + len(made) - 1]), None
    return torch.tensor(made), lengths


def num_right(drafts: Sequence[int], picks: Sequence[int]) -> int:
    """How many drafts, from the first on, equal the picks at their places; `picks` may be longer."""
    for index, draft in enumerate(drafts):
        if draft != picks[index]:
            return index
    return len(drafts)


def count_passes(tokens: Sequence[int], drafts: Sequence[int], num_drafts: int) -> int:
    """Passes that `decode_frame` takes for a frame, if the drafts of its places are known beforehand."""
    passes = done = 0
    while done < len(tokens):
        drafted = slice(done, min(done + num_drafts, len(tokens) - 1))
        done += num_right(drafts[drafted], tokens[drafted]) + 1
        passes += 1
    return passes
