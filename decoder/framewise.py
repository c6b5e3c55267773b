"""Tokens to frames: what a decoder is, and the one that shows each frame by itself."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Literal, Protocol, get_args, runtime_checkable

import torch

from tokenizer.errors import ConfigError
from tokenizer.model import MAX_FRAMES_AT_ONCE
from tokenizer.types import Frames, TokenGrid

Dtype = Literal["float32", "bfloat16", "float16"]


class DecodesTokens(Protocol):
    """Anything that turns token grids into as many frames, such as an `LFQTokenizer`."""

    def decode(self, tokens: TokenGrid) -> Frames:
        """Frames in [-1, 1] for int64 token grids; `ValueError` for grids that are not the tokenizer's."""
        ...


@runtime_checkable
class Decoder(DecodesTokens, Protocol):
    """Turns the tokens of a rollout into its frames, one frame for each grid."""

    @property
    def framewise(self) -> bool:
        """Whether each frame depends on its own tokens alone, so that frames of several rollouts may be mixed."""
        ...

    @property
    def device(self) -> torch.device:
        """Where frames are decoded."""
        ...


def element_type(name: Dtype) -> torch.dtype:
    """The element type of a decoder's setting. Raises ConfigError for another name."""
    if name not in get_args(Dtype):
        raise ConfigError(f"decoder.dtype: expected one of {', '.join(get_args(Dtype))}, got {name!r}")
    return getattr(torch, name)


class FramewiseDecoder:
    """Decodes each frame alone, with the tokenizer's own decoder (anything that has `decode`, as LFQTokenizer).

    So a frame looks the same wherever it stands in a rollout, and a rollout can be shown while it grows. Another type,
    or compiling, works on a copy of the tokenizer.

    Args:
        tokenizer: a module, unless `dtype` is float32.
        dtype: element type to decode in. "bfloat16" is several times faster on a GPU, and on a CPU that multiplies it.
        compiled: torch.compile the tokenizer's module `decoder`: twice as fast on a GPU, no faster on a CPU. A GPU gets
            lots of 1, 4 and 16 frames then, filled up with the last one, of which the first of each size waits some
            20 s.

    Raises:
        ConfigError: another type, or a tokenizer with no such module to compile.
    """

    framewise = True

    def __init__(self, tokenizer: DecodesTokens, dtype: Dtype = "float32", *, compiled: bool = False) -> None:
        element = element_type(dtype)
        self.tokenizer = tokenizer
        if (element != torch.float32 or compiled) and isinstance(tokenizer, torch.nn.Module):
            self.tokenizer = deepcopy(tokenizer).to(element)
        if compiled:
            network = getattr(self.tokenizer, "decoder", None)
            if not isinstance(network, torch.nn.Module):
                raise ConfigError(f"decoder.compiled: {type(tokenizer).__name__} has no module `decoder` to compile")
            network.compile(dynamic=False)
        self._lots = [1, 4, MAX_FRAMES_AT_ONCE] if compiled and self.device.type == "cuda" else []

    @property
    def device(self) -> torch.device:
        """Where frames are decoded."""
        if isinstance(self.tokenizer, torch.nn.Module):
            return next(self.tokenizer.parameters()).device
        return torch.device("cpu")

    @torch.no_grad()
    def decode(self, tokens: TokenGrid) -> Frames:
        """float32 frames in [-1, 1] for int64 token grids, on the tokenizer's device; `ValueError` for other tokens."""
        if not self._lots or not len(tokens):
            return self.tokenizer.decode(tokens).float()
        return torch.cat([self.tokenizer.decode(lot)[:count].float() for lot, count in filled(tokens, self._lots)])


def filled(tokens: TokenGrid, sizes: Sequence[int]) -> Iterator[tuple[TokenGrid, int]]:
    """Grids in lots of these ascending sizes, and how many of each are theirs: the last is filled up with its last."""
    for some in tokens.split(sizes[-1]):
        size = next(size for size in sizes if size >= len(some))
        yield torch.cat([some, *[some[-1:]] * (size - len(some))]), len(some)
