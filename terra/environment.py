"""Wraps the world model as a Gymnasium environment: reset to context frames, step with an action, get a frame.

    env = WorldEnv(pipeline, DriveContext.load(pipeline, "drive/*.png", "drive.json"))
    frame, info = env.reset(seed=0)
    frame, reward, terminated, truncated, info = env.step(action)

`WorldVectorEnv` steps many sessions of one engine together. `SteeringAction` and `SteeringVectorAction` take
[steering angle, speed] instead of an action. The same seed, context and actions give the tokens that `terra generate`
and `terra rollout` give. Nothing here knows where the road is: the reward is the user's, and nothing terminates.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8

from decoder.video import to_uint8
from terra.actions import Choice, Keys, Vector, Waypoints
from terra.context import load_context
from terra.driving.control import MAX_SPEED, Driver, Steering
from terra.engine.base import EngineSpec
from terra.errors import ActionError, ConfigError
from terra.extras import extras_named
from terra.pipeline import Pipeline
from terra.prompt import Actions, FrameTokens
from terra.rollout import load_inputs
from terra.sampling import SamplingParams
from terra.windows import SlidingSession
from tokenizer import Frames, TokenGrid
from tokenizer.cores import on_cores

with extras_named("terra.environment"):
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space

MAX_ANGLE = 0.6  # rad at the wheels, of a car
TOP_SPEED = 30.0  # m/s, of the driver's actions
_SEEDS = 2**63
_REMEMBERED = 64  # tokenized contexts

Image = UInt8[np.ndarray, "height width 3"]
Reward = Callable[[Image, np.ndarray], float]
"""Called with the frame and the action that led to it."""


@dataclass(frozen=True, eq=False)
class DriveContext:
    """The start of a drive: context frames in [-1, 1], and the actions between them, one fewer."""

    frames: Frames
    actions: Actions

    @classmethod
    def load(
        cls, pipeline: Pipeline, source: str | Path, trajectory: Path | None = None, *, num_frames: int = 3
    ) -> Self:
        """Load a start from files, as for `terra generate`; a single frame needs no trajectory.

        Raises:
            ContextError, VideoError, TrajectoryError: see `load_context` and `load_trajectory`.
            ConfigError: several frames and no trajectory.
        """
        spec = pipeline.engine.spec
        size = pipeline.tokenizer.config.image_size
        if trajectory is not None:
            inputs = load_inputs(
                source, trajectory, num_frames=num_frames, num_context=num_frames, image_size=size, spec=spec
            )
            return cls(inputs.context_frames, inputs.actions)
        if num_frames > 1:
            raise ConfigError(f"trajectory: expected one for {num_frames} context frames, got none")
        frames = load_context(source, num_frames=num_frames, image_size=size, fps=spec.fps, views=spec.views)
        return cls(frames, torch.zeros(0, *spec.action_shape))


class _Drives:
    """Sessions of one engine, by index of the environment, that step together."""

    def __init__(self, pipeline: Pipeline, sampling: SamplingParams, num: int) -> None:
        self._pipeline, self._sampling = pipeline, sampling
        self._sessions: list[SlidingSession | None] = [None] * num
        self._encode: Callable[[DriveContext], TokenGrid] = lru_cache(_REMEMBERED)(
            lambda context: pipeline.wait(pipeline.encode(context.frames))
        )

    def open(self, indices: Sequence[int], contexts: Sequence[DriveContext], seeds: Sequence[int]) -> list[FrameTokens]:
        """Start (or restart) the drives `indices`; returns the tokens of each one's last context frame."""
        self.close(indices)
        tokens = [self._encode(context) for context in contexts]

        async def start() -> list[SlidingSession]:
            given = zip(tokens, contexts, seeds, strict=True)
            opened = (self._pipeline.open(grid, each.actions, self._sampling, seed) for grid, each, seed in given)
            return await asyncio.gather(*opened)

        for index, session in zip(indices, self._pipeline.wait(start()), strict=True):
            self._sessions[index] = session
        return [grid[-1] for grid in tokens]

    def step(self, indices: Sequence[int], actions: np.ndarray) -> list[FrameTokens]:
        """Step the drives `indices` with elements of `action_space`; returns the tokens of each one's next frame."""
        sessions = [session for index in indices if (session := self._sessions[index]) is not None]
        if len(sessions) < len(indices):
            raise gymnasium.error.ResetNeeded("expected reset before step")
        rows = _rows(self._pipeline.engine.spec, actions)

        async def step() -> list[FrameTokens]:
            given = zip(sessions, torch.from_numpy(rows), strict=True)
            return await asyncio.gather(*(session.step(action) for session, action in given))

        return self._pipeline.wait(step())

    def draw(self, tokens: Sequence[FrameTokens]) -> UInt8[np.ndarray, "envs height width 3"]:
        """Decode one frame of each drive, all together, to 8-bit RGB."""
        grids = torch.stack(list(tokens))
        return on_cores(lambda: to_uint8(self._pipeline.decoder.decode(grids))).result()

    def close(self, indices: Sequence[int] | None = None) -> None:
        """End the drives `indices`, or all of them. Closing a drive that has not begun does nothing."""

        async def end(sessions: list[SlidingSession]) -> None:
            await asyncio.gather(*(session.close() for session in sessions))

        chosen = range(len(self._sessions)) if indices is None else indices
        self._pipeline.wait(end([session for index in chosen if (session := self._sessions[index]) is not None]))
        for index in chosen:
            self._sessions[index] = None


def _frame_space(pipeline: Pipeline) -> spaces.Box:
    return spaces.Box(0, 255, (*pipeline.tokenizer.config.image_size, 3), np.uint8)


def action_space(spec: EngineSpec) -> spaces.Space[Any]:
    """The world's actions as Gymnasium has them.

    Waypoints are rows of [y left (m), x forward (m), t (s)], with bounds of 80 m/s and the model's times; a vector is a
    box in its own units, keys are `MultiBinary`, a choice is `Discrete`.
    """
    space = spec.space
    if isinstance(space, Vector):
        return spaces.Box(np.array(space.low, np.float32), np.array(space.high, np.float32))
    if isinstance(space, Keys):
        return spaces.MultiBinary(len(space.names))
    if isinstance(space, Choice):
        return spaces.Discrete(len(space.names))
    times = np.array(spec.waypoint_times, np.float32)
    reach = MAX_SPEED * times
    low, high = np.stack([-reach, -reach, times], -1), np.stack([reach, reach, times], -1)
    return spaces.Box(low, high, dtype=np.float32)


def _rows(spec: EngineSpec, actions: np.ndarray) -> Float32[np.ndarray, "envs slots action_dim"]:
    """The model's rows of actions of the environment's space. Raises ActionError for one that is out of range."""
    space = spec.space
    if isinstance(space, Waypoints):
        return np.array(actions, np.float32)
    values = np.asarray(actions, np.float64).reshape(len(actions), -1)
    for each in values:
        if len(each) != len(space.columns):
            raise ActionError(f"action: expected {len(space.columns)} numbers of {space.title}, got {len(each)}")
        if problem := space.problem(each):
            raise ActionError(f"action: {problem}")
    return space.rows(values)


def _steering_space() -> spaces.Box:
    return spaces.Box(np.array([-MAX_ANGLE, 0], np.float32), np.array([MAX_ANGLE, TOP_SPEED], np.float32))


def _info(tokens: FrameTokens, seed: int, num_steps: int) -> dict[str, Any]:
    return {"tokens": tokens.numpy().copy(), "seed": seed, "num_steps": num_steps}


class WorldEnv(gymnasium.Env[Image, np.ndarray]):
    """An environment of one rollout; `action_space` says what its actions are.

    A frame is 8-bit RGB; `info` has its `tokens`, the rollout's `seed` and `num_steps`.

    `reset(seed=s)` makes the drive of seed s; without a seed, the next one from `np_random`. The first frame is the
    last context frame as the decoder draws it. `reset(options={"context": ...})` starts from another `DriveContext`,
    from then on.

    Args:
        pipeline: stays open when the environment is closed.
        context: the start of drives.
        sampling: how tokens are chosen.
        max_steps: steps after which a drive is truncated; None for no limit.
        reward: gives the reward of each step; None for 0.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        context: DriveContext,
        *,
        sampling: SamplingParams | None = None,
        max_steps: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        self.spec_of_engine = pipeline.engine.spec
        self.observation_space, self.action_space = _frame_space(pipeline), action_space(self.spec_of_engine)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": self.spec_of_engine.fps}
        self.render_mode = "rgb_array"
        self._drives = _Drives(pipeline, sampling or SamplingParams(), 1)
        self._context, self._max_steps, self._reward = context, max_steps, reward
        self._frame: Image | None = None
        self._num_steps, self._seed = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        """Start a drive. Raises ConfigError for an unknown option or a context that is none."""
        super().reset(seed=seed)
        (self._context,) = _contexts(options, [self._context])
        self._seed = int(self.np_random.integers(_SEEDS)) if seed is None else seed
        (tokens,) = self._drives.open([0], [self._context], [self._seed])
        self._num_steps = 0
        self._frame = frame = self._drives.draw([tokens])[0]
        return frame.copy(), _info(tokens, self._seed, 0)

    def step(self, action: np.ndarray) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        """Apply an action to the last frame.

        Raises:
            EngineError: waypoints that are not finite or of another shape.
            ActionError: another action that is out of range.
        """
        (tokens,) = self._drives.step([0], np.asarray(action)[None])
        self._num_steps += 1
        self._frame = frame = self._drives.draw([tokens])[0]
        reward = 0.0 if self._reward is None else float(self._reward(frame, action))
        truncated = self._max_steps is not None and self._num_steps >= self._max_steps
        return frame.copy(), reward, False, truncated, _info(tokens, self._seed, self._num_steps)

    def render(self) -> Image | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The last frame."""
        return None if self._frame is None else self._frame.copy()

    def close(self) -> None:
        """End the drive."""
        self._drives.close()


class WorldVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A vector environment of many drives in one engine, stepped together; each is as in `WorldEnv`.

    `reset(seed=s)` makes the drives of the seeds s, s + 1, ..., or of the seeds of a list. A truncated drive starts
    anew with the next step, whose action for it is of no effect (`AutoresetMode.NEXT_STEP`).

    Args:
        pipeline: stays open when the environment is closed.
        contexts: the start of each drive.
        sampling, max_steps, reward: as `WorldEnv` has them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        contexts: Sequence[DriveContext],
        *,
        sampling: SamplingParams | None = None,
        max_steps: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        self.spec_of_engine = pipeline.engine.spec
        self.num_envs = len(contexts)
        self.single_observation_space = _frame_space(pipeline)
        self.single_action_space = action_space(self.spec_of_engine)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = "rgb_array"
        self.metadata = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "render_modes": ["rgb_array"],
            "render_fps": self.spec_of_engine.fps,
        }
        self._drives = _Drives(pipeline, sampling or SamplingParams(), self.num_envs)
        self._contexts, self._max_steps, self._reward = list(contexts), max_steps, reward
        self._num_steps = np.zeros(self.num_envs, int)
        self._over = np.zeros(self.num_envs, bool)
        self._seeds = [0] * self.num_envs
        self._frames = np.zeros((self.num_envs, *self.single_observation_space.shape), np.uint8)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all drives. Raises ConfigError for an unknown option or a context that is none."""
        super().reset(seed=seed if isinstance(seed, int) or seed is None else seed[0])
        self._contexts = _contexts(options, self._contexts)
        if isinstance(seed, int):
            seed = [seed + index for index in range(self.num_envs)]
        tokens = self._start(range(self.num_envs), seed)
        self._frames = self._drives.draw(tokens)
        return self._frames.copy(), self._infos(tokens)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Apply an action to each drive; errors as `WorldEnv.step`."""
        going, anew = (np.flatnonzero(mask).tolist() for mask in (~self._over, self._over))
        tokens = dict(zip(going, self._drives.step(going, np.asarray(actions)[going]), strict=True)) if going else {}
        self._num_steps[going] += 1
        tokens |= dict(zip(anew, self._start(anew, None), strict=True)) if anew else {}
        grids = [tokens[index] for index in range(self.num_envs)]
        self._frames = self._drives.draw(grids)
        rewards = np.zeros(self.num_envs)
        if self._reward is not None:
            rewards[going] = [self._reward(self._frames[index], actions[index]) for index in going]
        self._over = np.zeros(self.num_envs, bool) if self._max_steps is None else self._num_steps >= self._max_steps
        ended = np.zeros(self.num_envs, bool)
        return self._frames.copy(), rewards, ended, self._over.copy(), self._infos(grids)

    def render(self) -> tuple[Image, ...]:
        """The last frames."""
        return tuple(self._frames.copy())

    def close_extras(self, **_: Any) -> None:
        """End all drives."""
        self._drives.close()

    def _start(self, indices: Sequence[int], seeds: Sequence[int] | None) -> list[FrameTokens]:
        indices = list(indices)
        if seeds is None:
            seeds = [int(seed) for seed in self.np_random.integers(_SEEDS, size=len(indices))]
        for index, seed in zip(indices, seeds, strict=True):
            self._seeds[index] = seed
        self._num_steps[indices] = 0
        self._over[indices] = False
        return self._drives.open(indices, [self._contexts[index] for index in indices], seeds)

    def _infos(self, tokens: Sequence[Int[torch.Tensor, "rows cols"]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for index, grid in enumerate(tokens):
            info = _info(grid, self._seeds[index], int(self._num_steps[index]))
            infos = self._add_info(infos, info, index)
        return infos


def steering_action(steering: Float[np.ndarray, " 2"], spec: EngineSpec) -> Float32[np.ndarray, "waypoints 3"]:
    """The action of wheels held at [angle in rad, left positive; speed in m/s]: an arc, see `Steering`."""
    angle, speed = (float(value) for value in steering)
    return Driver(Steering(angle, speed), spec.fps).action(spec.waypoint_times)


class SteeringAction(gymnasium.ActionWrapper):
    """A `WorldEnv` whose action is [steering angle in rad (left positive), speed in m/s]."""

    def __init__(self, env: WorldEnv) -> None:
        super().__init__(env)
        self.action_space = _steering_space()
        self._spec = env.spec_of_engine

    def action(self, action: Float[np.ndarray, " 2"]) -> Float32[np.ndarray, "waypoints 3"]:
        """See `steering_action`."""
        return steering_action(action, self._spec)


class SteeringVectorAction(gymnasium.vector.VectorActionWrapper):
    """A `WorldVectorEnv` whose actions are [steering angle in rad (left positive), speed in m/s] each."""

    def __init__(self, env: WorldVectorEnv) -> None:
        super().__init__(env)
        self.single_action_space = _steering_space()
        self.action_space = batch_space(self.single_action_space, env.num_envs)
        self._spec = env.spec_of_engine

    def actions(self, actions: Float[np.ndarray, "envs 2"]) -> Float32[np.ndarray, "envs waypoints 3"]:
        """See `steering_action`."""
        return np.stack([steering_action(each, self._spec) for each in actions])


def _contexts(options: dict[str, Any] | None, before: list[DriveContext]) -> list[DriveContext]:
    """The contexts in `reset`'s options, one for all or one for each; without the option, the earlier contexts."""
    options = options or {}
    for name in options.keys() - {"context"}:
        raise ConfigError(f"options: expected context, got {name!r}")
    given = options.get("context", before)
    given = [given] * len(before) if isinstance(given, DriveContext) else list(given)
    for each in given:
        if not isinstance(each, DriveContext):
            raise ConfigError(f"context: expected a DriveContext, got a {type(each).__name__}")
    if len(given) != len(before):
        raise ConfigError(f"context: expected {len(before)}, one for each drive, got {len(given)}")
    return given
