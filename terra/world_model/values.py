"""What values a world model's config.json may have; checked before torch is imported."""

import functools
import itertools
import logging
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from terra.actions.space import WaypointTime
from terra.errors import CheckpointError
from terra.memory import MemoryRule
from terra.trajectory.checks import MAX_FPS, MIN_FPS
from terra.views import Views
from terra.world_model.published import LEFTOVERS
from tokenizer.checkpoint import BOOKKEEPING, refuse_code
from tokenizer.settings import Fraction, Natural, Settings, expecting

logger = logging.getLogger(__name__)

_KEYS_SHOWN = 5


FloatType = Literal["float32", "bfloat16", "float16"]


RopeTheta = Annotated[float, Field(ge=1, le=1e12)]


TokenId = Natural


class _Rope(Settings):
    """Rotary positions, as transformers 5 writes them."""

    rope_theta: RopeTheta
    rope_type: Literal["default"] = "default"


class WorldModelValues(Settings):
    """The keys of a world model's config.json that are read, and what values they may have."""

    error_class = CheckpointError

    architectures: Annotated[list[str], Field(max_length=1)] | None = None
    model_type: Literal["llama_action"] = "llama_action"
    vocab_size: Annotated[int, Field(ge=2, le=1 << 24)] = 262145
    hidden_size: Annotated[int, Field(ge=1, le=1 << 15)] = 2048
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 18)] = 5632
    num_hidden_layers: Annotated[int, Field(ge=1, le=256)] = 22
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)] = 32
    num_key_value_heads: Annotated[int, Field(ge=1, le=1024)] = 4
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)] | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 22)] = 14550
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    rope_theta: RopeTheta | None = None
    rope_scaling: None = None
    rope_parameters: _Rope | None = None
    attention_bias: bool = False
    attention_dropout: Fraction = 0.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(ge=0, le=1)] = 0.02
    pretraining_tp: Literal[1] = 1
    use_cache: bool = True
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    pad_token_id: TokenId | None = None
    dtype: FloatType | None = None
    torch_dtype: FloatType | None = None
    num_image_patches: Annotated[int, Field(ge=1, le=1 << 16)] = 576
    num_action_tokens: Annotated[int, Field(ge=1, le=64)] = 6
    num_spatio_embeddings: Annotated[int, Field(ge=1, le=1 << 17)] = 582
    num_temporal_embeddings: Annotated[int, Field(ge=2, le=1 << 12)] = 25
    action_dim: Annotated[int, Field(ge=1, le=1 << 12)] = 3
    fps: Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)] = 10.0
    waypoint_times: Annotated[list[WaypointTime], Field(min_length=1, max_length=64)] | None = None
    action_space: dict[str, Any] | None = None
    tokenizer_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$"), expecting("64 hexadecimal digits")] | None = None
    memory: MemoryRule | None = None
    views: Views | None = None

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if (getattr(self, name) or 0) >= self.vocab_size:
                got = getattr(self, name)
                raise ValueError(f"{name}: expected an id below vocab_size={self.vocab_size}, got {got}")
        times = self.waypoint_times or []
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"waypoint_times: expected increasing seconds, got {reprlib.repr(times)}")
        if self.action_space is not None and self.waypoint_times is not None:
            raise ValueError("action_space: expected none beside waypoint_times, got both")
        return self

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of the keys that are given; leftovers are dropped, and other unknown keys named once.

        Raises:
            CheckpointError: a value of another kind or out of its bounds, or a key that bears code.
        """
        refuse_code(content)
        unknown = sorted(content.keys() - cls.model_fields.keys() - BOOKKEEPING - LEFTOVERS)
        if unknown:
            _warn_of(tuple(unknown))
        values = {name: value for name, value in content.items() if name in cls.model_fields}
        return cls(**values).model_dump(include=set(values))


@functools.cache
def _warn_of(unknown: tuple[str, ...]) -> None:
    names = ", ".join(name[:80] for name in unknown[:_KEYS_SHOWN])
    more = f" and {len(unknown) - _KEYS_SHOWN} more" if len(unknown) > _KEYS_SHOWN else ""
    logger.warning("config.json of the world model: unknown keys are left out: %s%s", names, more)
