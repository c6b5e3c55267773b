"""Training objectives of the tokenizer: a new one, one that exists, or its decoder alone (the tokens stay the same)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, final

import torch
from jaxtyping import Int, UInt8
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from decoder.video import to_unit_range
from terra.errors import ConfigError
from terra.metrics.networks import MIN_SIDE, multiscale_distance
from terra.training.adversarial import (
    PatchDiscriminator,
    adaptive_weight,
    generator_loss,
    hinge_loss,
    lecam_loss,
)
from terra.training.loop import Batch
from terra.training.processes import unwrapped
from terra.training.randomness import StepRandom, draw_indices
from terra.training.reconstruction import comparison, evaluate_tokenizer, shares_kept, tokens_kept
from terra.training.state import Ema
from terra.training.terms import Terms
from tokenizer import Frames, LFQTokenizer, LFQTokenizerConfig, tokenizer_loss
from tokenizer.losses import PreQuantized, kept_signs_loss, reconstruction_loss
from tokenizer.quantizer import quantize, tokens_from_signs

EightBit = UInt8[Tensor, "frames 3 height width"]


class _Autoencoding(ABC):
    """An objective on single random frames with a reconstruction loss, a perceptual loss and an adversarial loss.

    Frames are never mirrored, because left and right carry meaning in driving.

    Args:
        trained: the tokenizer, or the part of it that is trained.
        tokenizer: the whole tokenizer; `frames` must have its `image_size`.
        frames: this process's training frames, on the device where training runs.
        terms: weights and networks of the loss's terms.
        pictured: held-out frames for the previews; None shows none.
    """

    samples = "frames"

    def __init__(
        self, trained: nn.Module, tokenizer: LFQTokenizer, frames: EightBit, terms: Terms, pictured: EightBit | None
    ) -> None:
        if tuple(frames.shape[2:]) != tuple(tokenizer.image_size):
            raise ConfigError(
                f"image_size: expected the dataset's {tuple(frames.shape[2:])} (height, width), "
                f"got {tuple(tokenizer.image_size)}"
            )
        side, pixel = min(frames.shape[2:]), 1 << (terms.scales - 1)  # a pixel of the smallest scale has so many a side
        if terms.network is not None and terms.scales > 1 and side < MIN_SIDE * pixel:
            raise ConfigError(
                f"perceptual.scales: expected frames of {MIN_SIDE * pixel} or more pixels a side for {terms.scales} "
                f"scales, got {side}"
            )
        self.model: nn.Module = trained
        self.discriminator: nn.Module | None = None
        if terms.adversarial.weight:
            discriminator = PatchDiscriminator(terms.adversarial.width)
            self.discriminator = discriminator.to(frames.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.tokens_per_sample: int | None = tokenizer.rows * tokenizer.cols
        self._tokenizer, self._frames, self._terms, self._pictured = tokenizer, frames, terms, pictured
        # 16 is the stride of all the perceptual network's layers but the last; a small picture keeps MIN_SIDE pixels.
        self._margin = min(16 * pixel, max(0, side - MIN_SIDE * pixel))
        self._reconstruction: Tensor | None = None

    @abstractmethod
    def reconstruct(self, frames: Frames, progress: float) -> tuple[Frames, dict[str, Tensor]]:
        """Return the reconstruction, not clamped, and the loss's parts without the perceptual and adversarial terms.

        The reconstruction and the part `total` carry gradients; the other parts are for the log.
        """

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Frames in [-1, 1], drawn with replacement."""
        chosen = self.choose(random, batch_size)
        corner = torch.randint(self._margin + 1, (2,), generator=random.host)  # stays on the CPU
        return {"frames": to_unit_range(chosen).to(memory_format=torch.channels_last), "corner": corner}

    def choose(self, random: StepRandom, count: int) -> EightBit:
        """Draw `count` training frames with replacement."""
        return self._frames[draw_indices(random, len(self._frames), count, self._frames.device)]

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The loss of `reconstruct` plus the perceptual and adversarial terms whose weight is not 0."""
        frames, terms = batch["frames"], self._terms
        reconstruction, parts = self.reconstruct(frames, progress)
        loss = parts.pop("total")
        if terms.network is not None:
            ours, theirs = (self._crop(pictures, batch["corner"]) for pictures in (reconstruction, frames))
            distance = multiscale_distance(terms.network, ours, theirs, terms.scales).mean()
            loss = loss + terms.perceptual * distance
            parts["perceptual"] = distance.detach()
        self._reconstruction = None
        if self.discriminator is not None and progress >= terms.adversarial.start:
            self._reconstruction = reconstruction.detach()
            adversarial = generator_loss(unwrapped(self.discriminator)(reconstruction))
            factor = adaptive_weight(loss, adversarial, reconstruction) if terms.adversarial.adaptive else 1.0
            loss = loss + terms.adversarial.weight * factor * adversarial
            parts["adversarial"] = adversarial.detach()
        return {"loss": loss, **parts}

    def _crop(self, frames: Frames, corner: Int[Tensor, " two"]) -> Frames:
        """Cut frames to (height - margin, width - margin) pixels whose top left pixel is `corner`.

        The strided layers of the perceptual network weigh some rows and columns more than others, and the decoder would
        learn stripes there; a random corner at each step evens the weights out.
        """
        height, width = (side - self._margin for side in frames.shape[2:])
        top, left = corner.tolist()
        return frames[..., top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The discriminator's loss on recorded frames and on `loss`'s reconstructions; 0 before the term begins."""
        frames, terms = batch["frames"], self._terms.adversarial
        if self.discriminator is None or self._reconstruction is None:
            return {"discriminator_loss": torch.zeros((), device=frames.device, requires_grad=True)}
        # One forward pass for both: the wrapper that averages gradients over processes expects one.
        scores = self.discriminator(torch.cat([frames, self._reconstruction.to(frames.dtype)]))
        recorded, reconstructed = scores.chunk(2)
        loss = hinge_loss(recorded, reconstructed)
        parts = {"recorded_score": recorded.detach().mean(), "reconstructed_score": reconstructed.detach().mean()}
        if terms.lecam:
            discriminator = cast(PatchDiscriminator, unwrapped(self.discriminator))
            loss = loss + terms.lecam * lecam_loss(discriminator, recorded, reconstructed, terms.lecam_decay)
        return {"discriminator_loss": loss, **parts}

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Held-out frames above their reconstruction by the averaged weights."""
        if self._pictured is None:
            return {}
        with ema.averaged():
            return {"reconstruction": comparison(self._pictured, self._tokenizer)}


class TokenizerObjective(_Autoencoding):
    """Training of a whole tokenizer; the arguments are those of `_Autoencoding`.

    With several processes the entropy of the mean distribution is that of each process's batch, not of all processes':
    a batch has thousands of vectors, each softly assigned to all ids, and exchanging distributions would cost a wait.
    """

    def __init__(
        self, tokenizer: LFQTokenizer, frames: EightBit, terms: Terms, pictured: EightBit | None = None
    ) -> None:
        super().__init__(tokenizer, tokenizer, frames, terms, pictured)
        self.flops_per_sample: float | None = flops_per_frame(tokenizer.config)

    def reconstruct(self, frames: Frames, progress: float) -> tuple[Frames, dict[str, Tensor]]:
        """Reconstruct frames; the loss is that of `parts`."""
        reconstruction, z = self.model(frames)
        return reconstruction, self.parts(reconstruction, z, frames, progress)

    def parts(self, reconstruction: Frames, z: PreQuantized, frames: Frames, progress: float) -> dict[str, Tensor]:
        """The parts of `tokenizer_loss`, with an annealed entropy weight."""
        terms = self._terms
        weights = terms.weights.replace(entropy=terms.weights.entropy * terms.anneal.factor(progress))
        return tokenizer_loss(reconstruction, z, frames, self._tokenizer.config.quantizer_config, weights)


@dataclass(frozen=True)
class OldDomain:
    """Frames of the domain that a tokenizer was trained on before: for training, and held out (first process only)."""

    frames: EightBit
    held_out: EightBit | None


@final
class FurtherTraining(TokenizerObjective):
    """Training of a whole tokenizer that starts as a copy of another one.

    With `terms.keep_tokens` a penalty holds the tokens to those of the tokenizer before; see `kept_signs_loss`. Each
    preview counts on held-out frames which tokens are as before.

    Args:
        tokenizer, frames, terms, pictured: see `_Autoencoding`.
        before: the tokenizer as it was, on the frames' device; it is frozen.
        held_out: frames that the previews are measured on, by the prefix of the numbers' names.
        old: training frames of the old domain: half of each batch is drawn from them; None draws none.
    """

    def __init__(
        self,
        tokenizer: LFQTokenizer,
        before: LFQTokenizer,
        frames: EightBit,
        terms: Terms,
        pictured: EightBit | None = None,
        held_out: Mapping[str, EightBit] | None = None,
        old: EightBit | None = None,
    ) -> None:
        super().__init__(tokenizer, frames, terms, pictured)
        before.eval().requires_grad_(False)
        self._before, self._held_out, self._old = before, held_out or {}, old
        if terms.keep_tokens.weight:
            encoder, _ = _forward_flops(tokenizer.config)
            self.flops_per_sample: float | None = flops_per_frame(tokenizer.config) + encoder

    def choose(self, random: StepRandom, count: int) -> EightBit:
        """Draw training frames with replacement, half of them from the old domain, if there are frames of it."""
        if self._old is None:
            return super().choose(random, count)
        new = super().choose(random, count - count // 2)
        return torch.cat([new, self._old[draw_indices(random, len(self._old), count // 2, self._old.device)]])

    def parts(self, reconstruction: Frames, z: PreQuantized, frames: Frames, progress: float) -> dict[str, Tensor]:
        """The parts of `TokenizerObjective`, and the penalty on tokens that change, if it has a weight."""
        parts = super().parts(reconstruction, z, frames, progress)
        keep, quantizer = self._terms.keep_tokens, self._tokenizer.config.quantizer_config
        if not keep.weight:
            return parts
        with torch.no_grad():
            before = self._before.encoder(frames)
        penalty = kept_signs_loss(z, before, keep.margin)
        ids, ids_before = (tokens_from_signs(each.detach(), quantizer.bit_order) for each in (z, before))
        shares = shares_kept(ids, ids_before, quantizer.dim)
        return parts | {"total": parts["total"] + keep.weight * penalty, "keep_tokens": penalty.detach()} | shares

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """PSNR and kept tokens of held-out frames by the averaged weights; frames above both reconstructions."""
        shown: dict[str, Tensor] = {}
        with ema.averaged():
            for prefix, frames in self._held_out.items():
                measured = evaluate_tokenizer(self._tokenizer, frames, None)
                measured |= tokens_kept(self._tokenizer, self._before, frames)
                names = ("psnr", "tokens_kept", "bits_kept")
                shown |= {f"{prefix}held_out_{name}": torch.tensor(measured[name]) for name in names}
            if self._pictured is not None:
                shown["reconstruction"] = comparison(self._pictured, self._before, self._tokenizer)
        return shown


@final
class DecoderObjective(_Autoencoding):
    """Training of a tokenizer's decoder while its encoder is frozen; the arguments are those of `_Autoencoding`.

    `model` is the decoder alone, so that no optimizer, moving average or saved state contains the encoder. The entropy
    and commitment terms, which only an encoder can lower, are left out.
    """

    def __init__(
        self, tokenizer: LFQTokenizer, frames: EightBit, terms: Terms, pictured: EightBit | None = None
    ) -> None:
        super().__init__(tokenizer.decoder, tokenizer, frames, terms, pictured)
        tokenizer.encoder.eval().requires_grad_(False)
        self.flops_per_sample: float | None = decoder_flops_per_frame(tokenizer.config)

    def reconstruct(self, frames: Frames, progress: float) -> tuple[Frames, dict[str, Tensor]]:
        """Decode the frames' tokens; the loss is `reconstruction_loss`."""
        with torch.no_grad():
            signs = quantize(self._tokenizer.encoder(frames))
        reconstruction = self.model(signs)
        terms = reconstruction_loss(reconstruction, frames, self._terms.weights)
        return reconstruction, {
            "total": terms.loss,
            "pixel": terms.pixel.detach(),
            "gradient": terms.gradient.detach(),
        }


def flops_per_frame(config: LFQTokenizerConfig) -> float:
    """Floating-point operations of a training step per frame: the convolutions forward, and twice as many backward."""
    return 3.0 * sum(_forward_flops(config))


def decoder_flops_per_frame(config: LFQTokenizerConfig) -> float:
    """Floating-point operations of a training step per frame if the encoder has no backward pass."""
    encoder, decoder = _forward_flops(config)
    return encoder + 3.0 * decoder


def _forward_flops(config: LFQTokenizerConfig) -> tuple[int, int]:
    """Floating-point operations of the forward passes of encoder and decoder, for one frame."""
    with torch.device("meta"):
        model, frame = LFQTokenizer(config), torch.empty(1, 3, *config.image_size)
    with torch.no_grad():
        with FlopCounterMode(display=False) as encoder:
            z = model.encoder(frame)
        with FlopCounterMode(display=False) as decoder:
            model.decoder(z)
    return encoder.get_total_flops(), decoder.get_total_flops()
