"""The engine on Hugging Face transformers: the reference for all other engines, on any torch device."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_adapter, check_prompt
from terra.errors import EngineError
from terra.prompt import Action, Actions, FrameTokens, Prompt
from terra.sampling import SamplingParams
from terra.world_model import load_world_model
from terra.world_model.window import FramePrefix, TokenReader, WindowReader, sample_frame
from tokenizer.cores import on_cores

logger = logging.getLogger(__name__)


class Window(Protocol):
    """The decoding of one window: a KV cache, and the frames that are sampled into it one after the other."""

    def next_frame(self, action: Action) -> FrameTokens:
        """Apply the last frame's action and sample the tokens of the next frame (in the model's thread)."""
        ...


class ModelThread:
    """A world model and the one thread that runs the model: sessions take turns of a frame each.

    Args:
        checkpoint: a checkpoint folder.
        adapter: folder of a LoRA adapter to merge, or None.
        dtype: element type of the weights, "float32" or "bfloat16".
        device: a torch device, such as "cpu" or "cuda".

    Attributes:
        model: the world model.
        spec: the model's geometry and rates.
        failure: why the model can't be used anymore, in one line; None while it works.

    Raises:
        ConfigError: no such dtype or device.
        CheckpointError: see `terra.world_model.load_config`.
    """

    def __init__(self, checkpoint: Path, adapter: Path | None, dtype: str, device: str) -> None:
        at, kind = torch_device(device), torch_dtype(dtype)
        self.model = on_cores(lambda: load_world_model(checkpoint, adapter=adapter, dtype=kind, device=at)).result()
        self.spec = EngineSpec.of(self.model.config)
        self._closed = False
        self.failure: str | None = None
        self._prefilled = self._sampled = 0
        self._passes: list[int] = []

    @property
    def counters(self) -> EngineCounters:
        """Tokens that were prefilled and sampled, and the passes of windows that count them."""
        return EngineCounters(prefilled=self._prefilled, sampled=self._sampled, passes=tuple(self._passes))

    def count_passes(self, lengths: Iterable[int]) -> None:
        """Count passes by the tokens that each of them gave."""
        for length in lengths:
            self._passes += [0] * (length + 1 - len(self._passes))
            self._passes[length] += 1

    def check_open(self) -> None:
        """Raise an error after `close`, or after a step that failed.

        Raises:
            EngineError: the engine is closed or has failed.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        if self._closed:
            raise EngineError("the engine is closed")

    async def decode(self, window: Window, action: Action, prefill: int) -> FrameTokens:
        """Wait for the thread and let it decode a window's next frame, which prefills `prefill` tokens of a prompt.

        Raises:
            EngineError: the engine is closed or has failed.
        """
        self.check_open()
        frame = await asyncio.wrap_future(on_cores(lambda: self._decode(window, action)))
        self._prefilled += prefill
        self._sampled += frame.numel()
        return frame

    def _decode(self, window: Window, action: Action) -> FrameTokens:
        self.check_open()
        try:
            return window.next_frame(action)
        except EngineError:  # closed meanwhile
            raise
        except Exception as error:  # whatever torch meets: memory, a device
            logger.exception("the engine failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
            raise EngineError(self.failure) from error

    async def close(self) -> None:
        """Stop the frame that is being decoded, fail the waiting sessions, and free the weights."""
        self._closed = True
        await asyncio.wrap_future(on_cores(lambda: self.model.to("meta")))  # pyright: ignore[reportArgumentType]


class HFSession:
    """One rollout within one window of a model that has a `ModelThread`.

    Args:
        thread: runs the model.
        prompt: context frames of the window, and the actions between them.
        window: made from the prompt, with an empty KV cache.
    """

    def __init__(self, thread: ModelThread, prompt: Prompt, window: Window) -> None:
        self._thread = thread
        self._window: Window | None = window
        self._num_frames = prompt.num_frames
        self._unread = prompt.num_frames * thread.spec.layout.block  # tokens to prefill, the first action's included

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        check_actions(action[None], self._num_frames, self._thread.spec)
        if self._window is None:
            raise EngineError("the session is closed")
        try:
            frame = await self._thread.decode(self._window, action, self._unread)
        except BaseException:
            self._window = None  # a frame was left in the middle, or still is being decoded: nothing can follow it
            raise
        self._num_frames += 1
        self._unread = 0
        return frame

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        check_actions(actions, self._num_frames, self._thread.spec)
        for action in actions:
            yield await self.step(action)

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        self._window = None


class HFEngine:
    """Runs the world model with a KV cache for each session, one token a pass, one session's frame at a time.

    Args:
        checkpoint: a checkpoint folder.
        adapter: folder of a LoRA adapter to merge, or None.
        dtype: element type of the weights, "float32" or "bfloat16".
        device: a torch device, such as "cpu" or "cuda".

    Raises:
        ConfigError: no such dtype or device.
        CheckpointError: see `terra.world_model.load_config`.
    """

    adapters: tuple[str, ...] = ()

    def __init__(
        self, checkpoint: Path, *, adapter: Path | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        self._thread = ModelThread(checkpoint, adapter, dtype, device)

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        return self._thread.spec

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself; None while it works."""
        return self._thread.failure

    @property
    def counters(self) -> EngineCounters:
        """Tokens that were prefilled and sampled (of drafts, those that were accepted), and passes with drafts."""
        return self._thread.counters

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None) -> HFSession:
        """See `terra.engine.base.Engine.open`."""
        self._thread.check_open()
        check_adapter(adapter, self.adapters)
        check_prompt(prompt, self.spec, seed)
        return HFSession(self._thread, prompt, self._window(prompt, sampling, seed))

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        await self._thread.close()

    def _window(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> Window:
        return SequentialWindow(self._thread, prompt, sampling, seed, WindowReader(self._thread.model))


class SequentialWindow:
    """Decodes one token a pass."""

    def __init__(
        self, thread: ModelThread, prompt: Prompt, sampling: SamplingParams, seed: int, reader: TokenReader
    ) -> None:
        self._thread, self._sampling, self._seed, self._reader = thread, sampling, seed, reader
        self._context, self._actions = prompt.tokens.clone(), prompt.actions.clone()
        self._frame, self._num_frames = self._context[-1], prompt.num_frames  # the last frame; how many there are

    def next_frame(self, action: Action) -> FrameTokens:
        """See `Window.next_frame`."""
        tokens = self._decode(self._prefix(action))
        self._frame = rearrange(tokens, "(rows cols) -> rows cols", rows=len(self._frame))
        self._num_frames += 1
        return self._frame.clone()  # the caller may change it

    def _prefix(self, action: Action) -> FramePrefix:
        """What the cache has not seen yet: at first the whole prompt, later the last token of the last frame."""
        if self._reader.length:
            return FramePrefix.after_frame(
                self._frame[-1, -1:], action[None], self._num_frames - 1, self._reader.layout
            )
        actions = torch.cat([self._actions, action[None]])
        return FramePrefix.after_context(self._context[None], actions[None])

    def _decode(self, prefix: FramePrefix) -> Int[Tensor, " image_tokens"]:
        seed = torch.tensor([self._seed], device=self._thread.model.device)
        return sample_frame(self._reader, prefix, self._sampling, seed, self._thread.check_open)[0].cpu()
