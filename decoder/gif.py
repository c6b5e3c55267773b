"""Writes GIFs by Pillow: every frame is kept, the total duration is right, one shared palette avoids flicker."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image

_TRANSPARENT = 255  # palette index that keeps the pixel of the previous frame
_PALETTE_PIXELS = 1 << 15
_DITHER_STEPS = 8.0  # peak to peak, in 8-bit steps: about the distance of two colors of a palette
_BAYER = np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) / 15 - 0.5


class GifSink:
    """Collects frames; `finish` computes their shared palette and writes the file."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path = path
        self._fps = fps
        self._frames: list[np.ndarray] = []

    def append(self, frame: UInt8[np.ndarray, "height width 3"]) -> None:
        """Keep a copy of one frame."""
        self._frames.append(frame.copy())

    def finish(self) -> None:
        """Write the file. Raises `OSError`."""
        palette = _shared_palette(self._frames)
        pictures = [_palette_picture(indices, palette) for indices in _changes(self._frames, palette)]
        # A GIF counts hundredths of a second: round each frame's end, so that the total stays right.
        ends = [round(100 * index / self._fps) for index in range(len(pictures) + 1)]
        pictures[0].save(
            self._path,
            format="GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=[10 * (end - start) for start, end in itertools.pairwise(ends)],
            loop=0,
            disposal=1,
            optimize=False,
            transparency=_TRANSPARENT,
        )

    def close(self) -> None:
        """Free the frames."""
        self._frames.clear()


def _shared_palette(frames: Sequence[np.ndarray]) -> Image.Image:
    """A palette picture of at most 255 colors, from pixels spread evenly over all frames."""
    step = max(1, math.isqrt(sum(frame.shape[0] * frame.shape[1] for frame in frames) // _PALETTE_PIXELS))
    pixels = np.concatenate([rearrange(frame[::step, ::step], "h w c -> (h w) c") for frame in frames])
    return Image.fromarray(pixels[None]).quantize(_TRANSPARENT, Image.Quantize.MEDIANCUT, kmeans=1)


def _changes(frames: Sequence[np.ndarray], palette: Image.Image) -> list[np.ndarray]:
    """Palette indices of each frame, transparent where the frame equals the previous one.

    Pillow merges equal consecutive frames into one long frame. To prevent that, the corner pixel of unchanged frames is
    transparent in every other frame.
    """
    drawn = [_to_palette(frames[0], palette)]
    shown = drawn[0]
    for frame in frames[1:]:
        indices = _to_palette(frame, palette)
        changes = np.where(indices == shown, _TRANSPARENT, indices)
        if changes[0, 0] == drawn[-1][0, 0] == _TRANSPARENT:
            changes[0, 0] = indices[0, 0]
        drawn.append(changes)
        shown = indices
    return drawn


def _to_palette(frame: np.ndarray, palette: Image.Image) -> np.ndarray:
    """Map to the nearest colors after ordered dithering, whose pattern, unlike error diffusion's, is fixed."""
    height, width = frame.shape[:2]
    pattern = np.tile(_BAYER, (height // 4 + 1, width // 4 + 1))[:height, :width, None] * _DITHER_STEPS
    dithered = Image.fromarray(np.clip(frame + pattern, 0, 255).round().astype(np.uint8))
    return np.asarray(dithered.quantize(palette=palette, dither=Image.Dither.NONE))


def _palette_picture(indices: np.ndarray, palette: Image.Image) -> Image.Image:
    colors = palette.getpalette() or []
    picture = Image.fromarray(indices.astype(np.uint8))
    picture.putpalette(colors + [0] * (768 - len(colors)))
    return picture
