"""From tokens to frames: the Decoder protocol, and the decoder that decodes each frame by itself."""

import threading
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from tokenizer.cores import on_cores
from tokenizer.cuda_graphs import capture_graph
from tokenizer.errors import ConfigError
from tokenizer.model import MAX_FRAMES_AT_ONCE
from tokenizer.types import Frames, TokenGrid

Dtype = Literal["float32", "bfloat16", "float16"]

BATCH_SIZES = (1, 4, MAX_FRAMES_AT_ONCE)
"""Numbers of frames for which a compiled decoder is compiled on a GPU."""


class DecodesTokens(Protocol):
    """Anything that turns token grids into as many frames, such as an `LFQTokenizer`."""

    def decode(self, tokens: TokenGrid) -> Frames:
        """Decode int64 token grids to frames in [-1, 1]; raise `ValueError` for grids that are not the tokenizer's."""
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
    """The torch data type of the setting `decoder.dtype`. Raises ConfigError for an unknown name."""
    if name not in get_args(Dtype):
        raise ConfigError(f"decoder.dtype: expected one of {', '.join(get_args(Dtype))}, got {name!r}")
    return getattr(torch, name)


class FramewiseDecoder:
    """Decodes each frame by itself, with the tokenizer's `decode` method.

    A frame therefore does not depend on its index in the rollout, and a rollout can be shown while it grows. With
    another `dtype` than float32, or `compiled`, the decoder works on a copy of the tokenizer.

    Args:
        tokenizer: an object with `decode`, such as LFQTokenizer; it must be a torch module unless `dtype` is float32.
        dtype: data type of the decoding. "bfloat16" is several times faster on a GPU, and on a CPU with instructions
            for it.
        compiled: whether to torch.compile the tokenizer's module `decoder`, and on a GPU to replay it as CUDA graphs:
            two to four times as fast on a GPU, no faster on a CPU. On a GPU, frames are then decoded in batches of 1, 4
            or 16, see `padded_batches`; the first batch of each size takes some 20 s.

    Raises:
        ConfigError: an unknown data type, or a tokenizer without a module `decoder` to compile.
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
            network.forward = torch.compile(network.forward, dynamic=False)
            if self.device.type == "cuda":
                network.forward = _CudaGraphs(network.forward, self.device)
        self._batch_sizes = BATCH_SIZES if compiled and self.device.type == "cuda" else ()

    @property
    def device(self) -> torch.device:
        """The device of the tokenizer's weights."""
        if isinstance(self.tokenizer, torch.nn.Module):
            return next(self.tokenizer.parameters()).device
        return torch.device("cpu")

    def decode(self, tokens: TokenGrid) -> Frames:
        """Decode int64 token grids to float32 frames in [-1, 1] on `device`; ValueError as in `Decoder`."""
        if self.device.type != "cpu":
            return self._decode(tokens)
        # One by one, so that an engine's frames come in between.
        frames = [on_cores(partial(self._decode, one)).result() for one in tokens.split(1)]
        if len(frames) == 1:  # a turn more would let the decoder fall behind the engine
            return frames[0]
        return on_cores(partial(torch.cat, frames)).result()

    @torch.no_grad()
    def _decode(self, tokens: TokenGrid) -> Frames:
        if not self._batch_sizes or not len(tokens):
            return self.tokenizer.decode(tokens).float()
        batches = padded_batches(tokens, self._batch_sizes)
        return torch.cat([self.tokenizer.decode(batch)[:count].float() for batch, count in batches])


@dataclass(frozen=True)
class _CudaGraph:
    """The input of captured work, which is replaced before a replay, and its result, which a replay replaces."""

    graph: torch.cuda.CUDAGraph
    input: Tensor
    result: Tensor


class _CudaGraphs:
    """Work on one tensor as CUDA graphs, one for each shape, captured when that is met first.

    Several threads may call it at once, each on a stream of its own: the graphs are replayed one after another on one
    further stream, so that they share their memory. No host waits for a replay.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._work, self._device = work, device
        self._graphs: dict[torch.Size, _CudaGraph] = {}
        self._stream, self._memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._lock = threading.Lock()

    def __call__(self, tensor: Tensor) -> Tensor:
        callers = torch.cuda.current_stream(self._device)
        with self._lock, torch.cuda.stream(self._stream):
            if tensor.shape not in self._graphs:
                self._graphs[tensor.shape] = self._capture(tensor)
            captured = self._graphs[tensor.shape]
            self._stream.wait_stream(callers)
            captured.input.copy_(tensor)
            captured.graph.replay()
            result = captured.result.clone()
            callers.wait_stream(self._stream)
        # The allocator must not give their memory away before both streams are done with it.
        tensor.record_stream(self._stream)
        result.record_stream(callers)
        return result

    def _capture(self, tensor: Tensor) -> _CudaGraph:
        given = torch.zeros_like(tensor)
        graph, result = capture_graph(lambda: self._work(given), self._device, warm_ups=2, pool=self._memory)
        return _CudaGraph(graph, given, result)


def padded_batches(tokens: TokenGrid, sizes: Sequence[int]) -> Iterator[tuple[TokenGrid, int]]:
    """Split grids into batches whose sizes are among `sizes` (ascending, from 1); yield each with its count of grids.

    A batch is padded, with copies of its last grid, only if three quarters of it or more are frames to decode; else
    smaller batches take them: an H200 decodes 288 x 512 pixels of 4, 4 and 1 frames in 5.7 ms, of 16 in 7.7.
    """
    rest = tokens
    while len(rest):
        size = max(size for size in sizes if 3 * size <= 4 * len(rest))
        some, rest = rest[:size], rest[size:]
        yield torch.cat([some, *[some[-1:]] * (size - len(some))]), len(some)
