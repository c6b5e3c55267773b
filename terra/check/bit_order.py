"""The bit order of token ids that a world model was trained with, measured by how well it predicts real frames.

A tokenizer alone can't tell, because it encodes and decodes consistently under either order. A world model predicts
badly if the bits of its ids are reversed.
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
"""Nats per token by which one order must be better than the other and than chance; a trained model's is larger."""


@dataclass(frozen=True)
class BitOrderLosses:
    """Cross-entropy (nats per token) of frames given the earlier frames, by bit order, and that of uniform guessing."""

    losses: Mapping[BitOrder, float]
    chance: float

    @property
    def margin(self) -> float:
        """Difference between the two orders, in nats per token."""
        return max(self.losses.values()) - min(self.losses.values())

    @property
    def meant(self) -> BitOrder | None:
        """The weights' bit order; None if neither is better than the other and than chance by `MIN_MARGIN`."""
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
    """Tokenize frames in both bit orders, and let the model predict each token from the true tokens before it.

    Args:
        model: the world model, on any device.
        tokenizer: the tokenizer, on any device, of either bit order.
        frames: consecutive frames in [-1, 1].
        actions: the actions between the frames, one fewer than frames.
        window: frames of a window, 2 or more; the first is not predicted.
        num_windows: number of evenly spread windows, bounded by the number possible.
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
    # The last frame gets slots because the model takes whole blocks; nothing is predicted from them.
    filled = torch.cat([actions, torch.zeros_like(actions[:1])])
    loss = model(input_ids=ids, actions=filled[None].to(model.device), labels=labels).loss
    return loss.item()
