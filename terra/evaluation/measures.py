"""Measures from the scores of many clips: each is one number with its interval and the number of clips."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float

from terra.evaluation.fidelity import confusion, motion_errors
from terra.evaluation.scores import GENERATED, PERSISTENCE, TRUE, VARIANTS, ClipScores
from terra.metrics.bootstrap import Estimate, mean_estimate, mean_estimates, share_estimate
from terra.metrics.frechet import ClipFeatures, clip_features, frechet_estimate, halves_distance
from terra.progress import ProgressLine

HALVES = "true halves"  # the floor of a Frechet distance: one half of the recordings against the other
MIN_FRECHET_CLIPS = 4


@dataclass(frozen=True)
class Measure:
    """One number of the evaluation.

    Attributes:
        run: "rollouts", "drift" or "counterfactual".
        metric: its name; metrics of a network carry the network's name.
        variant: whose video it is of, see `terra.evaluation.scores`.
        first_frame, last_frame: the generated frames that it is of, from 1; both None for all of a clip.
        estimate: value, 95 % interval over places, and the number of clips (of samples, for a Frechet distance).
    """

    run: str
    metric: str
    variant: str
    first_frame: int | None
    last_frame: int | None
    estimate: Estimate


@dataclass(frozen=True)
class Bootstrap:
    """Numbers of resamples for the intervals of means and of Frechet distances (which cost more), and the seed."""

    resamples: int
    frechet_resamples: int
    seed: int


def frame_measures(run: str, scores: Sequence[ClipScores], bootstrap: Bootstrap) -> list[Measure]:
    """The frame metrics by frame and over clips: `psnr`, `ssim`, `psnr-moving` and `psnr-gain-moving`.

    Where several cameras share a picture there is also `psnr-NAME` of each view.

    `psnr-moving` is the PSNR of the clips that move (`Clip.is_moving`); `psnr-gain-moving` is the model's minus that of
    persistence. Higher is better for all four.
    """
    measures = []
    moving = [each for each in scores if each.clip.is_moving]
    for variant in VARIANTS:
        for metric in scores[0].metrics[variant]:
            curves = np.stack([each.metrics[variant][metric] for each in scores])
            measures += _curve(run, metric, variant, curves, _places(scores), bootstrap)
        if moving:
            psnr = np.stack([each.metrics[variant]["psnr"] for each in moving])
            measures += _curve(run, "psnr-moving", variant, psnr, _places(moving), bootstrap)
    if moving:
        ours, held = (
            np.stack([each.metrics[variant]["psnr"] for each in moving]) for variant in (GENERATED, PERSISTENCE)
        )
        measures += _curve(run, "psnr-gain-moving", GENERATED, ours - held, _places(moving), bootstrap)
    return measures


def frechet_measures(
    run: str, scores: Sequence[ClipScores], network: str, bin_frames: int, bootstrap: Bootstrap
) -> list[Measure]:
    """Frechet distances to the recordings, of frames by bin (FD-NETWORK) and of clips (FD-NETWORK-T); [] under 4 clips.

    All sets have the same clips. `true halves` is the floor; its two halves have half as many samples, which biases it
    upwards more.
    """
    if len(scores) < MIN_FRECHET_CLIPS:
        return []
    measures: list[Measure] = []
    sets = {name: torch.stack([each.features[name] for each in scores]) for name in (TRUE, *VARIANTS)}
    metric, num_frames = f"FD-{network}", sets[TRUE].shape[1]
    places = _places(scores)
    parts: list[tuple[str, dict[str, ClipFeatures], int | None, int | None]] = [(metric, sets, None, None)]
    for first, last in frame_bins(num_frames, bin_frames):
        parts.append((metric, {name: features[:, first - 1 : last] for name, features in sets.items()}, first, last))
    if num_frames > 1:
        parts.append((f"{metric}-T", {name: clip_features(features) for name, features in sets.items()}, None, None))
    with ProgressLine(f"{run}, {metric}", len(parts)) as line:
        for done, (name, part, first, last) in enumerate(parts):
            line.show(done, f"distance {done + 1} of {len(parts)}, {bootstrap.frechet_resamples} resamples each")
            measures += _distances(run, name, part, first, last, places, bootstrap)
        line.show(len(parts), f"{len(parts)} distances")
    return measures


def video_measures(run: str, scores: Sequence[ClipScores], network: str, bootstrap: Bootstrap) -> list[Measure]:
    """Frechet distances of clips by a video network's features (FD-NETWORK); [] under 4 clips."""
    if len(scores) < MIN_FRECHET_CLIPS:
        return []
    sets = {name: torch.stack([each.video_features[name] for each in scores]) for name in (TRUE, *VARIANTS)}
    return _distances(run, f"FD-{network}", sets, None, None, _places(scores), bootstrap)


def fidelity_measures(run: str, scores: Sequence[ClipScores], fps: float, bootstrap: Bootstrap) -> list[Measure]:
    """Errors of recovered against instructed motion; the errors of `TRUE` are the estimator's own.

    `ADE` and `FDE` are the mean and the last distance (m) between the paths, `heading-error` the difference at the last
    frame (degrees), `speed-error` the mean difference (m/s); `displacement` (m) and `heading-difference` (degrees) are
    given by frame. `class-agreement` is the share of clips whose class is the instructed one.
    """
    measures = []
    places = _places(scores)
    for variant in (TRUE, *VARIANTS):
        errors = [motion_errors(each.steps[variant], each.clip.instructed, fps) for each in scores]
        displacement = np.stack([each["displacement"] for each in errors])
        heading = np.stack([each["heading"] for each in errors])
        agree, _ = confusion([each.steps[variant] for each in scores], [e.clip.instructed for e in scores], fps)
        whole = {
            "ADE": displacement.mean(axis=1),
            "FDE": displacement[:, -1],
            "heading-error": heading[:, -1],
            "speed-error": np.stack([each["speed"] for each in errors]).mean(axis=1),
        }
        estimates = {name: _mean(clips, places, bootstrap) for name, clips in whole.items()}
        estimates["class-agreement"] = _share(agree, places, bootstrap)
        measures += [Measure(run, name, variant, None, None, each) for name, each in estimates.items()]
        measures += _points(run, "displacement", variant, displacement, places, bootstrap)
        measures += _points(run, "heading-difference", variant, heading, places, bootstrap)
    return measures


def confusions(scores: Sequence[ClipScores], fps: float) -> dict[str, list[list[int]]]:
    """Confusion matrix of each variant, in clips: rows are instructed, columns recovered `motion.CLASSES`."""
    instructed = [each.clip.instructed for each in scores]
    return {
        variant: confusion([each.steps[variant] for each in scores], instructed, fps)[1].astype(int).tolist()
        for variant in (TRUE, *VARIANTS)
    }


def order_measures(
    contrast: str, ordered: dict[str, list[bool]], places: Sequence[str], bootstrap: Bootstrap
) -> list[Measure]:
    """By variant the share of counterfactual groups, each with its place, whose futures have the right order."""
    return [
        Measure("counterfactual", f"{contrast}-order", variant, None, None, _share(np.array(each), places, bootstrap))
        for variant, each in ordered.items()
    ]


def frame_bins(num_frames: int, bin_frames: int) -> list[tuple[int, int]]:
    """First and last frames, from 1, of bins of `bin_frames`; a remainder below half a bin joins the last bin."""
    firsts = list(range(1, num_frames + 1, bin_frames))
    if len(firsts) > 1 and num_frames - firsts[-1] + 1 < bin_frames / 2:
        firsts.pop()
    return list(zip(firsts, [first - 1 for first in firsts[1:]] + [num_frames], strict=True))


def find(measures: Iterable[Measure], run: str, metric: str, variant: str) -> Measure | None:
    """Find the measure over whole clips; None if there is none."""
    same = (each for each in measures if (each.run, each.metric, each.variant) == (run, metric, variant))
    return next((each for each in same if each.first_frame is None), None)


def curve(measures: Iterable[Measure], run: str, metric: str, variant: str) -> list[Measure]:
    """Find the measures by frame or by bin, in order."""
    same = (each for each in measures if (each.run, each.metric, each.variant) == (run, metric, variant))
    return sorted((each for each in same if each.first_frame is not None), key=lambda each: each.first_frame or 0)


def _places(scores: Iterable[ClipScores]) -> list[str]:
    return [each.clip.place for each in scores]


def _curve(
    run: str,
    metric: str,
    variant: str,
    curves: Float[np.ndarray, "clips frames"],
    places: Sequence[str],
    bootstrap: Bootstrap,
) -> list[Measure]:
    whole = Measure(run, metric, variant, None, None, _mean(curves.mean(axis=1), places, bootstrap))
    return [whole, *_points(run, metric, variant, curves, places, bootstrap)]


def _points(
    run: str,
    metric: str,
    variant: str,
    curves: Float[np.ndarray, "clips frames"],
    places: Sequence[str],
    bootstrap: Bootstrap,
) -> list[Measure]:
    estimates = mean_estimates(curves, units=places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)
    return [Measure(run, metric, variant, index, index, each) for index, each in enumerate(estimates, start=1)]


def _mean(values: Float[np.ndarray, " clips"], places: Sequence[str], bootstrap: Bootstrap) -> Estimate:
    return mean_estimate(values, units=places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)


def _share(holds: Bool[np.ndarray, " clips"], places: Sequence[str], bootstrap: Bootstrap) -> Estimate:
    return share_estimate(holds, units=places, num_resamples=bootstrap.resamples, seed=bootstrap.seed)


def _distances(
    run: str,
    metric: str,
    sets: dict[str, ClipFeatures],
    first: int | None,
    last: int | None,
    places: Sequence[str],
    bootstrap: Bootstrap,
) -> list[Measure]:
    num, seed = bootstrap.frechet_resamples, bootstrap.seed
    estimates = {
        variant: frechet_estimate(sets[variant], sets[TRUE], units=places, num_resamples=num, seed=seed)
        for variant in VARIANTS
    }
    floor = halves_distance(sets[TRUE], seed)
    samples = len(sets[TRUE]) // 2 * sets[TRUE].shape[1]
    estimates[HALVES] = Estimate(floor, np.nan, np.nan, samples, len(set(places)))
    return [Measure(run, metric, variant, first, last, each) for variant, each in estimates.items()]
