"""The world model: a Llama that predicts the next frame's tokens from earlier frames and actions.

Importing this package registers both classes with transformers' AutoConfig and AutoModel, so that released
checkpoints load with no remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from terra.world_model.config import LlamaActionConfig
from terra.world_model.loading import ARCHITECTURES, load_adapter, load_config, load_world_model, write_weights
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

AutoConfig.register(LlamaActionConfig.model_type, LlamaActionConfig, exist_ok=True)
for _auto in (AutoModel, AutoModelForCausalLM):
    # A tuple: transformers then chooses by the config's `architectures`.
    _auto.register(LlamaActionConfig, tuple(ARCHITECTURES.values()), exist_ok=True)  # pyright: ignore[reportArgumentType]

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
