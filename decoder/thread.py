"""Turns tokens into frames in a thread of its own; decides when a rollout is decoded, and with what else."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from decoder.framewise import Decoder
from decoder.video import Pixels, to_uint8
from tokenizer import Frames, TokenGrid
from tokenizer.model import frames_at_once

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Piece:
    """Tokens that wait to be decoded, and what is made of their frames or, with `rounded`, of their 8-bit pixels."""

    tokens: TokenGrid
    then: Callable[[Any, float], Any]
    rounded: bool
    future: Future[Any]


class RolloutDecoding:
    """Decides when the tokens of rollouts are decoded.

    The decoder works in a thread of its own, on a CPU in that of `tokenizer.cores`, never in an event loop.

    A framewise decoder on a GPU decodes frames while the next ones are generated, on a stream of its own. A
    decoder on a CPU, which would take the cores from the engine, and one that looks at several frames (not framewise)
    decode a rollout when all its tokens are there.

    Args:
        decoder: turns tokens into frames.
        adapted: decoders of rollouts with an adapter, by the adapter's name, where they differ from `decoder`; each
            has a thread of its own.
    """

    def __init__(self, decoder: Decoder, adapted: Mapping[str, Decoder] | None = None) -> None:
        self._thread = DecodingThread(decoder)
        self._adapted = {name: DecodingThread(each) for name, each in (adapted or {}).items()}

    def start(self, then: Callable[[Frames], _T], adapter: str | None = None) -> "Decoding[_T]":
        """Begin to decode a rollout. `then` is called in the thread with some of its frames, on the decoder's device.

        All frames of the rollout reach `then`, in order, in one piece or in several. `adapter` is the rollout's.
        """
        return Decoding(self._thread_of(adapter), then)

    def start_pixels(self, then: Callable[[Pixels], _T], adapter: str | None = None) -> "Decoding[_T]":
        """`start`, but `then` is called with 8-bit pixels. Frames that are decoded together are rounded together.

        A piece fails with `VideoError` if one of its frames is not finite.
        """
        return Decoding(self._thread_of(adapter), then, rounded=True)

    def close(self) -> None:
        """Wait for the frames that are being decoded; those behind them are given up."""
        for thread in (self._thread, *self._adapted.values()):
            thread.close()

    def _thread_of(self, adapter: str | None) -> "DecodingThread":
        return self._thread if adapter is None else self._adapted.get(adapter, self._thread)


class Decoding(Generic[_T]):
    """One rollout that is being decoded; see `RolloutDecoding.start` and, with `rounded`, `start_pixels`.

    `seconds` is what the decoder took for its frames so far.
    """

    def __init__(self, thread: "DecodingThread", then: Callable[[Any], _T], *, rounded: bool = False) -> None:
        self._thread, self._then, self._rounded = thread, then, rounded
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
        self._pieces.append(self._thread.decode(tokens, self._note, rounded=self._rounded))

    def _note(self, shown: Frames | Pixels, seconds: float) -> _T:
        self.seconds += seconds
        return self._then(shown)


class DecodingThread:
    """Decodes what waits, in a thread; on a GPU on a stream of its own, beside the engine's.

    Args:
        decoder: if it is framewise, frames of several rollouts go through it together. On a CPU it computes by
            `tokenizer.cores.on_cores`.

    Attributes:
        beside_engine: whether frames are best decoded while the next ones are generated, see `RolloutDecoding`.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.beside_engine = decoder.framewise and decoder.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "terra-decode", torch.set_num_threads, (1,))
        self._most = frames_at_once(decoder.device) if decoder.framewise else 1
        self._waiting: deque[_Piece] = deque()
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)  # the weights are there
            self._stream = torch.cuda.Stream(decoder.device)

    def decode(self, tokens: TokenGrid, then: Callable[[Any, float], _T], *, rounded: bool = False) -> Future[_T]:
        """What `then` makes of the tokens' frames, when their turn comes.

        It is called in a thread, with the frames where the decoder has them or, if they are to be `rounded`, with
        their 8-bit pixels, and with their share of the seconds it took, without those of rounding.
        """
        future: Future[_T] = Future()
        self._waiting.append(_Piece(tokens, then, rounded, future))
        self._thread.submit(self._decode_waiting)
        return future

    def close(self) -> None:
        """Wait for the frames that are being decoded; those behind them are given up."""
        self._thread.shutdown(cancel_futures=True)
        _give_up(piece.future for piece in self._waiting)

    def _decode_waiting(self) -> None:
        pieces = self._take()
        if not pieces:  # an earlier call has taken them along
            return
        lengths = [len(piece.tokens) for piece in pieces]
        with torch.cuda.stream(self._stream):
            started = time.perf_counter()
            try:
                frames = self._decoder.decode(torch.cat([piece.tokens for piece in pieces]))
                if self._stream is not None:
                    self._stream.synchronize()
            except Exception as error:
                for piece in pieces:
                    piece.future.set_exception(error)
                return
            each = (time.perf_counter() - started) / len(frames)
            pixels = None
            if len(pieces) > 1 and any(piece.rounded for piece in pieces):
                with suppress(Exception):  # then each by itself: a rollout fails alone
                    pixels = to_uint8(frames)
            start = 0
            for piece, own in zip(pieces, frames.split(lengths), strict=True):
                try:
                    shown = own
                    if piece.rounded:
                        shown = to_uint8(own) if pixels is None else pixels[start : start + len(own)].copy()
                    piece.future.set_result(piece.then(shown, each * len(own)))
                except Exception as error:
                    piece.future.set_exception(error)
                start += len(own)

    def _take(self) -> list[_Piece]:
        """The pieces that have waited longest and are still wanted, until they fill the decoder."""
        pieces, num_frames = [], 0
        while self._waiting and num_frames < self._most:
            piece = self._waiting.popleft()
            if piece.future.set_running_or_notify_cancel():
                pieces.append(piece)
                num_frames += len(piece.tokens)
        return pieces


def _give_up(pieces: Iterable[Future[Any]]) -> None:
    for piece in pieces:
        piece.cancel()
