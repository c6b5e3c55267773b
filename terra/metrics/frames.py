"""Similarity of a frame to the true frame: PSNR and SSIM."""

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from decoder.video import to_8_bit
from tokenizer import Frames

PSNR_CAP = 100.0  # dB; the value for equal frames


def psnr(ours: Frames, truth: Frames) -> Float[Tensor, " frames"]:
    """Peak signal-to-noise ratio in dB, at most 100, of frames in [-1, 1] after rounding to 8 bits."""
    error = (_levels(ours) - _levels(truth)).square().mean(dim=(1, 2, 3)) / 255.0**2
    return -10 * torch.log10(error.clamp_min(10 ** (-PSNR_CAP / 10)))


def ssim(ours: Frames, truth: Frames) -> Float[Tensor, " frames"]:
    """Structural similarity (Wang et al. 2004, torchmetrics' defaults), at most 1, of frames rounded to 8 bits."""
    pictures = (_levels(ours) / 255.0, _levels(truth) / 255.0)
    similarity = structural_similarity_index_measure(*pictures, data_range=1.0, reduction="none")
    return similarity.reshape(len(ours))  # pyright: ignore[reportAttributeAccessIssue]


def _levels(frames: Frames) -> Frames:
    """Gray levels 0 to 255, rounded as a written picture is."""
    return to_8_bit(frames).float()
