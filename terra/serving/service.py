"""The service behind the routes: owns model, scenes, contexts, jobs and live sessions, and starts and ends them."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from terra.driving.control import Driver, Steering
from terra.errors import ConfigError
from terra.pipeline import Pipeline
from terra.prompt import Actions, Layout
from terra.sampling import SamplingParams
from terra.serving.contexts import Contexts
from terra.serving.errors import ApiError
from terra.serving.forks import Forks
from terra.serving.jobs import Jobs
from terra.serving.messages import Open, Sampling
from terra.serving.metrics import Metrics
from terra.serving.model import Model
from terra.serving.rollout import Fork, context_moments
from terra.serving.scenes import Scene, Scenes
from terra.serving.session import LiveSession, Send
from terra.serving.settings import ServeSettings
from terra.serving.store import JobStore
from terra.windows import check_overlap
from tokenizer import TokenGrid


def check_windows(settings: ServeSettings, layout: Layout) -> None:
    """Raise ConfigError if overlap, context lengths or rollout lengths leave no frame to generate."""
    check_overlap(settings.overlap, layout.max_frames)
    counts = {"num_context": settings.num_context, "uploads.max_frames": settings.uploads.max_frames}
    for name, count in counts.items():
        if not 1 <= count < layout.max_frames:
            limit = layout.max_frames
            raise ConfigError(f"{name}: expected 1 to {limit - 1} (the window holds {limit}), got {count}")
    shortest, longest, default = settings.num_context + 1, settings.jobs.max_frames, settings.jobs.default_frames
    if not shortest <= default <= longest:
        expected = f"{shortest} (one more than num_context) to {longest} (jobs.max_frames)"
        raise ConfigError(f"jobs.default_frames: expected {expected}, got {default}")
    if settings.live.max_frames < shortest:
        got = settings.live.max_frames
        raise ConfigError(f"live.max_frames: expected {shortest} (one more than num_context) or more, got {got}")


class Service:
    """One engine, and the jobs and live sessions that use it.

    Args:
        pipeline: the loaded pipeline; closed with the service.
        settings: limits and folders.
        scenes: the scenes by id, see `load_scenes`.
        model_hash: hash of the weights.

    Raises:
        ConfigError: see `check_windows`.
        OutputError: a data folder that can't be used.
    """

    def __init__(
        self, pipeline: Pipeline, settings: ServeSettings, scenes: Mapping[str, Scene], model_hash: str
    ) -> None:
        self.settings = settings
        self.model = Model(pipeline, settings.model_name, settings.decode_threads)
        check_windows(settings, self.model.spec.layout)
        self.created = int(time.time())
        self.metrics = Metrics()
        self.scenes = Scenes(scenes, self.model)
        self.contexts = Contexts(self.model, settings.uploads, settings.num_context, settings.limits)
        self.store = JobStore(settings.data, settings.jobs.lifetime_seconds)
        self.jobs = Jobs(self.model, self.store, settings.jobs, self.metrics, model_hash)
        self.sessions: dict[str, LiveSession] = {}
        self.give_up = asyncio.Event()
        self.draining = False
        self._seats: Counter[str] = Counter()
        self.forks = Forks(settings.live)

    async def start(self) -> None:
        """Start background work in the running event loop, which all methods must use."""
        await self.jobs.start()

    async def drain(self) -> None:
        """Refuse new work, tell live sessions, finish running jobs or requeue them. To be called once."""
        self.draining = True
        for session in list(self.sessions.values()):
            session.end("shutdown")
        await self.jobs.drain(self.settings.drain_seconds, self.give_up)
        ends = time.monotonic() + 3.0
        while self.sessions and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End sessions and jobs, and close the pipeline."""
        if not self.draining:
            self.give_up.set()
            await self.drain()
        self.store.close()
        await asyncio.to_thread(self.model.close)

    def check_engine(self) -> None:
        """Raises ApiError (503) when the engine has failed."""
        if self.model.failure is not None:
            raise ApiError(503, "engine_failed", self.model.failure)

    def check_open(self) -> None:
        """Refuse new work when the engine has failed, or while the server is ending. Raises ApiError (503)."""
        self.check_engine()
        if self.draining:
            raise ApiError(503, "shutting_down", "the server is shutting down", retry_seconds=30)

    @contextmanager
    def admit(self, client: str) -> Iterator[str]:
        """Admit one live session of a client within the block; gives the session's id. Raises ApiError (429, 503)."""
        limits = self.settings.live
        if self._seats.total() >= limits.sessions:
            message = f"all {limits.sessions} live sessions are taken"
            raise ApiError(503, "server_full", message, retry_seconds=10)
        if self._seats[client] >= limits.sessions_per_client:
            message = f"expected at most {limits.sessions_per_client} live sessions of one client"
            raise ApiError(429, "too_many_sessions", message, retry_seconds=10)
        self._seats[client] += 1
        self.metrics.sessions(self._seats.total())
        name = f"live_{secrets.token_hex(12)}"
        try:
            yield name
        finally:
            self.sessions.pop(name, None)
            self._seats[client] -= 1
            if not self._seats[client]:
                del self._seats[client]
            self.metrics.sessions(self._seats.total())

    async def open(self, message: Open, client: str, send: Send) -> tuple[LiveSession, Fork]:
        """Create the live session that a client's first message describes, and its start. Raises ApiError (4xx)."""
        if message.fork is not None:
            start = self.forks.find(message.fork).reseeded(message.seed)
        else:
            start = await self._context_start(message)
        session = LiveSession(
            self.model,
            start,
            self.settings.live,
            self.metrics,
            send,
            partial(self.forks.keep, client),
            kind=message.format,
            quality=message.quality,
        )
        return session, start

    def sampling(self, wanted: Sampling | None) -> SamplingParams:
        """The server's sampling parameters, with a client's changes."""
        changes = {} if wanted is None else wanted.model_dump(exclude_none=True)
        return SamplingParams(**{**vars(self.settings.sampling), **changes})

    async def _context_start(self, message: Open) -> Fork:
        speed = self.settings.start_speed
        actions: Actions | None = None
        if message.scene is not None:
            scene = self.scenes.find(message.scene)
            context = await self.scenes.tokens(scene)
            if scene.start is not None:
                actions, speed = scene.start
        else:
            assert message.context is not None
            context = await self.contexts.tokens(message.context)
        speed = speed if message.speed is None else message.speed
        driver = Driver(Steering(0.0, speed), self.model.spec.fps)
        if message.actions is not None:
            actions = self._given_actions(message.actions, context)
        elif actions is None or message.speed is not None:
            made = driver.action(self.model.spec.waypoint_times)
            actions = torch.from_numpy(made).expand(len(context) - 1, -1, -1).clone()
        moments = context_moments(context, actions, driver)
        return Fork(moments, len(context), self.sampling(message.sampling), message.seed or 0)

    def _given_actions(self, rows: list[list[list[float]]], context: TokenGrid) -> Actions:
        slots = self.model.spec.layout.action_slots
        if len(rows) != len(context) - 1 or any(len(each) != slots for each in rows):
            message = f"expected {len(context) - 1} actions of {slots} rows, one between two context frames"
            raise ApiError(400, "invalid_actions", message, param="actions")
        actions = torch.from_numpy(np.array(rows, np.float32).reshape(-1, slots, 3))
        if bool((torch.diff(actions[:, :, 2], dim=1, prepend=torch.zeros(len(rows), 1)) <= 0).any()):
            raise ApiError(400, "invalid_actions", "expected times that increase from 0 s", param="actions")
        return actions
