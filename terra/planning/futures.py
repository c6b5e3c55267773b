"""Generates several futures of one context, and finds the best by the user's score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from terra.errors import ConfigError
from terra.pipeline import Pipeline, Rollout, RolloutRequest
from terra.prompt import Actions
from terra.rollouts.manifest import sample_seed
from terra.sampling import SamplingParams
from tokenizer import Frames, TokenGrid

Score = Callable[[Frames, TokenGrid, Actions], float]
"""Called with a rollout's frames in [-1, 1], tokens and actions, context included; the higher the better."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The generated futures, and which one is the best.

    Attributes:
        best: index of the candidate with the highest mean score, the first of equal ones.
        best_sample: index of its best future.
        scores: scores by candidate and sample.
        rollouts: rollouts by candidate and sample.
    """

    best: int
    best_sample: int
    scores: Float64[np.ndarray, "candidates samples"]
    rollouts: list[list[Rollout]]


def imagine(
    pipeline: Pipeline,
    context_frames: Frames,
    candidates: Sequence[Actions],
    score: Score,
    *,
    sampling: SamplingParams,
    seed: int = 0,
    num_samples: int = 1,
) -> Choice:
    """Generate `num_samples` futures of each candidate, all at once, and score them.

    With one candidate this is best-of-K. Sample k has the same seed in all candidates, that of sample k of
    `terra rollout`, so that candidates differ by their actions more than by chance.

    Args:
        pipeline: generates the futures.
        context_frames: real frames in [-1, 1].
        candidates: each the actions of a rollout, with those between the context frames first.
        score: gives the score of one future.
        sampling: how tokens are chosen.
        seed: seed of sample 0, from which the others follow.
        num_samples: number of futures of each candidate.

    Raises:
        ConfigError: no candidate, no sample, a length that no window fits, or a score that is not finite.
    """
    if not candidates or num_samples < 1:
        raise ConfigError(f"expected a candidate and a sample or more, got {len(candidates)} and {num_samples}")
    seeds = [sample_seed(seed, sample) for sample in range(num_samples)]
    requests = [RolloutRequest(context_frames, actions, each) for actions in candidates for each in seeds]
    made = pipeline.generate(requests, sampling)
    values = [
        float(score(each.frames, each.tokens, request.actions)) for each, request in zip(made, requests, strict=True)
    ]
    scores = np.array(values).reshape(len(candidates), num_samples)
    if not np.isfinite(scores).all():
        raise ConfigError(f"score: expected finite numbers, got {scores.tolist()}")
    best = int(scores.mean(axis=1).argmax())
    rollouts = [made[start : start + num_samples] for start in range(0, len(made), num_samples)]
    return Choice(best, int(scores[best].argmax()), scores, rollouts)
