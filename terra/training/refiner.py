"""Training of the video refiner: first its VAE on single frames, then its UNet on clips, given decoded frames."""

import logging
from dataclasses import replace
from itertools import pairwise

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from decoder.refiner import Refiner, RefinerConfig
from terra.errors import DatasetError
from terra.training.data import DrivingFrames, to_unit_range
from terra.training.loop import Batch, train
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from tokenizer import Frames, LFQTokenizer

logger = logging.getLogger(__name__)

FOLDER = "refiner"
# ln(sigma) of the noise in training: mean and deviation, as in the published refiner's configuration.
LOG_SIGMA_MEAN, LOG_SIGMA_STD = 1.0, 1.6

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

    def __init__(self, vae: nn.Module, frames: Frames, crop: tuple[int, int]) -> None:
        self.model, self._frames, self._crop = vae, frames, crop

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Frames in [-1, 1], all cropped at one place."""
        chosen = self._frames[draw_indices(random, len(self._frames), batch_size, self._frames.device)]
        room = [side - cut + 1 for side, cut in zip(chosen.shape[2:], self._crop, strict=True)]
        top, left = (int(torch.randint(most, (), generator=random.host)) for most in room)
        return {"frames": chosen[..., top : top + self._crop[0], left : left + self._crop[1]]}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """How far the reconstruction is from the frames."""
        (reconstruction,) = self.model(batch["frames"], return_dict=False)
        return {"loss": F.l1_loss(reconstruction, batch["frames"])}


class DenoisingObjective(_Plain):
    """The UNet on clips: the squared error of its velocity, which is EDM's loss with v-weighting.

    Args:
        refiner: of which the UNet is trained.
        latents: of the recorded frames, scaled.
        condition: of the decoded ones, not scaled.
        episode_start: see `terra.training.data.DrivingFrames`.
    """

    samples = "clips"

    def __init__(
        self, refiner: Refiner, latents: Latents, condition: Latents, episode_start: Int[Tensor, " boundaries"]
    ) -> None:
        self.model: nn.Module = refiner.unet
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
        sigma = (LOG_SIGMA_MEAN + LOG_SIGMA_STD * levels).exp()
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
) -> Refiner:
    """Train a refiner from nothing for what a tokenizer decodes, and write it to `refiner/` in `denoiser.output`.

    Recorded frames are of the tokenizer's size; the latents' scale is found from them. `crop` is (height, width) of the
    parts of them, in the refiner's size, that the VAE is trained on. In one process; all frames must fit on its device.

    Raises:
        ConfigError, CheckpointError, OutputError: see `terra.training.loop.train`.
        DatasetError: no episode as long as a window.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(denoiser.seed)
        refiner = Refiner(config).to(accelerator.device)
    with torch.no_grad():
        decoded = to_unit_range(driving.frames)
        recorded = refiner.fit(decoded)
        decoded = refiner.fit(tokenizer.decode(tokenizer.encode(decoded)))
    train(AutoencoderObjective(refiner.vae, recorded, crop), autoencoder, accelerator).ema.copy_to_model()
    refiner.vae.eval().requires_grad_(False)
    latents = refiner.encode(recorded)
    scaling_factor = 1 / latents.std().item()
    logger.info("latents: scaled by %.3g", scaling_factor)
    scaled = Refiner(replace(config, vae={**config.vae, "scaling_factor": scaling_factor})).to(accelerator.device)
    scaled.load_state_dict(refiner.state_dict())
    scaled.vae.requires_grad_(False)
    objective = DenoisingObjective(scaled, latents * scaling_factor, scaled.encode(decoded), driving.episode_start)
    train(objective, denoiser, accelerator).ema.copy_to_model()
    scaled.eval().requires_grad_(False)
    scaled.save_pretrained(denoiser.output / FOLDER)
    return scaled
