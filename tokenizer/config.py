"""The tokenizer's config.json: the published keys, our optional ones, and what values they may have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tokenizer.checkpoint import BOOKKEEPING, read_config
from tokenizer.errors import CheckpointError
from tokenizer.settings import Count, NonNegative, Positive, Settings, checked, expecting

BitOrder = Literal["msb_first", "lsb_first"]

MODEL_TYPE = "lfq_tokenizer"
NORM_GROUPS = 32
MAX_SIDE, MAX_PIXELS = 8192, 1 << 23
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
"""Height or width of a picture, in pixels."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$"), expecting("64 hexadecimal digits")]

_OPTIONAL_KEYS = frozenset({"bit_order", "image_size", "same_tokens_as", "tokens_like"})


class EncoderDecoderConfig(Settings):
    """Widths and depth of both convolutional nets.

    Level `l` of `len(ch_mult)` has `ch * ch_mult[l]` channels and `num_res_blocks` residual blocks; between levels the
    picture is halved. Raises CheckpointError on values that build no such net.
    """

    error_class = CheckpointError

    ch: Annotated[int, Field(ge=1, le=4096)] = 128
    in_channels: Literal[3] = 3
    out_ch: Literal[3] = 3
    z_channels: Annotated[int, Field(ge=1, le=62)] = 18
    num_res_blocks: Annotated[int, Field(ge=1, le=32)] = 2
    ch_mult: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(strict=False, min_length=1, max_length=10)
    ] = (1, 1, 2, 2, 4)

    @model_validator(mode="after")
    def _groups(self) -> Self:
        for width in (self.ch, *self.widths):
            if width % NORM_GROUPS:
                expected = f"ch and every ch * ch_mult divisible by {NORM_GROUPS} (GroupNorm)"
                raise ValueError(f"expected {expected}, got {width}")
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the full resolution down."""
        return tuple(self.ch * factor for factor in self.ch_mult)


class QuantizerConfig(Settings):
    """Lookup-free quantization: `dim` signs make one of `codebook_size = 2**dim` ids.

    `bit_order` says which channel is the most significant bit of an id: the first ("msb_first", Open-MAGVIT2 until
    August 2024, hence the published tokenizer by all signs) or the last ("lsb_first", Open-MAGVIT2 since then).
    The two weights are those of the entropy terms in training.
    """

    error_class = CheckpointError

    dim: Annotated[int, Field(ge=1, le=62)] = 18  # ids are int64
    codebook_size: Count = 262144
    batch_maximization_weight: NonNegative = 1.0
    sample_minimization_weight: NonNegative = 1.0
    bit_order: BitOrder = "msb_first"

    @model_validator(mode="after")
    def _all_ids(self) -> Self:
        if self.codebook_size != 2**self.dim:
            raise ValueError(f"codebook_size: expected 2**dim = {2**self.dim}, got {self.codebook_size}")
        return self


class LossWeights(Settings):
    """Weights of the terms of `tokenizer.losses.tokenizer_loss`.

    `temperature` is that of the entropies' soft assignment; `foreground` raises the weight of pixels that are far from
    the batch's mean picture, see `tokenizer.losses.pixel_loss`.

    The two entropies' weights against each other stand in the tokenizer's `quantizer_config`. Raises ConfigError on a
    negative weight or a temperature that is not positive.
    """

    pixel: NonNegative = 1.0
    gradient: NonNegative = 1.0
    entropy: NonNegative = 0.1
    commitment: NonNegative = 0.25
    temperature: Positive = 0.01
    foreground: NonNegative = 0.0


class LFQTokenizerConfig(Settings):
    """Everything that a checkpoint's config.json says; the defaults are the published tokenizer.

    `image_size` is (height, width) in pixels. `same_tokens_as` is the `checkpoint_sha256` of the first tokenizer that
    had this one's encoder, if this one has another decoder. `tokens_like` is the `tokens_sha256` of the tokenizer that
    this one was trained from, if the training kept its tokens nearly as they were (see `tokenizer.lineage` for both).
    Raises CheckpointError on values that do not fit one another.
    """

    error_class = CheckpointError

    encoder_decoder_config: EncoderDecoderConfig = EncoderDecoderConfig()
    quantizer_config: QuantizerConfig = QuantizerConfig()
    image_size: Annotated[
        tuple[Side, Side], Field(strict=False), expecting(f"[height, width], whole numbers from 1 to {MAX_SIDE}")
    ] = (288, 512)
    same_tokens_as: Sha256 | None = None
    tokens_like: Sha256 | None = None

    @model_validator(mode="after")
    def _fit(self) -> Self:
        dim, z_channels = self.quantizer_config.dim, self.encoder_decoder_config.z_channels
        if dim != z_channels:
            raise ValueError(f"quantizer_config.dim: expected that of {z_channels = }, got {dim}")
        if self.image_size[0] * self.image_size[1] > MAX_PIXELS:
            raise ValueError(f"image_size: expected at most {MAX_PIXELS} pixels, got {list(self.image_size)}")
        if any(side % self.downsample for side in self.image_size):
            expected = f"[height, width] divisible by {self.downsample}"
            raise ValueError(f"image_size: expected {expected}, got {list(self.image_size)}")
        return self

    @property
    def downsample(self) -> int:
        """Pixels along each side of one token."""
        return 2 ** (len(self.encoder_decoder_config.ch_mult) - 1)

    @property
    def rows(self) -> int:
        """Token rows of a frame."""
        return self.image_size[0] // self.downsample

    @property
    def cols(self) -> int:
        """Token columns of a frame."""
        return self.image_size[1] // self.downsample

    @property
    def num_tokens(self) -> int:
        """Tokens of a frame."""
        return self.rows * self.cols

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "config.json") -> "LFQTokenizerConfig":
        """Read the content of a config.json; `source` names it in errors.

        All published keys must be there and no unknown one may be; `image_size`, `same_tokens_as`,
        `tokens_like` and `quantizer_config.bit_order` are optional. Raises CheckpointError.
        """
        if data.get("model_type") != MODEL_TYPE:
            raise CheckpointError(f"{source}: expected model_type {MODEL_TYPE!r}, got {data.get('model_type')!r}")
        return checked(cls, _published(cls, data, source), source, CheckpointError)

    @classmethod
    def load(cls, path: Path) -> "LFQTokenizerConfig":
        """Read a config.json file. Raises CheckpointError naming the file."""
        return cls.from_dict(read_config(path), source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, with our optional keys written out, but for a lineage of None."""
        unsaid = {name for name in ("same_tokens_as", "tokens_like") if getattr(self, name) is None}
        return {"model_type": MODEL_TYPE, **self.model_dump(exclude=unsaid)}


def _published(kind: type[Settings], values: object, source: str, prefix: str = "") -> object:
    """A config.json's values without bookkeeping. Raises CheckpointError if a published key is missing."""
    if not isinstance(values, Mapping):
        return values
    plain = {name: value for name, value in values.items() if name not in BOOKKEEPING}
    for name, field in kind.model_fields.items():
        if name not in plain and name not in _OPTIONAL_KEYS:
            raise CheckpointError(f"{source}: expected all published keys, with {prefix}{name}, got none")
        if name in plain and isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            plain[name] = _published(field.annotation, plain[name], source, f"{name}.")
    return plain
