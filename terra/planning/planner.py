"""The planner: draws sequences of actions, imagines where each leads, and searches on near the cheapest ones."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from terra.actions import require_table
from terra.actions.space import Values
from terra.errors import ConfigError
from terra.pipeline import Pipeline
from terra.planning.costs import Cost, Target
from terra.planning.search import Distribution, Search, Sequences, first_distribution
from terra.prompt import Actions
from terra.rollouts.manifest import sample_seed
from terra.sampling import SamplingParams
from tokenizer import Frames, TokenGrid

OnIteration = Callable[[int, list[float]], None]
"""Called after each iteration with its number, from 1, and the lowest cost of each problem so far."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Where a plan starts and where it shall end.

    Attributes:
        context_frames: real frames in [-1, 1], the last of them the present.
        actions: the model's rows of the actions between them, one fewer.
        goal: the frame to be reached, in [-1, 1].
        seed: of the candidates and of the imagined futures, 0 to 2**63 - 1.
        start: values of actions to begin the search with, (up to the horizon, columns): what is left of an older plan.
            A search for keys or choices begins anew.
        steps: actions that are left to reach the goal: a plan has no more, and `ends` beyond them count as the last
            of them. None for as many as the horizon.
    """

    context_frames: Frames
    actions: Actions
    goal: Float[Tensor, "3 height width"]
    seed: int
    start: Values | None = None
    steps: int | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """The cheapest candidate of a search.

    Attributes:
        values: its actions, values of the world's action space, (steps, columns): as many as the horizon, or the
            problem's `steps` if these are fewer.
        cost: its cost.
        end: how many of the actions lead to its cheapest frame.
        costs: the lowest cost so far, after each iteration.
        tokens: the imagined frames, the context's first.
    """

    values: Values
    cost: float
    end: int
    costs: tuple[float, ...]
    tokens: TokenGrid


class Planner:
    """Searches for actions whose imagined future comes near a goal; several problems at once in one engine.

    A problem's plan depends on the problem and the settings alone, not on the others beside it. All candidates of a
    problem are imagined with the same seeds, so that they differ by their actions more than by chance.

    Args:
        pipeline: imagines; stays open.
        cost: how far a frame is from the goal.
        search: CEM or MPPI.
        horizon: frames that a plan reaches ahead.
        ends: numbers of actions, ascending, after which a future is compared with the goal; the cheapest of these
            frames counts. None for the last frame alone. On PushT, where the goal may be reached at any step, a
            search on a simulator with errors reached 84 % of 128 goals with 3 ends, 67 % with the last frame alone.
        hold: frames for which an action is held: the search then has fewer numbers to find.
        sampling: how tokens are chosen.
        num_samples: futures of each candidate, whose mean cost counts.
        at_once: sessions open at a time; best as many as the engine has slots.

    Raises:
        ConfigError: a number out of range, or a world of waypoints.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        cost: Cost,
        search: Search,
        horizon: int,
        ends: Sequence[int] | None = None,
        hold: int = 1,
        sampling: SamplingParams | None = None,
        num_samples: int = 1,
        at_once: int = 128,
    ) -> None:
        for name, value in {"horizon": horizon, "hold": hold, "num_samples": num_samples, "at_once": at_once}.items():
            if value < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {value}")
        ends = (horizon,) if ends is None else tuple(ends)
        if not ends or list(ends) != sorted(set(ends)) or ends[0] < 1 or ends[-1] > horizon:
            raise ConfigError(f"ends: expected ascending numbers from 1 to {horizon}, the horizon, got {list(ends)}")
        self.space = require_table(pipeline.engine.spec.space, "planning")
        self.pipeline, self.horizon = pipeline, horizon
        self._cost, self._search, self._ends, self._hold = cost, search, ends, hold
        self._sampling = sampling or SamplingParams(temperature=0.0)
        self._num_samples, self._at_once = num_samples, at_once

    def plan(self, problems: Sequence[Problem], on_iteration: OnIteration | None = None) -> list[Plan]:
        """Search for a plan of each problem.

        Raises:
            ConfigError: no problem, one without steps, or a horizon that no window fits.
            EngineError: the engine failed.
        """
        if not problems:
            raise ConfigError("problems: expected one or more, got none")
        for problem in problems:
            if problem.steps is not None and problem.steps < 1:
                raise ConfigError(f"steps: expected 1 or more, got {problem.steps}")
        searches = [self._begin(problem) for problem in problems]
        for number in range(1, self._search.iterations + 1):
            for search in searches:
                search.draw()
            self.pipeline.wait(self._imagine(searches))
            for search in searches:
                search.weigh()
            if on_iteration is not None:
                on_iteration(number, [search.best.cost for search in searches if search.best is not None])
        return [search.best for search in searches if search.best is not None]

    def _begin(self, problem: Problem) -> "_Searching":
        context = self.pipeline.wait(self.pipeline.encode(problem.context_frames))
        goal = self.pipeline.wait(self.pipeline.encode(problem.goal[None]))
        target = Target(goal[0], self.pipeline.decoder.decode(goal)[0])
        return _Searching(self, problem, context, target)

    async def _imagine(self, searches: Sequence["_Searching"]) -> None:
        """Imagine all candidates of all problems."""
        room = asyncio.Semaphore(self._at_once)
        await asyncio.gather(*(search.imagine(room) for search in searches))


class _Searching:
    """The search for one problem's plan."""

    def __init__(self, planner: Planner, problem: Problem, context: TokenGrid, target: Target) -> None:
        self._planner, self._problem, self._context, self._target = planner, problem, context, target
        self._random = np.random.default_rng(problem.seed)
        self._steps = planner.horizon if problem.steps is None else min(planner.horizon, problem.steps)
        self._ends = sorted({min(end, self._steps) for end in planner._ends})
        knots = -(-self._steps // planner._hold)
        self._distribution: Distribution = first_distribution(planner.space, knots, planner._search, self._start(knots))
        self._drawn: Sequences = np.zeros((0, knots, len(planner.space.columns)))
        # Candidates of earlier iterations that compete again, and their costs.
        self._kept: tuple[Sequences, Float64[np.ndarray, " kept"]] = self._drawn, np.zeros(0)
        self._futures: list[TokenGrid] = []
        self._costs: list[float] = []
        self.best: Plan | None = None

    def draw(self) -> None:
        """Draw the candidates of an iteration."""
        self._drawn = self._distribution.draw(self._random, self._planner._search.candidates)

    async def imagine(self, room: AbstractAsyncContextManager[object]) -> None:
        """Make the tokens of each candidate's futures, `num_samples` of the first one first."""
        planner, problem = self._planner, self._problem
        seeds = [sample_seed(problem.seed, sample) for sample in range(planner._num_samples)]

        async def future(values: Values, seed: int) -> TokenGrid:
            actions = torch.cat([problem.actions, torch.from_numpy(planner.space.rows(values))])
            async with room:
                return await planner.pipeline.rollout_tokens(self._context, actions, planner._sampling, seed)

        self._futures = await asyncio.gather(
            *(future(self._held(drawn), seed) for drawn in self._drawn for seed in seeds)
        )

    def weigh(self) -> None:
        """Note the cheapest candidate, and fit the next iteration's distribution."""
        planner = self._planner
        by_end = self._costs_by_end()
        costs = by_end.min(axis=1)
        index = int(costs.argmin())
        cost = float(costs[index])
        if self.best is None or cost < self.best.cost:
            values, tokens = self._held(self._drawn[index]), self._futures[index * planner._num_samples]
            end = self._ends[int(by_end[index].argmin())]
            self.best = Plan(values, cost, end, (), tokens)
        self._costs.append(self.best.cost)
        self.best = replace(self.best, costs=tuple(self._costs))
        # The same actions have the same futures in each iteration: seeds don't change.
        sequences, costs = np.concatenate([self._drawn, self._kept[0]]), np.concatenate([costs, self._kept[1]])
        weights = planner._search.weights(costs)
        self._distribution = self._distribution.fitted(sequences, weights, planner._search)
        kept = planner._search.kept(weights)
        self._kept = sequences[kept], costs[kept]

    def _costs_by_end(self) -> Float64[np.ndarray, "candidates ends"]:
        """The mean cost of each candidate's futures at each possible end of the plan."""
        planner = self._planner
        present = len(self._context) - 1
        tokens = torch.stack([future[present + end] for future in self._futures for end in self._ends])
        # Decoded problem by problem: the sums of another batch size round differently.
        frames = planner.pipeline.decoder.decode(tokens) if planner._cost.reads_frames else torch.empty(0, 3, 0, 0)
        costs = planner._cost.of(tokens, frames, self._target).double().cpu().numpy()
        shape = {"samples": planner._num_samples, "ends": len(self._ends)}
        return rearrange(costs, "(candidates samples ends) -> candidates samples ends", **shape).mean(1)

    def _held(self, drawn: Float64[np.ndarray, "knots columns"]) -> Values:
        """The actions of all frames."""
        return np.repeat(drawn, self._planner._hold, axis=0)[: self._steps]

    def _start(self, knots: int) -> Values | None:
        """The values that the search begins with, at the frames where an action begins; neutral ones at the end."""
        if self._problem.start is None:
            return None
        given = self._problem.start[:: self._planner._hold][:knots]
        neutral = np.tile(self._planner.space.neutral, (knots - len(given), 1))
        return np.concatenate([given, neutral])
