"""Training of the video refiner: first its VAE on single frames, then its UNet on clips, given decoded frames."""

import logging
from collections.abc import Callable
from itertools import pairwise
from time import monotonic

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from decoder.refiner import Refiner, RefinerConfig
from decoder.video import to_8_bit, to_unit_range
from terra.errors import DatasetError
from terra.training.data import DrivingFrames
from terra.training.loop import Batch, train
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from tokenizer import Frames, LFQTokenizer

logger = logging.getLogger(__name__)

FOLDER = "refiner"
# Mean and standard deviation of ln(sigma), sigma being the noise level in training; from the published refiner.
LOG_SIGMA = (1.0, 1.6)
FRAMES_AT_ONCE = 32  # frames, in float32, that one call of the VAE's encoder takes

Latents = Float[Tensor, "frames channels rows cols"]


class _Plain:
    """The part that both objectives share: they have no discriminator and log no previews."""

    discriminator: nn.Module | None = None
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """There is no discriminator."""
        raise NotImplementedError("the refiner has no discriminator")

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Return no previews."""
        return {}


class AutoencoderObjective(_Plain):
    """The VAE's mean absolute error on crops of single frames; the latents are the mode of the VAE's posterior."""

    samples = "frames"

    def __init__(self, vae: nn.Module, frames: UInt8[Tensor, "frames 3 height width"], crop: tuple[int, int]) -> None:
        self.model, self._frames, self._crop = vae, frames, crop

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw frames in [-1, 1], all cropped to the same rectangle."""
        chosen = self._frames[draw_indices(random, len(self._frames), batch_size, self._frames.device)]
        room = [side - cut + 1 for side, cut in zip(chosen.shape[2:], self._crop, strict=True)]
        top, left = (int(torch.randint(most, (), generator=random.host)) for most in room)
        return {"frames": to_unit_range(chosen[..., top : top + self._crop[0], left : left + self._crop[1]])}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The mean absolute error of the reconstruction."""
        (reconstruction,) = self.model(batch["frames"], return_dict=False)
        return {"loss": F.l1_loss(reconstruction, batch["frames"])}


class DenoisingObjective(_Plain):
    """The squared error of the UNet's velocity on clips (EDM's loss with v-weighting).

    Args:
        refiner: the refiner whose UNet is trained.
        latents: the scaled latents to denoise; see `RefinerConfig.residual`.
        condition: the latents of the decoded frames, not scaled.
        episode_start: see `terra.training.data.DrivingFrames`.
        log_sigma: mean and standard deviation of ln(sigma), sigma being the noise level.
    """

    samples = "clips"

    def __init__(
        self,
        refiner: Refiner,
        latents: Latents,
        condition: Latents,
        episode_start: Int[Tensor, " boundaries"],
        log_sigma: tuple[float, float],
    ) -> None:
        self.model: nn.Module = refiner.unet
        self._log_sigma = log_sigma
        self._refiner, self._latents, self._condition = refiner, latents, condition
        self._length = refiner.config.num_frames
        bounds = episode_start.tolist()
        starts = [range(first, end - self._length + 1) for first, end in pairwise(bounds)]
        self._starts = torch.tensor([start for episode in starts for start in episode], device=latents.device)
        if not len(self._starts):
            raise DatasetError(f"expected an episode of {self._length} frames or more, got none")

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw clips of latents, noise, and a noise level for each clip."""
        device = self._latents.device
        starts = self._starts[draw_indices(random, len(self._starts), batch_size, device)]
        frames = starts[:, None] + torch.arange(self._length, device=device)
        latents = self._latents[frames]
        levels = torch.randn(batch_size, generator=random.device, device=device)
        noise = torch.randn(latents.shape, generator=random.device, device=device)
        mean, deviation = self._log_sigma
        sigma = (mean + deviation * levels).exp()
        return {"latents": latents, "condition": self._condition[frames], "noise": noise, "sigma": sigma}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The mean squared error of the predicted velocity to (noise - sigma x latents) / sqrt(sigma^2 + 1)."""
        sigma = batch["sigma"][:, None, None, None, None]
        spread = (sigma.square() + 1).sqrt()
        scaled = (batch["latents"] + sigma * batch["noise"]) / spread
        target = (batch["noise"] - sigma * batch["latents"]) / spread
        velocity = self._refiner.predict(scaled, batch["condition"], batch["sigma"].log() / 4, unet=self.model)
        return {"loss": F.mse_loss(velocity, target)}


def train_refiner(
    driving: DrivingFrames,
    tokenizer: LFQTokenizer,
    config: RefinerConfig,
    autoencoder: LoopConfig,
    denoiser: LoopConfig,
    accelerator: Accelerator,
    *,
    crop: tuple[int, int],
    log_sigma: tuple[float, float] = LOG_SIGMA,
) -> Refiner:
    """Train a refiner of a tokenizer's decoded frames from random weights; write it to `denoiser.output`/refiner.

    The recorded frames must have the tokenizer's size; the scale of the latents is measured on them. `crop` is the
    (height, width), in pixels of the refiner's size, of the crops on which the VAE is trained. `log_sigma` is as in
    `DenoisingObjective`; noise levels that the sampler visits should be frequent in it. The training runs in one
    process, and its device must hold all frames in 8 bits, the latents of the recorded frames and those of the decoded
    frames.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`.
        DatasetError: no episode as long as a window.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(denoiser.seed)
        refiner = Refiner(config).to(accelerator.device)
    # A VAE learns to pass pictures through much sooner if its residual and attention branches output 0 at first.
    _silence(refiner.vae, (".conv2", ".to_out.0"))
    frames = driving.frames
    with torch.no_grad():
        if config.image_size != tuple(frames.shape[2:]):
            frames = torch.cat([to_8_bit(refiner.fit(to_unit_range(part))) for part in frames.split(FRAMES_AT_ONCE)])
    train(AutoencoderObjective(refiner.vae, frames, crop), autoencoder, accelerator).ema.copy_to_model()
    refiner.vae.eval().requires_grad_(False)
    latents = _encode(refiner, frames, lambda part: part)
    condition = _encode(refiner, driving.frames, lambda part: tokenizer.decode(tokenizer.encode(part)))
    if config.residual:
        latents -= condition
        _begin_unchanged(refiner)
    scaling_factor = 1 / latents.std().item()
    logger.info("latents: scaled by %.3g", scaling_factor)
    scaled = Refiner(config.replace(vae={**config.vae, "scaling_factor": scaling_factor})).to(accelerator.device)
    scaled.load_state_dict(refiner.state_dict())
    scaled.vae.requires_grad_(False)
    objective = DenoisingObjective(scaled, latents.mul_(scaling_factor), condition, driving.episode_start, log_sigma)
    train(objective, denoiser, accelerator).ema.copy_to_model()
    scaled.eval().requires_grad_(False)
    scaled.save_pretrained(denoiser.output / FOLDER)
    return scaled


@torch.no_grad()
def _encode(
    refiner: Refiner, frames: UInt8[Tensor, "frames 3 height width"], change: Callable[[Frames], Frames]
) -> Latents:
    """Apply `change` to frames, resize them to the refiner's size and encode them; the latents are not scaled."""
    started = monotonic()
    parts = (refiner.fit(change(to_unit_range(part))) for part in frames.split(FRAMES_AT_ONCE))
    # The VAE encodes each frame by itself, so the number of frames in a call does not change the latents.
    latents = torch.cat([refiner.vae.encode(part, return_dict=False)[0].mode() for part in parts])
    logger.info("%d frames encoded in %.0f s", len(frames), monotonic() - started)
    return latents


@torch.no_grad()
def _begin_unchanged(refiner: Refiner) -> None:
    """Make a residual refiner start as the identity: its output is the decoded frame and does not depend on the noise.

    Noise that passes through at first differs between frames, and unlearning it takes longer than learning to use it.
    """
    _silence(refiner.unet, ("conv_out",))
    # See `Refiner.predict`: the noised latents are the first channels.
    refiner.unet.conv_in.weight[:, : refiner.latent_shape[0]].zero_()


@torch.no_grad()
def _silence(network: nn.Module, ends: tuple[str, ...]) -> None:
    """Zero the parameters of the layers whose names end with one of `ends`, so that they output 0 at first."""
    for name, part in network.named_modules():
        if name.endswith(ends):
            for parameter in part.parameters():
                parameter.zero_()
