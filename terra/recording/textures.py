"""The two small tileable textures, mild noise for the ground and clouds; everything else has plain colors."""

import numpy as np
from jaxtyping import Float, UInt8

NOISE_SIZE = 256


def tileable_noise(rng: np.random.Generator, size: int, falloff: float, lowest: int) -> Float[np.ndarray, "size size"]:
    """Noise in [0, 1] that repeats without a seam, with amplitudes that fall as frequency ** -`falloff`.

    Frequencies below `lowest` waves a tile are left out, so that no large patch shows that the tile repeats.
    """
    spectrum = np.fft.fft2(rng.normal(size=(size, size)))
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size, 1 / size), np.fft.fftfreq(size, 1 / size)))
    weight = np.where(frequency >= lowest, np.maximum(frequency, 1.0) ** -falloff, 0.0)
    noise = np.fft.ifft2(spectrum * weight).real
    return np.clip(0.5 + noise / (5 * noise.std()), 0.0, 1.0)


def ground_texture() -> UInt8[np.ndarray, "size size"]:
    """Mild, soft unevenness of asphalt and grass."""
    noise = tileable_noise(np.random.default_rng(1), NOISE_SIZE, 1.2, 3)
    return np.round(255 * noise).astype(np.uint8)


def cloud_texture() -> UInt8[np.ndarray, "size size"]:
    """Soft cloud cover."""
    noise = tileable_noise(np.random.default_rng(2), NOISE_SIZE, 2.1, 2)
    return np.round(255 * noise).astype(np.uint8)
