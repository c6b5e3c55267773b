"""What a refiner is made of and how it samples: the content of its config.json."""

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
        image_size: (height, width) in pixels of what it makes.
        unet: arguments of diffusers' UNetSpatioTemporalConditionModel; {} is Stable Video Diffusion's network.
        vae: arguments of diffusers' AutoencoderKLTemporalDecoder.
        num_frames: refined at once.
        overlap: frames that a window shares with the one before.
        num_steps: Euler steps.
        sigma_min, sigma_max: the noise levels between which they lie (EDM's spacing, rho 7).
        guidance: how far to go from the prediction without the condition to that with it, for the first and the last
            frame of a window, linearly between; 1 is the prediction with it, for which the other isn't computed.
        residual: the networks make changes, not frames: latents to be added to the frames' own are denoised, and what
            they change in the VAE's pictures is added to the frames to be refined. So these need not be learnt, and
            what the VAE loses of them is not lost. False, as published: latents of frames are denoised and decoded.
        time_ids: numbers that the network is told: the noise on the condition, the frame rate's id, the motion bucket.
        frames_at_once: that go through the VAE together.

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
        """Pixels along a side of one latent vector's cell."""
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
