"""The refiner's configuration, the content of its config.json: networks and sampling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tokenizer.checkpoint import read_config
from tokenizer.config import Side
from tokenizer.errors import CheckpointError, TerraError
from tokenizer.settings import Natural, NonNegative, Positive, Settings, checked, expecting

MODEL_TYPE = "video_refiner"

Width = Annotated[int, Field(ge=1, le=8192)]
Widths = Annotated[tuple[Width, ...], Field(strict=False, min_length=1, max_length=8)]
Layer = Annotated[int, Field(ge=1, le=16)]
Layers = Layer | Annotated[tuple[Layer, ...], Field(strict=False, min_length=1, max_length=8)]
Head = Annotated[int, Field(ge=1, le=256)]
Heads = Head | Annotated[tuple[Head, ...], Field(strict=False, min_length=1, max_length=8)]
Block = Annotated[str, Field(pattern="^[A-Za-z0-9]{1,60}$")]
Blocks = Annotated[tuple[Block, ...], Field(strict=False, max_length=8)]

Guidance = Annotated[
    tuple[NonNegative, NonNegative], Field(strict=False), expecting("two finite numbers of at least 0")
]


class _Unet(Settings):
    """Arguments of diffusers' UNetSpatioTemporalConditionModel."""

    sample_size: Width | None = None
    in_channels: Width = 8
    out_channels: Width = 4
    down_block_types: Blocks = ()
    up_block_types: Blocks = ()
    block_out_channels: Widths = (320, 640, 1280, 1280)
    addition_time_embed_dim: Width = 256
    projection_class_embeddings_input_dim: Width = 768
    layers_per_block: Layers = 2
    cross_attention_dim: Width = 1024
    transformer_layers_per_block: Layers = 1
    num_attention_heads: Heads = (5, 10, 20, 20)
    num_frames: Width = 25


class _Vae(Settings):
    """Arguments of diffusers' AutoencoderKLTemporalDecoder."""

    in_channels: Literal[3] = 3
    out_channels: Literal[3] = 3
    down_block_types: Blocks = ()
    block_out_channels: Widths
    layers_per_block: Layer = 1
    latent_channels: Width = 4
    sample_size: Width = 32
    scaling_factor: Annotated[float, Field(gt=0, le=1000)] = 0.18215
    force_upcast: bool = True


def _check(name: str, kind: type[Settings], values: Mapping[str, Any]) -> None:
    try:
        kind(**values)
    except TerraError as error:
        raise ValueError(f"{name}: {error}") from None


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

    image_size: Annotated[tuple[Side, Side], Field(strict=False)]
    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    num_frames: Annotated[int, Field(ge=1, le=1024)] = 25
    overlap: Natural = 3
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 15
    sigma_min: Positive = 0.002
    sigma_max: Positive = 700.0
    guidance: Guidance = (1.0, 1.0)
    residual: bool = False
    time_ids: Annotated[tuple[float, ...], Field(strict=False, min_length=1, max_length=16)] = (0.0, 9.0, 127.0)
    frames_at_once: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.overlap >= self.num_frames:
            raise ValueError(f"overlap: expected 0 to {self.num_frames - 1}, got {self.overlap}")
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min: expected less than sigma_max={self.sigma_max}, got {self.sigma_min}")
        _check("unet", _Unet, self.unet)
        _check("vae", _Vae, self.vae)
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
        values = read_config(path)
        if values.pop("model_type", None) != MODEL_TYPE or values.keys() != cls.model_fields.keys():
            differing = ", ".join(sorted(values.keys() ^ cls.model_fields.keys())) or "model_type"
            raise CheckpointError(f"{path}: expected the configuration of a {MODEL_TYPE}, differs in {differing}")
        return checked(cls, values, str(path), CheckpointError)
