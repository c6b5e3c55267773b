"""Diagonal decoding: several rows of a frame at once, each some tokens behind the one above it. Fast, and not exact.

As in "Fast Autoregressive Video Generation with Diagonal Decoding" (Ye et al. 2025, arXiv 2503.14070), here on a KV
cache that holds tokens in the order they were made, at explicit positions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.drafts import Pick
from terra.world_model.window import Head, WindowReader


def diagonal_places(rows: int, cols: int, lag: int) -> list[list[int]]:
    """The places of a frame (row-major) that each pass picks, top row first.

    Pass t picks column t - lag * r of every row r that has it: a row begins when the one above has `lag` tokens, and
    `lag` = `cols` is sequential decoding. There are cols + lag * (rows - 1) passes.

    Raises:
        ValueError: a lag that is not 1 to `cols`.
    """
    if not 1 <= lag <= cols:
        raise ValueError(f"lag: expected 1 to {cols} (the columns), got {lag}")
    return [
        [row * cols + t - lag * row for row in range(rows) if 0 <= t - lag * row < cols]
        for t in range(cols + lag * (rows - 1))
    ]


def decode_diagonally(
    reader: WindowReader, head: Head, pick: Pick, previous: Int[Tensor, "batch rows cols"], lag: int
) -> Int[Tensor, "batch rows cols"]:
    """One frame of each window of a batch, by `diagonal_places`.

    A pass feeds what the pass before picked, so the token left of a place predicts it, as in training. The first place
    of a row is predicted by the last one of the row above, which is not made yet (unless `lag` is `cols`): the previous
    frame's token stands in for it, is seen by nobody else and leaves the cache after the pass. What else a token sees
    is the reader's `Sight`; of one pass, tokens of rows above are fed first. The frame's last token is left for the
    next head.
    """
    batch, rows, cols = previous.shape
    before = previous.flatten(1).cpu()
    start = int(head.positions[-1]) + 1
    tokens = torch.zeros_like(before)
    fed = [-1]
    for places in diagonal_places(rows, cols, lag):
        stand_ins = [place - 1 for place in places if place % cols == 0 and place - 1 not in fed]
        if fed == [-1]:
            logits = reader.feed(head.ids, head.positions, head.actions)[:, -1:]
        else:
            ids = torch.cat([tokens[:, fed], before[:, stand_ins]], dim=1)
            logits = reader.feed(ids, torch.tensor(fed + stand_ins) + start)
        reader.drop(len(stand_ins))
        predicting = fed + stand_ins
        tokens[:, places] = pick(logits[:, [predicting.index(place - 1) for place in places]], places)
        fed = places
    return tokens.reshape(batch, rows, cols)


class TruthPicks:
    """Picks the true tokens of a frame, and keeps how likely the model found them: teacher forcing.

    Attributes:
        nats: cross-entropy of each place, by row of the batch, once all places were picked.
    """

    def __init__(self, truth: Int[Tensor, "batch rows cols"]) -> None:
        self._truth = truth.flatten(1).cpu()
        self.nats: Float[Tensor, "batch image_tokens"] = torch.full(self._truth.shape, torch.nan)

    def __call__(self, logits: Float[Tensor, "batch n vocab"], places: Sequence[int]) -> Int[Tensor, "batch n"]:
        """See `terra.engine.drafts.Pick`."""
        wanted = self._truth[:, list(places)]
        likely = logits.float().cpu().log_softmax(-1).gather(-1, wanted[..., None])
        self.nats[:, list(places)] = -likely[..., 0]
        return wanted
