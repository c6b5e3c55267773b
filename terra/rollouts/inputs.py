"""Loads the inputs of a batch's rollouts; lines that share a context or a map share the tokens, too."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import UInt8

from decoder.video import to_uint8
from terra.context import load_context
from terra.errors import ContextError
from terra.memory import memory_frames
from terra.pipeline import Pipeline
from terra.place_map import MapPictures, Place, load_map
from terra.prompt import Actions
from terra.recall import PlaceMap
from terra.rollout import load_action_file, track_actions
from terra.rollouts.manifest import Job
from tokenizer import Frames, TokenGrid
from tokenizer.limits import Limits

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


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


@dataclass
class _Map:
    """A map, or one that the holder of the lock is loading."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    place: Place | None = None


@dataclass(frozen=True, eq=False)
class SeenMap:
    """The map that a rollout remembers, in the axes of its first frame, and what the rollout's record says of it."""

    frames: PlaceMap
    described: dict[str, Any]


class Inputs:
    """Loads contexts, maps and trajectories in the threads "read", and tokenizes contexts and maps.

    Args:
        pipeline: its tokenizer encodes the contexts and maps.
        num_contexts: number of tokenized contexts to remember, the last used ones, and of maps.
        in_thread: see `InThread`.
        limits: bounds on what is read.
    """

    def __init__(self, pipeline: Pipeline, num_contexts: int, in_thread: InThread, limits: Limits) -> None:
        self._pipeline, self._num_contexts, self._in, self._limits = pipeline, num_contexts, in_thread, limits
        self._contexts: OrderedDict[tuple[tuple[str, ...], int], _Context] = OrderedDict()
        self._maps: OrderedDict[tuple[Path, int], _Map] = OrderedDict()  # by the frames that a window needs, too

    async def actions(self, job: Job) -> Actions:
        """The job's actions, one fewer than the rollout has frames. Raises ActionError."""
        return await self._in("read", partial(self._load_actions, job))

    async def context(self, job: Job) -> tuple[TokenGrid, UInt8[np.ndarray, "frames height width 3"]]:
        """The context's tokens, on the CPU, and its frames in 8 bits. Raises ContextError or VideoError."""
        context = self._kept(self._contexts, (job.contexts, job.num_context), _Context)
        async with context.lock:
            if context.tokens is None or context.frames is None:
                frames = await self._in("read", partial(self._load_context, job))
                context.tokens, context.frames = await self._pipeline.encode(frames), to_uint8(frames)
            return context.tokens, context.frames

    async def place(self, job: Job) -> SeenMap | None:
        """The map that the job remembers; None for none. Raises ContextError, DatasetError or VideoError."""
        if job.map is None:
            return None
        needed = memory_frames(self._pipeline.memory_for(job.adapter))
        kept = self._kept(self._maps, (job.map, needed), _Map)
        async with kept.lock:
            if kept.place is None:
                pictures = await self._in("read", partial(self._load_map, job.map, needed))
                kept.place = Place(pictures, self._pipeline.encode_map)
        return SeenMap(await kept.place.seen_from(job.map_pose), kept.place.pictures.describe(job.map_pose))

    def _kept(self, kept: OrderedDict[_Key, _Value], key: _Key, new: Callable[[], _Value]) -> _Value:
        """What is kept under a key, or a new value in the place of the one that was not used for longest."""
        value = kept.setdefault(key, new())
        kept.move_to_end(key)
        if len(kept) > self._num_contexts:
            kept.popitem(last=False)
        return value

    def _load_map(self, path: Path, at_least: int) -> MapPictures:
        spec, size = self._pipeline.engine.spec, self._pipeline.tokenizer.config.image_size
        return load_map(path, size, spec.fps, self._limits, at_least=at_least)

    def _load_actions(self, job: Job) -> Actions:
        spec = self._pipeline.engine.spec
        if job.trajectory is not None:
            sample_id = job.sample_id if job.several_trajectories else None
            return load_action_file(job.trajectory, spec, job.num_frames, sample_id=sample_id, limits=self._limits)[0]
        return track_actions(job.inline_trajectory(self._limits), job.num_frames, spec)[0]

    def _load_context(self, job: Job) -> Frames:
        try:
            return load_context(
                job.contexts,
                num_frames=job.num_context,
                image_size=self._pipeline.tokenizer.config.image_size,
                fps=self._pipeline.engine.spec.fps,
                limits=self._limits,
                views=self._pipeline.engine.spec.views,
            )
        except ContextError as error:
            raise ContextError(str(error) if len(job.contexts) == 1 else f"{job.where}: {error}") from None
