"""A live rollout that can rewind: it keeps its last frames, and can continue from each of them.

Going back to frame k opens the window that the undisturbed rollout has at k, with the frames kept up to k as its
prompt and its own seed, so that the same actions give the same tokens again. The engine's prefix cache has computed
that prompt before. With memory, every frame among which the undisturbed rollout would choose is kept, too.
"""

import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int32

from terra.actions import TableSpace, Waypoints, require_waypoints
from terra.driving.control import Driver
from terra.engine.base import EngineSpec
from terra.errors import EngineError
from terra.memory import MOST_CANDIDATES, MemoryRule, Pose, advance, memory_frames, poses_along
from terra.pipeline import Pipeline
from terra.prompt import Action, Actions, FrameTokens, build_prompt
from terra.recall import PlaceMap, Recall
from terra.sampling import SamplingParams
from terra.window_plan import window_at
from terra.windows import SlidingSession
from tokenizer import TokenGrid


@dataclass(frozen=True, eq=False)
class Player:
    """What holds an action of a model that is not driven, until it is told another one; immutable, as `Driver` is.

    Attributes:
        space: the model's action space.
        values: the action, in the space's columns.
    """

    space: TableSpace
    values: Float64[np.ndarray, " columns"]

    @property
    def action(self) -> Float32[np.ndarray, "slots action_dim"]:
        """The model's rows of the action."""
        return self.space.rows(self.values[None])[0]

    def told(self, values: Float64[np.ndarray, " columns"]) -> "Player":
        """Return a player with another action."""
        return replace(self, values=values)


Choice = Float32[np.ndarray, "slots action_dim"] | Literal["driver"] | None
"""An action, or the word for the driver's own; None where there is none yet."""


@dataclass(frozen=True, eq=False)
class Moment:
    """One frame of a live rollout.

    `action` led to it (None for the first frame); `driver` is the car, or who plays, at this frame; `pose` is where
    `terra.memory` takes the camera to be, None in worlds without poses; `memory` are the memory frames of the window in
    which it was generated, see `Recall.choose`. Token ids are kept in 32 bits, because a long session holds many.
    """

    index: int
    tokens: Int32[np.ndarray, "rows cols"]
    action: Float32[np.ndarray, "slots action_dim"] | None
    driver: Driver | Player
    generated: bool
    pose: Pose | None = None
    memory: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Fork:
    """The state of a rollout at one of its frames, from which other rollouts can start, with the same adapter.

    `memory` is how the rollout chooses memory frames, and `place` the map that it remembers; None for none.
    """

    moments: tuple[Moment, ...]
    num_context: int
    sampling: SamplingParams
    seed: int
    adapter: str | None = None
    memory: MemoryRule | None = None
    place: PlaceMap | None = None

    @property
    def last(self) -> Moment:
        """The frame from which the fork continues."""
        return self.moments[-1]

    def reseeded(self, seed: int | None) -> "Fork":
        """A copy with another seed, for another future; None keeps the seed."""
        return self if seed is None else replace(self, seed=seed)


def context_moments(
    context: TokenGrid, actions: Actions, driver: Driver | Player, spec: EngineSpec
) -> tuple[Moment, ...]:
    """The frames that a rollout starts from, along `actions`, which lie between them; `driver` is at the first."""
    moments: list[Moment] = []
    poses = poses_along(actions.numpy(), spec.space, spec.fps) if isinstance(spec.space, Waypoints) else None
    for index, grid in enumerate(context):
        action = actions[index - 1].numpy() if index else None
        if action is not None and isinstance(driver, Driver):
            driver = driver.moved_by(action)
        pose = None if poses is None else poses[index]
        moments.append(Moment(index, grid.numpy().astype(np.int32), action, driver, generated=False, pose=pose))
    return tuple(moments)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A frame in the making: the action that leads to it, the driver at it, and the driver as told last before it."""

    action: Float32[np.ndarray, "slots action_dim"]
    driver: Driver | Player
    told: Driver | Player

    def driver_now(self, newest: Driver | Player, told: Driver | Player, num_frames: int) -> Driver | Player:
        """The driver at this frame, who obeys the last order from here on.

        Args:
            newest: the driver at the newest complete frame, as told since; an order's time, such as a path's, is
                counted from there.
            told: the driver as told last.
            num_frames: frames from the newest one to this one. A car has moved meanwhile as it had been told before.
        """
        if self.told is told:
            return self.driver
        if isinstance(self.driver, Player) or isinstance(newest, Player):
            return newest
        return replace(newest, pose=self.driver.pose, num_since=newest.num_since + num_frames)


class LiveRollout:
    """Goes on with the driver's or given actions, and rewinds. Not for use by two callers at once.

    Args:
        pipeline: its engine generates the frames.
        start: the fork to continue from; see `context_moments`.
        history: number of frames to keep, at least a window's.
    """

    def __init__(self, pipeline: Pipeline, start: Fork, history: int) -> None:
        self._pipeline, self._spec, self._overlap = pipeline, pipeline.engine.spec, pipeline.overlap
        self._max_frames = self._spec.layout.max_frames
        self._start = start
        kept = max(history, self._max_frames) + (MOST_CANDIDATES if start.memory else 0)
        self._moments = deque(start.moments, maxlen=kept)
        self._session: SlidingSession | None = None
        self.adapter, self.memory = start.adapter, start.memory
        # The driver at the newest frame, and as told last; the engine's thread reads both when a frame begins.
        self._lock = threading.Lock()
        self._driver = self._told = start.last.driver

    @property
    def last(self) -> Moment:
        """The newest frame."""
        return self._moments[-1]

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The kept frames, oldest first."""
        return tuple(self._moments)

    @property
    def driver(self) -> Driver | Player:
        """The driver at the newest frame, as told since."""
        return self._driver

    def tell(self, driver: Driver | Player) -> None:
        """Give an order, by the driver at the newest frame who has it: frames that begin from now on obey it."""
        with self._lock:
            self._driver = self._told = driver

    async def run(self, actions: Iterator[Choice]) -> AsyncGenerator[Moment, None]:
        """Generate a frame for each action. To be closed before the rollout is.

        Args:
            actions: asked for an action when the action's frame can begin, perhaps in the engine's thread and while
                the frame before is in the making; None where there is none yet, see `terra.engine.base.RunsLive`.

        Raises:
            EngineError: an action does not fit the model, or the engine failed.
        """
        if self._session is None:
            self._session = await self._open()
        begun = deque[_Begun]()
        async with aclosing(self._session.run_live(self._begin(actions, begun))) as frames:
            async for tokens in frames:
                yield self._complete(tokens, begun)

    async def step(self, action: Float32[np.ndarray, "slots action_dim"] | None = None) -> Moment:
        """Generate the next frame with the given action, or with the driver's. Raises EngineError as `run`."""
        choices: list[Choice] = ["driver" if action is None else action]
        async with aclosing(self.run(iter(choices))) as moments:
            return await anext(moments)

    async def rewind(self, index: int) -> Moment:
        """Rewind to a frame, which becomes the last one.

        Raises:
            EngineError: the frame is not kept any more, or not generated yet.
        """
        kept = self._up_to(index)
        await self.close()
        self._moments = deque(kept, maxlen=self._moments.maxlen)
        self.tell(kept[-1].driver)
        return kept[-1]

    def fork(self, index: int) -> Fork:
        """The state of the rollout at a frame. Raises EngineError as `rewind`."""
        return replace(self._start, moments=tuple(self._up_to(index)))

    async def close(self) -> None:
        """Close the engine session; a further `step` opens another one."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _begin(self, actions: Iterator[Choice], begun: deque[_Begun]) -> Iterator[Action | None]:
        """The actions that frames begin with; what has begun is added to `begun`."""
        for action in actions:
            if action is None:
                yield None
                continue
            with self._lock:
                driver = begun[-1].driver_now(self._driver, self._told, len(begun)) if begun else self._driver
                taken, moved = self._taken(driver, action)
                begun.append(_Begun(taken, moved, self._told))
            yield torch.from_numpy(taken)

    def _complete(self, tokens: FrameTokens, begun: deque[_Begun]) -> Moment:
        """Keep the first frame that has begun, whose tokens these are."""
        assert self._session is not None
        with self._lock:
            first = begun.popleft()
            driver = self._driver = first.driver_now(self._driver, self._told, 1)
        grid, pose = tokens.numpy().astype(np.int32), self._pose(first.action)
        memory = tuple(self._session.memory)
        moment = Moment(self.last.index + 1, grid, first.action, driver, generated=True, pose=pose, memory=memory)
        self._moments.append(moment)
        return moment

    def _taken(
        self, driver: Driver | Player, action: Float32[np.ndarray, "slots action_dim"] | Literal["driver"]
    ) -> tuple[Float32[np.ndarray, "slots action_dim"], Driver | Player]:
        """The given action or the driver's, and the driver after it."""
        if isinstance(driver, Player):
            return (driver.action if isinstance(action, str) else action), driver
        if isinstance(action, str):
            return driver.action(self._spec.waypoint_times), driver.moved()
        return action, driver.moved_by(action)

    def _up_to(self, index: int) -> Sequence[Moment]:
        oldest = self._moments[0].index
        # The window that goes on from there must be kept whole.
        first = max(self._start.num_context - 1, oldest)
        kept = [moment for moment in self._moments if moment.index <= index]
        if not first <= index <= self.last.index or self._oldest_needed(index) < oldest:
            raise EngineError(f"frame: expected one of those kept, {self._first_frame()} to {self.last.index}")
        return kept

    def _first_frame(self) -> int:
        oldest = self._moments[0].index
        candidates = range(max(self._start.num_context - 1, oldest), self.last.index + 1)
        return next(each for each in candidates if self._oldest_needed(each) >= oldest)

    def _window_at(self, index: int) -> tuple[int, int]:
        memory, has_map = memory_frames(self.memory), self._start.place is not None
        return window_at(index, self._max_frames, self._overlap, memory, has_map=has_map)

    def _oldest_needed(self, index: int) -> int:
        """The oldest frame that the window after frame `index` depends on."""
        _, start = self._window_at(index)
        return max(0, start - MOST_CANDIDATES) if self.memory else start

    def _pose(self, action: Float32[np.ndarray, "slots action_dim"]) -> Pose | None:
        """The pose to which an action leads from the newest frame."""
        if self.last.pose is None:
            return None
        return advance(self.last.pose, action, require_waypoints(self._spec.space, "memory"), self._spec.fps)

    async def _open(self) -> SlidingSession:
        index, start = self._window_at(self.last.index)
        inside = [moment for moment in self._moments if moment.index >= start]
        tokens = torch.from_numpy(np.stack([moment.tokens for moment in inside]).astype(np.int64))
        led = [moment.action for moment in inside[1:] if moment.action is not None]
        actions = torch.from_numpy(np.stack(led)) if led else torch.zeros(0, *self._spec.action_shape)
        prompt, start, engine = build_prompt(tokens, actions), self._start, self._pipeline.engine
        recall = None if self.memory is None else self._recall(self.memory)
        return await SlidingSession.open(
            engine, prompt, start.sampling, start.seed, self._overlap, index, start.adapter, recall
        )

    def _recall(self, rule: MemoryRule) -> Recall:
        frames = [
            (torch.from_numpy(moment.tokens.astype(np.int64)), moment.pose)
            for moment in self._moments
            if moment.pose is not None
        ]
        start = self._start
        return Recall(rule, self._spec, start.num_context, frames, self._moments[0].index, start.place)
