"""Loads the inputs of a batch's rollouts; lines that share a context share the tokens, too."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8

from decoder.video import to_uint8
from terra.context import load_context
from terra.errors import ContextError
from terra.pipeline import Pipeline
from terra.prompt import Actions
from terra.rollout import drive_actions, load_action_file
from terra.rollouts.manifest import Job
from tokenizer import Frames, TokenGrid
from tokenizer.limits import Limits


class InThread(Protocol):
    """Runs work in the thread pool of a name, and returns the work's result."""

    def __call__(self, threads: str, work: Callable[[], Any], /) -> Awaitable[Any]:
        """Run `work` and wait for its result."""
        ...


@dataclass
class _Context:
    """A tokenized context, or one that the holder of the lock is tokenizing."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tokens: TokenGrid | None = None
    frames: UInt8[np.ndarray, "frames height width 3"] | None = None


class Inputs:
    """Loads contexts and trajectories in the threads "read", and tokenizes contexts.

    Args:
        pipeline: its tokenizer encodes the contexts.
        num_contexts: number of tokenized contexts to remember, the last used ones.
        in_thread: see `InThread`.
        limits: bounds on what is read.
    """

    def __init__(self, pipeline: Pipeline, num_contexts: int, in_thread: InThread, limits: Limits) -> None:
        self._pipeline, self._num_contexts, self._in, self._limits = pipeline, num_contexts, in_thread, limits
        self._contexts: OrderedDict[tuple[tuple[str, ...], int], _Context] = OrderedDict()

    async def actions(self, job: Job) -> Actions:
        """The job's actions, one fewer than the rollout has frames. Raises ActionError."""
        return await self._in("read", partial(self._load_actions, job))

    async def context(self, job: Job) -> tuple[TokenGrid, UInt8[np.ndarray, "frames height width 3"]]:
        """The context's tokens, on the CPU, and its frames in 8 bits. Raises ContextError or VideoError."""
        key = (job.contexts, job.num_context)
        context = self._contexts.setdefault(key, _Context())
        self._contexts.move_to_end(key)
        if len(self._contexts) > self._num_contexts:
            self._contexts.popitem(last=False)
        async with context.lock:
            if context.tokens is None or context.frames is None:
                frames = await self._in("read", partial(self._load_context, job))
                context.tokens, context.frames = await self._pipeline.encode(frames), to_uint8(frames)
            return context.tokens, context.frames

    def _load_actions(self, job: Job) -> Actions:
        spec = self._pipeline.engine.spec
        if job.trajectory is not None:
            sample_id = job.sample_id if job.several_trajectories else None
            return load_action_file(job.trajectory, spec, job.num_frames, sample_id=sample_id, limits=self._limits)[0]
        return drive_actions(job.inline_trajectory(self._limits), job.num_frames, spec)[0]

    def _load_context(self, job: Job) -> Frames:
        try:
            return load_context(
                job.contexts,
                num_frames=job.num_context,
                image_size=self._pipeline.tokenizer.config.image_size,
                fps=self._pipeline.engine.spec.fps,
                limits=self._limits,
            )
        except ContextError as error:
            raise ContextError(str(error) if len(job.contexts) == 1 else f"{job.where}: {error}") from None
