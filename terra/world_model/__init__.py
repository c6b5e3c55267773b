"""The world model: a Llama that predicts the next frame's tokens from earlier frames and actions.

The modules of both classes register them with transformers' AutoConfig and AutoModel, so that released checkpoints load
with no remote code. Names are imported on first use, so that config.json is checked before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from terra.world_model.config import LlamaActionConfig
    from terra.world_model.loading import ARCHITECTURES, load_adapter, load_config, load_world_model, write_weights
    from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

__all__ = [
    "ARCHITECTURES",
    "LlamaActionConfig",
    "LlamaActionForCausalLM",
    "LlamaActionV2ForCausalLM",
    "load_adapter",
    "load_config",
    "load_world_model",
    "write_weights",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'terra.world_model' has no attribute {name!r}")
    return getattr(import_module("terra.world_model.loading"), name)
