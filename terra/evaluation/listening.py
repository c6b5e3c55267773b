"""Does a world model listen to its actions? The cost of wrong ones, in cross-entropy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terra.evaluation.measures import Bootstrap
from terra.metrics.bootstrap import Estimate, mean_estimate


@dataclass(frozen=True)
class Listening:
    """Mean cross-entropy (nats an image token, given the true past) of held-out clips, by the actions that were fed.

    Attributes:
        right: with the recorded actions.
        other: with those of another clip.
        none: with the action of nothing done, at each frame.
        cost: `other` minus `right`, over clips, with its 95 % interval over places.
    """

    right: float
    other: float
    none: float
    cost: Estimate

    @property
    def listens(self) -> bool:
        """Whether another clip's actions make the truth less likely, with the whole interval above 0."""
        return self.cost.low > 0

    @property
    def line(self) -> str:
        """One line for people."""
        verdict, interval = "no sign that the model uses its actions", f"[{self.cost.low:.3f}, {self.cost.high:.3f}]"
        if self.listens:
            verdict = "the model listens to its actions"
        elif math.isnan(self.cost.low):
            verdict, interval = "too few places for a verdict", "clips of one place have no interval"
        return (
            f"actions: cross-entropy {self.right:.3f} nats with the recorded ones, {self.other:.3f} with those of "
            f"another clip, {self.none:.3f} with none: {verdict}; another clip's cost {self.cost.value:.3f} more "
            f"({interval})"
        )


def measure_listening(
    teacher_forced: Mapping[str, Any], places: Sequence[str], bootstrap: Bootstrap
) -> Listening | None:
    """Compare what `terra.training.prediction.evaluate_world_model` found of clips; None for a single clip.

    Args:
        teacher_forced: its metrics, with `other_actions_cross_entropy`; a window is a clip.
        places: the place of each clip.
        bootstrap: how many resamples, and their seed.
    """
    if "other_actions_cross_entropy" not in teacher_forced:
        return None
    right, other = (
        np.array(teacher_forced[f"{name}_by_window"]) for name in ("cross_entropy", "other_actions_cross_entropy")
    )
    cost = mean_estimate(other - right, units=places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)
    return Listening(
        right=teacher_forced["cross_entropy"],
        other=teacher_forced["other_actions_cross_entropy"],
        none=teacher_forced["no_actions_cross_entropy"],
        cost=cost,
    )
