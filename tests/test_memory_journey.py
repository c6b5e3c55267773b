"""Memory from a recording to a table: recordings that come back, tokens, a training, and the evaluation of both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entry import read_settings
from rich.console import Console
from tiny_driving import CAMERA, FPS, drive_poses

from terra.dataset import ShardWriter, create_dataset, read_split
from terra.engine.base import EngineSpec
from terra.errors import ConfigError, DatasetError
from terra.evaluation.clips import LoadedClip, load_clips
from terra.evaluation.evaluate import run
from terra.evaluation.measures import Bootstrap
from terra.evaluation.remembering import (
    BEST_VIEW,
    NO_MEMORY,
    ORACLE,
    RECENT,
    Remembered,
    loop_measures,
    recall_of,
    revisit_measures,
)
from terra.evaluation.revisits import Revisit, choose_drives, find_revisits, loop_of, poses_of, returns_of
from terra.evaluation.scores import GENERATED, RE_ENCODED, ClipScores
from terra.evaluation.settings import EvaluationSettings
from terra.memory import MemoryRule
from terra.recording.samples import draw_plane
from terra.training import tokenize, world_model
from terra.training.tokenizer import small_config
from terra.world_model import load_config
from tokenizer import LFQTokenizer

SIZE = (32, 48)
LAP = 78  # frames of a circle at 0.8 rad/s
NUM_FRAMES = 100


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Drives around a circle over a plane of colored squares: what is seen comes again after 78 frames."""
    folder = tmp_path_factory.mktemp("recorded")
    create_dataset(folder, FPS, SIZE, "town")
    for split, first in (("train", 0), ("held_out", 900_000)):
        for place in (first, first + 1):
            with ShardWriter(
                folder, split=split, source="town", place=f"{place:06d}", fps=FPS, image_size=SIZE, camera=CAMERA
            ) as writer:
                poses = drive_poses(NUM_FRAMES, turning=0.8, speed=5.0 + place % 2)
                frames = draw_plane(poses, NUM_FRAMES, SIZE, CAMERA)
                writer.add(f"{writer.name_prefix}_00", frames, poses, events=[(0, "circle")])
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LFQTokenizer(
            small_config(image_size=SIZE, ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1, dim=6)
        ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(recorded, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    settings = [f"data={recorded}", f"checkpoint={tokenizer}", f"output={folder}", "device=cpu", "workers=0"]
    tokenize.run(read_settings("tokenize", settings))
    return folder


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory) -> Path:
    """A world model that remembers two frames, after a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [
        *(f"data={tokens}", f"output={folder}", "recipe=world_model_smoke", "device=cpu", "window=9"),
        *("memory.frames=2", "schedule=steps", "max_steps=3", "max_seconds=null", "evaluation_windows=4"),
    ]
    world_model.run(read_settings("train", settings))
    return folder / "world_model"


def evaluation(recorded: Path, tokenizer: Path, model: Path, output: Path, **changes: Any) -> EvaluationSettings:
    settings = [
        *(f"data={recorded}", f"output={output}", "estimator=null", "engine=jacobi", "device=cpu", "max_groups=0"),
        *(f"tokenizer.pretrained={tokenizer}", f"world_model.pretrained={model}", "num_clips=2", "num_frames=12"),
        *("num_context=3", "overlap=3", "drift_clips=0", "revisit_clips=2", "revisit_frames=16"),
        *("revisit_loops=1", "workers=0", "resamples=20"),
        *("frechet_resamples=3", "pictures=0"),
    ]
    return read_settings("evaluate", [*settings, *(f"{name}={value}" for name, value in changes.items())])


def test_what_is_seen_again_is_found_by_poses():
    poses = drive_poses(160, turning=0.8, speed=5.0)
    frames, before = find_revisits(np.stack([poses.x, poses.y, poses.heading], axis=1), FPS)
    assert frames[0] in range(LAP - 8, LAP + 1)
    assert (np.diff(frames) == 1).all()
    later = frames > LAP + 2
    lap = (frames - before)[later] % (2 * np.pi / 0.08)
    assert (np.minimum(lap, 2 * np.pi / 0.08 - lap) <= 1).all()
    straight = drive_poses(300, turning=0.0, speed=2.0)
    assert len(find_revisits(np.stack([straight.x, straight.y, straight.heading], axis=1), FPS)[0]) == 0
    standing = drive_poses(300, turning=0.0, speed=0.0)  # what never left the picture is not seen again
    assert len(find_revisits(np.stack([standing.x, standing.y, standing.heading], axis=1), FPS)[0]) == 0


def returns(recorded: Path) -> list[Revisit]:
    """The returns of the held-out drives."""
    drives = choose_drives(read_split(recorded, "held_out").episodes, 5)
    return [each for drive in drives for each in returns_of(drive, num_frames=16, num_context=3, seed=0)]


def test_returns_lie_behind_what_they_show_again(recorded):
    found = returns(recorded)
    assert [each.kind for each in found] == ["circle", "circle"]
    assert [each.age for each in found] == [10, 10]
    assert len({each.clip.seed for each in found}) == 2
    for each in found:
        assert each.clip.start + each.clip.num_frames <= NUM_FRAMES
        assert set(each.frames) <= set(range(3, 16))
        assert (each.before < each.clip.start).all()
        all_frames, all_before = find_revisits(poses_of(each.clip.episode), FPS)
        expected = dict(zip(all_frames, all_before, strict=True))
        again = {each.clip.start + frame: before for frame, before in zip(each.frames, each.before, strict=True)}
        assert again.items() <= expected.items()


def test_a_drive_has_a_return_for_each_age_where_most_of_it_counts(recorded):
    (drive, _) = choose_drives(read_split(recorded, "held_out").episodes, 2)
    frames = np.r_[20:23, 40:50, 80:93]
    before = frames - np.repeat([10, 20, 40], [3, 10, 13])
    slow = replace(drive, episode=replace(drive.episode, fps=1.0), frames=frames, before=before)
    found = returns_of(slow, num_frames=16, num_context=3, seed=0)
    assert [(each.age, each.clip.start, len(each.frames)) for each in found] == [
        (10, 13, 3),
        (20, 34, 10),
        (40, 77, 13),
    ]


def test_a_loop_compares_what_was_generated_alone(recorded):
    (drive, _) = choose_drives(read_split(recorded, "held_out").episodes, 2)
    loop = loop_of(drive, num_context=3, seed=0)
    assert (loop.clip.start, loop.clip.num_frames) == (0, NUM_FRAMES)
    assert loop.before.min() >= 3
    assert len(loop.frames) == (drive.before >= 3).sum()


def test_drives_that_do_not_come_back_are_refused_in_one_line(recorded, tokenizer, trained, tmp_path):
    with pytest.raises(DatasetError, match="drives of more than revisit_frames=100 frames that come back, got none"):
        run(evaluation(recorded, tokenizer, trained, tmp_path, revisit_frames=100), Console(quiet=True))
    assert not tmp_path.joinpath("metrics.json").exists()
    with pytest.raises(ConfigError, match="revisit_loops: expected at most revisit_clips, got 3"):
        evaluation(recorded, tokenizer, trained, tmp_path, revisit_loops=3)


def test_measures_compare_with_no_memory_and_with_the_oracle(recorded):
    values = {RE_ENCODED: 30.0, GENERATED: 22.0, NO_MEMORY: 18.0, RECENT: 19.0, ORACLE: 24.0, BEST_VIEW: 20.0}
    drives = []
    for index, revisit in enumerate(returns(recorded)):
        count = len(revisit.frames)
        scores = {name: {"psnr": np.full(count, value + index)} for name, value in values.items()}
        drives.append(Remembered(revisit, ClipScores(revisit.clip, metrics=scores), {}))
    measures = {
        (each.run, each.metric, each.variant): each.estimate for each in revisit_measures(drives, Bootstrap(20, 3, 0))
    }
    assert measures["revisits", "psnr", GENERATED].value == 22.5
    assert measures["revisits-circle", "psnr", GENERATED] == measures["revisits", "psnr", GENERATED]
    assert measures["revisits-10s", "psnr", GENERATED] == measures["revisits", "psnr", GENERATED]
    of_loops = {
        (each.run, each.metric, each.variant): each.estimate for each in loop_measures(drives, Bootstrap(9, 3, 0))
    }
    assert of_loops["loops", "psnr-gain", GENERATED].value == 4.0
    gain = measures["revisits", "psnr-gain", GENERATED]
    assert (gain.value, gain.low, gain.high, gain.units) == (4.0, 4.0, 4.0, 2)
    closed = measures["revisits", "psnr-closed", GENERATED]
    assert closed.value == pytest.approx(4 / 6)
    assert closed.low == pytest.approx(4 / 6)
    assert measures["revisits", "psnr-closed", RECENT].value == pytest.approx(1 / 6)


def test_variants_remember_other_frames(recorded, trained):
    spec, rule = EngineSpec.of(load_config(trained)), MemoryRule(frames=2)
    clip = returns(recorded)[0].clip
    (loaded,) = load_clips([replace(clip, start=0, num_frames=NUM_FRAMES)], 0, spec.space)
    assert isinstance(loaded, LoadedClip)
    start, actions = clip.start, loaded.actions
    tokens = torch.arange(NUM_FRAMES)[:, None, None].expand(-1, 4, 6)
    chosen = {}
    for variant in (GENERATED, RECENT, ORACLE):
        begin = recall_of(variant, rule, spec, tokens, actions, start)
        recall = begin(tokens[start : start + 3], actions[start : start + 2])
        assert recall is not None
        memory, _ = recall.prompt(recall.choose(0, 3, actions[start + 2]), 0, 3, actions[start + 2])
        chosen[variant] = memory[:, 0, 0].tolist()
    assert all(frame < start - 10 for frame in chosen[GENERATED])
    assert chosen[RECENT] == [start - 2, start - 1]
    assert all(frame >= start for frame in chosen[ORACLE])
    assert recall_of(NO_MEMORY, rule, spec, tokens, actions, start)(tokens[:3], actions[:2]) is None


@pytest.mark.slow
def test_a_model_trained_with_memory_is_evaluated_with_and_without(recorded, tokenizer, trained, tmp_path):
    config = evaluation(recorded, tokenizer, trained, tmp_path)
    run(config, Console(quiet=True))
    first = json.loads((tmp_path / "metrics.json").read_text())
    psnr = first["measures"]["revisits"]["psnr"]
    assert set(psnr) == {RE_ENCODED, GENERATED, NO_MEMORY, RECENT, ORACLE, BEST_VIEW}
    assert len({psnr[name]["value"] for name in (RE_ENCODED, GENERATED, NO_MEMORY, BEST_VIEW)}) == 4
    assert first["revisits"]["clips"] == 2
    assert set(first["measures"]["loops"]["psnr"]) == {RE_ENCODED, GENERATED, NO_MEMORY, RECENT}
    assert (tmp_path / "revisits.png").read_bytes().startswith(b"\x89PNG")
    run(config, Console(quiet=True))
    second = json.loads((tmp_path / "metrics.json").read_text())
    assert second["measures"] == first["measures"]
    assert second["scores_reused"] == 2 + 2 + 1
    run(config.replace(pictures=1), Console(quiet=True))
    assert (tmp_path / "revisit_clips.mp4").stat().st_size > 0
    assert (tmp_path / "loop_clips.mp4").stat().st_size > 0
    third = json.loads((tmp_path / "metrics.json").read_text())
    assert third["measures"] == first["measures"]
    assert third["rollouts_reused"] == 1 + 4 + 3


@pytest.mark.slow
def test_a_model_without_memory_stands_beside_one_with_it(recorded, tokenizer, trained, tokens, tmp_path):
    settings = [
        *(f"data={tokens}", f"output={tmp_path / 'plain'}", "recipe=world_model_smoke", "device=cpu", "window=9"),
        *("schedule=steps", "max_steps=1", "max_seconds=null", "evaluation_windows=4"),
    ]
    world_model.run(read_settings("train", settings))
    plain = tmp_path / "plain" / "world_model"
    config = evaluation(recorded, tokenizer, plain, tmp_path / "out", engine="persistence")
    run(config.replace(compare=[str(trained)]), Console(quiet=True))
    compared = json.loads((tmp_path / "out" / "compare.json").read_text())
    names = list(compared["models"])
    assert names[0] == "base"
    assert compared["rows"]["psnr, seen again"] == {"unit": "dB", "higher_is_better": True}
    difference = compared["models"][names[1]]["differences"]["psnr, seen again"]
    values = [compared["models"][name]["values"]["psnr, seen again"]["value"] for name in names]
    assert difference["value"] == pytest.approx(values[1] - values[0])
    base = json.loads((tmp_path / "out" / "base" / "metrics.json").read_text())["measures"]["revisits"]["psnr"]
    assert set(base) == {RE_ENCODED, GENERATED, BEST_VIEW}
    with pytest.raises(ConfigError, match="the model was trained without memory"):
        run(config.replace(memory=2), Console(quiet=True))
