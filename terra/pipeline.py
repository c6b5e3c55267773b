"""The pipeline: context frames and actions in, the frames of the drive out.

context frames --tokenizer.encode--> tokens --+
                                              +--> prompt --> engine: a session --> tokens --decoder--> frames
trajectory --> actions -----------------------+
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from decoder import Decoder, FramewiseDecoder
from decoder.thread import DecodingThread, give_up
from terra.engine.base import Engine
from terra.errors import CheckpointError
from terra.prompt import Action, Actions, build_prompt
from terra.sampling import SamplingParams
from terra.windows import SlidingSession, plan_windows
from tokenizer import Frames, LFQTokenizer, TokenGrid

_T = TypeVar("_T")

OnFrame = Callable[[int, int], None]
"""Called with (index of the request, index of the frame in its rollout) when a frame's tokens are there."""

OnPixels = Callable[[int, Frames], None]
"""Called with (index of the request, its next decoded frames), all of a rollout in order, maybe in another thread."""

OnRollout = Callable[[int, "Rollout"], None]
"""Called with (index of the request, its rollout) when that is finished, while others may still be under way."""


@dataclass(frozen=True)
class RolloutRequest:
    """What a rollout is made from.

    Attributes:
        context_frames: real frames, in [-1, 1].
        actions: one between each two frames of the rollout, so one fewer than it has frames; the first
            `context - 1` lie between context frames.
        seed: 0 or more.
    """

    context_frames: Frames
    actions: Actions
    seed: int

    @property
    def num_frames(self) -> int:
        """Frames of the rollout, context included."""
        return self.actions.shape[0] + 1


@dataclass(frozen=True)
class Rollout:
    """A finished rollout: context and generated frames, as tokens and as the decoder draws them.

    `seconds` holds what encoding, generating and decoding took; of decoding, what came after generating.
    """

    tokens: TokenGrid
    frames: Frames
    num_context: int
    seconds: dict[str, float]


class Pipeline:
    """Chains tokenizer, engine and decoder.

    A framewise decoder on a GPU decodes each frame while the next is generated. On a CPU it would take the cores from
    the engine, and any other decoder looks at several frames: these decode a rollout when its tokens are there.

    Args:
        tokenizer: frames to tokens.
        engine: predicts tokens; closed with the pipeline.
        decoder: tokens to frames.
        overlap: frames read again when the window slides.

    Raises:
        CheckpointError: the tokenizer is not the one that the world model was made for.
    """

    def __init__(self, tokenizer: LFQTokenizer, engine: Engine, decoder: Decoder, *, overlap: int = 3) -> None:
        self.tokenizer = tokenizer
        _check_pair(tokenizer, engine)
        self.engine = engine
        self.decoder = decoder
        self.overlap = overlap
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoding: DecodingThread | None = None
        if isinstance(decoder, FramewiseDecoder) and decoder.device.type == "cuda":
            self._decoding = DecodingThread(decoder)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingParams,
        on_frame: OnFrame | None = None,
        on_rollout: OnRollout | None = None,
        on_pixels: OnPixels | None = None,
    ) -> list[Rollout]:
        """Make several rollouts at once; the synchronous face of `rollout`. Works within a running event loop too.

        The callbacks are called in the pipeline's thread.
        """

        async def one(index: int, request: RolloutRequest) -> Rollout:
            here = on_frame and partial(on_frame, index), on_pixels and partial(on_pixels, index)
            rollout = await self.rollout(request, sampling, *here)
            if on_rollout is not None:
                on_rollout(index, rollout)
            return rollout

        async def together() -> list[Rollout]:
            return await asyncio.gather(*(one(index, request) for index, request in enumerate(requests)))

        return self.wait(together())

    async def rollout(
        self,
        request: RolloutRequest,
        sampling: SamplingParams,
        on_frame: Callable[[int], None] | None = None,
        on_pixels: Callable[[Frames], None] | None = None,
    ) -> Rollout:
        """Make one rollout whose actions are known.

        Raises:
            ConfigError: context or length that no window fits; see `terra.windows.plan_windows`.
        """
        num_context = request.context_frames.shape[0]
        list(plan_windows(request.num_frames, num_context, self.engine.spec.layout.max_frames, self.overlap))
        started = time.perf_counter()
        context = self.tokenizer.encode(request.context_frames).cpu()
        encoded = time.perf_counter()
        session = await self.open(context, request.actions[: num_context - 1], sampling, request.seed)
        frames = list(context)
        decoded: list[Future[Frames]] = []
        show = partial(_shown, on_pixels)
        if self._decoding is not None:
            decoded.append(self._decoding.decode(context, show))
        try:
            try:
                async for frame in session.run(request.actions[num_context - 1 :]):
                    frames.append(frame)
                    if self._decoding is not None:
                        decoded.append(self._decoding.decode(frame[None], show))
                    if on_frame is not None:
                        on_frame(len(frames) - 1)
            finally:
                await session.close()
            generated = time.perf_counter()
            pieces = [await asyncio.wrap_future(piece) for piece in decoded]
        except BaseException:
            give_up(decoded)
            raise
        tokens = torch.stack(frames)
        pixels = torch.cat(pieces) if pieces else show(self.decoder.decode(tokens))
        seconds = {
            "encode": encoded - started,
            "generate": generated - encoded,
            "decode": time.perf_counter() - generated,
        }
        return Rollout(tokens, pixels, num_context, seconds)

    async def open(self, context: TokenGrid, actions: Actions, sampling: SamplingParams, seed: int) -> SlidingSession:
        """Start a live rollout from tokenized context frames and the actions between them."""
        return await SlidingSession.open(self.engine, build_prompt(context, actions), sampling, seed, self.overlap)

    def drive(self, context_frames: Frames, actions: Actions, sampling: SamplingParams, seed: int) -> "Drive":
        """Start a live rollout to be driven step by step; the synchronous face of `open`.

        Args:
            context_frames: real frames, in [-1, 1].
            actions: those between the context frames, one fewer.
            sampling: how tokens are chosen.
            seed: 0 or more.
        """
        context = self.tokenizer.encode(context_frames).cpu()
        return Drive(self, self.wait(self.open(context, actions, sampling, seed)))

    def close(self) -> None:
        """Close the engine. Closing twice does nothing."""
        self.wait(self.engine.close())
        if self._decoding is not None:
            self._decoding.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something asynchronous in the pipeline's own event loop, and wait for what it gives."""
        # A loop in a thread of its own: notebooks run in a loop already, and live sessions outlast one call.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="terra-pipeline", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


class Drive:
    """A live rollout for synchronous callers: one action in, one frame out."""

    def __init__(self, pipeline: Pipeline, session: SlidingSession) -> None:
        self._pipeline = pipeline
        self._session = session

    def step(self, action: Action) -> Float[Tensor, "3 height width"]:
        """Apply the action to the last frame and return the next, in [-1, 1]."""
        tokens = self._pipeline.wait(self._session.step(action))
        return self._pipeline.decoder.decode(tokens[None])[0].cpu()

    def close(self) -> None:
        """End the rollout. Closing twice does nothing."""
        self._pipeline.wait(self._session.close())


def _shown(on_pixels: Callable[[Frames], None] | None, frames: Frames, _seconds: float = 0.0) -> Frames:
    frames = frames.cpu()
    if on_pixels is not None:
        on_pixels(frames)
    return frames


def _check_pair(tokenizer: LFQTokenizer, engine: Engine) -> None:
    tokens, layout = tokenizer.rows * tokenizer.cols, engine.spec.layout
    if tokens != layout.image_tokens or tokenizer.codebook_size != engine.spec.vocab_size:
        raise CheckpointError(
            f"tokenizer and world model: expected {layout.image_tokens} tokens a frame of a codebook of "
            f"{engine.spec.vocab_size}, got {tokens} of {tokenizer.codebook_size}"
        )
