"""Several models on the same clips: a column of numbers each, and its difference to the base's, clip by clip."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from decoder.video import Pixels
from terra.actions import require_table
from terra.errors import DatasetError
from terra.evaluation.criteria import Criterion
from terra.evaluation.fidelity import motion_errors
from terra.evaluation.measures import Bootstrap, Measure, find
from terra.evaluation.plan import EvaluationPlan
from terra.evaluation.recovered import agreement
from terra.evaluation.remembering import Remembered
from terra.evaluation.scores import GENERATED, TRUE, ClipScores
from terra.metrics.bootstrap import Estimate, mean_estimate
from terra.metrics.frechet import ClipFeatures, clip_features, frechet_difference

OTHER_ACTIONS, COST = "cross-entropy, another clip's actions", "cost of another clip's actions"
_RUN = "rollouts"
_PREDICTED = {"cross-entropy": "cross_entropy", "accuracy": "accuracy", OTHER_ACTIONS: "other_actions_cross_entropy"}
_UNITS = {"cross-entropy": "nats", OTHER_ACTIONS: "nats", COST: "nats", "psnr": "dB", "ADE": "m"}
_OLD, _AGAIN = "old domain: ", ", seen again"
_HIGHER = ("accuracy", "cost", "psnr", "ssim", "choice-accuracy", "exact-keys")


@dataclass(frozen=True)
class Evaluated:
    """What one model's evaluation found.

    Attributes:
        plan: the model's plan.
        measures, facts: as in the model's metrics.json.
        scores: of the rollouts' clips.
        remembered: of the drives that come back.
        old_places: the place of each clip of `old_data`.
        shown: the videos of a few clips, by variant.
        criteria, lines: the requirements, and what else is printed.
    """

    plan: EvaluationPlan
    measures: list[Measure]
    facts: dict[str, Any]
    scores: list[ClipScores]
    remembered: list[Remembered]
    old_places: list[str]
    shown: list[dict[str, Pixels]]
    criteria: list[Criterion]
    lines: list[str]


@dataclass(frozen=True)
class ModelColumn:
    """One model's column of the table, by the row's name.

    Attributes:
        name: the model's.
        values: each with its 95 % interval over places.
        differences: the model's value minus the base's on the same clips, each with the interval of the difference;
            empty for the base.
    """

    name: str
    values: dict[str, Estimate]
    differences: dict[str, Estimate] = field(default_factory=dict)


def make_column(name: str, model: Evaluated, base: Evaluated | None = None) -> ModelColumn:
    """A model's numbers and, with a base, their paired differences to it.

    Raises:
        DatasetError: the two have other clips, since recordings were changed or damaged in between.
    """
    bootstrap, ours = model.plan.bootstrap, _clip_numbers(model)
    values = {row: _mean(numbers, bootstrap) for row, numbers in ours.items()}
    features = _features(model)
    for row in (*values, *features):
        measure = find(model.measures, _RUN, row, GENERATED)
        if measure is not None:
            values[row] = measure.estimate
    if base is None:
        return ModelColumn(name, values)
    theirs = _clip_numbers(base)
    if [each.clip.name for each in model.scores] != [each.clip.name for each in base.scores] or any(
        theirs[row].places != numbers.places for row, numbers in ours.items()
    ):
        raise DatasetError(f"expected the clips of the base for {name}, got others: were recordings changed meanwhile?")
    differences = {
        row: _mean(_Numbers(numbers.values - theirs[row].values, numbers.places), bootstrap)
        for row, numbers in ours.items()
    }
    base_features, places = _features(base), [each.clip.place for each in model.scores]
    for row, sets in features.items():
        if row in values:
            three = sets[GENERATED], base_features[row][GENERATED], sets[TRUE]
            options = {"num_resamples": bootstrap.frechet_resamples, "seed": bootstrap.seed}
            differences[row] = frechet_difference(*three, units=places, **options)
    return ModelColumn(name, values, differences)


def unit_of(row: str) -> str:
    """The unit of a row's numbers; empty for a share or a distance between features."""
    name = row.removeprefix(_OLD).removesuffix(_AGAIN)
    return "dB" if name.startswith("psnr-") else _UNITS.get(name, "")


def higher_is_better(row: str) -> bool:
    """Whether more is better in a row; otherwise less is."""
    return row.removeprefix(_OLD).startswith(_HIGHER)


def is_clear(difference: Estimate) -> bool:
    """Whether the whole interval of a difference lies on one side of 0; False where the interval is unknown."""
    return difference.low > 0 or difference.high < 0


@dataclass(frozen=True)
class _Numbers:
    """One number for each clip, and the clip's place."""

    values: Float[np.ndarray, " clips"]
    places: list[str]


def _mean(numbers: _Numbers, bootstrap: Bootstrap) -> Estimate:
    return mean_estimate(numbers.values, units=numbers.places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)


def _clip_numbers(model: Evaluated) -> dict[str, _Numbers]:
    """The rows that are means over clips."""
    scores, space = model.scores, model.plan.model.space
    places = [each.clip.place for each in scores]
    rows = _predicted(model.facts["teacher_forced"], places)
    if OTHER_ACTIONS in rows:
        rows[COST] = _Numbers(rows[OTHER_ACTIONS].values - rows["cross-entropy"].values, places)
    old = _predicted(model.facts.get("old_teacher_forced", {}), model.old_places)
    rows |= {f"{_OLD}{row}": numbers for row, numbers in old.items() if row != OTHER_ACTIONS}
    numbers: dict[str, Float[np.ndarray, " clips"]] = {}
    for metric in scores[0].metrics[GENERATED] if scores else ():
        numbers[metric] = np.array([each.metrics[GENERATED][metric].mean() for each in scores])
    if scores and scores[0].steps:
        errors = [motion_errors(each.steps[GENERATED], each.clip.instructed, model.plan.fps) for each in scores]
        numbers["ADE"] = np.array([each["displacement"].mean() for each in errors])
    if scores and scores[0].recovered:
        recovered = [each.recovered[GENERATED] for each in scores]
        instructed = [each.clip.instructed_values for each in scores]
        numbers |= agreement(recovered, instructed, require_table(space, "reading actions back"))
    rows |= {row: _Numbers(values, places) for row, values in numbers.items()}
    return rows | _remembered(model.remembered)


def _remembered(drives: list[Remembered]) -> dict[str, _Numbers]:
    """The rows of what a model shows where drives come back."""
    places = [each.revisit.clip.place for each in drives]
    metrics = drives[0].scores.metrics[GENERATED] if drives else ()
    return {
        f"{metric}{_AGAIN}": _Numbers(
            np.array([each.scores.metrics[GENERATED][metric].mean() for each in drives]), places
        )
        for metric in metrics
    }


def _predicted(metrics: Mapping[str, Any], places: list[str]) -> dict[str, _Numbers]:
    """The rows of what `terra.training.prediction.evaluate_world_model` found; a window is a clip."""
    return {
        row: _Numbers(np.array(metrics[f"{name}_by_window"]), places)
        for row, name in _PREDICTED.items()
        if name in metrics
    }


def _features(model: Evaluated) -> dict[str, dict[str, ClipFeatures]]:
    """The sets of features, generated and true, whose Frechet distances evaluate measures, by the metric's name."""
    found: dict[str, dict[str, ClipFeatures]] = {}
    for measure in model.measures:
        is_distance = measure.metric.startswith("FD-") and measure.first_frame is None
        if (measure.run, measure.variant) != (_RUN, GENERATED) or not is_distance:
            continue
        of_video = measure.metric == f"FD-{model.plan.settings.video_network}"
        for variant in (GENERATED, TRUE):
            each = [scores.video_features if of_video else scores.features for scores in model.scores]
            stacked = torch.stack([features[variant] for features in each])
            sets = clip_features(stacked) if measure.metric.endswith("-T") else stacked
            found.setdefault(measure.metric, {})[variant] = sets
    return found
