"""Tokens to frames: what a decoder is, and the one that shows each frame by itself."""

from typing import Protocol, runtime_checkable

import torch

from tokenizer.types import Frames, TokenGrid


@runtime_checkable
class Decoder(Protocol):
    """Turns tokens into frames. It may look at several frames at once, but gives one frame for each grid."""

    def decode(self, tokens: TokenGrid) -> Frames:
        """Frames in [-1, 1] for int64 token grids; `ValueError` for grids that are not the tokenizer's."""
        ...


class FramewiseDecoder:
    """Decodes each frame alone, with the tokenizer's own decoder (anything that has `decode`, as LFQTokenizer).

    So a frame looks the same wherever it stands in a rollout, and a rollout can be shown while it grows.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self.tokenizer = tokenizer

    @torch.no_grad()
    def decode(self, tokens: TokenGrid) -> Frames:
        """Frames in [-1, 1] for int64 token grids, on the tokenizer's device; `ValueError` for other tokens."""
        return self.tokenizer.decode(tokens)
