"""Several tokens from one pass of the world model, losslessly: drafts are accepted as far as the pass samples the same.

With position-keyed noise a sampled token depends on nothing but the tokens before it, so a draft is right exactly when
it equals the token sampled at its position, and the frame is the one that sequential decoding makes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.world_model.window import FramePrefix, TokenReader

TokenSampler = Callable[[Float[Tensor, "batch n vocab"], Sequence[int]], Int[Tensor, "batch n"]]
"""Samples the tokens at some positions of a frame (0 is its first token), from the logits that predict them."""

Drafter = Callable[[Sequence[int], Mapping[int, int], range], list[int]]
"""Drafts for a range of positions, from the frame's tokens so far and what the last pass sampled, by position."""


def draft_from_last_pass_or_previous_frame(previous: Sequence[int]) -> Drafter:
    """Draft what the last pass sampled, and the previous frame's tokens at positions that the pass did not reach."""

    def draft(decoded: Sequence[int], last_pass: Mapping[int, int], positions: range) -> list[int]:
        return [last_pass.get(position, previous[position]) for position in positions]

    return draft


def decode_frame(
    reader: TokenReader, prefix: FramePrefix, sample: TokenSampler, drafter: Drafter, num_drafts: int
) -> tuple[Int[Tensor, " image_tokens"], list[int]]:
    """Decode one frame; returns its tokens, and how many of them each pass gave.

    A pass feeds what is not in the cache yet (at first `prefix`, then the last token) and drafts, so that it has
    `num_drafts` tokens beyond the first (at most: there is none beyond the frame's end, and no prefix is cut). Its
    first sampled token is always kept; each of the next ones is kept as long as the draft before it was accepted. The
    frame's last token is left for the next prefix. With no drafts this is sequential decoding.

    Args:
        reader: one window (a batch of one), which holds everything before `prefix`.
        prefix: what stands before the frame's first token and is not in the cache yet.
        sample: samples tokens from logits.
        drafter: drafts tokens.
        num_drafts: tokens a pass beyond the first, at most.
    """
    total = reader.layout.image_tokens
    start = int(prefix.positions[-1]) + 1
    ids, positions, actions = prefix.ids, prefix.positions, prefix.actions
    decoded: list[int] = []
    lengths: list[int] = []
    last_pass: dict[int, int] = {}
    while len(decoded) < total:
        done = len(decoded)
        drafted = range(done, min(done + max(0, num_drafts + 1 - ids.shape[1]), total - 1))
        drafts = drafter(decoded, last_pass, drafted)
        fed = torch.cat([ids, torch.tensor([drafts], dtype=torch.int64)], dim=1)
        at = torch.cat([positions, torch.tensor(drafted, dtype=torch.int64) + start])
        in_frame = range(done, done + len(drafts) + 1)
        sampled = sample(reader.feed(fed, at, actions, last=len(in_frame)), in_frame)[0].tolist()
        accepted = num_accepted(drafts, sampled)
        reader.drop(len(drafts) - accepted)
        decoded += sampled[: accepted + 1]
        lengths.append(accepted + 1)
        last_pass = dict(zip(in_frame[accepted + 1 :], sampled[accepted + 1 :], strict=True))
        ids, positions, actions = torch.tensor([decoded[-1:]]), torch.tensor([start + len(decoded) - 1]), None
    return torch.tensor(decoded), lengths


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts, from the first on, equal the tokens sampled at their positions; `sampled` may be longer."""
    for index, draft in enumerate(drafts):
        if draft != sampled[index]:
            return index
    return len(drafts)
