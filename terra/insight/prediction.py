"""The entropy of the world model's predictions, and how much an action changes them."""

import math

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Float32
from torch import Tensor

from terra.insight.window import LastFrame, WorldModel, check_window
from terra.prompt import Action, Prompt, pack_blocks

_BIT = math.log(2)  # nats


@torch.no_grad()
def token_entropy(model: WorldModel, window: Prompt) -> Float[Tensor, "frames rows cols"]:
    """Entropy in bits of each token's distribution at temperature 1, given all tokens before it.

    0 is certainty; the window's first token, which nothing precedes, counts as log2 of the number of image tokens.
    Raises ValueError for fewer than two frames, or more than the model's window holds.
    """
    check_window(model, window)
    actions = torch.cat([window.actions, window.actions[-1:]])  # nothing follows the last frame: any will do
    ids = pack_blocks(window.tokens[None], model.config.layout.action_slots)
    (states,) = model.predicting_states(ids.to(model.device), actions[None].to(model.device))
    entropies = []
    for frame in states:  # one at a time: all logits of a window of the published size are 15 GB
        logs = model.image_logits(frame).float().log_softmax(-1)
        entropies.append(-(logs.exp() * logs).sum(-1) / _BIT)
    rows = window.tokens.shape[1]
    return rearrange(torch.stack(entropies).cpu(), "frames (rows cols) -> frames rows cols", rows=rows)


@torch.no_grad()
def action_divergence(
    model: WorldModel, window: Prompt, others: Float32[Tensor, "others slots action_dim"]
) -> Float[Tensor, "others rows cols"]:
    """The change of the last frame's prediction when each of `others` replaces the window's last action.

    For each token, the result is the Kullback-Leibler divergence in bits from its distribution under the window's own
    action to that under the other action, both given the window's tokens before it. If the frame was drawn at
    temperature 1, the sum over its tokens is an unbiased estimate of the whole frame's divergence (by the chain rule;
    Cover and Thomas, Elements of Information Theory, theorem 2.5.3). Raises ValueError as `token_entropy`.
    """
    last = LastFrame(model, window)

    def expected(action: Action) -> Float[Tensor, "tokens vocabulary"]:
        return model.image_logits(last.states(action)).float().log_softmax(-1)

    told = expected(window.actions[-1])
    bits = [(told.exp() * (told - expected(other))).sum(-1) / _BIT for other in others]
    rows = window.tokens.shape[1]
    return rearrange(torch.stack(bits).cpu(), "others (rows cols) -> others rows cols", rows=rows)


def moved_waypoints(action: Action, meters: float) -> Float32[Tensor, "2 slots slots action_dim"]:
    """Variants of the action with one waypoint moved by `meters`: [0, k] moves waypoint k left, [1, k] ahead."""
    slots = len(action)
    moved = repeat(action, "slots action_dim -> axes each slots action_dim", axes=2, each=slots).clone()
    for axis, each in ((axis, each) for axis in range(2) for each in range(slots)):
        moved[axis, each, each, axis] += meters
    return moved
