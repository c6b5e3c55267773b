"""The tokenizer's optional adversarial loss: a discriminator learns to tell recorded frames from reconstructions.

Sources: the patch discriminator of Isola et al. 2017 (pix2pix, arXiv 1611.07004); its use on an autoencoder with an
adaptive weight, Esser et al. 2021 (VQGAN, arXiv 2012.09841); the hinge loss of Lim and Ye 2017 (arXiv 1705.02894);
LeCam regularization, Tseng et al. 2021 (arXiv 2104.03310).
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from terra.training.tokenizer_settings import NORM_GROUPS
from tokenizer import Frames

Scores = Float[Tensor, "frames 1 rows cols"]
Scalar = Float[Tensor, ""]

_MAX_ADAPTIVE_WEIGHT = 1e4


class PatchDiscriminator(nn.Module):
    """Scores each overlapping patch of 70 x 70 pixels: high for recorded frames, low for reconstructions.

    GroupNorm stands where pix2pix has BatchNorm, so that a frame's scores don't depend on its batch. The moving
    averages that LeCam needs are buffers, so that they are saved and restored with the weights.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 8 * width)
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for index, (narrow, wide) in enumerate(pairwise(widths)):
            stride = 1 if index == 2 else 2
            layers += [
                nn.Conv2d(narrow, wide, 4, stride=stride, padding=1, bias=False),
                nn.GroupNorm(NORM_GROUPS, wide),
                nn.LeakyReLU(0.2),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, padding=1))
        self.recorded_average: Tensor
        self.reconstructed_average: Tensor
        self.register_buffer("recorded_average", torch.zeros(()))
        self.register_buffer("reconstructed_average", torch.zeros(()))

    def forward(self, frames: Frames) -> Scores:
        """Return an unbounded score for each patch of frames in [-1, 1] whose sides are 32 pixels or more."""
        return self.layers(frames)


def generator_loss(reconstructed: Scores) -> Scalar:
    """The tokenizer's adversarial loss: minus the mean score of its reconstructions, in float32."""
    return -reconstructed.float().mean()


def adaptive_weight(reconstruction_loss: Scalar, adversarial_loss: Scalar, reconstruction: Frames) -> Scalar:
    """The ratio of the two losses' gradient norms, in [0, 1e4], without a gradient of its own.

    VQGAN takes the gradients at the decoder's last weights; here they are taken at the reconstruction, one
    convolution further on, so that the tokenizer's (compiled) backward pass runs once and not three times.
    """
    ours, theirs = (
        torch.autograd.grad(loss, reconstruction, retain_graph=True)[0].float().norm()
        for loss in (reconstruction_loss, adversarial_loss)
    )
    return (ours / (theirs + 1e-4)).clamp(0.0, _MAX_ADAPTIVE_WEIGHT).detach()


def hinge_loss(recorded: Scores, reconstructed: Scores) -> Scalar:
    """The discriminator's loss (Lim and Ye 2017), in float32: 1 while all its scores are 0."""
    return 0.5 * (F.relu(1.0 - recorded.float()).mean() + F.relu(1.0 + reconstructed.float()).mean())


def lecam_loss(discriminator: PatchDiscriminator, recorded: Scores, reconstructed: Scores, decay: float) -> Scalar:
    """The LeCam loss: squared distance of each side's scores (recorded, reconstructed) to the other's moving average.

    The call also updates both moving averages. Each process of a run averages the scores of its own frames; the
    saved state holds the first process's averages.
    """
    recorded, reconstructed = recorded.float(), reconstructed.float()
    with torch.no_grad():
        discriminator.recorded_average.lerp_(recorded.mean(), 1 - decay)
        discriminator.reconstructed_average.lerp_(reconstructed.mean(), 1 - decay)
    # Copies: a later forward pass changes the averages in place before this one's backward pass has run.
    to_reconstructed = recorded - discriminator.reconstructed_average.clone()
    to_recorded = reconstructed - discriminator.recorded_average.clone()
    return to_reconstructed.square().mean() + to_recorded.square().mean()
