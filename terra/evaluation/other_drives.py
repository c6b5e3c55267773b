"""Unpaired Frechet distances of long rollouts: to other drives of the same places, which share no frame with them.

A paired distance, to a clip's own recording, grows with time even if every frame looks real, because a generated drive
is soon elsewhere than the recorded one. An unpaired distance asks only whether frames look like those of the place.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int

from decoder.video import to_frames
from terra.dataset import Episode
from terra.errors import DatasetError
from terra.evaluation.clips import Clip, place_of
from terra.evaluation.measures import HALVES, MIN_FRECHET_CLIPS, Bootstrap, Measure, frame_bins
from terra.evaluation.scores import GENERATED, RE_ENCODED, TRUE, ClipScores, Scorer
from terra.metrics.bootstrap import Estimate
from terra.metrics.frechet import normal_estimate, reference_distances
from terra.metrics.networks import Features, frechet_distance, moments
from terra.progress import ProgressLine
from terra.training.data import decode_episodes, kept_frames

logger = logging.getLogger(__name__)

LATE_BINS = 5  # the last 10 s, in bins of 2 s


@dataclass(frozen=True, eq=False)
class OtherDrive:
    """A drive from which no clip is taken, and the indices of those of its frames that the reference takes."""

    episode: Episode
    frames: Int[np.ndarray, " frames"]

    @property
    def place(self) -> str:
        """Source and place, as `Clip.place`."""
        return place_of(self.episode)


@dataclass(frozen=True)
class Reference:
    """The features of other drives' frames.

    Attributes:
        places: the place of each drive, as `Clip.place`.
        features: of each drive's frames, float32 on the CPU.
        damaged: for each drive that can't be read, one line that says why.
    """

    places: list[str] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def choose_other_drives(episodes: Sequence[Episode], clips: Sequence[Clip], count: int) -> list[OtherDrive]:
    """At most `count` frames of the clips' places, evenly spread over the episodes that no clip and no group is of.

    Raises:
        DatasetError: no place of the clips has such an episode.
    """
    if not count:
        return []
    own, places = {clip.episode.video for clip in clips}, {clip.place for clip in clips}
    others = [each for each in episodes if each.group is None and each.video not in own and place_of(each) in places]
    if not others:
        raise DatasetError(
            f"data: expected other drives of the {len(places)} places of the long rollouts, as drift_reference_frames "
            f"asks, got none beside the {len(own)} that drift_clips={len(clips)} takes"
        )
    chosen = zip(others, kept_frames(others, count), strict=True)
    drives = [OtherDrive(episode, frames) for episode, frames in chosen if len(frames)]
    if alone := places - {drive.place for drive in drives}:
        text = "drift_reference_frames: %d of the %d places of the long rollouts have no other drive and are left out"
        logger.warning(text, len(alone), len(places))
    return drives


def measure_other_drives(drives: Sequence[OtherDrive], scorer: Scorer, workers: int) -> Reference:
    """Decode each drive and keep the features of its chosen frames alone; a damaged drive is left out with a warning.

    Args:
        drives: as `choose_other_drives` chose them.
        scorer: has the feature network.
        workers: videos decoded at once, see `terra.training.data.decode_episodes`.
    """
    reference = Reference()
    with ProgressLine("other drives", len(drives)) as line:
        decoded = decode_episodes([each.episode for each in drives], workers)
        for index, (drive, episode) in enumerate(zip(drives, decoded, strict=True), start=1):
            if isinstance(episode, str):
                logger.warning("left out: %s", episode)
                reference.damaged.append(episode)
            else:
                reference.places.append(drive.place)
                reference.features.append(scorer.features(to_frames(episode.frames[drive.frames])))
            line.show(index, f"{index} of {len(drives)} drives")
    return reference


def unpaired_measures(
    run: str,
    scores: Sequence[ClipScores],
    reference: Reference,
    network: str,
    bin_frames: int,
    bootstrap: Bootstrap,
) -> list[Measure]:
    """Frechet distances by bin to other drives of the clips' places (FD-NETWORK-unpaired); [] under 4 such clips.

    Clips of places without other drives are left out. `TRUE` is how far the clips' own recordings are from the other
    drives: the floor. All bins have as many frames as the shortest one, evenly spread, so that they are biased alike.
    Over whole clips there are `true halves`, every second drive of the reference against the others, and with more than
    5 bins FD-NETWORK-unpaired-growth, the mean of the last 5 divided by the first. Intervals resample the clips'
    places; the reference is the same in each resample.
    """
    scores = [each for each in scores if each.clip.place in reference.places]
    if len(scores) < MIN_FRECHET_CLIPS or sum(map(len, reference.features)) < 2:
        return []
    metric, places = f"FD-{network}-unpaired", [each.clip.place for each in scores]
    bins = frame_bins(len(scores[0].features[TRUE]), bin_frames)
    size = min(last - first + 1 for first, last in bins)
    theirs = moments(torch.cat(reference.features))
    options = {"units": places, "num_resamples": bootstrap.frechet_resamples, "seed": bootstrap.seed}
    units, measures, done = len(set(places)), _halves(run, metric, reference), 0
    with ProgressLine(f"{run}, {metric}", 3 * len(bins)) as line:
        for variant in (TRUE, GENERATED, RE_ENCODED):
            features = torch.stack([each.features[variant] for each in scores])
            draws = []
            for first, last in bins:
                line.show(done, f"distance {done + 1} of {3 * len(bins)}, {bootstrap.frechet_resamples} resamples each")
                at = np.linspace(first - 1, last - 1, size).round().astype(int)
                draws.append(reference_distances(features[:, at], theirs, **options))
                estimate = normal_estimate(draws[-1], len(scores) * size, units)
                measures.append(Measure(run, metric, variant, first, last, estimate))
                done += 1
            if len(bins) > LATE_BINS:
                growth = np.mean(draws[-LATE_BINS:], axis=0) / np.array(draws[0])
                estimate = normal_estimate(growth.tolist(), len(scores) * size, units)
                measures.append(Measure(run, f"{metric}-growth", variant, None, None, estimate))
        line.show(done, f"{done} distances")
    return measures


def _halves(run: str, metric: str, reference: Reference) -> list[Measure]:
    if len(reference.features) < 2:
        return []
    halves = [torch.cat(reference.features[first::2]) for first in (0, 1)]
    count = min(map(len, halves))
    if count < 2:
        return []
    estimate = Estimate(frechet_distance(*halves), np.nan, np.nan, count, len(set(reference.places)))
    return [Measure(run, metric, HALVES, None, None, estimate)]
