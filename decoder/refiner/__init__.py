"""The video refiner: latent diffusion over framewise decoded frames, so that what one shows agrees with the next.

tokens --tokenizer.decode--> frames --resize, VAE--> condition --+
                                                                 +--> 15 Euler steps of the UNet --VAE--> frames
noise, by seed and frame ----------------------------------------+

The networks are diffusers' (those of Stable Video Diffusion); nothing else of ours imports it.
"""

from decoder.refiner.config import RefinerConfig
from decoder.refiner.decoder import RefinerDecoder
from decoder.refiner.model import Refiner

__all__ = ["Refiner", "RefinerConfig", "RefinerDecoder"]
