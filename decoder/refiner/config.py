"""The refiner's configuration, the content of its config.json: networks and sampling."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tokenizer.checkpoint import read_json
from tokenizer.errors import CheckpointError, ConfigError

MODEL_TYPE = "video_refiner"


@dataclass(frozen=True, kw_only=True)
class RefinerConfig:
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

    image_size: tuple[int, int]
    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    num_frames: int = 25
    overlap: int = 3
    num_steps: int = 15
    sigma_min: float = 0.002
    sigma_max: float = 700.0
    guidance: tuple[float, float] = (1.0, 1.0)
    residual: bool = False
    time_ids: tuple[float, ...] = (0.0, 9.0, 127.0)
    frames_at_once: int = 1

    def __post_init__(self) -> None:
        for name in ("num_frames", "num_steps", "frames_at_once"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"refiner: {name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.overlap < self.num_frames:
            raise ConfigError(f"refiner: overlap: expected 0 to {self.num_frames - 1}, got {self.overlap}")
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ConfigError(f"refiner: expected 0 < sigma_min < sigma_max, got {self.sigma_min}, {self.sigma_max}")
        check_guidance(self.guidance)
        sides = [side for side in self.image_size if side < 1 or side % self.latent_factor]
        if len(self.image_size) != 2 or sides:
            expected = f"two multiples of {self.latent_factor}"
            raise ConfigError(f"refiner: image_size: expected {expected}, got {list(self.image_size)}")

    @property
    def latent_factor(self) -> int:
        """Side of a latent cell in pixels."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": MODEL_TYPE, **asdict(self)}

    @classmethod
    def load(cls, path: Path) -> "RefinerConfig":
        """Read config.json. Raises CheckpointError."""
        values = read_json(path)
        names = {field.name for field in fields(cls)}
        if values.pop("model_type", None) != MODEL_TYPE or values.keys() != names:
            differing = ", ".join(sorted(values.keys() ^ names)) or "model_type"
            raise CheckpointError(f"{path}: expected the configuration of a {MODEL_TYPE}, differs in {differing}")
        try:
            for name in ("image_size", "guidance", "time_ids"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (ConfigError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def check_guidance(guidance: tuple[float, ...]) -> None:
    """Raise ConfigError unless `guidance` is two finite numbers of 0 or more."""
    if len(guidance) != 2 or not all(0 <= value < math.inf for value in guidance):
        raise ConfigError(f"refiner: guidance: expected two numbers of 0 or more, got {list(guidance)}")
