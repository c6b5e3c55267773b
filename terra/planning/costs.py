"""Costs of a plan: how far an imagined frame is from the goal's, by tokens or by pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from terra.prompt import FrameTokens
from tokenizer import Frames, TokenGrid

# Sides of the squares over which `blurred` and `whitened` average, as shares of the height.
_BLURRED, _WHITENED = (0.0, 1 / 8, 1 / 4, 1 / 2), (1 / 16, 1 / 8, 1 / 4)
_LEAST_VARIANCE = 1e-3  # of a color channel, in the units of [-1, 1]


@dataclass(frozen=True, eq=False)
class Target:
    """A goal: its frame's tokens, and the frame in [-1, 1] as the decoder draws it from them.

    Imagined frames are decoded, too, so that what the tokenizer loses costs nothing. The tokens are on the CPU, the
    frame is on the decoder's device.
    """

    tokens: FrameTokens
    frame: Float[Tensor, "3 height width"]


@dataclass(frozen=True)
class Cost:
    """A measure of distance from a goal; the lower the better.

    Attributes:
        name: what it is called in settings and reports.
        of: called with frames in which candidates may end, as tokens (frames, rows, cols) on the CPU and as frames in
            [-1, 1] (frames, 3, height, width) on the decoder's device, and with the goal; returns the cost of each
            frame, (frames,), on either device.
        reads_frames: whether `of` looks at frames; without, it is called with no frames, and none are decoded.
    """

    name: str
    of: Callable[[TokenGrid, Frames, Target], Float[Tensor, " frames"]]
    reads_frames: bool = True


def _differing_tokens(tokens: TokenGrid, frames: Frames, goal: Target) -> Float[Tensor, " frames"]:
    """The share of tokens that differ from the goal's."""
    return (tokens != goal.tokens).float().mean(dim=(1, 2))


def _differing_bits(tokens: TokenGrid, frames: Frames, goal: Target) -> Float[Tensor, " frames"]:
    """How many bits of a token's id differ, on average; code vectors are these bits as -1 and 1."""
    differing = torch.bitwise_xor(tokens, goal.tokens.expand_as(tokens))
    bits = sum(
        ((differing >> bit) & 1 for bit in range(int(differing.max()).bit_length())), torch.zeros_like(differing)
    )
    return bits.float().mean(dim=(1, 2))


def _pixels(tokens: TokenGrid, frames: Frames, goal: Target) -> Float[Tensor, " frames"]:
    """The mean squared error of the pixels, in the units of [-1, 1]."""
    return (frames - goal.frame).square().mean(dim=(1, 2, 3))


def _blurred(tokens: TokenGrid, frames: Frames, goal: Target) -> Float[Tensor, " frames"]:
    """The sum of mean squared errors of the frames as they are and of three blurs.

    Without a blur, an object that does not touch its place in the goal costs the same wherever it is. Averages over
    squares differ less the nearer it is; an average over squares of a side of k pixels has the weight k, since its
    errors are small.
    """
    return _averaged_errors(frames - goal.frame, _BLURRED)


def _whitened(tokens: TokenGrid, frames: Frames, goal: Target) -> Float[Tensor, " frames"]:
    """The sum of mean squared errors of blurs over 1/16, 1/8 and 1/4 of the height, by Mahalanobis color distances.

    Differences are multiplied by the inverse Cholesky factor of the covariance of colors over the goal's pixels. So a
    rare color, such as that of a small blue disc beside a large gray block, weighs more than its share of the error.
    """
    covariance = torch.cov(goal.frame.flatten(1).double())
    factor = torch.linalg.cholesky(covariance + _LEAST_VARIANCE * torch.eye(3).to(covariance))
    whitening = torch.linalg.inv(factor).to(frames)
    differences = torch.einsum("ij,njhw->nihw", whitening, frames - goal.frame)
    return _averaged_errors(differences, _WHITENED)


def _averaged_errors(
    differences: Float[Tensor, "frames channels height width"], shares: Sequence[float]
) -> Float[Tensor, " frames"]:
    """The sum of mean squared errors of averages over squares, each times its square's side in pixels."""
    height, errors = differences.shape[2], []
    for share in shares:
        side = 2 * round(share * height / 2) + 1
        stride = max(1, side // 4)
        means = F.avg_pool2d(differences, side, stride, padding=side // 2, count_include_pad=False)
        errors.append(side * means.square().mean(dim=(1, 2, 3)))
    return torch.stack(errors).sum(0)


COSTS: Mapping[str, Cost] = MappingProxyType(
    {
        "tokens": Cost("tokens", _differing_tokens, reads_frames=False),
        "bits": Cost("bits", _differing_bits, reads_frames=False),
        "pixels": Cost("pixels", _pixels),
        "blurred": Cost("blurred", _blurred),
        "whitened": Cost("whitened", _whitened),
    }
)
"""The costs that there are, by name."""
