"""Acceptance criteria of a demo world model, and whether its measures meet them.

A criterion is judged from enough samples alone; from fewer it is neither passed nor failed but says how many it needs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from terra.evaluation.measures import Measure, curve, find
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE

_MIN_PLACES = 8
"""Places behind a mean. A bootstrap of n places divides by n where an unbiased variance divides by n - 1, and so
understates the standard error by the factor sqrt((n - 1) / n): by 29 % for two places, by 6 % for eight. A single place
has no interval at all."""

_MIN_MOVING_CLIPS = 16
"""Moving clips behind the worst of the frames' means. The lowest of some twenty means lies about two standard errors
below what they scatter around; from 16 clips on a standard error is a quarter of the clips' standard deviation."""

_MIN_DISTANCE_CLIPS = 32
"""Clips behind a ratio of Frechet distances. Few samples bias both distances upwards, so that their ratio goes to 1,
and a resample of few clips changes it much. 32 is the fewest that `terra evaluate` takes unless it is told otherwise
(`drift_clips`)."""

_MIN_GROUPS = 20
"""Groups behind a share of 0.95: of fewer a single wrong one is a failure."""

_TOKENS_AN_ENTRY = 10
"""Image tokens for each entry of the codebook, behind its use. Of n tokens an entry on average, an entry that a tenth
as many tokens have is seen with probability 1 - exp(-n / 10): 0.63 for 10."""


@dataclass(frozen=True)
class Criterion:
    """One requirement.

    Attributes:
        name: the quantity's name.
        value: None where it was not measured.
        limit: such as "at least 27".
        passed: whether it is met; None where it is unknown or there are too few samples.
        too_few: what there is and what is needed, such as "2 of 8 places"; None where there is enough or nothing.
    """

    name: str
    value: float | None
    limit: str
    passed: bool | None
    too_few: str | None = None


@dataclass(frozen=True)
class CodebookUse:
    """Count the image tokens of true clips, the distinct ids among these, and the ids of the codebook."""

    tokens: int
    distinct: int
    size: int

    @property
    def share(self) -> float:
        """The share of the codebook that is used."""
        return self.distinct / self.size


@dataclass(frozen=True)
class _Sample:
    """How many samples there are of those that a criterion needs; 0 where nothing was measured."""

    given: int
    needed: int
    unit: str


def evaluate_criteria(measures: Iterable[Measure], network: str, codebook: CodebookUse) -> list[Criterion]:
    """Compare measures on held-out driving with all criteria; a criterion whose measures are missing is unknown.

    The Frechet distance that is compared with persistence's is that of clips (-T), because persistence repeats a real
    frame: its single frames look real, and only its motion is wrong.
    """
    measures = list(measures)
    clips = _Sample(_count(measures, "psnr", RE_ENCODED), _MIN_DISTANCE_CLIPS, "clips")
    psnr_places = _places(measures, "psnr", RE_ENCODED)
    path_places = _places(measures, "ADE", GENERATED)
    groups = _count(measures, "turning-order", GENERATED, run="counterfactual")
    return [
        _at_least("tokenizer PSNR (dB)", _value(measures, "psnr", RE_ENCODED), 27.0, psnr_places),
        _at_least("tokenizer SSIM", _value(measures, "ssim", RE_ENCODED), 0.85, psnr_places),
        _codebook_use(codebook),
        _psnr_gain(measures),
        _at_least(
            f"FD-{network}-T, persistence / generated",
            _ratio(_value(measures, f"FD-{network}-T", PERSISTENCE), _value(measures, f"FD-{network}-T", GENERATED)),
            2.0,
            clips,
        ),
        _at_least(
            "left > straight > right, share of groups",
            _value(measures, "turning-order", GENERATED, run="counterfactual"),
            0.95,
            _Sample(groups, _MIN_GROUPS, "groups"),
        ),
        _at_most(
            "ADE, generated / estimator's own",
            _ratio(_value(measures, "ADE", GENERATED), _value(measures, "ADE", TRUE)),
            2.0,
            path_places,
        ),
        _at_most(
            "ADE, generated / persistence",
            _ratio(_value(measures, "ADE", GENERATED), _value(measures, "ADE", PERSISTENCE)),
            0.5,
            path_places,
        ),
        _drift(measures, network),
    ]


def _codebook_use(codebook: CodebookUse) -> Criterion:
    """Judge the use of the codebook; further tokens only raise it, so that enough use needs no more of them."""
    needed = 0 if codebook.share >= 0.6 else _TOKENS_AN_ENTRY * codebook.size
    return _at_least("codebook use", codebook.share, 0.6, _Sample(codebook.tokens, needed, "tokens"))


def _psnr_gain(measures: list[Measure]) -> Criterion:
    gains = [each.estimate for each in curve(measures, "rollouts", "psnr-gain-moving", GENERATED)]
    name = f"PSNR over persistence when moving, worst of frames 1 to {len(gains)} (dB)"
    sample = _Sample(gains[0].count if gains else 0, _MIN_MOVING_CLIPS, "moving clips")
    return _at_least(name, min((each.value for each in gains), default=None), 0.0, sample)


def _drift(measures: list[Measure], network: str) -> Criterion:
    bins = [each.estimate.value for each in curve(measures, "drift", f"FD-{network}", GENERATED)]
    name = f"FD-{network} of the long rollouts, last bin / first bin"
    clips = _Sample(_count(measures, "psnr", RE_ENCODED, run="drift"), _MIN_DISTANCE_CLIPS, "clips")
    return _at_most(name, _ratio(bins[-1], bins[0]) if bins else None, 2.0, clips)


def _value(measures: Iterable[Measure], metric: str, variant: str, run: str = "rollouts") -> float | None:
    measure = find(measures, run, metric, variant)
    return None if measure is None or np.isnan(measure.estimate.value) else measure.estimate.value


def _count(measures: Iterable[Measure], metric: str, variant: str, run: str = "rollouts") -> int:
    measure = find(measures, run, metric, variant)
    return 0 if measure is None else measure.estimate.count


def _places(measures: Iterable[Measure], metric: str, variant: str) -> _Sample:
    measure = find(measures, "rollouts", metric, variant)
    return _Sample(0 if measure is None else measure.estimate.units, _MIN_PLACES, "places")


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below


def _at_least(name: str, value: float | None, limit: float, sample: _Sample) -> Criterion:
    return _judge(name, value, f"at least {limit:g}", None if value is None else value >= limit, sample)


def _at_most(name: str, value: float | None, limit: float, sample: _Sample) -> Criterion:
    return _judge(name, value, f"at most {limit:g}", None if value is None else value <= limit, sample)


def _judge(name: str, value: float | None, limit: str, passed: bool | None, sample: _Sample) -> Criterion:
    if 0 < sample.given < sample.needed:
        return Criterion(name, value, limit, None, f"{sample.given} of {sample.needed} {sample.unit}")
    return Criterion(name, value, limit, passed)
