"""`RefinerDecoder`: decodes tokens to frames and makes them consistent over time."""

from functools import partial
from pathlib import Path
from typing import final

import torch

from decoder.framewise import DecodesTokens, Dtype, element_type
from decoder.refiner.model import Latents, Refiner
from decoder.refiner.windows import frame_noise, refined_windows
from tokenizer.cores import on_cores
from tokenizer.errors import ConfigError
from tokenizer.types import Frames, TokenGrid


@final
class RefinerDecoder:
    """Decodes each frame with the tokenizer, then refines windows of frames, one window after the other.

    A frame depends only on the tokens of its window, its index and the seed. Memory holds one window, and on the CPU
    the returned frames in the refiner's size.

    Args:
        tokenizer: the tokenizer that made the tokens.
        refiner: the networks, on the device where they run.
        seed: seed of the noise, 0 or more.
        guidance: replaces the refiner's own guidance (see `RefinerConfig`).

    Raises:
        ConfigError: a seed or guidance out of range.
    """

    framewise = False

    def __init__(
        self, tokenizer: DecodesTokens, refiner: Refiner, *, seed: int = 0, guidance: tuple[float, float] | None = None
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"refiner: seed: expected 0 to 2^64 - 1, got {seed}")
        self.tokenizer, self.refiner, self.seed = tokenizer, refiner, seed
        config = refiner.config if guidance is None else refiner.config.replace(guidance=guidance)
        self.guidance = config.guidance

    @classmethod
    def from_pretrained(
        cls,
        tokenizer: DecodesTokens,
        pretrained: str | Path,
        *,
        seed: int = 0,
        guidance: tuple[float, float] | None = None,
        dtype: Dtype = "float32",
        device: str = "cpu",
    ) -> "RefinerDecoder":
        """Load the refiner from a folder or a Hub repository. Raises CheckpointError, ConfigError."""
        refiner = Refiner.from_pretrained(pretrained, element_type(dtype)).to(device)
        return cls(tokenizer, refiner, seed=seed, guidance=guidance)

    @property
    def device(self) -> torch.device:
        """Where frames are refined."""
        return self.refiner.device

    def decode(self, tokens: TokenGrid) -> Frames:
        """Decode int64 token grids to frames of the refiner's size in [-1, 1], on the CPU; errors as in `Decoder`."""
        work = partial(self._decode, tokens)
        return on_cores(work).result() if self.device.type == "cpu" else work()

    @torch.no_grad()
    def _decode(self, tokens: TokenGrid) -> Frames:
        config = self.refiner.config
        kept = []
        for window in refined_windows(len(tokens), config.num_frames, config.overlap):
            frames = self.refiner.fit(self.tokenizer.decode(tokens[window.start : window.stop]))
            condition = self.refiner.encode(frames)
            latents = self._denoise(condition, window.start)
            new = slice(window.keep_from - window.start, None)
            kept.append(self.refiner.decode(latents[new], frames[new], condition[new]))
        return torch.cat(kept)

    def _denoise(self, condition: Latents, first: int) -> Latents:
        """Denoise a window of latents given its condition; `first` is the index of its first frame in the video."""
        device = self.refiner.device
        noise = frame_noise(self.seed, range(first, first + len(condition)), self.refiner.latent_shape)
        guidance = torch.linspace(*self.guidance, len(condition))
        return self.refiner.denoise(noise.to(device), condition, guidance.to(device))
