"""Structural similarity of a frame to the true frame. It needs torchmetrics, which generating does without."""

from jaxtyping import Float
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from terra.metrics.frames import levels
from tokenizer import Frames


def ssim(ours: Frames, truth: Frames) -> Float[Tensor, " frames"]:
    """Structural similarity (Wang et al. 2004, torchmetrics' defaults), at most 1, of frames rounded to 8 bits."""
    pictures = (levels(ours) / 255.0, levels(truth) / 255.0)
    similarity = structural_similarity_index_measure(*pictures, data_range=1.0, reduction="none")
    return similarity.reshape(len(ours))  # pyright: ignore[reportAttributeAccessIssue]
