"""What the draft experiment compares: kinds of drafts, and picks with a frame's noise drawn before.

Decoding with drafts itself is the engine's, see `terra.engine.drafts`.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.drafts import Drafter, num_right
from terra.noise import vocabulary_noise
from terra.prompt import Layout, Prompt, interleave
from terra.world_model.window import WindowReader


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
        """See `terra.engine.drafts.Pick`."""
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


def count_passes(tokens: Sequence[int], drafts: Sequence[int], num_drafts: int) -> int:
    """Passes that `decode_frame` takes for a frame, if the drafts of its places are known beforehand."""
    passes = done = 0
    while done < len(tokens):
        drafted = slice(done, min(done + num_drafts, len(tokens) - 1))
        done += num_right(drafts[drafted], tokens[drafted]) + 1
        passes += 1
    return passes
