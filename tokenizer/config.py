"""The tokenizer's config.json: the published keys, our optional ones, and what values they may have."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizer.checkpoint import read_json
from tokenizer.errors import CheckpointError

BitOrder = Literal["msb_first", "lsb_first"]

MODEL_TYPE = "lfq_tokenizer"
NORM_GROUPS = 32

# Bookkeeping that Hugging Face's writers add; it says nothing about the architecture.
_TOLERATED_KEYS = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "model_type", "name_or_path"}
    | {"torch_dtype", "transformers_version"}
)
_OPTIONAL_KEYS = frozenset({"bit_order", "image_size", "same_tokens_as"})


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Widths and depth of both convolutional nets.

    Level `l` of `len(ch_mult)` has `ch * ch_mult[l]` channels and `num_res_blocks` residual blocks; between levels the
    picture is halved. Raises CheckpointError on values that build no such net.
    """

    ch: int = 128
    in_channels: int = 3
    out_ch: int = 3
    z_channels: int = 18
    num_res_blocks: int = 2
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)

    def __post_init__(self) -> None:
        for name in ("ch", "z_channels", "num_res_blocks"):
            _require(getattr(self, name) >= 1, f"{name} of at least 1", getattr(self, name))
        for name in ("in_channels", "out_ch"):
            _require(getattr(self, name) == 3, f"{name} 3 (RGB)", getattr(self, name))
        _require(bool(self.ch_mult) and min(self.ch_mult) >= 1, "ch_mult of factors of at least 1", self.ch_mult)
        for width in (self.ch, *self.widths):
            _require(
                width % NORM_GROUPS == 0, f"ch and every ch * ch_mult divisible by {NORM_GROUPS} (GroupNorm)", width
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the full resolution down."""
        return tuple(self.ch * factor for factor in self.ch_mult)


@dataclass(frozen=True, kw_only=True)
class QuantizerConfig:
    """Lookup-free quantization: `dim` signs make one of `codebook_size = 2**dim` ids.

    `bit_order` says which channel is the most significant bit of an id: the first ("msb_first", Open-MAGVIT2 until
    August 2024, hence the published tokenizer by all signs) or the last ("lsb_first", Open-MAGVIT2 since then).
    The two weights are those of the entropy terms in training.
    """

    dim: int = 18
    codebook_size: int = 262144
    batch_maximization_weight: float = 1.0
    sample_minimization_weight: float = 1.0
    bit_order: BitOrder = "msb_first"

    def __post_init__(self) -> None:
        _require(1 <= self.dim <= 62, "dim in 1..62 (ids are int64)", self.dim)
        _require(self.codebook_size == 2**self.dim, f"codebook_size 2**dim = {2**self.dim}", self.codebook_size)
        _bit_order(self.bit_order, "bit_order")
        for name in ("batch_maximization_weight", "sample_minimization_weight"):
            _require(getattr(self, name) >= 0, f"{name} of at least 0", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class LFQTokenizerConfig:
    """Everything that a checkpoint's config.json says; the defaults are the published tokenizer.

    `image_size` is (height, width) in pixels. `same_tokens_as` is the `checkpoint_sha256` of the first tokenizer that
    had this one's encoder, if this one has another decoder (see `tokenizer.lineage`). Raises CheckpointError on values
    that do not fit one another.
    """

    encoder_decoder_config: EncoderDecoderConfig = field(default_factory=EncoderDecoderConfig)
    quantizer_config: QuantizerConfig = field(default_factory=QuantizerConfig)
    image_size: tuple[int, int] = (288, 512)
    same_tokens_as: str | None = None

    def __post_init__(self) -> None:
        dim, z_channels = self.quantizer_config.dim, self.encoder_decoder_config.z_channels
        _require(dim == z_channels, f"quantizer_config.dim equal to {z_channels = }", dim)
        divisible = all(side >= 1 and side % self.downsample == 0 for side in self.image_size)
        _require(divisible, f"image_size [height, width] divisible by {self.downsample}", self.image_size)

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

        All published keys must be there and no unknown one may be; `image_size`, `same_tokens_as` and
        `quantizer_config.bit_order` are optional. Raises CheckpointError.
        """
        try:
            _require(data.get("model_type") == MODEL_TYPE, f"model_type {MODEL_TYPE!r}", data.get("model_type"))
            return cls(**_read(cls, data, ""))
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: Path) -> "LFQTokenizerConfig":
        """Read a config.json file. Raises CheckpointError naming the file."""
        return cls.from_dict(read_json(path), source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, with our optional keys written out, but for a `same_tokens_as` of None."""
        content = {"model_type": MODEL_TYPE, **asdict(self)}
        if self.same_tokens_as is None:
            del content["same_tokens_as"]
        return content


def _require(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise CheckpointError(f"expected {expected}, got {got!r}")


def _read(kind: type, values: object, prefix: str) -> dict[str, Any]:
    """The fields of the dataclass `kind` from a JSON object that stands under the dotted `prefix`."""
    if not isinstance(values, dict):
        raise CheckpointError(f"expected {prefix.rstrip('.')} as an object, got {values!r}")
    names = [f.name for f in fields(kind)]
    missing = [name for name in names if name not in values and name not in _OPTIONAL_KEYS]
    _require(not missing, f"all published keys, with {prefix}{(missing or ' ')[0]}", "none")
    unknown = sorted(values.keys() - set(names) - _TOLERATED_KEYS)
    _require(not unknown, "known keys only", ", ".join(prefix + name for name in unknown))
    return {name: _READERS.get(name, _integer)(values[name], prefix + name) for name in names if name in values}


def _integer(value: object, where: str) -> int:
    if type(value) is not int:
        raise CheckpointError(f"expected {where} as an integer, got {value!r}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"expected {where} as a number, got {value!r}")
    return float(value)


def _integers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"expected {where} as a list of integers, got {value!r}")
    return tuple(_integer(item, where) for item in value)


def _image_size(value: object, where: str) -> tuple[int, ...]:
    sides = _integers(value, where)
    _require(len(sides) == 2, f"{where} as [height, width]", value)
    return sides


def _bit_order(value: object, where: str) -> object:
    _require(value in get_args(BitOrder), f"{where} of {get_args(BitOrder)}", value)
    return value


def _sha256(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise CheckpointError(f"expected {where} as 64 hexadecimal digits, got {value!r}")
    return value


_READERS: dict[str, Callable[[object, str], Any]] = {
    "encoder_decoder_config": lambda values, where: EncoderDecoderConfig(
        **_read(EncoderDecoderConfig, values, f"{where}.")
    ),
    "quantizer_config": lambda values, where: QuantizerConfig(**_read(QuantizerConfig, values, f"{where}.")),
    "image_size": _image_size,
    "same_tokens_as": _sha256,
    "ch_mult": _integers,
    "bit_order": _bit_order,
    "batch_maximization_weight": _number,
    "sample_minimization_weight": _number,
}
