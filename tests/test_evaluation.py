import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from entry import read_settings
from hypothesis import given, settings, strategies as st
from rich.console import Console
from tiny import save_tiny
from tiny_adapter import save_adapter
from torch import nn

from decoder import FramewiseDecoder
from terra.actions import Waypoints
from terra.dataset import NUM_FUTURE_POSES, Episode, Poses, ShardWriter, create_dataset, read_split
from terra.engine.persistence import PersistenceEngine
from terra.errors import CheckpointError, ConfigError, DatasetError, EngineError
from terra.evaluation.clips import Clip, LoadedClip, choose_clips, load_clips
from terra.evaluation.contrasts import CONTRASTS, find_groups
from terra.evaluation.criteria import CodebookUse, evaluate_criteria
from terra.evaluation.estimator import EstimatorConfig, MotionEstimator, resize
from terra.evaluation.estimator_training import evaluate_estimator, load_recordings, positions, train_estimator
from terra.evaluation.evaluate import run
from terra.evaluation.fidelity import confusion, motion_errors
from terra.evaluation.measures import (
    HALVES,
    Bootstrap,
    Measure,
    fidelity_measures,
    frame_bins,
    frame_measures,
    frechet_measures,
    order_measures,
)
from terra.evaluation.motion import CLASSES, classify, integrate, steps_of
from terra.evaluation.other_drives import Reference, choose_other_drives, unpaired_measures
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import (
    GENERATED,
    PERSISTENCE,
    RE_ENCODED,
    TRUE,
    VARIANTS,
    ClipScores,
    Scorer,
    decode_variants,
)
from terra.evaluation.settings import EvaluationSettings
from terra.metrics.bootstrap import Estimate, mean_estimate, share_estimate
from terra.metrics.frames import PSNR_CAP, psnr
from terra.metrics.frechet import (
    clip_features,
    frechet_distance,
    frechet_estimate,
    halves_distance,
    reference_distances,
)
from terra.metrics.networks import FeatureNetwork, moments
from terra.metrics.similarity import ssim
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.training.processes import start_processes
from terra.training.settings import LoopConfig
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig

FPS = 10.0
IMAGE_SIZE, PATCHES = (32, 48), 4 * 6
SMALL_ESTIMATOR = EstimatorConfig(fps=FPS, image_size=IMAGE_SIZE, width=8, reach=1, features=8)


def poses_of(steps: np.ndarray) -> Poses:
    path = integrate(steps)
    zeros = np.zeros(len(path))
    speed = np.append(steps[:, 0] * FPS, 0.0)
    return Poses(np.arange(len(path)) / FPS, path[:, 0], path[:, 1], zeros, path[:, 2], zeros, speed)


def episode_of(steps: np.ndarray, **facts: Any) -> Episode:
    known: dict[str, Any] = {
        **{"id": "drive", "split": "held_out", "source": "town", "place": "000001", "weather": "day", "fps": FPS},
        **{"num_frames": len(steps) + 1, "image_size": (12, 16), "events": (), "video": Path("drive.mp4")},
        **{"video_sha256": "", "group": None, "maneuver": None, "num_context": 0, "camera": None},
        **{"space": Waypoints(), "actions": None},
    }
    return Episode(**{**known, "motion": poses_of(steps), **facts})


def constant(speed: float, turn_degrees: float, count: int = 22) -> np.ndarray:
    return np.tile([speed / FPS, np.radians(turn_degrees) / count], (count, 1))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 60))
def test_steps_and_path_undo_each_other(seed: int, count: int) -> None:
    steps = np.random.default_rng(seed).normal(size=(count, 2)) * [1.0, 0.1]
    assert np.allclose(steps_of(poses_of(steps), 0, count + 1), steps)


def test_a_quarter_circle_is_integrated_to_its_chord() -> None:
    steps = constant(5.0, 90.0, 100)
    x, y, heading = integrate(steps)[-1]
    assert heading == pytest.approx(np.pi / 2)
    assert x == pytest.approx(y)
    # Each step's chord is a little shorter than its arc; here the chord is given, so the radius is a little larger.
    chord = steps[0, 0]
    assert x == pytest.approx(chord / (2 * np.sin(steps[0, 1] / 2)))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (constant(0.2, 0), "stopped"),
        (np.column_stack([np.linspace(0, 0.8, 22), np.zeros(22)]), "starting"),
        (np.column_stack([np.linspace(0.8, 0, 22), np.zeros(22)]), "stopping"),
        (constant(6, 40), "left"),
        (constant(6, -40), "right"),
        (constant(6, 5), "straight"),
        (np.column_stack([np.linspace(0.4, 0.9, 22), np.zeros(22)]), "accelerating"),
        (np.column_stack([np.linspace(0.9, 0.4, 22), np.zeros(22)]), "decelerating"),
    ],
)
def test_paths_have_the_class_that_they_show(steps: np.ndarray, expected: str) -> None:
    assert classify(steps, FPS) == expected


def test_motion_errors_are_those_of_the_paths() -> None:
    errors = motion_errors(constant(6.0, 0), constant(5.0, 0), FPS)
    assert np.allclose(errors["displacement"], np.arange(1, 23) * 0.1)
    assert np.allclose(errors["speed"], 1.0)
    assert not errors["heading"].any()
    assert not any(error.any() for error in motion_errors(constant(6.0, 20), constant(6.0, 20), FPS).values())


def test_confusion_counts_instructed_by_recovered_class() -> None:
    agree, counts = confusion([constant(6, 40), constant(6, 0)], [constant(6, 40), constant(6, 40)], FPS)
    left, straight = CLASSES.index("left"), CLASSES.index("straight")
    assert agree.tolist() == [1.0, 0.0]
    assert counts[left, left] == counts[left, straight] == 1
    assert counts.sum() == 2


def test_frame_metrics_of_equal_and_of_known_frames() -> None:
    frames = torch.rand(2, 3, 16, 16) * 1.8 - 0.9
    assert psnr(frames, frames).tolist() == [PSNR_CAP] * 2
    assert torch.allclose(ssim(frames, frames), torch.ones(2))
    black, gray = torch.full((1, 3, 16, 16), -1.0), torch.full((1, 3, 16, 16), -1.0 + 10 / 127.5)
    assert psnr(black, gray).item() == pytest.approx(20 * np.log10(255 / 10), abs=1e-4)


def test_each_frame_of_a_clip_has_a_psnr_of_its_own() -> None:
    levels_apart = [1, 10, 100]
    truth = torch.full((3, 3, 16, 16), -1.0)
    ours = torch.stack([frame + levels / 127.5 for frame, levels in zip(truth, levels_apart, strict=True)])
    assert psnr(ours, truth).tolist() == pytest.approx([20 * np.log10(255 / levels) for levels in levels_apart], 1e-4)
    ours[0, :, :8] = -1.0  # within a frame it is the squared errors that are averaged: half the pixels are right
    assert psnr(ours, truth)[0].item() == pytest.approx(20 * np.log10(255) + 10 * np.log10(2), 1e-4)


def gaussian(count: int, mean: float, deviation: float, seed: int, size: int = 4) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * deviation + mean


def test_frechet_distance_is_that_of_two_gaussians() -> None:
    # |m - n|^2 + sum (a - b)^2 for independent axes of standard deviations a and b.
    expected = 4 * 2.0**2 + 4 * (3.0 - 1.0) ** 2
    distance = frechet_distance(gaussian(200_000, 0, 1, 0), gaussian(200_000, 2, 3, 1))
    assert distance == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("samples", "features"), [(50, 8), (10, 40)])
def test_frechet_distance_is_torchmetrics_also_with_few_samples(samples: int, features: int) -> None:
    ours, theirs = gaussian(samples, 0, 1, 0, features).double(), gaussian(samples + 3, 1, 2, 1, features).double()
    a, b = torch.cov(ours.T), torch.cov(theirs.T)
    root = torch.linalg.eigvals(a @ b).sqrt().real.sum()  # as torchmetrics' FrechetInceptionDistance computes it
    expected = (ours.mean(0) - theirs.mean(0)).square().sum() + a.trace() + b.trace() - 2 * root
    assert frechet_distance(ours, theirs) == pytest.approx(expected.item(), rel=1e-4)


def test_frechet_distance_of_a_set_to_itself_is_nothing_and_symmetric() -> None:
    ours, theirs = gaussian(30, 0, 1, 0, 50), gaussian(40, 1, 1, 1, 50)
    assert frechet_distance(ours, ours) == pytest.approx(0.0, abs=1e-9)
    assert frechet_distance(ours, theirs) == pytest.approx(frechet_distance(theirs, ours))
    with pytest.raises(ValueError, match="two or more samples"):
        frechet_distance(ours[:1], theirs)


def test_frechet_interval_holds_the_estimate_and_clip_features_see_standstill() -> None:
    clips = gaussian(12 * 5, 0, 1, 0, 6).view(12, 5, 6)
    estimate = frechet_estimate(clips, clips + torch.rand_like(clips), num_resamples=20)
    assert estimate.low < estimate.value < estimate.high
    assert estimate.count == 60
    still = clips[:, :1].expand(-1, 5, -1)
    assert not clip_features(still)[..., 6:].any()
    assert (clip_features(clips)[..., 6:] > 0).all()
    assert halves_distance(clips) > 0


def test_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    estimates = [mean_estimate(random.normal(3.0, 2.0, 60), num_resamples=200, seed=i) for i in range(200)]
    covered = np.mean([estimate.low <= 3.0 <= estimate.high for estimate in estimates])
    assert 0.88 < covered < 0.99
    assert mean_estimate(np.array([]), num_resamples=5).count == 0


def test_intervals_resample_towns_and_not_their_clips() -> None:
    random = np.random.default_rng(0)
    towns = random.normal(3.0, 2.0, 20)
    names = [f"town_{index // 4}" for index in range(80)]
    alike = np.repeat(towns, 4)  # a town's four clips say no more than one of them
    by_town, alone = (
        mean_estimate(values, units=units, num_resamples=200)
        for values, units in ((alike, names), (towns, [f"town_{index}" for index in range(20)]))
    )
    assert (by_town.value, by_town.low, by_town.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert (by_town.count, by_town.units) == (80, 20)
    assert alone == mean_estimate(towns, num_resamples=200)
    covered = {"town": 0, "clip": 0}
    for seed in range(200):
        clips = np.repeat(random.normal(3.0, 2.0, 30), 4) + random.normal(0.0, 0.5, 120)
        units = [f"town_{index // 4}" for index in range(120)]
        for name, each in (("town", units), ("clip", None)):
            estimate = mean_estimate(clips, units=each, num_resamples=200, seed=seed)
            covered[name] += estimate.low <= 3.0 <= estimate.high
    assert covered["town"] > 0.88 * 200
    assert covered["clip"] < 0.75 * 200


def test_a_resample_has_all_clips_of_the_towns_that_it_draws() -> None:
    # Two towns are drawn with replacement: of one clip (0) and of three (4, 5, 6), so the mean is 0, 3.75 or 5.
    values, units = np.array([4.0, 0.0, 5.0, 6.0]), ["large", "small", "large", "large"]
    estimate = mean_estimate(values, units=units, num_resamples=500)
    assert (estimate.value, estimate.low, estimate.high) == (3.75, 0.0, 5.0)


def test_of_one_town_no_interval_is_known() -> None:
    estimate = mean_estimate(np.array([1.0, 2.0]), units=["a", "a"], num_resamples=10)
    assert (estimate.value, estimate.count, estimate.units) == (1.5, 2, 1)
    assert np.isnan([estimate.low, estimate.high]).all()
    clips = gaussian(12 * 5, 0, 1, 0, 6).view(12, 5, 6)
    distance = frechet_estimate(clips, clips + 1, units=["a"] * 12, num_resamples=5)
    assert distance.value == pytest.approx(6.0)
    assert np.isnan([distance.low, distance.high]).all()
    with pytest.raises(ValueError, match="expected the unit of each of 2 clips, got 1 names"):
        mean_estimate(np.array([1.0, 2.0]), units=["a"], num_resamples=10)


def test_a_frechet_interval_covers_as_often_as_it_says() -> None:
    def drawn(seed: int, num_clips: int) -> tuple[torch.Tensor, torch.Tensor]:
        ours = gaussian(num_clips * 20, 0, 1, seed, 2).view(num_clips, 20, 2)
        shifts = gaussian(num_clips, 1, 0.5, 1000 + seed, 2)[:, None]
        return ours, ours + shifts

    # Of many clips the distance is (1, 1)'s squared length and what the shifts' variance of 0.25 adds.
    true = frechet_distance(*(each.reshape(-1, 2) for each in drawn(0, 20_000)))
    estimates = [frechet_estimate(*drawn(1 + seed, 40), num_resamples=30, seed=seed) for seed in range(100)]
    assert 85 <= sum(estimate.low <= true <= estimate.high for estimate in estimates) <= 99


def test_frechet_intervals_resample_towns() -> None:
    towns = gaussian(8 * 40, 0, 1, 0, 3).view(8, 40, 3) + torch.arange(8.0)[:, None, None]
    alike, names = towns.repeat_interleave(4, dim=0), [f"town_{index // 4}" for index in range(32)]
    by_town = frechet_estimate(alike, alike * 2, units=names, num_resamples=100)
    alone = frechet_estimate(towns, towns * 2, num_resamples=100)
    by_clip = frechet_estimate(alike, alike * 2, num_resamples=100)
    assert (by_town.low, by_town.high) == pytest.approx((alone.low, alone.high), rel=0.02)
    assert by_town.high - by_town.low > 1.5 * (by_clip.high - by_clip.low)
    assert (by_town.units, by_clip.units) == (8, 32)


@pytest.mark.parametrize("num_clips", [1, 5, 24])
def test_a_share_of_all_or_none_has_an_exact_binomial_bound(num_clips: int) -> None:
    every, none = (share_estimate(np.full(num_clips, holds), num_resamples=50) for holds in (True, False))
    assert (every.value, every.high, none.value, none.low) == (1.0, 1.0, 0.0, 0.0)
    # All of n hold with a chance of 2.5 % if each holds with the chance at the bound.
    assert every.low**num_clips == pytest.approx(0.025)
    assert none.high == pytest.approx(1 - every.low)


def test_the_bound_of_a_share_counts_towns_and_other_shares_are_resampled() -> None:
    towns = ["a", "a", "b", "b", "c", "c"]
    assert share_estimate(np.full(6, True), units=towns, num_resamples=50).low == pytest.approx(0.025 ** (1 / 3))
    some = np.array([True, True, False, True, False, False])
    as_numbers = mean_estimate(some.astype(float), units=towns, num_resamples=50)
    assert share_estimate(some, units=towns, num_resamples=50) == as_numbers
    assert as_numbers.low < 0.5 < as_numbers.high
    assert share_estimate(np.array([], bool), num_resamples=50).count == 0


def test_clips_are_spread_over_long_enough_episodes_and_lie_inside() -> None:
    episodes = [episode_of(constant(5, 0, count), id=f"e{count}") for count in (10, 60, 80, 100)]
    clips = choose_clips(episodes, 7, num_frames=25, num_context=3, seed=0)
    assert {clip.episode.id for clip in clips} == {"e60", "e80", "e100"}
    assert all(clip.start >= 0 and clip.start + 25 <= clip.episode.num_frames for clip in clips)
    assert len({clip.seed for clip in clips}) == len({clip.name for clip in clips}) == 7
    assert all(len(clip.instructed) == 22 and clip.is_moving for clip in clips)
    assert choose_clips(episodes, 7, num_frames=25, num_context=3, seed=1)[0].seed != clips[0].seed
    with pytest.raises(DatasetError, match="got at most 101"):
        choose_clips(episodes, 1, num_frames=200, num_context=3, seed=0)


def test_clips_start_wherever_their_frames_lie_inside() -> None:
    episode = episode_of(constant(5, 0, 26))
    clips = choose_clips([episode], 12, num_frames=25, num_context=3, seed=0)
    assert {clip.start for clip in clips} == {0, 1, 2}


GRAY_STEP = 8  # levels from a frame of `speeding_up` to the next, more than H.264 adds or takes


def speeding_up(num_frames: int) -> np.ndarray:
    """Steps straight ahead of which no two are equal: the first of 0.2 m, each 0.05 m longer than the one before."""
    return np.column_stack([0.2 + 0.05 * np.arange(num_frames - 1), np.zeros(num_frames - 1)])


@pytest.fixture
def marked(tmp_path: Path) -> Episode:
    """A recorded drive of 20 frames that speeds up; frame i is gray of level 40 + 8 i."""
    create_dataset(tmp_path, FPS, IMAGE_SIZE, "gray")
    facts: dict[str, Any] = {"split": "held_out", "source": "gray", "place": "a", "fps": FPS, "camera": None}
    with ShardWriter(tmp_path, image_size=IMAGE_SIZE, **facts) as writer:
        frames = [np.full((*IMAGE_SIZE, 3), 40 + GRAY_STEP * index, np.uint8) for index in range(20)]
        writer.add("drive", frames, poses_of(speeding_up(20 + NUM_FUTURE_POSES)))
    (episode,) = read_split(tmp_path, "held_out").episodes
    return episode


def indices(frames: torch.Tensor) -> np.ndarray:
    """Which frames of `marked` these are, by how light they are."""
    levels = (frames.mean(dim=(1, 2, 3)).numpy() + 1) * 127.5
    return ((levels - 40) / GRAY_STEP).round().astype(int)


class PerfectEstimator(MotionEstimator):
    """Knows from a frame's gray where on its drive the car is."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(SMALL_ESTIMATOR)
        self.x = episode.poses.x

    def estimate(self, frames: torch.Tensor) -> torch.Tensor:
        forward = np.diff(self.x[indices(frames)])
        return torch.from_numpy(np.column_stack([forward, 0 * forward]))


def test_an_action_of_a_clip_lies_between_its_frame_and_the_next(marked: Episode) -> None:
    start, num_frames, ahead = 5, 8, (0.1, 1.0)
    (loaded,) = load_clips([Clip("clip", marked, start, num_frames, 3, 0)], 0, Waypoints(times=ahead))
    assert isinstance(loaded, LoadedClip)
    assert indices(loaded.frames).tolist() == list(range(start, start + num_frames))
    x = marked.poses.x
    expected = [
        [[0.0, x[frame + round(seconds * FPS)] - x[frame], seconds] for seconds in ahead]
        for frame in range(start, start + num_frames - 1)
    ]
    assert np.allclose(loaded.actions.numpy(), expected, atol=1e-5)


def test_instructed_motion_goes_from_the_last_context_frame_to_the_last_frame() -> None:
    steps = speeding_up(40)
    clip = Clip("clip", episode_of(steps), start=5, num_frames=12, num_context=3, seed=0)
    assert np.allclose(clip.instructed, steps[5 + 3 - 1 : 5 + 12 - 1])


def test_motion_recovered_without_error_is_the_instructed_motion(marked: Episode) -> None:
    clip = Clip("clip", marked, start=5, num_frames=8, num_context=3, seed=0)
    (loaded,) = load_clips([clip], 0, Waypoints(times=(0.1,)))
    assert isinstance(loaded, LoadedClip)
    scorer = Scorer(cast(FeatureNetwork, None), PerfectEstimator(marked))
    recovered = scorer.recover(clip, loaded.frames)
    assert np.allclose(recovered, speeding_up(20)[7:12])
    assert not any(error.round(6).any() for error in motion_errors(recovered, clip.instructed, FPS).values())


def test_a_measured_size_gives_the_scores_of_frames_of_that_size() -> None:
    steps, size, network = constant(5.0, 0, 8), (32, 48), FeatureNetwork("averages", [nn.AvgPool2d(4)])
    clip = Clip("clip", episode_of(steps), start=0, num_frames=8, num_context=3, seed=0)
    random = torch.Generator().manual_seed(0)
    variants = {name: torch.rand(8, 3, 64, 96, generator=random) * 2 - 1 for name in (TRUE, *VARIANTS)}
    estimator = MotionEstimator(SMALL_ESTIMATOR).eval()
    ours = Scorer(network, estimator, image_size=size).score(clip, variants)
    small = {name: resize(frames, size) for name, frames in variants.items()}
    theirs = Scorer(network, estimator).score(clip, small)
    for name in VARIANTS:
        for metric, values in theirs.metrics[name].items():
            assert np.array_equal(ours.metrics[name][metric], values)
        assert torch.equal(ours.features[name], theirs.features[name])
        assert np.array_equal(ours.steps[name], theirs.steps[name])
    whole = Scorer(network, estimator).score(clip, variants)
    assert not np.array_equal(ours.metrics[GENERATED]["psnr"], whole.metrics[GENERATED]["psnr"])


def futures(turns: dict[str, float], group: str = "g0", straight_on: int = 12, count: int = 60) -> list[Episode]:
    """Episodes that drive straight on for some frames, then turn by so many degrees in 2 s."""
    episodes = []
    for maneuver, turn in turns.items():
        steps = constant(5.0, 0, count)
        steps[straight_on : straight_on + 20, 1] = np.radians(turn) / 20
        episodes.append(episode_of(steps, id=f"{group}_{maneuver}", group=group, maneuver=maneuver))
    return episodes


LIMITS: dict[str, Any] = {"num_frames": 25, "num_context": 3, "agree_within": 0.05, "max_groups": 9, "seed": 0}


def test_groups_start_right_before_their_futures_part() -> None:
    turning = CONTRASTS[0]
    alike = futures({"left": 3, "straight": 0, "right": -3}, "alike")
    short = futures({"left": 60, "right": -60}, "short", count=20)
    alone = futures({"left": 60}, "alone")
    good = futures({"right": -60, "left": 60, "straight": 0}, "good")
    (group,), left_out = find_groups(alike + short + alone + good, turning, **LIMITS)
    assert left_out == {"recorded futures too similar": 1, "recording too short": 1, "one future only": 1}
    assert [clip.episode.maneuver for clip in group.clips] == ["left", "straight", "right"]
    assert len({clip.seed for clip in group.clips}) == 1
    last = group.clips[0].start + 2
    apart = [
        max(np.hypot(a.poses.x[at] - b.poses.x[at], a.poses.y[at] - b.poses.y[at]) for a in good for b in good)
        for at in (last, last + 1)
    ]
    assert apart[0] <= 0.05 < apart[1]


def test_order_is_that_of_the_recovered_headings() -> None:
    (group,), _ = find_groups(futures({"left": 60, "straight": 0, "right": -60}), CONTRASTS[0], **LIMITS)
    assert group.is_ordered([constant(5, 20), constant(5, 1), constant(5, -20)])
    assert not group.is_ordered([constant(5, 20), constant(5, -21), constant(5, -20)])
    assert not group.is_ordered([constant(0, 0)] * 3)  # persistence
    assert group.is_ordered([clip.instructed for clip in group.clips])


@given(st.integers(1, 200), st.integers(1, 50))
def test_bins_tile_the_frames(num_frames: int, bin_frames: int) -> None:
    bins = frame_bins(num_frames, bin_frames)
    assert [frame for first, last in bins for frame in range(first, last + 1)] == list(range(1, num_frames + 1))


def test_a_remainder_below_half_a_bin_joins_the_last_bin() -> None:
    assert frame_bins(9, 4) == [(1, 4), (5, 9)]
    assert frame_bins(10, 4) == [(1, 4), (5, 8), (9, 10)]


def test_persistence_holds_the_decoded_last_frame_of_the_context() -> None:
    class Decoder:
        def decode(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens[:, None].expand(-1, 3, -1, -1) / 64

    tokens = torch.arange(6).reshape(6, 1, 1).expand(-1, 2, 4)
    variants = decode_variants(torch.zeros(6, 3, 2, 4), tokens, tokens + 10, 3, cast(Any, Decoder()))
    assert {name: (64 * frames[:, 0, 0, 0]).tolist() for name, frames in variants.items()} == {
        TRUE: [0] * 6,
        RE_ENCODED: [0, 1, 2, 3, 4, 5],
        GENERATED: [10, 11, 12, 13, 14, 15],
        PERSISTENCE: [0, 1, 2, 2, 2, 2],
    }


def scored_clip(index: int, gain: float, place: str = "000001") -> ClipScores:
    episode = episode_of(constant(5, 0, 60), id=f"e{index}", place=place)
    clip = choose_clips([episode], 1, num_frames=25, num_context=3, seed=0)[0]
    levels = {GENERATED: 20.0 + gain, RE_ENCODED: 30.0, PERSISTENCE: 20.0}
    metrics = {
        name: {"psnr": np.full(22, level + index), "ssim": np.full(22, level / 30)} for name, level in levels.items()
    }
    features = {
        name: gaussian(22, shift, 1, index, 5) for name, shift in zip((TRUE, *levels), (0, 1, 0.1, 2), strict=True)
    }
    return ClipScores(clip, metrics, features)


def test_measures_and_bars_follow_from_the_scores() -> None:
    scores = [scored_clip(index, 2.0) for index in range(5)]
    bootstrap = Bootstrap(50, 4, 0)
    measures = frame_measures("rollouts", scores, bootstrap) + frechet_measures("rollouts", scores, "N", 5, bootstrap)
    criteria = {each.name: each for each in evaluate_criteria(measures, "N", CodebookUse(1000, 50, 100))}
    assert criteria["tokenizer PSNR (dB)"].value == pytest.approx(32.0)
    gain = criteria["PSNR over persistence when moving, worst of frames 1 to 22 (dB)"]
    assert gain.value == pytest.approx(2.0)
    assert (gain.passed, gain.too_few) == (None, "5 of 16 moving clips")
    assert criteria["codebook use"].passed is False
    assert criteria["ADE, generated / persistence"].passed is None
    assert criteria["ADE, generated / persistence"].too_few is None  # nothing was measured
    assert criteria["FD-N-T, persistence / generated"].too_few == "5 of 32 clips"
    assert criteria["tokenizer PSNR (dB)"].too_few == "1 of 8 places"
    whole = {(m.metric, m.variant): m.estimate for m in measures if m.first_frame is None}
    assert whole["FD-N", RE_ENCODED].value < whole["FD-N", GENERATED].value < whole["FD-N", PERSISTENCE].value
    assert whole["FD-N", GENERATED].count == 5 * 22
    assert whole["psnr", GENERATED].count == 5


def test_every_interval_of_the_evaluation_is_over_places() -> None:
    places = ["000001", "000001", "000002", "000003", "000003", "000003"]
    scores = [scored_clip(index, 2.0, place) for index, place in enumerate(places)]
    for each in scores:
        still = each.clip.place == "town_000003"
        each.steps = dict.fromkeys((TRUE, *VARIANTS), each.clip.instructed * (0.0 if still else 1.0))
    bootstrap = Bootstrap(50, 4, 0)
    measures = frame_measures("rollouts", scores, bootstrap) + frechet_measures("rollouts", scores, "N", 5, bootstrap)
    measures += fidelity_measures("rollouts", scores, FPS, bootstrap)
    measures += order_measures("turning", {GENERATED: [True] * 6}, places, bootstrap)
    assert {each.estimate.units for each in measures} == {3}
    whole = {(m.metric, m.variant): m.estimate for m in measures if m.first_frame is None}
    clips = np.array([22.0 + index for index in range(6)])
    assert whole["psnr", GENERATED] == mean_estimate(clips, units=places, num_resamples=50)
    right = np.array([True, True, True, False, False, False])
    assert whole["class-agreement", GENERATED] == share_estimate(right, units=places, num_resamples=50)
    assert whole["turning-order", GENERATED] == share_estimate(np.full(6, True), units=places, num_resamples=50)


@pytest.mark.parametrize(("clips", "passed", "too_few"), [(31, None, "31 of 32 clips"), (32, False, None)])
def test_drift_compares_the_last_bin_with_the_first(clips: int, passed: bool | None, too_few: str | None) -> None:
    points = [
        Measure("drift", "FD-N", GENERATED, first, first + 19, Estimate(value, 0.0, 9.0, 3, 3))
        for first, value in ((21, 3.0), (1, 2.0), (41, 5.0))
    ]
    points.append(Measure("drift", "psnr", RE_ENCODED, None, None, Estimate(30.0, 29.0, 31.0, clips, clips)))
    made = evaluate_criteria(points, "N", CodebookUse(0, 0, 64))
    (criterion,) = (criterion for criterion in made if "long rollouts" in criterion.name)
    assert (criterion.value, criterion.passed, criterion.too_few) == (2.5, passed, too_few)


@pytest.mark.parametrize(
    ("places", "given", "passed", "too_few"),
    [(7, 20.0, None, "7 of 8 places"), (7, 30.0, None, "7 of 8 places"), (8, 20.0, False, None), (8, 30.0, True, None)],
)
def test_a_mean_is_judged_from_enough_places(places: int, given: float, passed: bool | None, too_few: str | None):
    psnr = Measure("rollouts", "psnr", RE_ENCODED, None, None, Estimate(given, 0.0, 40.0, 99, places))
    criterion = evaluate_criteria([psnr], "N", CodebookUse(0, 0, 64))[0]
    assert (criterion.name, criterion.passed, criterion.too_few) == ("tokenizer PSNR (dB)", passed, too_few)


@pytest.mark.parametrize(
    ("groups", "share", "passed", "too_few"),
    [(19, 1.0, None, "19 of 20 groups"), (20, 1.0, True, None), (20, 0.9, False, None)],
)
def test_an_order_is_judged_from_enough_groups(groups: int, share: float, passed: bool | None, too_few: str | None):
    order = Measure("counterfactual", "turning-order", GENERATED, None, None, Estimate(share, 0, 1, groups, groups))
    (criterion,) = (each for each in evaluate_criteria([order], "N", CodebookUse(0, 0, 64)) if "groups" in each.name)
    assert (criterion.passed, criterion.too_few) == (passed, too_few)


@pytest.mark.parametrize(
    ("tokens", "distinct", "passed", "too_few"),
    [
        (639, 9, None, "639 of 640 tokens"),
        (640, 9, False, None),
        (639, 39, True, None),  # more tokens can only show more entries
        (0, 0, False, None),
    ],
)
def test_the_use_of_a_codebook_is_judged_from_enough_tokens(
    tokens: int, distinct: int, passed: bool | None, too_few: str | None
) -> None:
    criterion = evaluate_criteria([], "N", CodebookUse(tokens, distinct, 64))[2]
    assert (criterion.name, criterion.passed, criterion.too_few) == ("codebook use", passed, too_few)


def test_the_reference_is_of_other_drives_of_the_same_places() -> None:
    def drive(name: str, place: str, **facts: Any) -> Episode:
        return episode_of(constant(5, 0, 29), id=name, video=Path(name), place=place, **facts)

    episodes = [drive(name, place) for name, place in (("a0", "a"), ("b0", "b"), ("c0", "c"), ("a1", "a"), ("a2", "a"))]
    future = drive("a3", "a", group="g", maneuver="left")
    abroad = drive("a4", "a", source="other")
    lengths = {"num_frames": 25, "num_context": 3, "seed": 0}
    clips = [choose_clips([each], 1, **lengths)[0] for each in episodes[:2]]
    drives = choose_other_drives([*episodes, future, abroad], clips, 12)
    assert [each.episode.id for each in drives] == ["a1", "a2"]
    frames = np.concatenate([drives[0].frames, drives[1].frames + 30])
    assert np.array_equal(frames, np.linspace(0, 59, 12).round())
    assert [len(each.frames) for each in choose_other_drives(episodes, clips, 1000)] == [30, 30]
    assert choose_other_drives(episodes, clips, 0) == []
    with pytest.raises(DatasetError, match=r"expected other drives of the 2 places .* got none beside the 2 "):
        choose_other_drives([*episodes[:3], future, abroad], clips, 12)


def test_unpaired_distances_are_to_the_same_reference_with_equally_many_frames() -> None:
    places = ["000001", "000001", "000002", "000003", "000004"]
    scores = [scored_clip(index, 2.0, place) for index, place in enumerate(places)]
    drives = [gaussian(30 + index, 0.5, 1, 50 + index, 5) for index in range(3)]
    reference = Reference(["town_000001", "town_000002", "town_000003"], drives)
    bins = frame_bins(22, 3)  # six of 3 frames, and one of 4
    measures = unpaired_measures("drift", scores, reference, "N", 3, Bootstrap(50, 4, 0))
    by_bin = {(m.variant, m.first_frame, m.last_frame): m.estimate for m in measures if m.first_frame}
    assert set(by_bin) == {(name, *span) for name in (TRUE, GENERATED, RE_ENCODED) for span in bins}
    assert {each.count for each in by_bin.values()} == {4 * 3}  # without the clip of a place that has no other drive
    features = torch.stack([each.features[TRUE] for each in scores[:4]])
    first = frechet_distance(features[:, :3].flatten(0, 1), torch.cat(drives))
    last = frechet_distance(features[:, [18, 20, 21]].flatten(0, 1), torch.cat(drives))
    assert by_bin[TRUE, 1, 3].value == pytest.approx(first)
    assert by_bin[TRUE, 19, 22].value == pytest.approx(last)
    whole = {(m.metric, m.variant): m.estimate for m in measures if m.first_frame is None}
    for variant in (TRUE, GENERATED):
        values = [by_bin[variant, *span].value for span in bins]
        growth = whole["FD-N-unpaired-growth", variant]
        assert growth.value == pytest.approx(np.mean(values[2:]) / values[0])
        assert growth.low < growth.value < growth.high
    halves = frechet_distance(torch.cat([drives[0], drives[2]]), drives[1])
    assert whole["FD-N-unpaired", HALVES].value == pytest.approx(halves)
    assert len([m for m in measures if m.metric == "FD-N-unpaired-growth"]) == 3
    short = unpaired_measures("drift", scores, reference, "N", 5, Bootstrap(50, 4, 0))  # four bins are below 10 s
    assert {m.metric for m in short} == {"FD-N-unpaired"}
    elsewhere = Reference(["town_000009"], drives[:1])
    assert unpaired_measures("drift", scores, elsewhere, "N", 3, Bootstrap(50, 4, 0)) == []


def test_distances_to_a_set_as_reference_are_those_to_its_samples() -> None:
    ours, theirs = (
        torch.stack([gaussian(7, shift, 1, 10 * shift + index, 5) for index in range(6)]) for shift in (0, 1)
    )
    samples = theirs.flatten(0, 1)
    value, *resampled = reference_distances(ours, moments(samples), units=list("aabbcc"), num_resamples=5)
    assert value == pytest.approx(frechet_distance(ours.flatten(0, 1), samples))
    assert len(set(resampled)) > 1
    assert reference_distances(theirs, moments(samples), num_resamples=0) == [pytest.approx(0, abs=1e-6)]


def test_kept_rollouts_are_not_made_again_and_equal_the_first(
    tiny_model: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    pipeline = Pipeline(
        tokenizer, PersistenceEngine.from_pretrained(tiny_model), FramewiseDecoder(tokenizer), overlap=1
    )
    sampling = SamplingParams()
    frames = torch.rand(3, 3, *tokenizer.image_size) * 2 - 1
    requests = [RolloutRequest(frames, torch.rand(6, 6, 3), seed) for seed in (1, 2)]
    with pipeline:
        first = KeptRollouts(pipeline, sampling, tmp_path, {"engine": "a"})
        tokens = first.tokens(["x", "y"], requests)
        assert all(torch.equal(each[3:], each[2:3].expand(4, -1, -1)) for each in tokens)  # persistence repeats
        stamp = (tmp_path / "x.safetensors").stat().st_mtime_ns
        (tmp_path / "y.safetensors").unlink()
        again = KeptRollouts(pipeline, sampling, tmp_path, {"engine": "a"})
        assert all(torch.equal(a, b) for a, b in zip(again.tokens(["x", "y"], requests), tokens, strict=True))
        assert (first.num_reused, again.num_reused) == (0, 1)
        assert (tmp_path / "x.safetensors").stat().st_mtime_ns == stamp
        other = KeptRollouts(pipeline, sampling, tmp_path, {"engine": "b"})
        other.tokens(["x"], [replace(requests[0], seed=3)])
        assert other.num_reused == 0


def test_a_rollout_is_kept_as_soon_as_it_is_made(tiny_model: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    pipeline = Pipeline(
        tokenizer, PersistenceEngine.from_pretrained(tiny_model), FramewiseDecoder(tokenizer), overlap=1
    )
    frames = torch.rand(3, 3, *tokenizer.image_size) * 2 - 1
    good = RolloutRequest(frames, torch.rand(4, 6, 3), 1)
    late = torch.rand(40, 6, 3)
    late[-1] = torch.nan  # the engine refuses it when it comes to it
    broken = RolloutRequest(frames, late, 2)
    with pipeline:
        with pytest.raises(EngineError):
            KeptRollouts(pipeline, SamplingParams(), tmp_path, {}).tokens(["good", "broken"], [good, broken])
        assert [path.name for path in tmp_path.iterdir()] == ["good.safetensors"]
        again = KeptRollouts(pipeline, SamplingParams(), tmp_path, {})
        again.tokens(["good"], [good])
        assert again.num_reused == 1


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of 32 x 48 pixels, because the measuring networks need sides of at least 32."""
    networks = EncoderDecoderConfig(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1, z_channels=6)
    quantizer = QuantizerConfig(dim=6, codebook_size=64)
    config = LFQTokenizerConfig(encoder_decoder_config=networks, quantizer_config=quantizer, image_size=IMAGE_SIZE)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tokenizer"
    LFQTokenizer(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    block = PATCHES + 6
    sizes = {"num_image_patches": PATCHES, "num_spatio_embeddings": block, "max_position_embeddings": 8 * block}
    return save_tiny(tmp_path_factory.mktemp("models") / "v2", LlamaActionV2ForCausalLM, **sizes)


@pytest.fixture(scope="module")
def driving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits of 32 x 48 pixel drives past stripes, with one counterfactual group; frames show where the car is."""
    folder = tmp_path_factory.mktemp("driving")
    create_dataset(folder, FPS, IMAGE_SIZE, "stripes")
    for split, place in (("train", "a"), ("held_out", "b")):
        options: dict[str, Any] = {"split": split, "source": "stripes", "place": place, "fps": FPS, "camera": None}
        with ShardWriter(folder, image_size=IMAGE_SIZE, **options) as writer:
            for index in range(5):
                steps = constant(2.0 + 2 * index, 0, 12 + NUM_FUTURE_POSES - 1)
                writer.add(f"{place}{index}", stripes(steps, 12), poses_of(steps))
        with ShardWriter(folder, image_size=IMAGE_SIZE, futures=True, **options) as writer:
            for episode in futures({"left": 80, "straight": 0, "right": -80}, straight_on=3, count=42):
                steps = steps_of(episode.poses, 0, 43)[:41]
                writer.add(
                    f"{place}_{episode.maneuver}",
                    stripes(steps, 12),
                    poses_of(steps),
                    group="g0",
                    maneuver=episode.maneuver,
                    num_context=2,
                )
    return folder


def stripes(steps: np.ndarray, count: int) -> list[np.ndarray]:
    path = integrate(steps)[:count]
    columns, rows = np.meshgrid(np.arange(IMAGE_SIZE[1]), np.arange(IMAGE_SIZE[0]))
    shades = [127 + 100 * np.sin(rows / 2 + 3 * x) * np.cos(columns / 3 + 9 * heading) for x, _, heading in path]
    return [np.repeat(shade[..., None], 3, axis=-1).astype(np.uint8) for shade in shades]


@pytest.mark.slow
def test_estimator_learns_and_is_stored(driving: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"window": 6, "workers": 0, "device": torch.device("cpu")}
    tokenizer = LFQTokenizer.from_pretrained(tokenizer_folder)
    recordings = load_recordings(
        driving, "train", IMAGE_SIZE, max_frames=500, tokenizer=tokenizer, corruption=0.1, **options
    )
    assert recordings.frames.shape == (2, 8 * 12, 3, *IMAGE_SIZE)
    held_out = load_recordings(driving, "held_out", IMAGE_SIZE, max_frames=500, tokenizer=None, **options)
    model = EstimatorConfig(fps=FPS, image_size=IMAGE_SIZE, width=8, reach=2, features=16)
    loop = LoopConfig(output=tmp_path, batch_size=8, max_steps=40, learning_rate=3e-3, warmup_steps=5, ema_decay=0.9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = evaluate_estimator(MotionEstimator(model), held_out, window=6, num_windows=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = start_processes("cpu")
        train_estimator(recordings, held_out, model, loop, accelerator, window=6, evaluation_windows=8)
        with pytest.raises(ConfigError, match="window: expected 4 frames or more, got 3"):
            train_estimator(recordings, held_out, model, loop, accelerator, window=3, evaluation_windows=8)
    stored = MotionEstimator.from_pretrained(tmp_path / "estimator")
    trained = evaluate_estimator(stored, held_out, window=6, num_windows=8)
    assert trained == {name: json.loads((tmp_path / "metrics.json").read_text())[name] for name in trained}
    assert trained["recorded"]["ADE"] < 0.7 * untrained["recorded"]["ADE"]


def test_differentiable_positions_are_the_integrated_path() -> None:
    steps = np.random.default_rng(0).normal(size=(9, 2))
    assert np.allclose(positions(torch.from_numpy(steps)[None])[0].numpy(), integrate(steps)[1:, :2])


def test_estimator_refuses_another_checkpoint(tmp_path: Path) -> None:
    MotionEstimator(SMALL_ESTIMATOR).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert MotionEstimator.from_pretrained(tmp_path).config.reach == 1
    (tmp_path / "config.json").write_text(json.dumps({**config, "features": 9}))
    with pytest.raises(CheckpointError, match="differs in"):
        MotionEstimator.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "width": 9}))
    with pytest.raises(CheckpointError, match="width: expected a whole number divisible by 8"):
        MotionEstimator.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="terra_motion_estimator"):
        MotionEstimator.from_pretrained(tmp_path)


def evaluation(driving: Path, model: Path, tokenizer: Path, folder: Path, **changes: Any) -> EvaluationSettings:
    if not (folder / "estimator").exists():
        MotionEstimator(SMALL_ESTIMATOR).save_pretrained(folder / "estimator")
    settings = [
        *(f"data={driving}", f"output={folder / 'out'}", f"estimator={folder / 'estimator'}", "engine=persistence"),
        *(f"tokenizer.pretrained={tokenizer}", f"world_model.pretrained={model}"),
        *("num_clips=4", "num_frames=6", "num_context=2", "overlap=1", "drift_clips=2", "drift_frames=10"),
        *("group_frames=8", "at_once=3", "workers=0", "resamples=20", "frechet_resamples=3"),
    ]
    return read_settings("evaluate", [*settings, *(f"{name}={value}" for name, value in changes.items())])


@pytest.mark.slow
def test_evaluation_writes_its_files_and_a_second_run_makes_nothing_new(
    driving: Path, model_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    unpaired = {"drift_clips": 4, "drift_reference_frames": 7}
    config = evaluation(driving, model_folder, tokenizer_folder, tmp_path, **unpaired)
    run(config, Console(quiet=True))
    out = tmp_path / "out"
    written = {path.name for path in out.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("clips", "drift_clips", "turning") for kind in ("png", "mp4")}
    assert written >= {"metrics.json", "metrics.csv", "rollouts.png", "drift.png", "rollouts"} | pictures
    first = json.loads((out / "metrics.json").read_text())
    assert first["clips"] == 4
    assert first["counterfactual_groups"]["turning"]["evaluated"] == 1
    assert len(first["teacher_forced"]["cross_entropy_by_frame"]) == 6
    assert set(first["measures"]["rollouts"]["ADE"]) == {TRUE, RE_ENCODED, GENERATED, PERSISTENCE}
    assert first["drift_reference"] == {"drives": 1, "frames": 7}
    assert set(first["measures"]["drift"]["FD-ENL0-unpaired"]) == {TRUE, RE_ENCODED, GENERATED}
    assert first["intervals"] == {"level": 0.95, "resampled_by": "place"}
    psnr = first["measures"]["rollouts"]["psnr"]
    assert (psnr[GENERATED]["count"], psnr[GENERATED]["units"]) == (4, 1)  # of one town, so that no interval is known
    assert psnr[GENERATED]["low"] is psnr[GENERATED]["high"] is None
    generated, held, re_encoded = (psnr[name]["value"] for name in (GENERATED, PERSISTENCE, RE_ENCODED))
    assert generated == pytest.approx(held, rel=1e-4)  # which is what this engine generates
    assert re_encoded != pytest.approx(held, rel=1e-4)
    run(config, Console(quiet=True))
    second = json.loads((out / "metrics.json").read_text())
    assert second["rollouts_reused"] == 4 + 2 + 3
    assert (
        second["scores_reused"] == 2
    )  # of the long rollouts that are not shown; the others are measured with the videos
    assert second["measures"] == first["measures"]
    assert first["criteria"] == []  # which are those of the shipped model
    run(config.replace(requirements=True), Console(quiet=True))
    assert len(json.loads((out / "metrics.json").read_text())["criteria"]) == 9


@pytest.mark.slow
def test_a_comparison_of_driving_has_the_error_of_the_path(
    driving: Path, model_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "snow" / "adapter", model_folder, seed=1)
    config = evaluation(driving, model_folder, tokenizer_folder, tmp_path, max_groups=0, drift_clips=0, engine="jacobi")
    run(config.replace(output=tmp_path / "alone", adapter=adapter), Console(quiet=True))
    out = run(config.replace(compare=[str(adapter.parent)], old_data=driving), Console(quiet=True))
    alone = json.loads((tmp_path / "alone" / "metrics.json").read_text())["measures"]["rollouts"]["ADE"][GENERATED]
    models = json.loads((out / "compare.json").read_text())["models"]
    base, ours = (models[name]["values"]["ADE"] for name in ("base", "snow"))
    assert ours == alone
    assert base != ours
    difference = models["snow"]["differences"]["ADE"]
    assert difference["value"] == pytest.approx(ours["value"] - base["value"])
    assert difference["low"] is None  # the recordings are of one place
    old = models["snow"]["values"]["old domain: cross-entropy"]
    assert old == models["snow"]["values"]["cross-entropy"]  # here the same recordings


@pytest.mark.slow
def test_an_evaluation_stopped_at_any_clip_goes_on_there_and_ends_with_the_same_numbers(
    driving: Path, model_folder: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    (tmp_path / "whole").mkdir()
    whole = evaluation(driving, model_folder, tokenizer_folder, tmp_path / "whole", pictures=0)
    config = evaluation(driving, model_folder, tokenizer_folder, tmp_path, pictures=0).replace(
        estimator=whole.estimator
    )
    run(whole, Console(quiet=True))
    score, recover = Scorer.score, Scorer.recover
    out = config.output

    def stop_after(count: int) -> None:
        measured = []

        def stop_soon(self: Scorer, clip: Clip, *rest: Any) -> Any:
            if len(measured) == count:
                raise KeyboardInterrupt
            measured.append(clip.name)
            return score(self, clip, *rest)

        monkeypatch.setattr(Scorer, "score", stop_soon)
        with pytest.raises(KeyboardInterrupt):
            run(config, Console(quiet=True))
        assert len(measured) == count

    stop_after(2)
    assert not (out / "metrics.json").exists()
    stop_after(3)  # the other two clips, and the first long rollout
    assert json.loads((out / "metrics.json").read_text())["complete"] is False
    monkeypatch.setattr(Scorer, "score", score)
    recovered = []
    monkeypatch.setattr(Scorer, "recover", lambda *args: recovered.append(1) or recover(*args))
    run(config, Console(quiet=True))
    first, second = (json.loads((each.output / "metrics.json").read_text()) for each in (whole, config))
    assert first["complete"] is second["complete"] is True
    assert first["measures"] == second["measures"]
    assert first["teacher_forced"] == second["teacher_forced"]
    assert "made anew" not in caplog.text

    # Everything is kept, and what is damaged is measured again.
    recovered.clear()
    run(config, Console(quiet=True))
    assert not recovered
    scores = sorted((out / "scores").iterdir())
    assert len(scores) == 4 + 2 + 1
    for path, content in zip(scores, (b"", b"{}", bytes(1000)), strict=False):
        path.write_bytes(content)
    scores[3].write_bytes(scores[3].read_bytes()[:-9] + bytes(9))
    rollouts = sorted((out / "rollouts").iterdir())
    for path in rollouts:
        path.write_bytes(path.read_bytes()[:-5])
    run(config, Console(quiet=True))
    assert caplog.text.count("is damaged and made again") >= 4 + 1
    assert json.loads((out / "metrics.json").read_text())["measures"] == first["measures"]

    # A changed setting starts anew, with a line.
    caplog.clear()
    run(config.replace(seed=1, resamples=21), Console(quiet=True))
    assert caplog.text.count("was made with other settings, data or weights: made anew") == 2
