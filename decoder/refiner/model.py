"""`Refiner`: the UNet and the VAE, sampling with them, and reading and writing of their checkpoints."""

from pathlib import Path
from typing import final

import torch
from diffusers.models.autoencoders.autoencoder_kl_temporal_decoder import AutoencoderKLTemporalDecoder
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from decoder.refiner.config import RefinerConfig
from tokenizer.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    load_tensors,
    resolve_checkpoint,
    verify_layout,
    write_json,
    write_tensors,
)
from tokenizer.errors import CheckpointError
from tokenizer.types import Frames

Latents = Float[Tensor, "frames channels rows cols"]


@final
class Refiner(nn.Module):
    """A UNet that denoises the latents of several frames, given the latents of the unrefined frames, and a VAE.

    The state dict has `unet.*` and `vae.*`, each with diffusers' names.
    """

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        self.config = config
        self.unet = UNetSpatioTemporalConditionModel(**config.unet)
        self.vae = AutoencoderKLTemporalDecoder(**config.vae)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.unet.conv_in.weight.device

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(channels, rows, cols) of a frame's latents."""
        height, width = self.config.image_size
        factor = self.config.latent_factor
        return self.vae.config["latent_channels"], height // factor, width // factor

    def fit(self, frames: Frames) -> Frames:
        """Resize frames in [-1, 1] to the refiner's size (bilinear, antialiased)."""
        return F.interpolate(frames.float(), self.config.image_size, mode="bilinear", antialias=True).clamp(-1.0, 1.0)

    def encode(self, frames: Frames) -> Latents:
        """Encode frames of the refiner's size in [-1, 1] to the mode of their latents, float32, not scaled."""
        chunks = frames.to(self.device).split(self.config.frames_at_once)
        return torch.cat([self.vae.encode(chunk, return_dict=False)[0].mode() for chunk in chunks])

    def decode(self, latents: Latents, frames: Frames, condition: Latents) -> Frames:
        """Decode latents from `denoise` to frames in [-1, 1], float32 on the CPU.

        `frames` are the unrefined frames and `condition` their `encode`d latents, see `RefinerConfig.residual`.
        """
        latents = latents / self.vae.config["scaling_factor"]
        if not self.config.residual:
            return self.reconstruct(latents).clamp(-1.0, 1.0)
        change = self.reconstruct(condition + latents) - self.reconstruct(condition)
        return (frames.cpu() + change).clamp(-1.0, 1.0)

    def reconstruct(self, latents: Latents) -> Frames:
        """Decode latents from `encode` with the VAE: float32 on the CPU, not clamped."""
        chunks = latents.split(self.config.frames_at_once)
        return torch.cat([self.vae.decode(part, num_frames=len(part), return_dict=False)[0].cpu() for part in chunks])

    def denoise(self, noise: Latents, condition: Latents, guidance: Float[Tensor, " frames"]) -> Latents:
        """Denoise normal noise to scaled latents (see `RefinerConfig.residual`), given the unrefined frames' latents.

        The sampler takes Euler steps of EDM with v-prediction, as the published refiner does. `guidance` is as in
        `RefinerConfig`; the unconditional prediction has a condition of 0.
        """
        scheduler = EulerDiscreteScheduler(
            prediction_type="v_prediction",
            timestep_type="continuous",
            timestep_spacing="leading",
            use_karras_sigmas=True,
            sigma_min=self.config.sigma_min,
            sigma_max=self.config.sigma_max,
        )
        scheduler.set_timesteps(self.config.num_steps, device=noise.device)
        latents = noise * scheduler.init_noise_sigma
        scale, guided = rearrange(guidance, "f -> f 1 1 1"), bool((guidance != 1).any())
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(latents, timestep)
            (velocity,) = self.predict(scaled[None], condition[None], timestep[None])
            if guided:
                (without,) = self.predict(scaled[None], torch.zeros_like(condition)[None], timestep[None])
                velocity = without + scale * (velocity - without)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return latents

    def predict(
        self,
        scaled: Float[Tensor, "batch frames channels rows cols"],
        condition: Float[Tensor, "batch frames channels rows cols"],
        timestep: Float[Tensor, " batch"],
        unet: nn.Module | None = None,
    ) -> Float[Tensor, "batch frames channels rows cols"]:
        """Predict the velocity with the UNet, in float32.

        Args:
            scaled: noised latents / sqrt(sigma^2 + 1).
            condition: latents of the unrefined frames, from `encode`.
            timestep: ln(sigma) / 4.
            unet: the module to call instead of `self.unet`: its wrapper, in training.
        """
        dtype, count = self.unet.conv_in.weight.dtype, len(scaled)
        # Stable Video Diffusion's picture embedding is not used: the network attends to one vector of 0.
        context = scaled.new_zeros(count, 1, self.unet.config["cross_attention_dim"], dtype=dtype)
        time_ids = scaled.new_tensor(self.config.time_ids).expand(count, -1)
        sample = torch.cat([scaled, condition], dim=2).to(dtype)
        return (unet or self.unet)(sample, timestep, context, time_ids, return_dict=False)[0].float()

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | Path, dtype: torch.dtype = torch.float32) -> "Refiner":
        """Load a local folder or a Hub repository, for evaluation, on the CPU. Raises CheckpointError.

        `dtype` is the data type of the UNet. The VAE stays in float32, because bfloat16's mantissa is too short for
        smooth pictures.
        """
        folder = resolve_checkpoint(path_or_hub_id)
        config = RefinerConfig.load(folder / CONFIG_NAME)
        try:
            with torch.device("meta"):
                refiner = cls(config)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:500]
            raise CheckpointError(f"{folder / CONFIG_NAME}: expected networks of diffusers, got: {reason}") from None
        verify_layout(folder, {name: tuple(tensor.shape) for name, tensor in refiner.state_dict().items()})
        tensors = load_tensors(folder)
        cast = {
            name: tensor.to(dtype if name.startswith("unet.") else torch.float32) for name, tensor in tensors.items()
        }
        refiner.load_state_dict(cast, assign=True)
        return refiner.eval().requires_grad_(False)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, each whole or not at all. Raises OutputError."""
        write_tensors(Path(folder) / WEIGHTS_NAME, self.state_dict())
        write_json(Path(folder) / CONFIG_NAME, self.config.to_dict())
