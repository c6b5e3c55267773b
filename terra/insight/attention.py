"""The world model's attention while it predicts a frame: the weights, and their sums over parts of the window."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from terra.insight.window import LastFrame, WorldModel
from terra.prompt import Layout, Prompt

Attention = Float[Tensor, "layers heads tokens positions"]


def last_frame_attention(model: WorldModel, window: Prompt) -> Attention:
    """Attention weights of the positions that predict the last frame's tokens, over the window's positions.

    Each row sums to 1. Raises ValueError for fewer than two frames, or more than the model's window holds.
    """
    return LastFrame(model, window).attention(window.actions[-1]).float().cpu()


def attention_by_part(attention: Attention, layout: Layout) -> dict[str, Float[Tensor, "layers heads"]]:
    """The share of attention to each part of the window, averaged over the tokens; the shares sum to 1.

    The parts are "this frame" (its tokens so far), "last action", "earlier actions", and "frame -1", "frame -2", ...
    """
    last = attention.shape[-1] // layout.block  # index of the predicted frame
    mass = attention.mean(dim=2)
    blocks = rearrange(
        mass[..., : last * layout.block], "layers heads (frames block) -> layers heads frames block", frames=last
    )
    images, slots = (part.sum(-1) for part in blocks.split([layout.image_tokens, layout.action_slots], dim=-1))
    return {
        "this frame": mass[..., last * layout.block :].sum(-1),
        "last action": slots[..., -1],
        "earlier actions": slots[..., :-1].sum(-1),
        **{f"frame -{back}": images[..., -back] for back in range(1, last + 1)},
    }


def attention_map(attention: Attention, layout: Layout, rows: int) -> Float[Tensor, "tokens frames rows cols"]:
    """The attention of each token of the last frame to each image token, averaged over layers and heads.

    The last frame is included, with 0 for the tokens that do not precede the attending token.
    """
    mean = attention.mean(dim=(0, 1))
    frames = mean.shape[-1] // layout.block + 1
    filled = F.pad(mean, (0, frames * layout.block - mean.shape[-1]))
    blocks = rearrange(filled, "tokens (frames block) -> tokens frames block", frames=frames)
    return rearrange(
        blocks[..., : layout.image_tokens], "tokens frames (rows cols) -> tokens frames rows cols", rows=rows
    )
