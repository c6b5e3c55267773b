"""What a rollout starts from: its actions, and its context's tokens, which lines that share a context share too."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from terra.context import load_context
from terra.engine.base import EngineSpec
from terra.errors import ContextError
from terra.prompt import Actions
from terra.rollouts.manifest import Job
from tokenizer import Frames, LFQTokenizer, TokenGrid


class InThread(Protocol):
    """Runs work in the threads of that name, and gives what it returns."""

    def __call__(self, threads: str, work: Callable[[], Any], /) -> Awaitable[Any]:
        """Wait for the result."""
        ...


@dataclass
class _Context:
    """A tokenized context, or one that the holder of the lock is tokenizing."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokens: TokenGrid | None = None


class Inputs:
    """Loads and tokenizes in the threads "read" and "tokenize".

    Args:
        tokenizer: of the contexts.
        spec: the engine's.
        num_contexts: how many tokenized contexts to remember, those used last.
        in_thread: see `InThread`.
    """

    def __init__(self, tokenizer: LFQTokenizer, spec: EngineSpec, num_contexts: int, in_thread: InThread) -> None:
        self._tokenizer, self._spec, self._num_contexts, self._in = tokenizer, spec, num_contexts, in_thread
        self._contexts: OrderedDict[tuple[tuple[str, ...], int], _Context] = OrderedDict()

    async def actions(self, job: Job) -> Actions:
        """One action fewer than the rollout has frames. Raises TrajectoryError."""
        return await self._in("read", partial(self._load_actions, job))

    async def context(self, job: Job) -> TokenGrid:
        """The context's tokens, on the CPU. Raises ContextError or VideoError."""
        key = (job.contexts, job.num_context)
        context = self._contexts.setdefault(key, _Context())
        self._contexts.move_to_end(key)
        if len(self._contexts) > self._num_contexts:
            self._contexts.popitem(last=False)
        async with context.lock:
            tokens = context.tokens
            if tokens is None:
                frames = await self._in("read", partial(self._load_context, job))
                tokens = context.tokens = await self._in("tokenize", lambda: self._tokenizer.encode(frames).cpu())
            return tokens

    def _load_actions(self, job: Job) -> Actions:
        trajectory = job.load_trajectory().resample(self._spec.fps)
        trajectory.require(job.num_frames)
        return torch.from_numpy(trajectory.actions(job.num_frames - 1, self._spec.waypoint_times))

    def _load_context(self, job: Job) -> Frames:
        load = partial(load_context, image_size=self._tokenizer.config.image_size, fps=self._spec.fps)
        if len(job.contexts) == 1:
            return load(job.contexts[0], num_frames=job.num_context)
        pictures = job.contexts[: job.num_context]
        if len(pictures) < job.num_context:
            got = len(pictures)
            raise ContextError(f"{job.where}: context_frames: expected {job.num_context} or more pictures, got {got}")
        return torch.cat([load(each, num_frames=1) for each in pictures])
