"""A thread that turns tokens into pixels while the engine makes more tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from decoder import FramewiseDecoder
from tokenizer import Frames, TokenGrid
from tokenizer.model import frames_at_once

_T = TypeVar("_T")

_Piece = tuple[TokenGrid, Callable[[Frames, float], Any], Future[Any]]


class DecodingThread:
    """Decodes what waits, frames of all rollouts together; on a GPU on a stream of its own, beside the engine's.

    Args:
        decoder: shows each frame by itself, so that frames of several rollouts may go through it at once.
    """

    def __init__(self, decoder: FramewiseDecoder) -> None:
        self._decoder = decoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="terra-decode")
        self._waiting: deque[_Piece] = deque()
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)  # the weights are there
            self._stream = torch.cuda.Stream(decoder.device)

    def decode(self, tokens: TokenGrid, then: Callable[[Frames, float], _T]) -> Future[_T]:
        """What `then` makes of the tokens' frames, when their turn comes.

        It is called in the thread, with the frames where the decoder has them and their share of the seconds it took.
        """
        future: Future[_T] = Future()
        self._waiting.append((tokens, then, future))
        self._thread.submit(self._decode_waiting)
        return future

    def close(self) -> None:
        """Wait for the frames that are being decoded; those behind them are given up."""
        self._thread.shutdown(cancel_futures=True)
        give_up(future for _, _, future in self._waiting)

    def _decode_waiting(self) -> None:
        pieces = self._take()
        if not pieces:  # an earlier call has taken them along
            return
        lengths = [len(tokens) for tokens, _, _ in pieces]
        with torch.cuda.stream(self._stream):
            started = time.perf_counter()
            try:
                frames = self._decoder.decode(torch.cat([tokens for tokens, _, _ in pieces]))
                if self._stream is not None:
                    self._stream.synchronize()
            except Exception as error:
                for _, _, future in pieces:
                    future.set_exception(error)
                return
            each = (time.perf_counter() - started) / len(frames)
            for (_, then, future), own in zip(pieces, frames.split(lengths), strict=True):
                try:
                    future.set_result(then(own, each * len(own)))
                except Exception as error:
                    future.set_exception(error)

    def _take(self) -> list[_Piece]:
        """What has waited longest and is still wanted: as many frames as go through the decoder together, or more."""
        pieces, num_frames = [], 0
        while self._waiting and num_frames < frames_at_once(self._decoder.device):
            tokens, then, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                pieces.append((tokens, then, future))
                num_frames += len(tokens)
        return pieces


def give_up(pieces: Iterable[Future[Any]]) -> None:
    """Let what has not begun of these be decoded no more."""
    for piece in pieces:
        piece.cancel()
