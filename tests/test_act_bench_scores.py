"""The benchmark's reader, its scores against known answers and a second computation, and how videos are read."""

import contextlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tiny_act_bench import record
from torch.nn import functional as F
from torchvision.transforms import CenterCrop, Compose, Resize

from decoder.video import read_video, write_video
from terra.act_bench.published import NUM_SCORED, PUBLISHED
from terra.act_bench.samples import CLASSES, Sample, class_of, read_samples, reference_waypoints, spread
from terra.act_bench.scores import ALL, confusion, score_videos, summarize
from terra.act_bench.videos import read_clip
from terra.errors import ConfigError, TerraError, VideoError
from terra.trajectory import load_trajectory


def write(path, *records):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return path


def sample(index, class_id, reference):
    return Sample(index, "", class_id, (), np.asarray(reference, dtype=np.float64))


class TestReader:
    @pytest.mark.parametrize(
        ("label", "expected"),
        [
            ("curving_to_left/curving_to_left_sharp", "curving_to_left"),
            ("stopping/stopping_15kmph", "stopping"),
            ("straight_constant_speed/straight_constant_speed_10kmph", "straight_constant_low_speed"),
            ("straight_constant_speed/straight_constant_speed_20kmph", "straight_constant_low_speed"),
            ("straight_constant_speed/straight_constant_speed_25kmph", "straight_constant_high_speed"),
            ("straight_accelerating/x/y", "straight_accelerating"),
            ("shifting_towards_right/short", None),
        ],
    )
    def test_labels_become_classes(self, label, expected):
        class_id = class_of(label, "here")
        assert (None if class_id is None else CLASSES[class_id]) == expected

    @given(
        st.one_of(st.text(), st.integers(), st.none(), st.text().map(lambda text: f"straight_constant_speed/{text}"))
    )
    def test_any_other_label_is_a_class_or_none_or_refused(self, label):
        with contextlib.suppress(ConfigError):
            assert class_of(label, "here") in {None, *range(9)}

    def test_the_reference_is_turned_to_right_and_forward(self):
        points = [[0.0, 0.0, 9.0], [2.0, 0.5, 9.0], [4, -1, 9.0]]
        assert reference_waypoints(points, 3, "here").tolist() == [[0, 0], [-0.5, 2], [1, 4]]

    def test_a_drive_to_the_left_has_actions_and_a_reference_on_its_left(self, tmp_path):
        path = write(tmp_path / "act_bench.jsonl", record(8, "curving_to_left/x"))
        ((only,), total) = read_samples(path, 44)
        assert (total, only.name, only.class_id) == (1, "NUSCENES_ACTION_000008", 0)
        actions = load_trajectory(path, sample_id=8).actions(46)
        lateral, forward, seconds = actions[0].T
        assert (lateral > 0).all()
        assert (np.diff(forward) > 0).all()
        assert seconds.tolist() == pytest.approx([0.45, 0.95, 1.45, 1.95, 2.45, 2.95])
        assert (only.reference[1:, 0] < 0).all()
        assert (np.diff(only.reference[:, 1]) > 0).all()

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"sample_id": "a"}, "line 1: sample_id: expected a whole number"),
            ({"sample_id": None}, "line 1: sample_id: expected a whole number"),
            ({"label": 3}, "line 1: label: expected category/subcategory, got 3"),
            ({"label": "straight_constant_speed/fast"}, "line 1: label: expected a speed such as 10kmph"),
            ({"context_frames": ["a.jpg"]}, "line 1: context_frames: expected 3 paths"),
            ({"reference_traj": None}, "line 1: reference_traj: expected 44 rows or more, got None"),
            ({"reference_traj": [[0, 0]] * 43}, "line 1: reference_traj: expected 44 rows or more, got 43 rows"),
            ({"reference_traj": [[0, "x"]] * 44}, r"reference_traj\[0\]: expected the numbers x, y"),
            ({"reference_traj": [[0, math.nan]] * 44}, "reference_traj.*: expected a finite number"),
            ({"label": "other/x"}, "expected samples that are scored, got none among 1"),
        ],
    )
    def test_bad_lines_are_one_line(self, tmp_path, change, expected):
        path = write(tmp_path / "act_bench.jsonl", record(1, "starting/x") | change)
        with pytest.raises(TerraError, match=expected) as caught:
            read_samples(path, 44)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_bad_files(self, tmp_path):
        line = record(1, "starting/x")
        with pytest.raises(TerraError, match="line 2: sample_id 1: already on line 1"):
            read_samples(write(tmp_path / "a.jsonl", line, line), 44)
        with pytest.raises(TerraError, match="line 3"):
            read_samples(write(tmp_path / "b.jsonl", line, "", '{"sample_id": 2'), 44)
        with pytest.raises(TerraError, match="got an empty file"):
            read_samples(write(tmp_path / "c.jsonl"), 44)

    @given(st.integers(1, 40), st.none() | st.integers(1, 50))
    def test_a_spread_is_of_different_samples_in_order(self, count, limit):
        samples = [sample(index, 0, [[0, 0]]) for index in range(count)]
        ids = [each.sample_id for each in spread(samples, limit)]
        assert len(ids) == min(count, limit or count)
        assert ids == sorted(set(ids))


class TestScores:
    def test_known_answers(self):
        straight = np.stack([np.zeros(44), np.arange(44) * 0.5], axis=1)
        samples = [sample(index, class_id, straight) for index, class_id in enumerate((0, 0, 7, 2))]
        logits = np.eye(9)[[0, 1, 7, 2]]
        late = straight * [1, 0]  # stands still: 0, 0.5, 1, ... 21.5 m behind
        paths = np.stack([straight, straight + np.array([0.6, -0.8]), late, straight])
        scores = score_videos(samples, logits, paths)
        assert scores.ade.tolist() == pytest.approx([0, 1, 10.75, 0])
        assert scores.fde.tolist() == pytest.approx([0, 1, 21.5, 0])
        rows = {row.name: row for row in summarize(scores, 50)}
        assert rows[ALL].accuracy.value == 0.75
        assert rows[ALL].ade.value == pytest.approx(11.75 / 4)
        assert rows["curving_to_left"].accuracy.value == 0.5
        assert rows["curving_to_left"].fde.value == pytest.approx(0.5)
        assert rows["stopping"].count == 1
        assert math.isnan(rows["stopped"].ade.value)
        assert rows[ALL].accuracy.low <= 0.75 <= rows[ALL].accuracy.high

    def test_intervals_resample_drives(self):
        straight = np.stack([np.zeros(44), np.arange(44) * 0.5], axis=1)
        # Two nuScenes logs of three samples each: all of the first are right, all of the second wrong.
        samples = [
            replace(sample(index, 0, straight), context_frames=(f"sweeps/CAM_FRONT/n00{log}__CAM_FRONT__{index}.jpg",))
            for log in (1, 2)
            for index in range(3)
        ]
        assert [each.drive for each in samples] == ["n001"] * 3 + ["n002"] * 3
        logits = np.eye(9)[[0, 0, 0, 1, 1, 1]]
        paths = np.stack([straight] * 3 + [straight + np.array([3.0, 4.0])] * 3)
        overall, first, *_ = summarize(score_videos(samples, logits, paths), 200)
        assert overall.accuracy == first.accuracy
        assert (overall.accuracy.count, overall.accuracy.units) == (6, 2)
        assert (overall.accuracy.low, overall.accuracy.value, overall.accuracy.high) == (0.0, 0.5, 1.0)
        assert (overall.ade.low, overall.ade.value, overall.ade.high) == pytest.approx((0.0, 2.5, 5.0))

    def test_an_accuracy_of_all_is_not_certain(self):
        straight = np.stack([np.zeros(44), np.arange(44) * 0.5], axis=1)
        samples = [sample(index, 0, straight) for index in range(5)]  # without nuScenes' names each is a drive
        overall = summarize(score_videos(samples, np.eye(9)[[0] * 5], np.stack([straight] * 5)), 50)[0]
        assert overall.accuracy.high == 1.0
        assert overall.accuracy.low**5 == pytest.approx(0.025)

    @given(st.integers(1, 30), st.integers(0, 2**32 - 1))
    def test_a_second_computation_agrees(self, count, seed):
        random = np.random.default_rng(seed)
        points = random.normal(size=(count, 50, 3)) * 10  # as in the file: x forward, y left, z
        logits = random.normal(size=(count, 9)).astype(np.float32)
        paths = (random.normal(size=(count, 44, 2)) * 10).astype(np.float32)
        wanted = random.integers(0, 8, count)
        samples = [
            sample(index, int(wanted[index]), reference_waypoints(points[index].tolist(), 44, "here"))
            for index in range(count)
        ]
        scores = score_videos(samples, logits, paths)
        rows = {row.name: row for row in summarize(scores, 5)}

        ade, fde, right = [], [], []
        table = [[0] * 9 for _ in range(9)]
        for index in range(count):
            distances = []
            for frame in range(44):
                x, y, _ = points[index, frame]
                distances.append(math.hypot(float(paths[index, frame, 0]) + y, float(paths[index, frame, 1]) - x))
            ade.append(math.fsum(distances) / 44)
            fde.append(distances[43])
            guess = max(range(9), key=lambda class_id: float(logits[index, class_id]))
            right.append(guess == wanted[index])
            table[wanted[index]][guess] += 1
        assert scores.ade.tolist() == pytest.approx(ade)
        assert scores.fde.tolist() == pytest.approx(fde)
        assert confusion(scores).tolist() == table
        assert rows[ALL].accuracy.value == pytest.approx(sum(right) / count)
        for class_id, name in enumerate(CLASSES):
            members = [index for index in range(count) if wanted[index] == class_id]
            assert rows[name].count == len(members)
            if members:
                assert rows[name].accuracy.value == pytest.approx(table[class_id][class_id] / len(members))
                assert rows[name].ade.value == pytest.approx(sum(ade[index] for index in members) / len(members))
                assert rows[name].fde.value == pytest.approx(sum(fde[index] for index in members) / len(members))

    def test_the_published_means_are_those_of_the_published_classes(self):
        assert NUM_SCORED[ALL] == 1979
        for model in ("Vista", "Terra v1"):
            for metric, tolerance in (("accuracy", 5e-4), ("ade", 6e-3), ("fde", 6e-3)):
                mean = sum(
                    NUM_SCORED[name] * getattr(score, metric) for name, score in PUBLISHED[model].items() if name != ALL
                )
                assert mean / 1979 == pytest.approx(getattr(PUBLISHED[model][ALL], metric), abs=tolerance), (
                    model,
                    metric,
                )


class TestVideos:
    @pytest.fixture
    def video(self, tmp_path):
        random = np.random.default_rng(0)
        frames = random.integers(0, 256, (5, 9, 16, 3), dtype=np.uint8).repeat(8, axis=1).repeat(8, axis=2)
        write_video(frames, tmp_path / "NUSCENES_ACTION_000001.mp4", 10.0)
        return tmp_path / "NUSCENES_ACTION_000001.mp4"

    def test_the_end_of_a_video_as_the_published_scorer_takes_it(self, video):
        clip = read_clip(video, 4, 224)
        assert clip.fps == 10
        assert clip.frames.shape == (3, 4, 224, 224)
        frames = torch.from_numpy(read_video(video))[1:].permute(0, 3, 1, 2)
        theirs = Compose([Resize((256, 256)), CenterCrop((224, 224))])
        for index in range(4):
            assert torch.equal(clip.frames[:, index], theirs(frames[index]))
        ours = F.interpolate(frames.float(), (256, 256), mode="bilinear", antialias=True).round()[..., 16:240, 16:240]
        assert torch.equal(clip.frames, ours.to(torch.uint8).transpose(0, 1))

    def test_fewer_frames_are_refused(self, video):
        with pytest.raises(VideoError, match="expected 6 frames or more, got 5"):
            read_clip(video, 6, 28)
