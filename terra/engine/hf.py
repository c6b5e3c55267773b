"""The engine on Hugging Face transformers: the reference that the others are compared with, on any torch device."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from transformers import DynamicCache

from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec, check_actions, check_prompt
from terra.errors import EngineError
from terra.prompt import SLOT_FILLER, Action, Actions, FrameTokens, Prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model import load_world_model


class HFEngine:
    """Runs the world model with a KV cache for each session, one session's frame at a time.

    Args:
        checkpoint: a checkpoint folder.
        dtype: element type of the weights, "float32" or "bfloat16".
        device: a torch device, such as "cpu" or "cuda".

    Raises:
        ConfigError: no such dtype or device.
        CheckpointError: see `terra.world_model.load_config`.
    """

    def __init__(self, checkpoint: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        self._model = load_world_model(checkpoint, dtype=torch_dtype(dtype), device=torch_device(device))
        self._spec = EngineSpec.of(self._model.config)
        # One thread: sessions take turns, a frame each, and the event loop stays free.
        cores = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "terra-hf", torch.set_num_threads, (cores,))
        self._closed = False

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        return self._spec

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> "HFSession":
        """See `terra.engine.base.Engine.open`."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_prompt(prompt, self._spec, seed)
        return self._session(prompt, sampling, seed)

    def _session(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> "HFSession":
        return HFSession(self, prompt, sampling, seed)

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        self._closed = True
        self._worker.shutdown()
        self._model.to("meta")  # pyright: ignore[reportArgumentType]


class HFSession:
    """One rollout with its own KV cache."""

    def __init__(self, engine: HFEngine, prompt: Prompt, sampling: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._model = engine._model
        self._layout = engine.spec.layout
        self._sampling = sampling
        self._seed = seed
        self._grid = prompt.tokens.shape[1:]
        self._num_frames = prompt.num_frames
        # What the cache has not seen yet: at first the whole prompt, later the last token of the last frame.
        self._unseen_ids = prompt.ids(self._layout.action_slots).tolist()
        self._unseen_actions = prompt.actions
        self._cache = DynamicCache(config=self._model.config)
        self._closed = False

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        check_actions(action[None], self._num_frames, self._engine.spec)
        if self._closed or self._engine._closed:
            raise EngineError("the session is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._engine._worker, self._next_frame, action)
        except asyncio.CancelledError:
            self._closed = True  # the thread goes on into the cache: nothing can continue from there
            raise

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        check_actions(actions, self._num_frames, self._engine.spec)
        for action in actions:
            yield await self.step(action)

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        self._closed = True
        self._cache = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def _next_frame(self, action: Action) -> FrameTokens:
        device = self._model.device
        seed = torch.tensor([self._seed], device=device)
        ids = self._unseen_ids + [SLOT_FILLER] * self._layout.action_slots
        actions = torch.cat([self._unseen_actions, action[None]]).to(device)
        logits = self._feed(torch.tensor([ids], device=device), actions[None])
        tokens: list[Tensor] = []
        while True:
            position = torch.tensor([self._cache.get_seq_length() - 1], device=device)
            tokens.append(sample_tokens(logits, self._sampling, seed, position))
            if len(tokens) == self._layout.image_tokens:
                break
            logits = self._feed(tokens[-1][None], None)
        frame = torch.cat(tokens).cpu()
        self._unseen_ids, self._unseen_actions = [int(frame[-1])], self._unseen_actions[:0]
        self._num_frames += 1
        return rearrange(frame, "(rows cols) -> rows cols", rows=self._grid[0])

    def _feed(self, ids: Tensor, actions: Tensor | None) -> Tensor:
        """Logits over the image tokens after the last of `ids`, which join the cache."""
        output = self._model(
            input_ids=ids, actions=actions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1, : self._engine.spec.vocab_size]
