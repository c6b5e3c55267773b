"""Training of the video refiner: first its VAE on single frames, then its UNet on clips, given decoded frames."""

import logging
from collections.abc import Callable
from dataclasses import replace
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
# Of ln(sigma) in training: mean and deviation, as in the published refiner's configuration.
LOG_SIGMA = (1.0, 1.6)
FRAMES_AT_ONCE = 32  # float32, on their way to latents

Latents = Float[Tensor, "frames channels rows cols"]


class _Plain:
    """What the two objectives have in common: no rival, and nothing to show."""

    rival: nn.Module | None = None
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None

    def rival_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """There is no rival."""
        raise NotImplementedError("the refiner has no rival")

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """None."""
        return {}


class AutoencoderObjective(_Plain):
    """The VAE on crops of single frames: the mean absolute error. The refiner uses the latents' mode alone."""

    samples = "frames"

    def __init__(self, vae: nn.Module, frames: UInt8[Tensor, "frames 3 height width"], crop: tuple[int, int]) -> None:
        self.model, self._frames, self._crop = vae, frames, crop

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Frames in [-1, 1], all cropped at one place."""
        chosen = self._frames[draw_indices(random, len(self._frames), batch_size, self._frames.device)]
        room = [side - cut + 1 for side, cut in zip(chosen.shape[2:], self._crop, strict=True)]
        top, left = (int(torch.randint(most, (), generator=random.host)) for most in room)
        return {"frames": to_unit_range(chosen[..., top : top + self._crop[0], left : left + self._crop[1]])}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """How far the reconstruction is from the frames."""
        (reconstruction,) = self.model(batch["frames"], return_dict=False)
        return {"loss": F.l1_loss(reconstruction, batch["frames"])}


class DenoisingObjective(_Plain):
    """The UNet on clips: the squared error of its velocity, which is EDM's loss with v-weighting.

    Args:
        refiner: of which the UNet is trained.
        latents: what is to be denoised, scaled; see `RefinerConfig.residual`.
        condition: the latents of the decoded frames, not scaled.
        episode_start: see `terra.training.data.DrivingFrames`.
        log_sigma: mean and deviation of ln(sigma), sigma being the noise's level.
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

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Clips, noise and its level."""
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
        """How far the predicted velocity is from (noise - sigma x latents) / sqrt(sigma^2 + 1)."""
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
    """Train a refiner from nothing for what a tokenizer decodes, and write it to `refiner/` in `denoiser.output`.

    Recorded frames are of the tokenizer's size; the latents' scale is found from them. `crop` is (height, width) of the
    parts of them, in the refiner's size, that the VAE is trained on; `log_sigma` as in `DenoisingObjective`: the levels
    that the sampler visits should be common in it. In one process; all frames in 8 bits and their latents twice, those
    of the recorded and of the decoded frames, must fit on its device.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`.
        DatasetError: no episode as long as a window.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(denoiser.seed)
        refiner = Refiner(config).to(accelerator.device)
    # A VAE learns to pass pictures through much sooner if what residual blocks and attention add begins at 0.
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
    scaled = Refiner(replace(config, vae={**config.vae, "scaling_factor": scaling_factor})).to(accelerator.device)
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
    """Latents (not scaled) of frames that went through `change`, in the refiner's size."""
    started = monotonic()
    parts = (refiner.fit(change(to_unit_range(part))) for part in frames.split(FRAMES_AT_ONCE))
    # The VAE encodes each frame alone, so that more of them at once than in decoding make no difference.
    latents = torch.cat([refiner.vae.encode(part, return_dict=False)[0].mode() for part in parts])
    logger.info("%d frames encoded in %.0f s", len(frames), monotonic() - started)
    return latents


@torch.no_grad()
def _begin_unchanged(refiner: Refiner) -> None:
    """Let a residual refiner give the frames that it is given, and what it makes of them not depend on the noise.

    Noise that gets through differs from frame to frame, and to forget it takes longer than to learn what it is for.
    """
    _silence(refiner.unet, ("conv_out",))
    # See `Refiner.predict`: the noised latents are the first channels.
    refiner.unet.conv_in.weight[:, : refiner.latent_shape[0]].zero_()


@torch.no_grad()
def _silence(network: nn.Module, ends: tuple[str, ...]) -> None:
    """Let the layers whose names end so give 0 at first."""
    for name, part in network.named_modules():
        if name.endswith(ends):
            for parameter in part.parameters():
                parameter.zero_()
