"""The world model's configuration: a Llama with action slots and learned spatio-temporal positions."""

import logging
from typing import Any

from transformers import AutoConfig, LlamaConfig

from terra.actions import ActionSpace, Waypoints, describe_space, read_space
from terra.errors import CheckpointError
from terra.memory import MemoryRule
from terra.prompt import Layout
from terra.views import Views
from terra.world_model.values import WorldModelValues
from tokenizer.settings import checked

logger = logging.getLogger(__name__)


class LlamaActionConfig(LlamaConfig):
    """Configuration of `LlamaActionForCausalLM` and `LlamaActionV2ForCausalLM`.

    Keys and defaults are those of the published Terra checkpoints; every default can be changed, the classes are
    the same for any size. The vocabulary is the image codebook plus one special token at its end, which is never
    sampled. `max_position_embeddings` must hold `num_temporal_embeddings` frames.

    Terra's additional optional keys are `fps` (frames per second in training), `waypoint_times` (for each slot, its
    waypoint's time ahead of the frame, in seconds), `action_space` (in place of `waypoint_times` where actions are no
    waypoints, see `terra.actions.space`), `tokenizer_sha256` (`tokenizer.lineage.tokens_sha256` of the
    tokenizer whose tokens the model was trained on, which is compared with the tokenizer's in use), `memory` (the
    `terra.memory.MemoryRule` that the model was trained with; absent for a model without memory) and `views` (the
    `terra.views.Views` of the pictures; absent for one camera).

    Raises:
        CheckpointError: the head counts do not divide, the lengths contradict each other, no such action space, views
            that overlap, or memory frames that leave no room in the window or that no pose is known of.
    """

    model_type = "llama_action"

    num_image_patches: int = 576
    num_action_tokens: int = 6
    num_spatio_embeddings: int = 582
    num_temporal_embeddings: int = 25
    action_dim: int = 3
    fps: float = 10.0
    waypoint_times: list[float] | None = None
    action_space: dict[str, Any] | None = None
    tokenizer_sha256: str | None = None
    memory: dict[str, Any] | None = None
    views: dict[str, Any] | None = None

    def __init__(
        self,
        vocab_size: int = 262145,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 22,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = 4,
        max_position_embeddings: int = 14550,
        rms_norm_eps: float = 1e-6,
        num_image_patches: int = 576,
        num_action_tokens: int = 6,
        num_spatio_embeddings: int = 582,
        num_temporal_embeddings: int = 25,
        action_dim: int = 3,
        fps: float = 10.0,
        waypoint_times: list[float] | None = None,
        action_space: dict[str, Any] | None = None,
        tokenizer_sha256: str | None = None,
        memory: dict[str, Any] | None = None,
        views: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Published configs have num_action_tokens under this second name too.
        kwargs.pop("num_action_embeddings", None)
        special = vocab_size - 1
        kwargs = {"bos_token_id": special, "eos_token_id": special, "pad_token_id": special} | kwargs
        kwargs = {"tie_word_embeddings": False} | kwargs
        _check_heads(hidden_size, num_attention_heads, num_key_value_heads)
        super().__init__(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=rms_norm_eps,
            **kwargs,
        )
        self.num_image_patches = num_image_patches
        self.num_action_tokens = num_action_tokens
        self.num_spatio_embeddings = num_spatio_embeddings
        self.num_temporal_embeddings = num_temporal_embeddings
        self.action_dim = action_dim
        self.fps = float(fps)
        space = read_space({"waypoint_times": waypoint_times, "action_space": action_space}, "config", CheckpointError)
        for name, value in describe_space(space).items():  # one of the two; published checkpoints have no other
            setattr(self, name, value)
        self.tokenizer_sha256 = tokenizer_sha256
        if memory is not None:  # as above: published checkpoints have no such key
            self.memory = checked(MemoryRule, memory, "memory", CheckpointError).model_dump()
        if views is not None:
            self.views = checked(Views, views, "views", CheckpointError).describe()
        self._check_lengths()
        self._check_memory()

    def _check_lengths(self) -> None:
        block = self.num_image_patches + self.num_action_tokens
        window = block * self.num_temporal_embeddings
        if self.num_spatio_embeddings != block:
            raise CheckpointError(
                f"num_spatio_embeddings: expected num_image_patches + num_action_tokens = {block}, "
                f"got {self.num_spatio_embeddings}"
            )
        if self.max_position_embeddings < window:
            raise CheckpointError(
                f"max_position_embeddings: expected at least {window} ({self.num_temporal_embeddings} frames of "
                f"{block}), got {self.max_position_embeddings}"
            )
        if self.waypoint_times is not None and len(self.waypoint_times) != self.num_action_tokens:
            raise CheckpointError(
                f"waypoint_times: expected one for each of {self.num_action_tokens} action slots, "
                f"got {len(self.waypoint_times)}"
            )
        space, shape = self.space, (self.num_action_tokens, self.action_dim)
        if space.shape != shape:
            raise CheckpointError(
                f"num_action_tokens and action_dim: expected {space.shape} for {space.title}, got {shape}"
            )

    def _check_memory(self) -> None:
        rule, most = self.memory_rule, self.num_temporal_embeddings - 2
        if rule is None:
            return
        if not isinstance(self.space, Waypoints):
            raise CheckpointError(f"memory: expected none, for the model's {self.space.title}: it has no poses")
        if rule.frames > most:
            window = self.num_temporal_embeddings
            raise CheckpointError(f"memory.frames: expected 1 to {most} (the window holds {window}), got {rule.frames}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from the content of a config.json, which a `WorldModelValues` checks.

        `num_key_value_heads` must be in it: transformers would replace a missing one by a default, and the KV cache
        would silently have a wrong shape.
        """
        if config_dict.get("num_key_value_heads") is None:
            raise CheckpointError(
                "config.json: num_key_value_heads is missing: state it (it sets the KV cache's shape)"
            )
        return super().from_dict(WorldModelValues.read(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, with both published names of the number of action slots."""
        return super().to_dict() | {"num_action_embeddings": self.num_action_tokens}

    @property
    def space(self) -> ActionSpace:
        """What the model's actions mean."""
        facts = {"waypoint_times": self.waypoint_times, "action_space": self.action_space}
        return read_space(facts, "config", CheckpointError)

    @property
    def memory_rule(self) -> MemoryRule | None:
        """How the model's memory frames are chosen; None for a model without memory."""
        return None if self.memory is None else MemoryRule(**self.memory)

    @property
    def camera_views(self) -> Views | None:
        """The cameras whose pictures share each frame; None for one camera."""
        return None if self.views is None else Views(**self.views)

    @property
    def layout(self) -> Layout:
        """The positions of image tokens and action slots in a window."""
        return Layout(self.num_image_patches, self.num_action_tokens, self.num_temporal_embeddings)

    @property
    def image_vocab_size(self) -> int:
        """Number of image tokens, the first ids of the vocabulary; the special token after them is never sampled."""
        return self.vocab_size - 1


def _check_heads(hidden_size: int, num_attention_heads: int, num_key_value_heads: int | None) -> None:
    if num_key_value_heads is None:
        raise CheckpointError("num_key_value_heads is missing: state it (it sets the KV cache's shape)")
    if num_key_value_heads < 1 or num_attention_heads < 1 or num_attention_heads % num_key_value_heads:
        raise CheckpointError(
            f"num_key_value_heads: expected a divisor of num_attention_heads={num_attention_heads}, "
            f"got {num_key_value_heads}"
        )
    if hidden_size % num_attention_heads:
        raise CheckpointError(
            f"hidden_size: expected a multiple of num_attention_heads={num_attention_heads}, got {hidden_size}"
        )


AutoConfig.register(LlamaActionConfig.model_type, LlamaActionConfig, exist_ok=True)
