"""A policy for Gymnasium's vector environments: plans when it has no action left, and follows the plan for a while."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from decoder.video import to_unit_range
from terra.actions.space import Values
from terra.dataset.importing.fitting import fit_picture
from terra.errors import ConfigError
from terra.planning.planner import Plan, Planner, Problem

Pictures = UInt8[np.ndarray, "envs height width 3"]
"""8-bit RGB of any size; the middle is cropped and resized to the model's picture."""


@dataclass(eq=False)
class _Episode:
    """One environment's last frames, the actions between them, and what is left of its plan."""

    frames: deque[Float[Tensor, "3 height width"]]
    actions: deque[Float64[np.ndarray, " columns"]]
    ahead: deque[Float64[np.ndarray, " columns"]] = field(default_factory=deque)
    left: Values | None = None
    num_plans: int = 0
    num_steps: int = 0


class PlannerPolicy:
    """Acts in several environments at once; each has a goal of its own.

    Args:
        planner: plans.
        num_context: frames that a plan sees, the present one included; fewer at an episode's start.
        execute: actions of a plan that are taken before the next plan, fewer where the plan ends; None for all up to
            its end.
        budget: steps of an episode, beyond which no plan reaches; None for no end.
        seed: plan n of an episode in environment e has a seed drawn from numpy's SeedSequence(seed, spawn_key=(e, n)).
        warm_start: whether a search begins with what is left of the last plan.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        num_context: int = 3,
        execute: int | None = None,
        budget: int | None = None,
        seed: int = 0,
        warm_start: bool = True,
    ) -> None:
        execute = planner.horizon if execute is None else execute
        if not 1 <= execute <= planner.horizon:
            raise ConfigError(f"execute: expected 1 to {planner.horizon}, the horizon, got {execute}")
        for name, value in {"num_context": num_context, "budget": budget}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {value}")
        self._planner, self._execute, self._seed, self._warm_start = planner, execute, seed, warm_start
        self._num_context, self._budget, self._num_plans = num_context, budget, 0
        self._size = planner.pipeline.tokenizer.config.image_size
        self._goals: list[Float[Tensor, "3 height width"]] = []
        self._episodes: list[_Episode] = []

    @property
    def num_plans(self) -> int:
        """Plans made so far, in all environments and episodes."""
        return self._num_plans

    def reset(self, goals: Pictures) -> None:
        """Begin an episode in each environment, one a goal."""
        self._goals = [self._frame(goal) for goal in goals]
        self._episodes = [_Episode(deque(maxlen=self._num_context), deque(maxlen=self._num_context - 1)) for _ in goals]

    def act(self, pictures: Pictures, done: Sequence[bool] | None = None) -> Float64[np.ndarray, "envs columns"]:
        """The next action of each environment, values of the world's action space.

        Args:
            pictures: what each environment shows now.
            done: which environments need no plan any more; their action is the neutral one.

        Raises:
            ConfigError: another number of pictures than of goals, or an environment that runs beyond the budget.
        """
        if len(pictures) != len(self._episodes):
            raise ConfigError(f"pictures: expected {len(self._episodes)}, one for each goal, got {len(pictures)}")
        for episode, picture in zip(self._episodes, pictures, strict=True):
            episode.frames.append(self._frame(picture))
        running = [index for index in range(len(pictures)) if done is None or not done[index]]
        self._plan([index for index in running if not self._episodes[index].ahead])
        neutral = self._planner.space.neutral
        acts = []
        for index, episode in enumerate(self._episodes):
            act = episode.ahead.popleft() if index in running else neutral
            episode.actions.append(act)
            episode.num_steps += 1
            acts.append(act)
        return np.stack(acts)

    def _plan(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        plans = self._planner.plan([self._problem(index) for index in indices])
        for index, plan in zip(indices, plans, strict=True):
            self._follow(self._episodes[index], plan)

    def _problem(self, index: int) -> Problem:
        episode = self._episodes[index]
        space = self._planner.space
        values = np.array(episode.actions).reshape(-1, len(space.columns))
        actions = torch.from_numpy(space.rows(values))
        state = np.random.SeedSequence(self._seed, spawn_key=(index, episode.num_plans))
        seed = int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return Problem(
            torch.stack(list(episode.frames)),
            actions,
            self._goals[index],
            seed,
            start=episode.left if self._warm_start else None,
            steps=None if self._budget is None else self._budget - episode.num_steps,
        )

    def _follow(self, episode: _Episode, plan: Plan) -> None:
        self._num_plans += 1
        episode.num_plans += 1
        taken = min(self._execute, plan.end)
        episode.ahead.extend(plan.values[:taken])
        left = plan.values[taken:]
        episode.left = left if len(left) else None

    def _frame(self, picture: UInt8[np.ndarray, "height width 3"]) -> Float[Tensor, "3 height width"]:
        fitted = torch.from_numpy(fit_picture(picture, self._size, None).copy())
        return to_unit_range(rearrange(fitted, "height width c -> 1 c height width"))[0]
