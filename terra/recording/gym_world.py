"""A Gymnasium environment as a world to record: its action space, its pictures, and what it tells of its state."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from terra.actions import Choice, Keys, TableSpace, Vector, parse_space, require_table
from terra.actions.space import Values
from terra.errors import ConfigError, TerraError
from terra.extras import extras_named
from terra.recording.step_rate import StepRate, step_rate
from tokenizer.limits import LIMITS
from tokenizer.settings import checked

with extras_named("terra record source=gym"):
    import gymnasium
    from gymnasium import spaces

HELD_FRAMES = 8  # for which policy=sticky holds an action, on average
MAX_OBSERVATION = 64  # numbers; a larger observation, such as a picture, is not kept
_DECLARE = "declare a range with action_space='{kind:vector,names:[a],units:[\"\"],low:[-1],high:[1]}'"

Picture = UInt8[np.ndarray, "height width 3"]
Policy = Callable[[Any, Any, np.random.Generator], Any]
"""Called with the observation, the environment's own action space, and a random generator; returns an action."""


class GymWorld:
    """One environment, whose actions are values of `space`."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        action_names: Sequence[str] | None = None,
        action_space: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the environment.

        Args:
            name: its id, such as "CartPole-v1"; "module:Name-v0" imports a module that registers it.
            options: further arguments of `gymnasium.make`.
            action_names: names of the actions; None for the environment's own (`get_action_meanings`) or action_0, ...
            action_space: the action space to declare, as `terra.actions.parse_space` reads it; None derives it.

        Raises:
            ConfigError: no such environment, or one whose actions are none of a Discrete, MultiBinary or
                one-dimensional Box space with finite bounds.
        """
        self.name = name
        with _running(f"env={name}: expected an environment that can be made"):
            self._env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **options)
        self.space = _declared(self._env, name, action_names, action_space)

    @property
    def step_rate(self) -> StepRate:
        """The steps a second of the environment, and what tells them."""
        return step_rate(self._env)

    @property
    def picture_size(self) -> tuple[int, int]:
        """(height, width) of the pictures. Raises ConfigError if the environment can't be rendered."""
        self.reset(0)
        return self.render().shape[:2]

    def close(self) -> None:
        """Free what the environment holds."""
        self._env.close()

    def reset(self, seed: int) -> Any:
        """Begin an episode; returns the observation. Raises ConfigError."""
        with _running(f"{self.name}: expected a reset with seed {seed}"):
            return self._env.reset(seed=seed)[0]

    def step(self, values: Float64[np.ndarray, " columns"]) -> tuple[Any, float, bool, bool]:
        """Take one step; returns observation, reward, terminated, truncated. Raises ConfigError."""
        with _running(f"{self.name}: expected a step"):
            observation, reward, terminated, truncated, _ = self._env.step(self._action(values))
            return observation, float(reward), bool(terminated), bool(truncated)

    def render(self) -> Picture:
        """The picture of the present state, RGB in [0, 255]. Raises ConfigError."""
        with _running(f"{self.name}: expected a picture"):
            picture: Any = self._env.render()
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            got = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
            raise ConfigError(f"{self.name}: expected pictures of uint8 (height, width, 3) in rgb_array, got {got}")
        if picture.shape[0] * picture.shape[1] > LIMITS.video_pixels:
            got = f"{picture.shape[1]} x {picture.shape[0]}"
            raise ConfigError(f"{self.name}: expected pictures of at most {LIMITS.video_pixels} pixels, got {got}")
        return picture

    def render_last(self, was_blank: bool) -> Picture | None:
        """The picture after an episode's end; None if the environment has none.

        An environment may have nothing to show once an episode is over: `render` then raises, returns no picture, or,
        as VizDoom's does, a black one. A picture of one color is taken for none, unless the one before it was so, too.

        Args:
            was_blank: whether the picture before has one color.
        """
        try:
            picture = self.render()
        except ConfigError:
            return None
        return None if not was_blank and is_blank(picture) else picture

    def asked(self, policy: Policy, observation: Any, random: np.random.Generator) -> Float64[np.ndarray, " columns"]:
        """The values of the action that a policy takes. Raises ConfigError for one outside the space."""
        theirs = self._env.action_space
        with _running(f"{self.name}: expected an action of the policy"):
            action = policy(observation, theirs, random)
            values = self._values(action)
        problem = None if values.shape == (len(self.space.columns),) else f"got {action!r}"
        problem = problem or self.space.problem(values)
        if problem is not None:
            raise ConfigError(f"{self.name}: expected of the policy an action of {theirs}: {problem}")
        return values

    def drawn(self, random: np.random.Generator) -> Float64[np.ndarray, " columns"]:
        """The values of a random action, as the environment will get them."""
        space = self.space
        if isinstance(space, Choice):
            return np.array([float(random.integers(len(space.names)))])
        if isinstance(space, Keys):
            return random.integers(0, 2, len(space.names)).astype(np.float64)
        return self._values(self._action(random.uniform(space.low, space.high)))

    def numbers(self, observation: Any) -> dict[str, float]:
        """The numbers of an observation by name; none if it is no small array of numbers.

        The names are those that the environment has (`get_observation_meanings`), else observation_0 and on.
        """
        theirs = self._env.observation_space
        size = 1 if isinstance(theirs, spaces.Discrete) else int(np.prod(getattr(theirs, "shape", None) or (0,)))
        if not isinstance(theirs, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
            return {}
        if not 0 < size <= MAX_OBSERVATION:
            return {}
        with _running(f"{self.name}: expected an observation of {size} numbers"):
            numbers = np.asarray(observation, np.float64).reshape(size).tolist()
        names = _meanings(self._env, "get_observation_meanings") or [f"observation_{k}" for k in range(size)]
        if len(names) != size:
            raise ConfigError(f"{self.name}: expected {size} names of get_observation_meanings, got {len(names)}")
        return dict(zip(names, numbers, strict=True))

    def _action(self, values: Float64[np.ndarray, " columns"]) -> Any:
        """Values as an element of the environment's own space."""
        theirs: Any = self._env.action_space
        if isinstance(self.space, Choice):
            return theirs.dtype.type(int(values[0]) + int(theirs.start))
        if isinstance(self.space, Keys):
            return values.astype(theirs.dtype)
        # Bounds are float32, so that the nearest float32 of a value may lie beyond them.
        return np.clip(values, theirs.low, theirs.high).astype(theirs.dtype)

    def _values(self, action: Any) -> Float64[np.ndarray, " columns"]:
        start = int(getattr(self._env.action_space, "start", 0))
        values = np.atleast_1d(np.asarray(action)).astype(np.float64)
        return values - start if isinstance(self.space, Choice) else values


class Play:
    """One episode: `frames` plays it; `actions`, `state` and `left_out` are whole when it has ended.

    Attributes:
        left_out: whether the last step is left out, because the environment has no picture after its end.
    """

    def __init__(self, world: GymWorld, policy: Policy | None, held_frames: int, seed: int, num_frames: int) -> None:
        """Note what to play.

        Args:
            world: the environment.
            policy: chooses the actions; None draws them.
            held_frames: frames for which a drawn action is held, on average.
            seed: seed of the environment's reset, and of the actions.
            num_frames: frames after which the episode is cut off.
        """
        self._world, self._policy, self._held_frames = world, policy, held_frames
        self._seed, self._num_frames = seed, num_frames
        self._actions: list[np.ndarray] = []
        self._state: list[dict[str, float]] = []
        self.left_out = False

    def frames(self) -> Iterator[Picture]:
        """Yield the picture before the first step and after each one, until the episode ends. Raises ConfigError."""
        world, random = self._world, np.random.default_rng(self._seed)
        observation, values = world.reset(self._seed), None
        self._state.append({"reward": 0.0, "terminated": 0.0} | world.numbers(observation))
        picture = world.render()
        yield picture
        while len(self._state) < self._num_frames:
            if self._policy is not None:
                values = world.asked(self._policy, observation, random)
            elif values is None or random.random() * self._held_frames < 1:
                values = world.drawn(random)
            was_blank = is_blank(picture)  # before the step: an environment may draw into the same array
            observation, reward, terminated, truncated = world.step(values)
            ends = terminated or truncated
            picture = world.render_last(was_blank) if ends else world.render()
            if picture is None:
                self.left_out = True
                return
            self._actions.append(values)
            told = {"reward": reward, "terminated": float(terminated)}
            self._state.append(told | world.numbers(observation))
            yield picture
            if ends:
                return

    def actions(self) -> Values:
        """The values of the action at each frame; the last one, which leads nowhere, is the neutral one."""
        return np.array([*self._actions, self._world.space.neutral])

    def state(self) -> dict[str, Float64[np.ndarray, " frames"]]:
        """What the environment tells at each frame: reward and terminated of the step before, and the observation."""
        return {name: np.array([row[name] for row in self._state]) for name in self._state[0]}


def is_blank(picture: Picture) -> bool:
    """Whether a picture has one color."""
    first = picture[0, 0]
    return bool((picture[0] == first).all() and (picture == first).all())


def load_policy(name: str) -> tuple[Policy | None, int]:
    """The policy of a name, and for how many frames an action is held on average where it is drawn.

    Args:
        name: "random" (an action drawn for each frame), "sticky" (drawn, and held for 8 frames on average), or
            "package.module:function".

    Raises:
        ConfigError: no such function.
    """
    if name in ("random", "sticky"):
        return None, HELD_FRAMES if name == "sticky" else 1
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"policy: expected random, sticky or package.module:function, got {name!r}")
    with _running(f"policy={name}: expected a function that can be imported"):
        policy = getattr(importlib.import_module(module), function)
    if not callable(policy):
        raise ConfigError(f"policy={name}: expected a function, got {type(policy).__name__}")
    return policy, 1


def _declared(
    env: "gymnasium.Env[Any, Any]",
    name: str,
    action_names: Sequence[str] | None,
    action_space: Mapping[str, Any] | None,
) -> TableSpace:
    """The action space of a dataset; ConfigError if the environment's is none of the kinds that there are."""
    theirs = env.action_space
    box = theirs if isinstance(theirs, spaces.Box) and len(theirs.shape) == 1 else None
    words = " ".join(str(theirs).split())[:200]
    if isinstance(theirs, spaces.Discrete):
        kind, count = Choice, int(theirs.n)
    elif isinstance(theirs, spaces.MultiBinary) and isinstance(theirs.n, int | np.integer):
        kind, count = Keys, int(theirs.n)
    elif box is not None:
        kind, count = Vector, box.shape[0]
    else:
        raise ConfigError(
            f"env={name}: expected actions of Discrete, MultiBinary or a one-dimensional Box, got {words}"
        )
    if action_space is not None:
        if action_names is not None:
            raise ConfigError("action_names: expected none beside action_space=, which has its own")
        space = require_table(parse_space(action_space, "action_space", ConfigError), f"env={name}")
        if type(space) is not kind or len(space.names) != count:
            raise ConfigError(
                f"action_space: expected a {kind.__name__.lower()} of {count}, as {words}, got {space.title}"
            )
        if (
            box is not None
            and isinstance(space, Vector)
            and ((space.low < box.low).any() or (space.high > box.high).any())
        ):
            raise ConfigError(f"action_space: expected a range within {words}, got {space.low} to {space.high}")
        return space
    names = list(action_names or _meanings(env, "get_action_meanings") or [f"action_{index}" for index in range(count)])
    if len(names) != count:
        raise ConfigError(f"action_names: expected {count}, one for each action of {words}, got {len(names)}")
    fields: dict[str, Any] = {"kind": kind.__name__.lower(), "names": names}
    if box is not None:
        low, high = box.low.astype(float).tolist(), box.high.astype(float).tolist()
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(f"env={name}: expected finite bounds of actions, got {words}; {_DECLARE}")
        fields |= {"units": [""] * count, "low": low, "high": high}
    return checked(kind, fields, f"env={name}: actions")


def _meanings(env: "gymnasium.Env[Any, Any]", method: str) -> Sequence[str] | None:
    """The names that an environment has for its actions or its observation's numbers; None without.

    Atari's environments have `get_action_meanings`; `get_observation_meanings` is the same for observations.
    """
    meanings = getattr(env.unwrapped, method, None)
    if meanings is None:
        return None
    with _running(f"expected names of {method}"):
        return [str(name) for name in meanings()]


@contextmanager
def _running(expected: str) -> Iterator[None]:
    """Turn whatever an environment or a policy raises into one line that begins with `expected`. Raises ConfigError."""
    try:
        yield
    except TerraError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{expected}, got {type(error).__name__}: {reason}") from error
