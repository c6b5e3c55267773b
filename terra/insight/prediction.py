"""How sure the world model is of each token, and what an action changes in what it expects."""

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
    """Entropy in bits of the distribution that each token is drawn from at temperature 1, given all before it.

    0 is certainty; log2 of the number of image tokens is what the first token has, which nothing precedes. Raises
    ValueError for fewer than two frames, or more than the model's window holds.
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
    """How much each of `others`, in the last action's place, changes what the model expects of the last frame.

    For each token the Kullback-Leibler divergence in bits: of its distribution under the window's own action from that
    under the other, both given the window's tokens before it. Of a frame drawn at temperature 1, the sum over its
    tokens is an unbiased estimate of the whole frame's divergence (by the chain rule; Cover and Thomas, Elements of
    Information Theory, theorem 2.5.3). Raises ValueError as `token_entropy`.
    """
    last = LastFrame(model, window)

    def expected(action: Action) -> Float[Tensor, "tokens vocabulary"]:
        return model.image_logits(last.states(action)).float().log_softmax(-1)

    told = expected(window.actions[-1])
    bits = [(told.exp() * (told - expected(other))).sum(-1) / _BIT for other in others]
    rows = window.tokens.shape[1]
    return rearrange(torch.stack(bits).cpu(), "others (rows cols) -> others rows cols", rows=rows)


def moved_waypoints(action: Action, meters: float) -> Float32[Tensor, "2 slots slots action_dim"]:
    """The action with one of its waypoints moved to the left (0 of the first axis) or ahead (1), each in turn."""
    slots = len(action)
    moved = repeat(action, "slots action_dim -> axes each slots action_dim", axes=2, each=slots).clone()
    for axis, each in ((axis, each) for axis in range(2) for each in range(slots)):
        moved[axis, each, each, axis] += meters
    return moved
