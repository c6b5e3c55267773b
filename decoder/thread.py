"""Turns tokens into frames in a thread of its own; decides when a rollout is decoded, and with what else."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch

from decoder.framewise import BATCH_SIZES, Decoder
from decoder.video import Pixels, to_uint8
from tokenizer import Frames, TokenGrid
from tokenizer.errors import VideoError
from tokenizer.model import frames_at_once

_T = TypeVar("_T")


class DecodedFrames:
    """Some of the frames that were decoded together, for use in the decoder's thread.

    Attributes:
        frames: in [-1, 1], on the decoder's device.
    """

    def __init__(self, batch: "_Batch", own: slice) -> None:
        self.frames = batch.frames[own]
        self._batch, self._own = batch, own

    def pixels(self) -> Pixels:
        """The frames as 8-bit pixels; the first call rounds and copies all that were decoded together.

        Raises VideoError if one of these frames is not finite.
        """
        if len(self.frames) < len(self._batch.frames) and self._batch.pixels is not None:
            return self._batch.pixels[self._own].copy()  # else who keeps them would keep all
        return to_uint8(self.frames)


class _Batch:
    """Frames that were decoded together."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    @cached_property
    def pixels(self) -> Pixels | None:
        """The frames as 8-bit pixels; None if one is not finite."""
        try:
            return to_uint8(self.frames)
        except VideoError:
            return None


_Piece = tuple[TokenGrid, Callable[[DecodedFrames, float], Any], Future[Any]]


class RolloutDecoding:
    """Decides when the tokens of rollouts are decoded.

    The decoder works in a thread of its own, on a CPU in that of `tokenizer.cores`, never in an event loop.

    A framewise decoder decodes frames while the next ones are generated: on a GPU on a stream of its own, on a CPU in
    turns with an engine that computes there. A decoder that looks at several frames (not framewise) decodes a rollout
    when all its tokens are there.

    Args:
        decoder: turns tokens into frames.
        adapted: decoders of rollouts with an adapter, by the adapter's name, where they differ from `decoder`; each
            has a thread of its own.
    """

    def __init__(self, decoder: Decoder, adapted: Mapping[str, Decoder] | None = None) -> None:
        self._thread = DecodingThread(decoder)
        self._adapted = {name: DecodingThread(each) for name, each in (adapted or {}).items()}

    def start(self, then: Callable[[DecodedFrames], _T], adapter: str | None = None) -> "Decoding[_T]":
        """Begin to decode a rollout. `then` is called in the thread with some of its frames.

        All frames of the rollout reach `then`, in order, in one piece or in several. `adapter` is the rollout's.
        """
        thread = self._thread if adapter is None else self._adapted.get(adapter, self._thread)
        return Decoding(thread, then)

    async def warm_up(self, rows: int, cols: int) -> None:
        """Let framewise decoders on a GPU decode a batch of each size once, of grids of `rows` x `cols` tokens.

        A compiled decoder takes some 20 s for each size the first time.
        """
        for adapter, thread in ((None, self._thread), *self._adapted.items()):
            for size in BATCH_SIZES if thread.warms_up else ():
                decoding = self.start(DecodedFrames.pixels, adapter)
                decoding.add(torch.zeros(size, rows, cols, dtype=torch.int64))
                await decoding.finish()

    def close(self) -> None:
        """Wait for the frames that are being decoded; those behind them are given up."""
        for thread in (self._thread, *self._adapted.values()):
            thread.close()


class Decoding(Generic[_T]):
    """One rollout that is being decoded; see `RolloutDecoding.start`.

    `seconds` is what the decoder took for its frames so far.
    """

    def __init__(self, thread: "DecodingThread", then: Callable[[DecodedFrames], _T]) -> None:
        self._thread, self._then = thread, then
        self._waiting: list[TokenGrid] = []
        self._pieces: list[Future[_T]] = []
        self.seconds = 0.0

    def add(self, tokens: TokenGrid) -> None:
        """The tokens of the rollout's next frames."""
        self._waiting.append(tokens)
        if self._thread.beside_engine:
            self._submit()

    async def finish(self) -> list[_T]:
        """Wait until all frames are decoded; what `then` made of each piece. Raises what the decoder or `then` did."""
        if self._waiting:
            self._submit()
        try:
            return [await asyncio.wrap_future(piece) for piece in self._pieces]
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Let what has not begun be decoded no more."""
        _give_up(self._pieces)

    def _submit(self) -> None:
        tokens, self._waiting = torch.cat(self._waiting), []
        self._pieces.append(self._thread.decode(tokens, self._note))

    def _note(self, decoded: DecodedFrames, seconds: float) -> _T:
        self.seconds += seconds
        return self._then(decoded)


class DecodingThread:
    """Decodes what waits, in a thread; on a GPU on a stream of its own, beside the engine's.

    Args:
        decoder: if it is framewise, frames of several rollouts go through it together. On a CPU it computes by
            `tokenizer.cores.on_cores`.

    Attributes:
        beside_engine: whether frames are decoded while the next ones are generated, see `RolloutDecoding`.
        warms_up: whether the first batch of each size may take longer, see `RolloutDecoding.warm_up`.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.beside_engine = decoder.framewise
        self.warms_up = self.beside_engine and decoder.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "terra-decode", torch.set_num_threads, (1,))
        self._most = frames_at_once(decoder.device) if decoder.framewise else 1
        self._waiting: deque[_Piece] = deque()
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)  # the weights are there
            self._stream = torch.cuda.Stream(decoder.device)

    def decode(self, tokens: TokenGrid, then: Callable[[DecodedFrames, float], _T]) -> Future[_T]:
        """What `then` makes of the tokens' frames, when their turn comes.

        It is called in a thread, with the frames and their share of the seconds that the decoder took.
        """
        future: Future[_T] = Future()
        self._waiting.append((tokens, then, future))
        self._thread.submit(self._decode_waiting)
        return future

    def close(self) -> None:
        """Wait for the frames that are being decoded; those behind them are given up."""
        self._thread.shutdown(cancel_futures=True)
        _give_up(future for _, _, future in self._waiting)

    def _decode_waiting(self) -> None:
        pieces = self._take()
        if not pieces:  # an earlier call has taken them along
            return
        bounds = accumulate((len(tokens) for tokens, _, _ in pieces), initial=0)
        with torch.cuda.stream(self._stream):
            started = time.perf_counter()
            try:
                batch = _Batch(self._decoder.decode(torch.cat([tokens for tokens, _, _ in pieces])))
                if self._stream is not None:
                    self._stream.synchronize()
            except Exception as error:
                for _, _, future in pieces:
                    future.set_exception(error)
                return
            each = (time.perf_counter() - started) / len(batch.frames)
            for (tokens, then, future), (start, stop) in zip(pieces, pairwise(bounds), strict=True):
                try:
                    future.set_result(then(DecodedFrames(batch, slice(start, stop)), each * len(tokens)))
                except Exception as error:
                    future.set_exception(error)

    def _take(self) -> list[_Piece]:
        """The pieces that have waited longest and are still wanted, until they fill the decoder."""
        pieces, num_frames = [], 0
        while self._waiting and num_frames < self._most:
            tokens, then, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                pieces.append((tokens, then, future))
                num_frames += len(tokens)
        return pieces


def _give_up(pieces: Iterable[Future[Any]]) -> None:
    for piece in pieces:
        piece.cancel()
