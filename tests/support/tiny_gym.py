"""Gymnasium environments of every kind of actions, which draw themselves without a library; used as `tiny_gym:NAME`."""

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

SPACES = {
    "Pad-v0": spaces.Discrete(3, start=1),
    "Keys-v0": spaces.MultiBinary(4),
    "Arm-v0": spaces.Box(np.float32([-0.1, 0]), np.float32([0.3, 2])),
    "Endless-v0": spaces.Box(-np.inf, np.inf, (2,)),
    "Grid-v0": spaces.MultiDiscrete([2, 3]),
}


class TinyEnv(gymnasium.Env):
    """Its picture shows the number of the step in red and the seed in green; it ends after `steps`.

    `after` says what its picture is then, and gives all pictures a white corner: "whole", "black" (as VizDoom's),
    "error", "none" or "gray". With `cut` it is truncated, not terminated.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None, *, name, steps=5, fails=False, gray=False, after=None, cut=False, rate=20):
        self.action_space, self.render_mode = SPACES[name], render_mode
        self.metadata = {**self.metadata, "render_fps": rate}
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self._steps, self._fails, self._gray, self._after, self._cut = steps, fails, gray, after, cut

    def reset(self, *, seed=None, options=None):
        self.seed, self.count, self.last = seed, 0, 0.0
        return self._observed(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        if self._fails and self.count == 2:
            raise RuntimeError("the cart\nfell off")
        self.count += 1
        self.last = float(np.sum(action))
        ends = self.count == self._steps
        return self._observed(), 0.5 * self.count, ends and not self._cut, ends and self._cut, {}

    def render(self):
        if self._gray:
            return np.zeros((48, 64), np.uint8)
        picture = np.full((48, 64, 3), (50 * self.count, self.seed % 256, 0), np.uint8)
        if self._after is None:
            return picture
        picture[24:, 32:] = 255
        if self.count < self._steps or self._after == "whole":
            return picture
        if self._after == "error":
            raise RuntimeError("the game is over")
        return {"black": np.zeros_like(picture), "gray": picture[..., 0], "none": None}[self._after]

    def _observed(self):
        return np.array([self.count, self.last])


class TinyPad(TinyEnv):
    def get_action_meanings(self):
        return ["NOOP", "FIRE", "LEFT"]


for _name in SPACES:
    gymnasium.register(_name, TinyPad if _name == "Pad-v0" else TinyEnv, kwargs={"name": _name}, max_episode_steps=50)


def always_last(observation, space, rng):
    """The greatest action."""
    return space.start + space.n - 1


def too_great(observation, space, rng):
    return 17


def broken(observation, space, rng):
    raise ValueError("no idea")
