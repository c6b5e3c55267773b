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

from terra.actions import TableSpace, Waypoints
from terra.driving.control import Driver, Steering
from terra.errors import ActionError, ConfigError
from terra.memory import MemoryRule, memory_frames
from terra.pipeline import Pipeline
from terra.place_map import MapPictures, Place
from terra.prompt import Action, Actions, Layout
from terra.sampling import SamplingParams
from terra.serving.about import About
from terra.serving.contexts import Contexts
from terra.serving.documents import Fields, Wanted, read_fields
from terra.serving.errors import ApiError
from terra.serving.forks import Forks
from terra.serving.jobs import Jobs
from terra.serving.messages import MapPose, MessageError, Open, Sampling, read_rows
from terra.serving.metrics import Metrics
from terra.serving.model import Model
from terra.serving.reader import Reader
from terra.serving.rollout import Fork, Player, context_moments
from terra.serving.scenes import Scene, Scenes
from terra.serving.session import LiveSession, Send
from terra.serving.settings import ServeSettings
from terra.serving.store import JobStore
from terra.window_plan import check_overlap, plan_windows

_SMALL_BYTES = 64 << 10  # JSON that a thread reads in a few milliseconds


def check_windows(settings: ServeSettings, layout: Layout, memory: int) -> None:
    """Raise ConfigError if overlap, context or rollout lengths leave no frame to generate beside `memory` frames."""
    check_overlap(settings.overlap, layout.max_frames, memory)
    if settings.map is not None:
        shortest = settings.num_context + 1
        list(plan_windows(shortest, shortest - 1, layout.max_frames, settings.overlap, memory, has_map=True))
    counts = {"num_context": settings.num_context, "uploads.max_frames": settings.uploads.pictures(layout.max_frames)}
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


def check_names(settings: ServeSettings) -> None:
    """Raise ConfigError if an adapter or a world has the base model's name: clients could not choose between them."""
    name = settings.model_name
    for group, folders in (("adapters", settings.adapters), ("worlds", settings.worlds)):
        if name in folders:
            raise ConfigError(f"{group}.{name}: expected another name than the base model's (model_name), got {name}")


class Service:
    """Owns one engine with its jobs and live sessions, and the services of further worlds.

    Args:
        pipeline: the loaded pipeline; closed with the service.
        settings: limits and folders.
        scenes: the scenes by id, see `load_scenes`.
        model_hash: hash of the weights.
        place: the map that sessions and jobs can remember; None for none.
        worlds: the services of further worlds by name, which start and end with this one.
        about: what the world says of itself on the page.

    Raises:
        ConfigError: see `check_windows` and `check_names`.
        OutputError: a data folder that can't be used.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: ServeSettings,
        scenes: Mapping[str, Scene],
        model_hash: str,
        place: MapPictures | None = None,
        worlds: "Mapping[str, Service] | None" = None,
        about: About | None = None,
    ) -> None:
        self.settings = settings
        self.worlds = dict(worlds or {})
        self.about = about or About()
        self.model = Model(pipeline, settings.model_name, settings.picture_threads, settings.uploads.at_once)
        memory = memory_frames(pipeline.memory, *pipeline.adapted_memory.values())
        check_windows(settings, self.model.spec.layout, memory)
        check_names(settings)
        self.place = None if place is None else Place(place, pipeline.encode_map)
        self.created = int(time.time())
        self.metrics = Metrics()
        self.scenes = Scenes(scenes, self.model)
        self.contexts = Contexts(self.model, settings.uploads, settings.num_context, settings.limits)
        self.store = JobStore(settings.data, settings.jobs.lifetime_seconds)
        self.jobs = Jobs(self.model, self.store, settings.jobs, self.metrics, model_hash, self.place)
        seconds = settings.jobs.max_frames / self.model.spec.fps
        self._wanted = Wanted(self.model.spec.space, seconds, settings.limits)
        self._reader = Reader(self._wanted, settings.uploads.read_bytes, settings.uploads.read_seconds)
        self.sessions: dict[str, LiveSession] = {}
        self.give_up = asyncio.Event()
        for each in self.worlds.values():
            each.give_up = self.give_up
        self.draining = False
        self._seats: Counter[str] = Counter()
        self.forks = Forks(settings.live)

    async def warm_up(self) -> None:
        """Warm up the models of all worlds, before the server listens. Raises EngineError; see `Model.warm_up`."""
        for each in (self, *self.worlds.values()):
            await each.model.warm_up()

    async def start(self) -> None:
        """Start background work in the running event loop, which all methods must use."""
        self._reader.start()
        await self.jobs.start()
        for each in self.worlds.values():
            await each.start()

    async def drain(self) -> None:
        """Refuse new work, tell live sessions, finish running jobs or requeue them. To be called once."""
        await asyncio.gather(self._drain(), *(each.drain() for each in self.worlds.values()))

    async def _drain(self) -> None:
        self.draining = True
        for session in list(self.sessions.values()):
            session.end("shutdown")
        await self.jobs.drain(self.settings.drain_seconds, self.give_up)
        ends = time.monotonic() + 3.0
        while self.sessions and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End sessions and jobs, and close the pipelines."""
        if not self.draining:
            self.give_up.set()
            await self.drain()
        for each in self.worlds.values():
            await each.close()
        self.store.close()
        await asyncio.to_thread(self._reader.close)
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

    async def read_fields(self, content: bytes | Mapping[str, str]) -> Fields:
        """Read the JSON of a video request off the event loop, and a large one outside this process.

        Raises:
            ApiError: 400, and 413 for one that takes too much time or memory.
        """
        size = len(content) if isinstance(content, bytes) else sum(map(len, content.values()))
        if size < _SMALL_BYTES:
            return await self.model.run("files", lambda: read_fields(content, self._wanted))
        return await self._reader.read(content)

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

    def adapter(self, model: str | None, scene: Scene | None) -> str | None:
        """The adapter that a request's `model` means; without a model the scene's. Raises ApiError (404)."""
        if model is not None:
            return self.model.adapter(model)
        return None if scene is None else scene.adapter

    def sampling(self, wanted: Sampling | None) -> SamplingParams:
        """The server's sampling parameters, with a client's changes."""
        changes = {} if wanted is None else wanted.model_dump(exclude_none=True)
        return SamplingParams(**{**vars(self.settings.sampling), **changes})

    async def _context_start(self, message: Open) -> Fork:
        usual: Actions | None = None
        scene = None if message.scene is None else self.scenes.find(message.scene)
        adapter = self.adapter(message.model, scene)
        if scene is not None:
            context, usual = await self.scenes.tokens(scene), scene.start
        else:
            assert message.context is not None
            context = await self.contexts.tokens(message.context)
        if message.actions is not None and len(message.actions) != len(context) - 1:
            got = len(message.actions)
            raise _invalid_actions(f"expected {len(context) - 1}, one between two context frames, got {got}")
        space = self.model.spec.space
        if isinstance(space, Waypoints):
            driver, actions = self._driven(message, len(context) - 1, usual)
        else:
            driver, actions = _played(message, len(context) - 1, usual, space)
        moments = context_moments(context, actions, driver, self.model.spec)
        memory = self.memory(message.memory, adapter)
        self.check_map_pose(message.map_pose, memory)
        pose = message.map_pose if message.map_pose is not None or scene is None else scene.map_pose
        place = None
        if self.place is not None and memory is not None and pose is not None:
            self._check_room(len(context), adapter)
            place = await self.place.seen_from(pose)
        return Fork(moments, len(context), self.sampling(message.sampling), message.seed or 0, adapter, memory, place)

    def memory(self, wanted: bool | None, adapter: str | None) -> MemoryRule | None:
        """How a video or a drive remembers, of a request's `memory`; None if it does not."""
        return None if wanted is False else self.model.pipeline.memory_for(adapter)

    def check_map_pose(self, map_pose: MapPose | None, memory: MemoryRule | None) -> None:
        """Raise ApiError (400) for a client's `map_pose` of a video or a drive that remembers no map."""
        if map_pose is not None and (self.place is None or memory is None):
            lacking = "map=" if self.place is None else "memory"
            message = f"map_pose: expected none without {lacking}, got one"
            raise ApiError(400, "invalid_request", message, param="map_pose")

    def _check_room(self, num_context: int, adapter: str | None) -> None:
        """Raise ApiError (400) for a context that leaves no room for a frame beside those of the map."""
        try:
            self.model.pipeline.plan(num_context + 1, num_context, adapter, has_map=True)
        except ConfigError as error:
            raise ApiError(400, "invalid_context", str(error), param="context") from None

    def _driven(self, message: Open, count: int, usual: Actions | None) -> tuple[Driver, Actions]:
        """The car at the first context frame, and the `count` actions between these."""
        speed = self.settings.start_speed if usual is None else _speed(usual[-1])
        speed = speed if message.speed is None else message.speed
        driver = Driver(Steering(0.0, speed), self.model.spec.fps)
        if message.actions is not None:
            return driver, self._given_rows(message)
        if usual is not None and message.speed is None:
            return driver, usual[:-1]
        made = driver.action(self.model.spec.waypoint_times)
        return driver, torch.from_numpy(made).expand(count, -1, -1).clone()

    def _given_rows(self, message: Open) -> Actions:
        slots = self.model.spec.layout.action_slots
        try:
            rows = read_rows(message.actions or [])
        except MessageError as error:
            raise ApiError(400, "invalid_message", str(error), param="actions") from None
        if any(len(each) != slots for each in rows):
            raise _invalid_actions(f"expected {slots} rows in each")
        actions = torch.from_numpy(np.array(rows, np.float32).reshape(-1, slots, 3))
        if bool((torch.diff(actions[:, :, 2], dim=1, prepend=torch.zeros(len(rows), 1)) <= 0).any()):
            raise _invalid_actions("expected times that increase from 0 s")
        return actions


def _played(message: Open, count: int, usual: Actions | None, space: TableSpace) -> tuple[Player, Actions]:
    """Who plays, with the neutral action, and the `count` actions between the context frames."""
    if message.speed is not None:
        raise ApiError(400, "invalid_message", f"speed: expected none, for the model's {space.title}", param="speed")
    player = Player(space, space.neutral)
    if message.actions is not None:
        try:
            values = [space.from_json(each, f"actions[{index}]") for index, each in enumerate(message.actions)]
        except ActionError as error:
            raise ApiError(400, "invalid_actions", str(error), param="actions") from None
        return player, torch.from_numpy(space.rows(np.array(values).reshape(-1, len(space.columns))))
    if usual is not None:
        return player, usual[:-1]
    return player, torch.from_numpy(player.action).expand(count, -1, -1).clone()


def _speed(action: Action) -> float:
    """Speed (m/s) from the ego position to the first waypoint [y, x, t]."""
    return float(np.hypot(*action[0, :2].numpy()) / action[0, 2].numpy())


def _invalid_actions(message: str) -> ApiError:
    return ApiError(400, "invalid_actions", f"actions: {message}", param="actions")
