"""Similarity of a frame to the true frame: PSNR. `terra.metrics.similarity` has SSIM."""

import torch
from jaxtyping import Float
from torch import Tensor

from decoder.video import to_8_bit
from terra.views import Views
from tokenizer import Frames

PSNR_CAP = 100.0  # dB; the value for equal frames


def psnr(ours: Frames, truth: Frames) -> Float[Tensor, " frames"]:
    """Peak signal-to-noise ratio in dB, at most 100, of frames in [-1, 1] after rounding to 8 bits."""
    error = (levels(ours) - levels(truth)).square().mean(dim=(1, 2, 3)) / 255.0**2
    return -10 * torch.log10(error.clamp_min(10 ** (-PSNR_CAP / 10)))


def psnr_by_view(ours: Frames, truth: Frames, views: Views | None) -> dict[str, Float[Tensor, " frames"]]:
    """`psnr` of the part of each view, by its name; nothing for one camera."""
    areas = {} if views is None else views.areas((truth.shape[-2], truth.shape[-1]))
    return {name: psnr(ours[..., rows, cols], truth[..., rows, cols]) for name, (rows, cols) in areas.items()}


def levels(frames: Frames) -> Frames:
    """Gray levels 0 to 255, rounded as a written picture is."""
    return to_8_bit(frames).float()
