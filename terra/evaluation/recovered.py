"""Action fidelity of worlds that are not driven: actions that were read back from video, against the instructed ones.

Keys and choices have accuracies, vectors have the mean absolute error (in the number's unit) and the coefficient of
determination R2 = 1 - (sum of squared errors) / (sum of squared deviations from the mean).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from terra.actions import Choice, Keys, TableSpace
from terra.actions.space import Values
from terra.evaluation.measures import Bootstrap, Measure
from terra.evaluation.scores import GENERATED, TRUE, VARIANTS, ClipScores
from terra.metrics.bootstrap import QUANTILES, Estimate, draw_units, mean_estimate, unit_members


def action_measures(run: str, scores: Sequence[ClipScores], space: TableSpace, bootstrap: Bootstrap) -> list[Measure]:
    """How well the actions recovered from each variant agree with the instructed ones; `TRUE` is the estimator's own.

    Keys: `exact-keys`, the share of frames whose keys are all right, and `accuracy-KEY`, that in which one is. Choices:
    `choice-accuracy`. Vectors: `MAE-NAME` and `R2-NAME`; a number that never changes has no R2.
    """
    places = [each.clip.place for each in scores]
    instructed = [each.clip.instructed_values for each in scores]
    measures = []
    for variant in (TRUE, *VARIANTS):
        recovered = [each.recovered[variant] for each in scores]
        estimates = compare(recovered, instructed, space, places, bootstrap)
        measures += [Measure(run, name, variant, None, None, each) for name, each in estimates.items()]
    return measures


def compare(
    recovered: Sequence[Values],
    instructed: Sequence[Values],
    space: TableSpace,
    places: Sequence[str],
    bootstrap: Bootstrap,
) -> dict[str, Estimate]:
    """The measures of `action_measures` for one variant, by name."""
    estimates = {
        name: mean_estimate(values, units=places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)
        for name, values in agreement(recovered, instructed, space).items()
    }
    if isinstance(space, Choice | Keys):
        return estimates
    means, estimates = estimates, {}
    for column, name in enumerate(space.names):
        estimates[f"MAE-{name}"] = means[f"MAE-{name}"]
        ours, theirs = ([each[:, column] for each in side] for side in (recovered, instructed))
        determined = _determination(ours, theirs, places, bootstrap)
        if determined is not None:
            estimates[f"R2-{name}"] = determined
    return estimates


def agreement(
    recovered: Sequence[Values], instructed: Sequence[Values], space: TableSpace
) -> dict[str, Float[np.ndarray, " clips"]]:
    """One number a clip for each measure of `action_measures` that is a mean over clips: all but R2."""

    def by_clip(of_clip: Callable[[Values, Values], float]) -> Float[np.ndarray, " clips"]:
        return np.array([of_clip(*pair) for pair in zip(recovered, instructed, strict=True)])

    if isinstance(space, Choice):
        return {"choice-accuracy": by_clip(lambda ours, theirs: float((ours == theirs).mean()))}
    if isinstance(space, Keys):
        numbers = {"exact-keys": by_clip(lambda ours, theirs: float((ours == theirs).all(axis=1).mean()))}
        for column, name in enumerate(space.names):
            numbers[f"accuracy-{name}"] = by_clip(lambda a, b, i=column: float((a[:, i] == b[:, i]).mean()))
        return numbers
    return {
        f"MAE-{name}": by_clip(lambda a, b, i=column: float(np.abs(a[:, i] - b[:, i]).mean()))
        for column, name in enumerate(space.names)
    }


def majority(instructed: Sequence[Values], space: TableSpace) -> dict[str, float]:
    """The accuracy of always the commonest answer, by the measure's name; of vectors the MAE of always the median."""
    rows = np.concatenate(list(instructed))
    if isinstance(space, Choice):
        return {"choice-accuracy": _commonest(rows)}
    if isinstance(space, Keys):
        shares = {f"accuracy-{name}": _commonest(rows[:, [i]]) for i, name in enumerate(space.names)}
        return {"exact-keys": _commonest(rows), **shares}
    errors = np.abs(rows - np.median(rows, axis=0)).mean(axis=0)
    return {f"MAE-{name}": float(error) for name, error in zip(space.names, errors, strict=True)}


def recovered_line(measures: Sequence[Measure], commonest: Mapping[str, float]) -> str:
    """One line for people, of the first of the measures that `majority` has."""
    first = next(iter(commonest))
    values = {each.variant: each.estimate.value for each in measures if each.metric == first}
    return (
        f"actions read back, {first}: {values[GENERATED]:.3g} from generated video, {values[TRUE]:.3g} from "
        f"recordings, {commonest[first]:.3g} by always the commonest answer"
    )


def _commonest(rows: Values) -> float:
    return Counter(map(tuple, rows.tolist())).most_common(1)[0][1] / len(rows)


def _determination(
    recovered: Sequence[Float[np.ndarray, " frames"]],
    instructed: Sequence[Float[np.ndarray, " frames"]],
    places: Sequence[str],
    bootstrap: Bootstrap,
) -> Estimate | None:
    """R2 over all clips' frames with its interval over places; None where the instructed number never changes."""
    mean = np.concatenate(list(instructed)).mean()
    errors = np.array([np.square(a - b).sum() for a, b in zip(recovered, instructed, strict=True)])
    spread = np.array([np.square(each - mean).sum() for each in instructed])
    if not spread.sum() > 0:
        return None
    members = unit_members(len(errors), places)
    low = high = np.nan
    if len(members) > 1:
        sums = np.array([[errors[clips].sum(), spread[clips].sum()] for clips in members])
        drawn = sums[draw_units(len(members), bootstrap.resamples, bootstrap.seed)].sum(axis=1)
        drawn = drawn[drawn[:, 1] > 0]
        low, high = np.quantile(1 - drawn[:, 0] / drawn[:, 1], QUANTILES)
    return Estimate(float(1 - errors.sum() / spread.sum()), float(low), float(high), len(errors), len(members))
