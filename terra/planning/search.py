"""Searches for actions: distributions over sequences of actions, and how CEM and MPPI move them towards cheap ones.

A distribution draws sequences of values of an action space and is fitted to weighted ones. The cross-entropy method
(CEM, de Boer et al. 2005) weighs the cheapest candidates equally and forgets the others; model predictive path integral
control (MPPI, Williams et al. 2017) weighs all by exp(-cost / temperature).
"""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from einops import repeat
from jaxtyping import Float64, Int

from terra.actions import Choice, Keys, TableSpace, Vector
from terra.errors import ConfigError

Sequences = Float64[np.ndarray, "candidates steps columns"]
Weights = Float64[np.ndarray, " candidates"]
Costs = Float64[np.ndarray, " candidates"]


@dataclass(frozen=True, kw_only=True)
class _Iterated:
    """What CEM and MPPI have in common; the attributes are described at `CEM`."""

    candidates: int = 64
    iterations: int = 8
    spread: float
    least_spread: float = 0.05
    keeps_spread: bool

    def __post_init__(self) -> None:
        for name in ("candidates", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.least_spread <= self.spread:
            got = f"{self.least_spread} and {self.spread}"
            raise ConfigError(f"least_spread: expected 0 or more, at most spread, got {got}")


@dataclass(frozen=True, kw_only=True)
class CEM(_Iterated):
    """The cross-entropy method.

    Attributes:
        candidates: sequences of an iteration.
        iterations: how many there are.
        elites: the share of the candidates that the next iteration is fitted to.
        keeps_elites: whether elites compete with the candidates of later iterations, which costs nothing: their costs
            are known (Pinneri et al. 2020, "Sample-efficient Cross-Entropy Method for Real-time Planning", arXiv
            2008.06389). On PushT's simulator 32 candidates in 4 iterations reached 21 instead of 15 of 32 goals.
        spread: standard deviation of the first iteration's numbers, as a share of half their range.
        least_spread: the least standard deviation of later iterations; with 0 a search may converge too early.
        keeps_spread: whether later iterations draw as widely as the first one.

    Raises:
        ConfigError: a number out of range.
    """

    elites: float = 0.2
    keeps_elites: bool = True
    spread: float = 0.5
    keeps_spread: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.elites <= 1:
            raise ConfigError(f"elites: expected a share above 0, at most 1, got {self.elites}")

    def weights(self, costs: Costs) -> Weights:
        """The same weight for each elite, 0 for the others; of equal costs the first one is in."""
        elites = np.argsort(costs, kind="stable")[: max(1, round(self.elites * self.candidates))]
        weights = np.zeros(len(costs))
        weights[elites] = 1 / len(elites)
        return weights

    def kept(self, weights: Weights) -> Int[np.ndarray, " kept"]:
        """Indices of the candidates that compete with the next iteration's."""
        return np.flatnonzero(weights) if self.keeps_elites else np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class MPPI(_Iterated):
    """Model predictive path integral control.

    Attributes:
        temperature: of the weights, in standard deviations of the candidates' costs.
        candidates, iterations, spread, least_spread, keeps_spread: see `CEM`.

    Raises:
        ConfigError: a number out of range.
    """

    temperature: float = 0.3
    spread: float = 0.3
    keeps_spread: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ConfigError(f"temperature: expected more than 0, got {self.temperature}")

    def weights(self, costs: Costs) -> Weights:
        """Weights that fall exponentially with the cost; all the same where all costs are."""
        scaled = (costs - costs.min()) / max(float(costs.std()), 1e-12)
        weights = np.exp(-scaled / self.temperature)
        return weights / weights.sum()

    def kept(self, weights: Weights) -> Int[np.ndarray, " kept"]:
        """None: MPPI forgets the candidates of an iteration."""
        return np.zeros(0, np.int64)


Search = CEM | MPPI


class Distribution(Protocol):
    """A distribution over sequences of an action space's values."""

    def draw(self, random: np.random.Generator, count: int) -> Sequences:
        """Draw sequences, of which the first one is the most likely one."""
        ...

    def fitted(self, sequences: Sequences, weights: Weights, search: Search) -> Self:
        """The distribution fitted to weighted sequences."""
        ...


@dataclass(frozen=True, eq=False)
class _Gaussian:
    """Independent normal distributions of a vector's numbers, which are scaled to [-1, 1] and cut off there."""

    space: Vector
    mean: Float64[np.ndarray, "steps columns"]
    spread: Float64[np.ndarray, "steps columns"]

    def draw(self, random: np.random.Generator, count: int) -> Sequences:
        drawn = self.mean + self.spread * random.standard_normal((count, *self.mean.shape))
        drawn[0] = self.mean
        return _of_unit(self.space, np.clip(drawn, -1, 1))

    def fitted(self, sequences: Sequences, weights: Weights, search: Search) -> "_Gaussian":
        scaled = _to_unit(self.space, sequences)
        mean = np.einsum("c,csd->sd", weights, scaled)
        if search.keeps_spread:
            return _Gaussian(self.space, mean, self.spread)
        spread = np.sqrt(np.einsum("c,csd->sd", weights, (scaled - mean) ** 2))
        return _Gaussian(self.space, mean, np.maximum(spread, search.least_spread))


@dataclass(frozen=True, eq=False)
class _Pressed:
    """Independent chances that keys are down."""

    chance: Float64[np.ndarray, "steps columns"]

    def draw(self, random: np.random.Generator, count: int) -> Sequences:
        drawn = (random.random((count, *self.chance.shape)) < self.chance).astype(np.float64)
        drawn[0] = self.chance > 0.5
        return drawn

    def fitted(self, sequences: Sequences, weights: Weights, search: Search) -> "_Pressed":
        chance = np.einsum("c,csd->sd", weights, sequences)
        least = search.least_spread / 2
        return _Pressed(np.clip(chance, least, 1 - least))


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Independent chances of the named actions."""

    chances: Float64[np.ndarray, "steps names"]

    def draw(self, random: np.random.Generator, count: int) -> Sequences:
        levels = random.random((count, len(self.chances), 1))
        drawn = (levels > np.cumsum(self.chances, axis=1)[None, :, :-1]).sum(axis=2)
        drawn[0] = self.chances.argmax(axis=1)
        return drawn[..., None].astype(np.float64)

    def fitted(self, sequences: Sequences, weights: Weights, search: Search) -> "_Chosen":
        names = self.chances.shape[1]
        chosen = np.eye(names)[sequences[..., 0].astype(int)]
        chances = np.einsum("c,csn->sn", weights, chosen)
        return _Chosen((1 - search.least_spread) * chances + search.least_spread / names)


def first_distribution(
    space: TableSpace, steps: int, search: Search, start: Float64[np.ndarray, "steps columns"] | None = None
) -> Distribution:
    """The distribution of a search's first iteration.

    Args:
        space: what an action is.
        steps: actions of a sequence.
        search: says how wide the numbers of a vector are drawn; keys and choices begin with equal chances.
        start: values about which the numbers of a vector are drawn; None for the neutral ones.
    """
    if isinstance(space, Keys):
        return _Pressed(np.full((steps, len(space.names)), 0.5))
    if isinstance(space, Choice):
        return _Chosen(np.full((steps, len(space.names)), 1 / len(space.names)))
    about = repeat(space.neutral, "columns -> steps columns", steps=steps) if start is None else start
    mean = _to_unit(space, about)
    return _Gaussian(space, mean, np.full_like(mean, search.spread))


def _to_unit(space: Vector, values: np.ndarray) -> np.ndarray:
    low, high = np.array(space.low), np.array(space.high)
    return (values - low) / (high - low) * 2 - 1


def _of_unit(space: Vector, scaled: np.ndarray) -> np.ndarray:
    low, high = np.array(space.low), np.array(space.high)
    return np.clip((scaled + 1) / 2 * (high - low) + low, low, high)
