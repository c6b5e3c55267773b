"""The pixels of a rollout, decoded while its next frames are generated."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from tokenizer import TokenGrid

Pixels = UInt8[np.ndarray, "frames height width 3"]


class GrowingPixels:
    """Decodes what is added, all that waits at a time; the next call begins when the last one has ended.

    Only for a decoder that shows each frame by itself. To be used in an event loop.

    Args:
        decode: token grids to pixels, in a thread.
    """

    def __init__(self, decode: Callable[[TokenGrid], Awaitable[Pixels]]) -> None:
        self._decode = decode
        self._waiting: list[Tensor] = []
        self._decoded: list[Pixels] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, frame: Int64[Tensor, "rows cols"]) -> None:
        """Have a frame decoded."""
        self._waiting.append(frame)
        if self._task is None:
            self._task = asyncio.create_task(self._decode_waiting())

    async def all(self) -> Pixels:
        """Those of all frames, at least one, when the last is decoded. Raises what `decode` raised."""
        while self._task is not None:
            await self._task
        return np.concatenate(self._decoded)

    def cancel(self) -> None:
        """Decode no more."""
        if self._task is not None:
            self._task.cancel()

    async def _decode_waiting(self) -> None:
        while self._waiting:
            grids = torch.stack(self._waiting)
            self._waiting.clear()
            self._decoded.append(await self._decode(grids))
        self._task = None
