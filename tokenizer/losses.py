"""The tokenizer's training objective: reconstruction, the entropies of lookup-free quantization, commitment.

Sources: Yu et al. 2023, "Language Model Beats Diffusion" (arXiv 2310.05737) for the entropy terms; Open-MAGVIT2's
configuration of the "B" tokenizer for the weights 0.1 (entropy) and 0.25 (commitment), and its temperature 0.01.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from tokenizer.config import LossWeights, QuantizerConfig
from tokenizer.quantizer import quantize, tokens_from_signs
from tokenizer.types import Frames

Scalar = Float[Tensor, ""]
PreQuantized = Float[Tensor, "frames dim rows cols"]

# A group of 18 bits has 2**9 by 2**9 probabilities, a megabyte in float32.
MAX_GROUP_BITS = 18


class EntropyTerms(NamedTuple):
    """The weighted loss, and the two entropies in nats that it is made of."""

    loss: Scalar
    per_sample: Scalar
    batch: Scalar


class ReconstructionTerms(NamedTuple):
    """The weighted loss, and the two terms that it is made of."""

    loss: Scalar
    pixel: Scalar
    gradient: Scalar


def lfq_entropy_loss(
    z: PreQuantized,
    *,
    temperature: float = 0.01,
    sample_weight: float = 1.0,
    batch_weight: float = 1.0,
    max_group_bits: int = MAX_GROUP_BITS,
) -> EntropyTerms:
    """`sample_weight * E[H(q(c|z))] - batch_weight * H(E[q(c|z)])`: each vector certain, all ids used.

    `q(c|z)` is the softmax over the 2**dim sign vectors c of `2 z.c / temperature`, so that its bits are independent
    with `P(bit i set) = sigmoid(4 z_i / temperature)`. The first entropy is therefore exactly the sum of the bits'.
    The mean distribution is exact up to `max_group_bits` channels: a product of the halves' probabilities, summed over
    the vectors by one matrix product. Above, it is approximated: consecutive groups of at most that many channels
    count as independent, and their entropies are added, which bounds the true one from above.
    The loss is computed in float32 under any autocast; all vectors of all frames have equal weight.
    """
    with torch.autocast(z.device.type, enabled=False):
        logits = rearrange(z.float(), "f dim rows cols -> (f rows cols) dim") * (4.0 / temperature)
        per_sample = _binary_entropy(logits).sum(dim=1).mean()
        num_groups = math.ceil(logits.shape[1] / max_group_bits)
        batch = torch.stack([_mean_entropy(group) for group in logits.chunk(num_groups, dim=1)]).sum()
        return EntropyTerms(sample_weight * per_sample - batch_weight * batch, per_sample, batch)


def commitment_loss(z: PreQuantized) -> Scalar:
    """Mean squared distance of `z` to its signs, in float32; it pulls the vectors towards the decoder's input."""
    z = z.float()
    return F.mse_loss(z, quantize(z.detach()))


def kept_signs_loss(z: PreQuantized, before: PreQuantized, margin: float) -> Scalar:
    """Mean of max(0, margin - s z)^2 over all bits, where s is the sign that the bit had `before`. In float32.

    A bit costs nothing that has its old sign and lies `margin` or more from 0. Source of the loss, there for the signs
    of a teacher's hidden neurons: Heo et al. 2019, "Knowledge Transfer via Distillation of Activation Boundaries Formed
    by Hidden Neurons" (arXiv 1811.03233).
    """
    return F.relu(margin - quantize(before.detach().float()) * z.float()).square().mean()


def pixel_loss(reconstruction: Frames, frames: Frames, foreground: float = 0.0) -> Scalar:
    """Mean absolute difference, in units of [-1, 1]. In float32.

    With `foreground` each pixel's error has the weight `1 + foreground * d`, where d is how far the pixel is from the
    mean picture of the batch (the mean of the channels' absolute differences). Small objects in front of a background
    that never changes are a small part of the plain mean, which then teaches the background alone.
    """
    frames = frames.float()
    error = (reconstruction.float() - frames).abs()
    if foreground:
        distance = (frames - frames.mean(dim=0)).abs().mean(dim=1, keepdim=True)
        error = error * (1.0 + foreground * distance)
    return error.mean()


def gradient_loss(reconstruction: Frames, frames: Frames, num_scales: int = 3) -> Scalar:
    """Mean absolute difference of neighboring pixels' differences, averaged over both directions and the scales.

    Each scale halves the picture, so sides must be at least `2**num_scales`; raises ValueError on smaller ones. This
    loss keeps edges sharp, which the plain L1 loss blurs. It is computed in float32.
    """
    if min(frames.shape[-2:]) < 2**num_scales:
        raise ValueError(f"expected frames of sides at least {2**num_scales}, got {tuple(frames.shape)}")
    error = reconstruction.float() - frames.float()
    terms = []
    for scale in range(num_scales):
        if scale:
            error = reduce(
                error[..., : error.shape[-2] // 2 * 2, : error.shape[-1] // 2 * 2],
                "f channels (height 2) (width 2) -> f channels height width",
                "mean",
            )
        terms += [error.diff(dim=-1).abs().mean(), error.diff(dim=-2).abs().mean()]
    return torch.stack(terms).mean()


def reconstruction_loss(reconstruction: Frames, frames: Frames, weights: LossWeights) -> ReconstructionTerms:
    """The weighted sum of `pixel_loss` and `gradient_loss` (3 scales), and both terms."""
    pixel, gradient = pixel_loss(reconstruction, frames, weights.foreground), gradient_loss(reconstruction, frames)
    return ReconstructionTerms(weights.pixel * pixel + weights.gradient * gradient, pixel, gradient)


def tokenizer_loss(
    reconstruction: Frames, z: PreQuantized, frames: Frames, quantizer: QuantizerConfig, weights: LossWeights
) -> dict[str, Tensor]:
    """The training loss on `frames` in [-1, 1], from the reconstruction and vectors of `LFQTokenizer.forward`.

    Returns scalars: `total`, the only one that carries gradients, and for logging, unweighted, `pixel`, `gradient`,
    `sample_entropy` and `batch_entropy` (nats), `commitment`, and `codebook_usage` in (0, 1]: the distinct ids of the
    batch as a fraction of the most there could be, which is its number of tokens or the codebook's size.
    """
    terms = reconstruction_loss(reconstruction, frames, weights)
    entropy = lfq_entropy_loss(
        z,
        temperature=weights.temperature,
        sample_weight=quantizer.sample_minimization_weight,
        batch_weight=quantizer.batch_maximization_weight,
    )
    commitment = commitment_loss(z)
    tokens = tokens_from_signs(z.detach(), quantizer.bit_order)
    num_possible = min(tokens.numel(), quantizer.codebook_size)
    # `unique` would make the host wait for the device, because its size is not known.
    used = torch.zeros(quantizer.codebook_size, dtype=torch.bool, device=z.device).scatter_(0, tokens.flatten(), True)
    total = terms.loss + weights.entropy * entropy.loss + weights.commitment * commitment
    logged = {
        "pixel": terms.pixel,
        "gradient": terms.gradient,
        "sample_entropy": entropy.per_sample,
        "batch_entropy": entropy.batch,
        "commitment": commitment,
        "codebook_usage": used.sum() / num_possible,
    }
    return {"total": total} | {name: value.detach() for name, value in logged.items()}


def _binary_entropy(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Entropy of a bit with the given log odds, in nats, without taking the logarithm of a probability."""
    return F.softplus(logits) - torch.sigmoid(logits) * logits


def _mean_entropy(logits: Float[Tensor, "vectors bits"]) -> Scalar:
    """Entropy of the vectors' mean distribution over all 2**bits sign vectors."""
    first, second = (_joint_probabilities(half) for half in logits.tensor_split(2, dim=1))
    mean = first.T @ second / logits.shape[0]
    # The gradient of p log p is infinite at p = 0; below the clamp it is large and finite.
    return -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()


def _joint_probabilities(logits: Float[Tensor, "vectors bits"]) -> Float[Tensor, "vectors combinations"]:
    """Probability of each combination of independent bits."""
    joint = logits.new_ones(logits.shape[0], 1)
    # Both sigmoids are computed, because one minus the other would round small probabilities to 0.
    bits = torch.stack([(-logits).sigmoid(), logits.sigmoid()], dim=-1)
    for bit in bits.unbind(dim=1):
        joint = rearrange(joint[:, :, None] * bit[:, None, :], "v c two -> v (c two)")
    return joint
