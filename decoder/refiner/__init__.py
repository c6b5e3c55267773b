"""The video refiner: latent diffusion over framewise decoded frames, which makes consecutive frames consistent.

tokens --tokenizer.decode--> frames --resize, VAE--> condition --+
                                                                 +--> 15 Euler steps of the UNet --VAE--> frames
noise, by seed and frame ----------------------------------------+

The networks are those of Stable Video Diffusion, from diffusers, which no other package of Terra imports.
"""

from decoder.refiner.config import RefinerConfig
from decoder.refiner.decoder import RefinerDecoder
from decoder.refiner.model import Refiner

__all__ = ["Refiner", "RefinerConfig", "RefinerDecoder"]
