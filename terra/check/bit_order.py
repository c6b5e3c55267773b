"""Which order of the bits in a token id a world model was trained with, seen from how well it predicts real frames.

Encoding and decoding agree under either order, so a tokenizer alone can't tell; a world model that reads ids with their
bits reversed sees other tokens than those it knows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float32
from torch import Tensor

from terra.prompt import pack_blocks
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM
from terra.world_model.model import IGNORED_LABEL
from tokenizer import Frames, LFQTokenizer, TokenGrid
from tokenizer.config import BitOrder
from tokenizer.quantizer import signs_from_tokens, tokens_from_signs

MIN_MARGIN = 0.5
"""Nats a token by which one order must be better than the other and than chance; that of a trained model is larger."""


@dataclass(frozen=True)
class BitOrderLosses:
    """Cross-entropy in nats a token of frames given those before them, by bit order, and that of guessing."""

    losses: Mapping[BitOrder, float]
    chance: float

    @property
    def margin(self) -> float:
        """How much better the better order is."""
        return max(self.losses.values()) - min(self.losses.values())

    @property
    def meant(self) -> BitOrder | None:
        """The order that the weights mean; None where neither is clearly better than the other and than chance."""
        best = min(self.losses, key=lambda order: self.losses[order])
        return best if min(self.margin, self.chance - self.losses[best]) >= MIN_MARGIN else None


def measure_bit_orders(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    tokenizer: LFQTokenizer,
    frames: Frames,
    actions: Float32[Tensor, "steps slots action_dim"],
    *,
    window: int,
    num_windows: int,
) -> BitOrderLosses:
    """Tokenize frames both ways and let the model predict them, each from the true ones before it.

    Args:
        model: on any device.
        tokenizer: on any device, of either order.
        frames: consecutive ones, in [-1, 1].
        actions: those between them, one fewer.
        window: frames of a window, 2 or more; its first frame is given.
        num_windows: windows, at most as many as there are, spread evenly.
    """
    quantizer = tokenizer.config.quantizer_config
    tokens = tokenizer.encode(frames)
    signs = signs_from_tokens(tokens, quantizer.dim, quantizer.bit_order)
    last = len(frames) - window
    starts = torch.linspace(0, last, min(num_windows, last + 1)).round().long().tolist()
    losses: dict[BitOrder, float] = {}
    for order in get_args(BitOrder):
        ids = tokens_from_signs(signs, order)
        of_windows = [
            next_frame_loss(model, ids[start : start + window], actions[start : start + window - 1]) for start in starts
        ]
        losses[order] = sum(of_windows) / len(of_windows)
    return BitOrderLosses(losses, chance=math.log(model.config.image_vocab_size))


@torch.inference_mode()
def next_frame_loss(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    tokens: TokenGrid,
    actions: Float32[Tensor, "steps slots action_dim"],
) -> float:
    """Mean cross-entropy in nats of the image tokens of all frames but the first, given all tokens before each."""
    layout = model.config.layout
    ids = pack_blocks(tokens, layout.action_slots)[None].to(model.device)
    labels = ids.clone()
    labels[:, : layout.block] = IGNORED_LABEL
    # The last frame's slots are there because a model is trained on whole blocks; nothing is predicted from them.
    filled = torch.cat([actions, torch.zeros_like(actions[:1])])
    loss = model(input_ids=ids, actions=filled[None].to(model.device), labels=labels).loss
    return loss.item()
