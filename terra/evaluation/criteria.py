"""Acceptance criteria of a demo world model, and whether its measures meet them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from terra.evaluation.measures import Measure, curve, find
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE


@dataclass(frozen=True)
class Criterion:
    """One requirement: the quantity's name, its value, its limit ("at least 27"), whether it is met; None: unknown."""

    name: str
    value: float | None
    limit: str
    passed: bool | None


def evaluate_criteria(measures: Iterable[Measure], network: str, codebook_used: float) -> list[Criterion]:
    """Compare measures on held-out driving with all criteria; a criterion whose measures are missing is unknown.

    The Frechet distance that is compared with persistence's is that of clips (-T), because persistence repeats a real
    frame: its single frames look real, and only its motion is wrong.
    """
    measures = list(measures)
    return [
        _at_least("tokenizer PSNR (dB)", _value(measures, "psnr", RE_ENCODED), 27.0),
        _at_least("tokenizer SSIM", _value(measures, "ssim", RE_ENCODED), 0.85),
        _at_least("codebook use", codebook_used, 0.6),
        _psnr_gain(measures),
        _at_least(
            f"FD-{network}-T, persistence / generated",
            _ratio(_value(measures, f"FD-{network}-T", PERSISTENCE), _value(measures, f"FD-{network}-T", GENERATED)),
            2.0,
        ),
        _at_least(
            "left > straight > right, share of groups",
            _value(measures, "turning-order", GENERATED, run="counterfactual"),
            0.95,
        ),
        _at_most(
            "ADE, generated / estimator's own",
            _ratio(_value(measures, "ADE", GENERATED), _value(measures, "ADE", TRUE)),
            2.0,
        ),
        _at_most(
            "ADE, generated / persistence",
            _ratio(_value(measures, "ADE", GENERATED), _value(measures, "ADE", PERSISTENCE)),
            0.5,
        ),
        _drift(measures, network),
    ]


def _psnr_gain(measures: list[Measure]) -> Criterion:
    gains = [each.estimate.value for each in curve(measures, "rollouts", "psnr-gain-moving", GENERATED)]
    name = f"PSNR over persistence when moving, worst of frames 1 to {len(gains)} (dB)"
    return _at_least(name, min(gains) if gains else None, 0.0)


def _drift(measures: list[Measure], network: str) -> Criterion:
    bins = [each.estimate.value for each in curve(measures, "drift", f"FD-{network}", GENERATED)]
    return _at_most(
        f"FD-{network} of the long rollouts, last bin / first bin", _ratio(bins[-1], bins[0]) if bins else None, 2.0
    )


def _value(measures: Iterable[Measure], metric: str, variant: str, run: str = "rollouts") -> float | None:
    measure = find(measures, run, metric, variant)
    return None if measure is None or np.isnan(measure.estimate.value) else measure.estimate.value


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below


def _at_least(name: str, value: float | None, limit: float) -> Criterion:
    return Criterion(name, value, f"at least {limit:g}", None if value is None else value >= limit)


def _at_most(name: str, value: float | None, limit: float) -> Criterion:
    return Criterion(name, value, f"at most {limit:g}", None if value is None else value <= limit)
