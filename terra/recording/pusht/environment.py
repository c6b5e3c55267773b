"""The Gymnasium environment: stable-worldmodel's PushT, with numbers as observation and one goal after the other."""

from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from terra.extras import extras_named

with extras_named("terra.recording.pusht"):
    import cv2  # pyright: ignore[reportMissingImports]
    import gymnasium
    import pygame  # pyright: ignore[reportMissingImports]
    from gymnasium import spaces
    from stable_worldmodel.envs.pusht.env import (  # pyright: ignore[reportMissingImports]
        PushT as SwmPushT,
    )
    from stable_worldmodel.envs.utils import DrawOptions  # pyright: ignore[reportMissingImports]

ACTIONS = ("dx", "dy")
STATE = ("agent_x", "agent_y", "block_x", "block_y", "block_angle", "agent_vx", "agent_vy")
GOAL = ("goal_x", "goal_y", "goal_angle")
LAST = ("steps", "last_dx", "last_dy")
OBSERVATION = (*STATE, *GOAL, *LAST, "goals_reached")
"""Names of the observation's numbers.

Positions are pixels of the square of 512 x 512 (y down), velocities pixels a second, angles radians. The goal is a
pose of the block, and the picture shows `TARGET` alone. `LAST` are the steps so far and the last action.
"""

PICTURE = 224  # pixels, side of the picture that planners are compared on
TARGET = (256.0, 256.0, np.pi / 4)  # the pose that the picture shows in green
NEAR, ALIGNED = 20.0, np.pi / 9  # pixels, rad: what stable-worldmodel counts as a success

_LOW, _HIGH = 110.0, 402.0  # where goals are drawn


class PushT(gymnasium.Env[Float64[np.ndarray, " numbers"], np.ndarray]):
    """Pushing of a block to one goal after the other; an episode never ends by itself.

    An action is where the disc is to go from where it is, in hundreds of pixels, as stable-worldmodel has it. Half of
    the goals are `TARGET`, the others are drawn.

    Args:
        render_mode: "rgb_array".
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012, as Gymnasium declares it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._world = _QuickPushT(resolution=PICTURE)
        self.action_space = spaces.Box(-1.0, 1.0, (len(ACTIONS),), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(OBSERVATION),), np.float64)
        self._state = np.zeros(len(STATE))
        self._goal, self._reached = np.array(TARGET), 0
        self._last = np.zeros(len(LAST))

    def get_action_meanings(self) -> list[str]:
        """The names of an action's numbers."""
        return list(ACTIONS)

    def get_observation_meanings(self) -> list[str]:
        """The names of the observation's numbers."""
        return list(OBSERVATION)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float64[np.ndarray, " numbers"], dict[str, Any]]:
        """Draw the disc's place, the block's pose and a goal."""
        super().reset(seed=seed)
        observation, _ = self._world.reset(seed=int(self.np_random.integers(2**31)))
        self._state, self._reached = observation["state"], 0
        self._last = np.zeros(len(LAST))
        self._goal = self._drawn()
        return self._observed(), {}

    def step(self, action: np.ndarray) -> tuple[Float64[np.ndarray, " numbers"], float, bool, bool, dict[str, Any]]:
        """Move for 0.1 s. The reward is 1 where the block comes to its goal, and then another goal is drawn."""
        observation, *_ = self._world.step(np.asarray(action, np.float64))
        self._state = observation["state"]
        self._last = np.array([self._last[0] + 1, *action])
        arrived = is_near(self._state[2:5], self._goal)
        if arrived:
            self._reached += 1
            self._goal = self._drawn()
        return self._observed(), float(arrived), False, False, {}

    def render(self) -> UInt8[np.ndarray, "height width 3"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The picture, RGB of 224 x 224 pixels."""
        return np.ascontiguousarray(self._world.render())

    def close(self) -> None:
        """Free the window, if there is one."""
        self._world.close()

    def _drawn(self) -> Float64[np.ndarray, "3"]:
        if self.np_random.random() < 0.5 and not is_near(self._state[2:5], np.array(TARGET)):
            return np.array(TARGET)
        return np.append(self.np_random.uniform(_LOW, _HIGH, 2), self.np_random.uniform(0, 2 * np.pi))

    def _observed(self) -> Float64[np.ndarray, " numbers"]:
        return np.concatenate([self._state, self._goal, self._last, [self._reached]])


class _QuickPushT(SwmPushT):
    """stable-worldmodel's PushT, which draws the same pictures in half of the time.

    The canvas is resized where it lies in memory; stable-worldmodel copies it pixel by pixel into another order first.
    """

    space: Any  # stable-worldmodel declares neither as what it is
    variation_space: Any

    def _render_frame(self, mode: str) -> UInt8[np.ndarray, "height width 3"]:
        if mode != "rgb_array" or self.render_action:
            return super()._render_frame(mode)
        colors = self.variation_space
        canvas = pygame.Surface((self.window_size, self.window_size), depth=32)
        canvas.fill(colors["background"]["color"].value)
        if colors["rendering"]["render_goal"].value and self.with_target:
            goal = self._get_goal_pose_body(self.goal_pose)
            for shape in self.block.shapes:
                points = [goal.local_to_world(vertex) for vertex in shape.get_vertices()]
                corners = [(round(x), round(y)) for x, y in points]
                pygame.draw.polygon(canvas, colors["goal"]["color"].value, corners)
        for body, name in ((self.agent, "agent"), (self.block, "block")):
            self._set_body_color(body, colors[name]["color"].value.tolist())
        self.space.debug_draw(DrawOptions(canvas))
        pixels = np.frombuffer(canvas.get_buffer().raw, np.uint8).reshape(self.window_size, self.window_size, 4)
        return cv2.resize(pixels, (self.render_size, self.render_size))[..., 2::-1]


def is_near(pose: Float64[np.ndarray, "3"], goal: Float64[np.ndarray, "3"]) -> bool:
    """Whether a pose of the block (x, y, angle) is as near to another one as a success needs."""
    turn = abs((pose[2] - goal[2] + np.pi) % (2 * np.pi) - np.pi)
    return bool(np.hypot(*(pose[:2] - goal[:2])) < NEAR and turn < ALIGNED)
