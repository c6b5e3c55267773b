"""The tokenizer turns frames into tokens and back: a convolutional autoencoder with lookup-free quantization.

Names are imported on first use, so that `tokenizer.errors` and a command's `--help` do not pay for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizer.config import EncoderDecoderConfig, LFQTokenizerConfig, LossWeights, QuantizerConfig
    from tokenizer.losses import tokenizer_loss
    from tokenizer.model import LFQTokenizer
    from tokenizer.types import Frames, TokenGrid

__all__ = [
    "EncoderDecoderConfig",
    "Frames",
    "LFQTokenizer",
    "LFQTokenizerConfig",
    "LossWeights",
    "QuantizerConfig",
    "TokenGrid",
    "tokenizer_loss",
]

_MODULES = {
    "EncoderDecoderConfig": "tokenizer.config",
    "Frames": "tokenizer.types",
    "LFQTokenizer": "tokenizer.model",
    "LFQTokenizerConfig": "tokenizer.config",
    "LossWeights": "tokenizer.config",
    "QuantizerConfig": "tokenizer.config",
    "TokenGrid": "tokenizer.types",
    "tokenizer_loss": "tokenizer.losses",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenizer' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
