"""The model of a benchmark: random weights in a checkpoint folder, and the bytes that decoding a frame must read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terra.errors import ConfigError
from terra.world_model import ARCHITECTURES, LlamaActionConfig, load_config, write_weights

SHAPES: dict[str, dict[str, Any]] = {
    "terra_v1": {},
    "town_hd": {
        "vocab_size": 32769,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "small": {
        "vocab_size": 4097,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_image_patches": 144,
        "num_spatio_embeddings": 150,
        "max_position_embeddings": 3750,
    },
    "tiny": {
        "vocab_size": 65,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_image_patches": 12,
        "num_spatio_embeddings": 18,
        "num_temporal_embeddings": 8,
        "max_position_embeddings": 144,
    },
}
"""Config values by shape name, else Terra v1's.

`small` is the shipped model's shape, `town_hd` the world's of this name (terra/worlds/town_hd.md), `tiny` is for tests.
"""


def make_random_model(shape: str, output: Path, dtype: torch.dtype, device: str) -> Path:
    """Write a v1 checkpoint of random weights (terra_v1: 4.1 GB in bfloat16) into a folder of `output`, once.

    Raises:
        ConfigError: no such shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape: expected one of {list(SHAPES)}, got {shape!r}")
    folder = output / f"random_{shape}"
    if (folder / "config.json").is_file():
        return folder
    config = LlamaActionConfig(**SHAPES[shape], dtype=dtype)
    with torch.device("meta"):
        model = ARCHITECTURES["LlamaActionForCausalLM"](config)
    model = model.to_empty(device=device).to(dtype=dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    partial = folder.with_name(folder.name + ".partial")
    write_weights(model.cpu(), partial, "5GB")
    partial.replace(folder)
    return folder


@dataclass(frozen=True)
class Traffic:
    """What a decode step of a model must read from memory.

    `layers` and `head` count weights: those of all layers with the final norm, and the head's rows of image tokens.
    `kv` counts elements of the KV cache a token of one rollout.
    """

    layers: int
    head: int
    kv: int
    image_tokens: int
    action_slots: int

    @classmethod
    def of(cls, folder: Path) -> "Traffic":
        """Count the weights and the KV cache of the model in a checkpoint folder, from its config alone."""
        config = load_config(folder)
        with torch.device("meta"):
            model = ARCHITECTURES[(config.architectures or [])[0]](config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        embedding = model.model.embed_tokens.weight.numel()
        return cls(
            layers=sum(p.numel() for p in model.model.parameters()) - embedding,
            head=config.image_vocab_size * config.hidden_size,
            kv=2 * config.num_hidden_layers * (config.num_key_value_heads or 0) * head_dim,
            image_tokens=config.layout.image_tokens,
            action_slots=config.layout.action_slots,
        )

    def frame_bytes(
        self,
        rollouts: int,
        frames_before: float,
        *,
        element: int,
        weight_bytes: int | None,
        head_bytes: int | None,
        kv_bytes: int | None,
    ) -> float:
        """Bytes read while `rollouts` generate a frame each after `frames_before` frames, a decode step a token."""
        block = self.image_tokens + self.action_slots
        length = frames_before * block + self.image_tokens / 2
        weights = self.layers * (weight_bytes or element) + self.head * (head_bytes or element)
        return self.image_tokens * (weights + rollouts * length * self.kv * (kv_bytes or element))
