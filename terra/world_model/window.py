"""A world model that reads one window several tokens at a time, with a KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from transformers import DynamicCache

from terra.prompt import SLOT_FILLER, Layout, pack_blocks
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


class TokenReader(Protocol):
    """A world model with the KV cache of one window, fed with tokens at explicit positions."""

    @property
    def layout(self) -> Layout:
        """The model's window."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

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
            positions: the tokens' positions in the window, on the CPU.
            actions: the actions whose slots are among `positions`, in order.
            last: compute the logits behind so many of the last tokens only; None computes all.

        Raises:
            ValueError: the slots are not filled by exactly the actions given.
        """
        ...

    def drop(self, count: int) -> None:
        """Forget the tokens that were fed last."""
        ...


class WindowReader:
    """The `TokenReader` over transformers' model.

    Several windows can be read side by side, as rows of a batch; they share positions.
    """

    def __init__(self, model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
        self.model = model
        self._cache = DynamicCache(config=model.config)
        self._length = 0

    @property
    def layout(self) -> Layout:
        """See `TokenReader.layout`."""
        return self.model.config.layout

    @property
    def length(self) -> int:
        """See `TokenReader.length`."""
        return self._length

    @torch.inference_mode()
    def feed(
        self,
        ids: Int[Tensor, "batch n"],
        positions: Int[Tensor, " n"],
        actions: Float32[Tensor, "batch steps slots action_dim"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch last vocab"]:
        """See `TokenReader.feed`."""
        model, device = self.model, self.model.device
        embeds = model.embed(ids.to(device), actions, positions)
        count, total = len(positions), self._length + len(positions)
        causal = torch.ones(count, total, dtype=torch.bool, device=device).tril(self._length)
        hidden = model.model(
            inputs_embeds=embeds,
            position_ids=positions.to(device)[None],
            # Without a mask, grouped heads share keys instead of each copying them.
            attention_mask=None if count == 1 else causal[None, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._length = total
        states = hidden.last_hidden_state
        return model.image_logits(states if last is None else states[:, -last:])

    def drop(self, count: int) -> None:
        """See `TokenReader.drop`."""
        if count:
            self._cache.crop(-count)
            self._length -= count


@dataclass(frozen=True)
class FramePrefix:
    """What stands before a frame's first token and is not in the KV cache yet; its last position predicts that token.

    Attributes:
        ids: token ids; those at slots are ignored.
        positions: the tokens' positions in the window.
        actions: the actions whose slots are among `positions`, in order.
    """

    ids: Int[Tensor, "batch n"]
    positions: Int[Tensor, " n"]
    actions: Float32[Tensor, "batch steps slots action_dim"]

    @classmethod
    def after_context(
        cls,
        context: Int[Tensor, "batch frames rows cols"],
        actions: Float32[Tensor, "batch frames slots action_dim"],
    ) -> "FramePrefix":
        """All frames of the window, each with its action."""
        ids = pack_blocks(context, actions.shape[2])
        return cls(ids, torch.arange(ids.shape[1]), actions)

    @classmethod
    def after_frame(
        cls, last: Int[Tensor, " batch"], action: Float32[Tensor, "batch slots action_dim"], frame: int, layout: Layout
    ) -> "FramePrefix":
        """The last token of frame number `frame` (from 0) of the window, and that frame's action."""
        slots = torch.full((len(last), layout.action_slots), SLOT_FILLER)
        start = layout.slot_start(frame)
        positions = torch.arange(start - 1, start + layout.action_slots)
        return cls(torch.cat([last.cpu()[:, None], slots], dim=1), positions, action[:, None])


@torch.inference_mode()
def sample_frame(
    reader: TokenReader,
    prefix: FramePrefix,
    sampling: SamplingParams,
    seeds: Int[Tensor, " batch"],
    before_pass: Callable[[], object] = lambda: None,
) -> Int[Tensor, "batch image_tokens"]:
    """Sample a frame's tokens, one a pass; the last one is left for the next prefix.

    Args:
        reader: the windows, which hold everything before `prefix`.
        prefix: what stands before the frame's first token and is not in the cache yet.
        sampling: how tokens are chosen.
        seeds: a seed for each window, on the model's device.
        before_pass: called before each pass; an error of it ends the frame.
    """
    ids, positions, actions = prefix.ids, prefix.positions, prefix.actions
    tokens: list[Tensor] = []
    while len(tokens) < reader.layout.image_tokens:
        before_pass()
        logits = reader.feed(ids, positions, actions, last=1)[:, -1]
        # The noise of a token is that of the position before it.
        tokens.append(sample_tokens(logits, sampling, seeds, torch.full_like(seeds, reader.length - 1)))
        ids, positions, actions = tokens[-1][:, None], torch.tensor([reader.length]), None
    return torch.stack(tokens, dim=1)
