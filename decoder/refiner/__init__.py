"""The video refiner: latent diffusion over framewise decoded frames, which makes consecutive frames consistent.

tokens --tokenizer.decode--> frames --resize, VAE--> condition --+
                                                                 +--> 15 Euler steps of the UNet --VAE--> frames
noise, by seed and frame ----------------------------------------+

The networks are those of Stable Video Diffusion, from diffusers, which no other package of Terra imports.

Names are imported on first use, so that settings are checked before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoder.refiner.config import RefinerConfig
    from decoder.refiner.decoder import RefinerDecoder
    from decoder.refiner.model import Refiner

__all__ = ["Refiner", "RefinerConfig", "RefinerDecoder"]

_MODULES = {
    "Refiner": "decoder.refiner.model",
    "RefinerConfig": "decoder.refiner.config",
    "RefinerDecoder": "decoder.refiner.decoder",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'decoder.refiner' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
