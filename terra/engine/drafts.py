"""Several tokens from one pass of the world model, losslessly: drafts are kept as far as the pass itself picks them.

With position-keyed noise a pick depends on nothing but the tokens before it, so a draft is right exactly when it equals
the pick at its place, and the frame is the one that sequential decoding makes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.world_model.window import Head, WindowReader

Pick = Callable[[Float[Tensor, "batch n vocab"], Sequence[int]], Int[Tensor, "batch n"]]
"""The tokens for some places of a frame, from the logits that predict them."""

Drafter = Callable[[Sequence[int], Mapping[int, int], range], list[int]]
"""Drafts for a range of places, from the frame's tokens so far and the last pass's picks by place."""


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
        picks = pick(reader.feed(fed, where, actions, last=len(places)), places)[0].tolist()
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
