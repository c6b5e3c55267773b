"""`terra-act-bench`: from the benchmark's file to its table, by generating and for videos that are there."""

import csv
import json
import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_act_bench import LABELS, Bench, record, save_estimator

from decoder.video import probe_video
from terra import cli
from terra.act_bench.estimator import ActEstimator, Estimates
from terra.act_bench.published import NUM_SAMPLES, NUM_SCORED
from terra.act_bench.samples import CLASSES, read_samples
from terra.errors import TerraError
from terra.rollouts.manifest import sample_seed

pytestmark = pytest.mark.slow

SCORED = [7, 12, 40]


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    return save_estimator(tmp_path_factory.mktemp("models") / "estimator")


@pytest.fixture
def bench(tmp_path, estimator, tiny_model, tiny_tokenizer):
    return Bench(tmp_path, estimator, tiny_model, tiny_tokenizer)


def answer(bench, monkeypatch, classes, offset=(0.0, 0.0)):
    """Have the estimator read the sample off the brightness, and give that class, and the path moved by `offset`."""
    samples = {sample.sample_id: sample for sample in read_samples(bench.manifest, 44)[0]}

    def estimate(self, videos, dtype):
        ids = (videos.float().mean(dim=(1, 2, 3, 4)) / 4).round().int().tolist()
        logits = torch.stack([torch.eye(9)[classes[sample_id]] for sample_id in ids])
        paths = np.stack([samples[sample_id].reference + offset for sample_id in ids])
        return Estimates(logits, torch.from_numpy(paths.astype(np.float32)))

    monkeypatch.setattr(ActEstimator, "estimate", estimate)


class TestGenerating:
    @pytest.mark.slow
    def test_from_the_manifest_to_the_table_and_again_without_generating(self, bench):
        assert bench.run() == 0
        names = [f"NUSCENES_ACTION_{sample_id:06}" for sample_id in SCORED]
        assert sorted(path.stem for path in (bench.output / "videos").iterdir()) == names
        info = probe_video(bench.output / "videos" / f"{names[0]}.mp4")
        assert (info.num_frames, info.fps) == (47, 10)
        made = {
            name: json.loads((bench.output / "generated/rollouts" / name / "rollout.json").read_text())
            for name in names
        }
        assert [made[name]["seed"] for name in names] == [sample_seed(0, sample_id) for sample_id in SCORED]
        results = bench.results
        assert results["coverage"]["statement"] == "3 of 1,979 scored samples"
        assert results["manifest"]["samples"] == 4
        assert results["left_out"] == {}
        assert "3 of 1,979 scored samples" in bench.console
        assert "Terra v2" in bench.console
        with (bench.output / "results.csv").open() as file:
            rows = {row["class"]: row for row in csv.DictReader(file)}
        assert float(rows["all"]["ade"]) == results["scores"]["all"]["ade"]["value"]
        assert rows["all"]["terra_v2_accuracy"] == "0.632"
        assert rows["stopped"]["accuracy"] == ""
        with Image.open(bench.output / "confusion.png") as picture:
            assert picture.size[0] > 500

        before = [(bench.output / "generated/rollouts" / name / "video.mp4").stat().st_mtime_ns for name in names]
        assert bench.run() == 0
        after = [(bench.output / "generated/rollouts" / name / "video.mp4").stat().st_mtime_ns for name in names]
        assert before == after
        assert bench.results["scores"] == results["scores"]

        # The same videos as if another had made them.
        bench.output, videos = bench.folder / "scored", bench.output / "videos"
        assert bench.run(videos=videos) == 0
        assert bench.results["scores"] == results["scores"]

    def test_what_a_sample_lacks_is_named_and_the_others_are_scored(self, bench):
        (bench.pictures / "sweeps/CAM_FRONT/7_1.jpg").unlink()
        broken = record(40, LABELS[40])
        broken["instruction_trajs"] = broken["instruction_trajs"][:30]
        bench.write(record(7, LABELS[7]), record(12, LABELS[12]), broken)
        assert bench.run(engine="persistence") == 3
        left_out = bench.results["left_out"]
        assert left_out["7"].endswith("7_1.jpg")
        assert left_out["40"].startswith("not generated")
        assert bench.results["coverage"]["scored"] == 1
        assert "left out: 2 samples" in bench.console

    def test_an_interruption_ends_it_before_anything_is_scored(self, bench, monkeypatch):
        monkeypatch.setattr("terra.rollouts.batch.run", lambda config: 143)
        assert bench.run() == 143
        assert not (bench.output / "results.json").exists()


class TestVideosOfOthers:
    def test_perfect_videos_score_perfectly(self, bench, monkeypatch):
        answer(bench, monkeypatch, {7: 0, 12: 2, 40: 7})
        assert bench.run(videos=bench.write_videos(7, 12, 40), **{"estimator.batch_size": 2}) == 0
        overall = bench.results["scores"]["all"]
        assert overall["accuracy"]["value"] == 1
        assert overall["ade"]["value"] == pytest.approx(0, abs=1e-5)
        assert overall["samples"] == 3

    def test_wrong_ones_are_counted_where_they_belong(self, bench, monkeypatch):
        answer(bench, monkeypatch, {7: 1, 12: 2, 40: 8}, offset=(3, -4))
        assert bench.run(videos=bench.write_videos(7, 12, 40)) == 0
        scores = bench.results["scores"]
        assert scores["all"]["accuracy"]["value"] == pytest.approx(1 / 3)
        assert scores["all"]["ade"]["value"] == pytest.approx(5, abs=1e-5)
        assert scores["all"]["fde"]["value"] == pytest.approx(5, abs=1e-5)
        assert [scores[name]["accuracy"]["value"] for name in CLASSES[:3]] == [0, None, 1]
        counts = np.array(bench.results["confusion"]["wanted_by_estimated"])
        assert {(row, col) for row, col in np.argwhere(counts)} == {(0, 1), (2, 2), (7, 8)}

    def test_missing_damaged_and_short_videos_are_listed(self, bench, monkeypatch, caplog):
        answer(bench, monkeypatch, {7: 0, 12: 2, 40: 7})
        bench.write(*(record(sample_id, "starting/starting_20kmph") for sample_id in (1, 2, 3)), record(40, LABELS[40]))
        videos = bench.write_videos(40, 41)
        bench.write_videos(2, num_frames=43)
        (videos / "NUSCENES_ACTION_000003.mp4").write_bytes(b"no video")
        caplog.set_level("INFO")
        assert bench.run(videos=videos) == 3
        left_out = bench.results["left_out"]
        assert left_out["1"] == "no video"
        assert "expected 44 frames or more, got 43" in left_out["2"]
        assert "NUSCENES_ACTION_000003.mp4" in left_out["3"]
        assert bench.results["scores"]["all"] | {"ade": 0, "fde": 0} == {
            **{"samples": 1, "benchmark_samples": 1979, "drives": 1, "ade": 0, "fde": 0},
            "accuracy": {"value": 1, "low": pytest.approx(0.025), "high": 1},
        }
        assert "left out: 1 samples (1): no video" in caplog.text
        assert "videos of no scored sample of the manifest: 1" in caplog.text

    def test_a_limit_is_spread_over_what_is_there(self, bench, monkeypatch):
        answer(bench, monkeypatch, {7: 0, 12: 2, 40: 7})
        assert bench.run(videos=bench.write_videos(7, 12, 40), limit=2) == 0
        lines = (bench.output / "estimates.jsonl").read_text().splitlines()
        assert [json.loads(line)["sample_id"] for line in lines] == [7, 12]
        assert np.array(json.loads(lines[0])["waypoints"]).shape == (44, 2)

    def test_another_frame_rate_is_scored_as_it_is_but_said(self, bench, monkeypatch, caplog):
        answer(bench, monkeypatch, {7: 0, 12: 2, 40: 7})
        bench.write_videos(7, 12)
        assert bench.run(videos=bench.write_videos(40, fps=25.0)) == 0
        assert bench.results["other_frame_rates"] == {"25": 1}
        assert "videos that say 25 frames a second: 1" in caplog.text


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"manifest": "none.jsonl"}, "manifest=none.jsonl: expected a readable file"),
            ({"context_root": "nowhere"}, "context_root=nowhere: expected the pictures of nuScenes, got none of 3"),
            ({"videos": "nowhere"}, "videos=nowhere: expected a folder, got none"),
            ({"num_frames": 25}, "num_frames: expected 47, 3 of context and 44 that are scored, got 25"),
            ({"num_samples": 2}, "num_samples: expected 1"),
            ({"limit": 0}, "limit: expected a whole number of at least 1 or null, got 0"),
            ({"resamples": "many"}, "resamples: expected a whole number"),
            ({"estimator.batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
            ({"estimator.dtype": "int8"}, "dtype: expected one of float32, bfloat16, float16"),
            ({"estimator.device": "tpu9"}, "device: expected cpu"),
            ({"estimator.pretrained": "./none"}, "found no folder ./none"),
            ({"world_model.pretrained": "./none"}, "found no folder ./none"),
        ],
    )
    def test_one_line_before_weights_load(self, bench, monkeypatch, changes, expected):
        def refuse(*_args, **_kwargs):
            raise AssertionError("weights were loaded")

        monkeypatch.setattr("terra.act_bench.estimator.load_tensors", refuse)
        monkeypatch.setattr("terra.config.spec.PipelineSpec.build", refuse)
        with pytest.raises(TerraError) as caught:
            bench.run(**changes)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_command_exits_with_2(self, bench, monkeypatch, capsys):
        bench.write({"sample_id": 1, "label": "starting"})
        monkeypatch.setattr(sys, "argv", ["terra-act-bench", *bench.overrides()])
        with pytest.raises(SystemExit) as caught:
            cli.command("act_bench", cli.COMMANDS["act-bench"].run)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error == f"error: {bench.manifest}: line 1: label: expected category/subcategory, got 'starting'\n"

    def test_videos_of_no_sample(self, bench):
        with pytest.raises(TerraError, match=r"expected videos of the manifest's samples, got none of 3 \(sample 7"):
            bench.run(videos=bench.write_videos(41))

    def test_videos_that_none_can_be_read(self, bench):
        videos = bench.write_videos(7, num_frames=4)
        with pytest.raises(TerraError, match="expected a video to score, got none"):
            bench.run(videos=videos)

    def test_two_videos_of_a_sample(self, bench):
        videos = bench.write_videos(7)
        (videos / "other_7.mp4").write_bytes(b"")
        with pytest.raises(TerraError, match="expected one video a sample, got NUSCENES_ACTION_000007"):
            bench.run(videos=videos)

    def test_a_model_of_another_rate(self, bench, tmp_path):
        model = tmp_path / "model"
        model.mkdir()
        for path in bench.model.iterdir():
            os.link(path, model / path.name)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").unlink()
        (model / "config.json").write_text(json.dumps({**config, "fps": 12.0}))
        with pytest.raises(TerraError, match="expected one of 10 frames a second, as the benchmark has, got 12"):
            bench.run(**{"world_model.pretrained": model})


def test_the_whole_benchmark_has_1979_scored_of_2286_samples(tmp_path):
    categories = {name: f"{name}/x" for name in CLASSES} | {
        "straight_constant_high_speed": "straight_constant_speed/straight_constant_speed_25kmph",
        "straight_constant_low_speed": "straight_constant_speed/straight_constant_speed_20kmph",
    }
    labels = [categories[name] for name in CLASSES for _ in range(NUM_SCORED[name])]
    labels += ["shifting_towards_left/shifting_towards_left_long"] * (NUM_SAMPLES - len(labels))
    path = tmp_path / "act_bench.jsonl"
    shared = {"context_frames": ["a.jpg"] * 3, "reference_traj": [[0, 0, 0]] * 44}
    lines = (json.dumps({"sample_id": index, "label": label, **shared}) for index, label in enumerate(labels))
    path.write_text("\n".join(lines))
    samples, total = read_samples(path, 44)
    assert (len(samples), total) == (1979, 2286)
    counts = Counter(CLASSES[sample.class_id] for sample in samples)
    assert {name: counts[name] for name in CLASSES} == {name: NUM_SCORED[name] for name in CLASSES}
