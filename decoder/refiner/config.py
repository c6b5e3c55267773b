"""The refiner's configuration, the content of its config.json: networks and sampling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from tokenizer.checkpoint import read_json
from tokenizer.errors import CheckpointError
from tokenizer.settings import Count, Natural, NonNegative, Positive, Settings, checked, expecting

MODEL_TYPE = "video_refiner"

Guidance = Annotated[
    tuple[NonNegative, NonNegative], Field(strict=False), expecting("two finite numbers of at least 0")
]


class RefinerConfig(Settings):
    """The refiner's networks and its sampling; defaults are those of the published one.

    Attributes:
        image_size: (height, width) in pixels of the refined frames.
        unet: arguments of diffusers' UNetSpatioTemporalConditionModel; {} is Stable Video Diffusion's network.
        vae: arguments of diffusers' AutoencoderKLTemporalDecoder.
        num_frames: frames of a window, which are refined together.
        overlap: frames that a window shares with the previous window.
        num_steps: number of Euler steps.
        sigma_min, sigma_max: smallest and largest noise level of the steps (EDM's spacing, rho 7).
        guidance: classifier-free guidance scale at the first and the last frame of a window, linear between them; 1 is
            the conditional prediction, for which the unconditional one is not computed.
        residual: whether the networks predict changes instead of frames. If True, the denoised latents are added to
            the latents of the input frames, and the change that they cause in the VAE's pictures is added to the input
            frames; the networks then need not learn to copy, and losses of the VAE do not show. If False, as published,
            the latents of the refined frames are denoised and decoded.
        time_ids: the network's extra inputs: the noise on the condition, the frame rate's id, the motion bucket.
        frames_at_once: frames of one call of the VAE.

    Raises:
        ConfigError: a value out of range.
    """

    image_size: Annotated[tuple[Count, Count], Field(strict=False)]
    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    num_frames: Count = 25
    overlap: Natural = 3
    num_steps: Count = 15
    sigma_min: Positive = 0.002
    sigma_max: Positive = 700.0
    guidance: Guidance = (1.0, 1.0)
    residual: bool = False
    time_ids: Annotated[tuple[float, ...], Field(strict=False)] = (0.0, 9.0, 127.0)
    frames_at_once: Count = 1

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.overlap >= self.num_frames:
            raise ValueError(f"overlap: expected 0 to {self.num_frames - 1}, got {self.overlap}")
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min: expected less than sigma_max={self.sigma_max}, got {self.sigma_min}")
        if not isinstance(self.vae.get("block_out_channels"), list | tuple):
            raise ValueError(f"vae: expected block_out_channels as a list, got {self.vae.get('block_out_channels')!r}")
        if any(side % self.latent_factor for side in self.image_size):
            expected = f"two multiples of {self.latent_factor}"
            raise ValueError(f"image_size: expected {expected}, got {list(self.image_size)}")
        return self

    @property
    def latent_factor(self) -> int:
        """Side of a latent cell in pixels."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"model_type": MODEL_TYPE, **self.model_dump()}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read config.json. Raises CheckpointError."""
        values = read_json(path)
        if values.pop("model_type", None) != MODEL_TYPE or values.keys() != cls.model_fields.keys():
            differing = ", ".join(sorted(values.keys() ^ cls.model_fields.keys())) or "model_type"
            raise CheckpointError(f"{path}: expected the configuration of a {MODEL_TYPE}, differs in {differing}")
        return checked(cls, values, str(path), CheckpointError)
