"""How frames and actions stand in the model's context: `[tokens 1][slots 1][tokens 2][slots 2] ...`.

Slots are positions, found by arithmetic on a `Layout`; which token id fills them is of no meaning, and id 0 is an
image token like any other.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int
from torch import Tensor
from torch.nn import functional as F

from tokenizer import TokenGrid

Action = Float32[Tensor, "slots action_dim"]
"""What leads from one frame to the next: a row of numbers for each action slot, see `terra.actions.space`."""

Actions = Float32[Tensor, "steps slots action_dim"]
"""An action for each step."""

FrameTokens = Int[Tensor, "rows cols"]
"""Token ids of one frame, int64, row-major."""

SLOT_FILLER = 0
"""The id written into action slots. Any id of the vocabulary would do: an action embedding replaces it."""


@dataclass(frozen=True)
class Layout:
    """Where the image tokens and action slots of a window stand.

    `image_tokens` and `action_slots` make one block; a window holds up to `max_frames` blocks, the last one without
    its slots (nothing follows it).
    """

    image_tokens: int
    action_slots: int
    max_frames: int

    @property
    def block(self) -> int:
        """Positions of one frame: its image tokens and its action slots."""
        return self.image_tokens + self.action_slots

    @property
    def max_length(self) -> int:
        """Positions of a full window, the last frame's slots included."""
        return self.block * self.max_frames

    def slot_start(self, frame: int) -> int:
        """Position of the first action slot of a frame of the window."""
        return frame * self.block + self.image_tokens

    def is_slot(self, position: int) -> bool:
        """Whether a position is an action slot."""
        return position % self.block >= self.image_tokens


@dataclass(frozen=True)
class Prompt:
    """The frames a session starts from.

    `tokens` are the context frames; `actions` those that led from each to the next, so one fewer: the last frame's
    action is the session's first step. Build it with `build_prompt`, which checks.
    """

    tokens: TokenGrid
    actions: Actions

    @property
    def num_frames(self) -> int:
        """Context frames."""
        return self.tokens.shape[0]

    def ids(self, action_slots: int) -> Int[Tensor, " length"]:
        """Token ids as they stand in the context, up to the last frame's last token."""
        packed = pack_blocks(self.tokens, action_slots)
        return packed[: len(packed) - action_slots]


def build_prompt(tokens: TokenGrid, actions: Actions) -> Prompt:
    """Check context frames and the actions between them, and put them together.

    Args:
        tokens: ids of at least one frame, (frames, rows, cols).
        actions: (frames - 1, slots, action_dim).

    Raises:
        ValueError: wrong number of frames or actions, or an action that is not finite.
    """
    if tokens.ndim != 3 or tokens.shape[0] < 1:
        raise ValueError(f"tokens: expected (frames >= 1, rows, cols), got {tuple(tokens.shape)}")
    if actions.shape[0] != tokens.shape[0] - 1:
        raise ValueError(f"actions: expected {tokens.shape[0] - 1} (one between two frames), got {actions.shape[0]}")
    if not torch.isfinite(actions).all():
        raise ValueError("actions: expected finite numbers, got NaN or infinity")
    return Prompt(tokens.long(), actions.float())


def pack_blocks(tokens: Int[Tensor, "*batch frames rows cols"], action_slots: int) -> Int[Tensor, "*batch length"]:
    """Token ids of frames as they stand in the context: [tokens of frame 1][slots][tokens of frame 2][slots] ...

    The last frame has its slots too.
    """
    return F.pad(tokens.flatten(-2), (0, action_slots), value=SLOT_FILLER).flatten(-2)
