import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from entry import load_script, read_settings
from hypothesis import given, settings, strategies as st
from tiny_driving import CAMERA, SIZE, drive_frames, drive_poses, shard_writer, write_driving

from terra.actions import Waypoints
from terra.dataset import (
    NUM_FUTURE_POSES,
    Poses,
    create_dataset,
    episode_actions,
    read_episode,
    read_frames,
    read_split,
    trajectory_of,
)
from terra.dataset.card import write_card
from terra.dataset.format import num_future_poses
from terra.dataset.inspect import inspect_dataset, run as run_inspection
from terra.dataset.motion import check_motion
from terra.dataset.pictures import draw_paths
from terra.dataset.statistics import SPEED_EDGES, split_statistics
from terra.dataset.tables import read_camera, read_poses, write_camera, write_poses
from terra.dataset.verify import verify_dataset
from terra.dataset.workers import run_jobs
from terra.errors import DatasetError
from terra.trajectory import load_trajectory

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=64)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_driving(tmp_path_factory.mktemp("written"), shards=2)


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_driving(tmp_path / "data")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Round trips


def test_episodes_come_back_as_they_were_written(written):
    split = read_split(written, "train")
    assert split.damaged == ()
    assert [e.id for e in split.episodes] == [f"town_{place:06d}_{number:02d}" for place in (0, 1) for number in (0, 1)]
    episode = split.episodes[3]
    assert (episode.split, episode.source, episode.place, episode.weather) == ("train", "town", "000001", "day")
    assert (episode.num_frames, episode.fps, episode.image_size, episode.camera) == (4, 10.0, SIZE, CAMERA)
    assert (episode.events, episode.group, episode.maneuver, episode.num_context) == (((2, "left"),), None, None, 0)
    for name, values in asdict(drive_poses(4)).items():
        np.testing.assert_array_equal(getattr(episode.poses, name), values)
    frames = read_frames(episode)
    original = np.stack(list(drive_frames(4, 2)))
    assert frames.shape == original.shape
    assert np.abs(frames.astype(int) - original).mean() < 6
    assert not list(written.rglob("*.tmp"))


def test_actions_are_those_of_the_trajectory(written):
    episode = read_split(written, "held_out").episodes[0]
    actions = episode_actions(episode)
    assert (actions.shape, actions.dtype) == ((4, 6, 3), np.float32)
    np.testing.assert_array_equal(actions, trajectory_of(episode).actions(4))
    # A circle to the left: the path bends to positive y, as far ahead as the arc is long.
    assert (np.diff(actions[:, :, 0], axis=1) > 0).all()
    np.testing.assert_allclose(actions[0, -1, 1], 60 * np.sin(0.295), atol=0.02)
    assert episode_actions(episode, Waypoints(times=(0.5, 1.0))).shape == (4, 2, 3)


@settings(max_examples=15)
@given(parts=st.lists(st.lists(st.tuples(*[NUMBERS] * 7), min_size=1, max_size=6), min_size=1, max_size=4))
def test_poses_come_back_bit_by_bit(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("poses") / "poses.parquet"
    poses = {f"e{index}": Poses(*np.array(rows).T.copy()) for index, rows in enumerate(parts)}
    write_poses(path, poses)
    again = read_poses(path)
    assert list(again) == list(poses)
    for name, part in poses.items():
        for field, values in asdict(part).items():
            np.testing.assert_array_equal(getattr(again[name], field), values)


def test_cameras_come_back_and_may_be_unknown(tmp_path):
    for camera in (CAMERA, CAMERA.replace(x_forward_meters=1.7), None):
        write_camera(tmp_path / "camera.json", camera, (144, 256), 10.0)
        assert read_camera(tmp_path / "camera.json") == camera
    write_camera(tmp_path / "camera.json", CAMERA, (144, 256), 10.0)
    intrinsics = json.loads((tmp_path / "camera.json").read_text())["intrinsics"]
    assert intrinsics["fx"] == pytest.approx(128 / np.tan(np.radians(37.5)))
    edit(tmp_path / "camera.json", axes="x_right_y_down_z_forward")
    with pytest.raises(DatasetError, match="axes: expected 'x_forward_y_left_z_up'"):
        read_camera(tmp_path / "camera.json")


def test_three_seconds_of_poses_follow_the_last_frame():
    assert num_future_poses(10.0) == NUM_FUTURE_POSES
    assert [num_future_poses(fps) for fps in (5.0, 30.0, 9.64)] == [15, 90, 29]


# Damage


@pytest.mark.parametrize("name", ["poses.parquet", "camera.json"])
def test_a_damaged_shard_is_left_out_and_the_rest_goes_on(tmp_path, name):
    folder = write_driving(tmp_path, shards=2)
    damage(folder / "train" / "town_000000" / name)
    split = read_split(folder, "train")
    assert {episode.place for episode in split.episodes} == {"000001"}
    (line,) = split.damaged
    assert f"{name}: expected the file with SHA-256" in line
    (folder / "train" / "town_000001" / name).unlink()
    with pytest.raises(DatasetError, match="expected a readable episode of split train, got 2 damaged: "):
        read_split(folder, "train")


def test_a_missing_video_costs_its_episode_only(dataset):
    (dataset / "train" / "town_000000" / "town_000000_00.mp4").unlink()
    split = read_split(dataset, "train")
    assert [episode.id for episode in split.episodes] == ["town_000000_01"]
    assert "town_000000_00.mp4: expected a video" in split.damaged[0]


def test_a_damaged_video_is_found_when_it_is_read(dataset):
    episode = read_split(dataset, "train").episodes[0]
    damage(episode.video)
    with pytest.raises(DatasetError, match="expected the file with SHA-256"):
        read_frames(episode)
    with pytest.raises(DatasetError, match=r"expected frames of shape \(5, 16, 32, 3\)"):
        read_frames(replace(read_split(dataset, "train").episodes[1], num_frames=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "expected terra-driving-shard version 2, got terra-driving-shard 1"),
        ({"fps": 5.0}, "fps: expected 10.0 as in the dataset, got 5.0"),
        ({"split": "held_out"}, "split: expected train"),
        ({"episodes": []}, "episodes: expected at least one"),
        ({"episodes": [7]}, r"episodes\[0\]: expected an object"),
        ({"episodes": [{"id": "a"}]}, r"episodes\[0\]: weather: expected str, got 'nothing'"),
        ({"place": None}, "place: expected str"),
    ],
)
def test_facts_that_do_not_fit_are_named(dataset, changes, message):
    edit(dataset / "train" / "town_000000" / "shard.json", **changes)
    with pytest.raises(DatasetError, match=message):
        read_split(dataset, "train")


def test_poses_that_do_not_fit_the_frames_are_named(dataset):
    path = dataset / "train" / "town_000000" / "shard.json"
    entries = json.loads(path.read_text())["episodes"]
    entries[0]["num_frames"] = 5
    entries[1]["id"] = "other"
    edit(path, episodes=entries)
    with pytest.raises(DatasetError, match=r"2 damaged: .*expected 35 poses .*got 34"):
        read_split(dataset, "train")


def test_missing_datasets_and_splits_are_named(dataset, tmp_path):
    with pytest.raises(DatasetError, match=r"split validation, got splits \['train', 'held_out'\]"):
        read_split(dataset, "validation")
    with pytest.raises(DatasetError, match="expected a dataset of video with actions"):
        read_split(tmp_path / "nowhere", "train")
    edit(dataset / "dataset.json", version=1)
    with pytest.raises(
        DatasetError, match="expected terra-driving version 2 or terra-world version 1, got terra-driving 1"
    ):
        read_split(dataset, "train")


def test_one_episode_is_read_by_its_video(dataset):
    video = dataset / "train" / "town_000000" / "town_000000_01.mp4"
    assert read_episode(video).id == "town_000000_01"
    with pytest.raises(DatasetError, match=r"expected an episode of its shard, got town_000000_00\.mp4"):
        read_episode(video.with_name("town_000000_07.mp4"))


def test_a_shard_without_its_facts_is_damaged_and_not_recorded_over(dataset):
    writer = shard_writer(dataset, "train", "000000")
    (writer.folder / "shard.json").unlink()
    with pytest.raises(DatasetError, match=r"1 damaged: .*shard\.json: expected a shard of a dataset"):
        read_split(dataset, "train")
    assert any("shard.json" in line for line in inspect_dataset(dataset).doubts)
    with pytest.raises(DatasetError, match=r"shard\.json: expected a whole shard, or no folder"):
        writer.is_complete()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": "ten"}, r"dataset\.json: fps: expected a number from 1 to 100, got 'ten'"),
        ({"image_size": [16]}, r"dataset\.json: image_size: expected even"),
        ({"sources": "town"}, r"dataset\.json: sources: expected a list"),
    ],
)
def test_facts_of_the_dataset_are_checked(dataset, changes, message):
    edit(dataset / "dataset.json", **changes)
    with pytest.raises(DatasetError, match=message):
        read_split(dataset, "train")


# Writing


def test_a_shard_is_there_whole_or_not_at_all(dataset):
    writer = shard_writer(dataset, "train", "000007")

    def interrupted():
        yield from drive_frames(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), writer:
        writer.add("town_000007_00", interrupted(), drive_poses(4))
    assert not writer.is_complete()
    assert sorted(path.name for path in (dataset / "train").iterdir()) == ["town_000000"]
    # What a killed process left is replaced.
    left = dataset / "train" / ".town_000007.tmp"
    left.mkdir()
    (left / "town_000007_09.mp4").write_bytes(b"cut off")
    assert len(read_split(dataset, "train").episodes) == 2
    with writer:
        writer.add("town_000007_00", drive_frames(4), drive_poses(4))
    assert writer.is_complete()
    assert sorted(path.name for path in writer.folder.glob("*.mp4")) == ["town_000007_00.mp4"]


def test_what_does_not_belong_in_a_shard_is_refused(dataset):
    with (
        pytest.raises(DatasetError, match="town_000008_00: expected 34 poses"),
        shard_writer(dataset, "train", "000008") as w,
    ):
        w.add("town_000008_00", drive_frames(4), drive_poses(5))
    with shard_writer(dataset, "train", "000009") as w:
        w.add("a", drive_frames(4), drive_poses(4))
        with pytest.raises(DatasetError, match="got a twice"):
            w.add("a", drive_frames(4), drive_poses(4))
    with pytest.raises(DatasetError, match=r"rows 0\.1 s apart"), shard_writer(dataset, "train", "000008") as w:
        w.add("a", drive_frames(4), replace(drive_poses(4), time=np.arange(34) / 9))
    with pytest.raises(DatasetError, match="at least one episode"), shard_writer(dataset, "train", "000008"):
        pass
    with pytest.raises(DatasetError, match="expected a name of letters"):
        shard_writer(dataset, "train", "../escape")
    with pytest.raises(DatasetError, match="split: expected one of train, held_out"):
        shard_writer(dataset, "test", "000008")
    with pytest.raises(DatasetError, match="expected town_000000 in held_out only"):
        shard_writer(dataset, "held_out", "000000").is_complete()


def test_a_shard_made_otherwise_is_not_taken_for_done(dataset):
    writer = shard_writer(dataset, "train", "000000")
    assert writer.is_complete()
    edit(writer.folder / "shard.json", recipe={"episodes": 3})
    with pytest.raises(DatasetError, match=r"expected a shard made by {}, got one by {'episodes': 3}"):
        writer.is_complete()


def test_a_dataset_of_other_frames_is_not_added_to(dataset):
    create_dataset(dataset, 10.0, SIZE, "kitti")
    assert json.loads((dataset / "dataset.json").read_text())["sources"] == ["kitti", "town"]
    with pytest.raises(DatasetError, match="image_size"):
        create_dataset(dataset, 10.0, (32, 32), "town")
    with pytest.raises(DatasetError, match="fps"):
        create_dataset(dataset, 5.0, SIZE, "town")


def test_a_dataset_without_a_shard_holds_nobody_to_its_size(tmp_path):
    create_dataset(tmp_path, 10.0, SIZE, "town")
    create_dataset(tmp_path, 5.0, (32, 32), "kitti")
    assert json.loads((tmp_path / "dataset.json").read_text())["image_size"] == [32, 32]


def test_futures_share_their_context_losslessly(dataset):
    frames = list(drive_frames(5))
    with shard_writer(dataset, "held_out", "900000", futures=True) as writer:
        for turning, maneuver in ((0.1, "left"), (-0.1, "right")):
            shown = [*frames[:3], *drive_frames(2, 4 if turning > 0 else 5)]
            poses = drive_poses(5, turning=turning)
            writer.add(f"g_{maneuver}", shown, poses, group="g", maneuver=maneuver, num_context=3)
    left, right = read_split(dataset, "held_out").episodes[2:]
    assert (left.group, left.maneuver, right.maneuver, left.num_context) == ("g", "left", "right", 3)
    assert left.video.parent.name == "town_900000_futures"
    names = sorted(path.name for path in (left.video.parent / "g").iterdir())
    assert names == ["frame_0000.png", "frame_0001.png", "frame_0002.png"]
    trajectory = load_trajectory(left.video.with_suffix(".json"))
    np.testing.assert_array_equal(trajectory.actions(5), episode_actions(left))
    damage(left.video.parent / "g" / "frame_0001.png")
    left.video.with_suffix(".json").unlink()
    lines = verify_dataset(dataset)
    for words in ("frame_0001.png: expected the file with SHA-256", "g_left.json: expected a readable file"):
        assert any(words in line for line in lines)
    with shard_writer(dataset, "held_out", "900001", futures=True) as writer:
        writer.add("g_left", drive_frames(5), drive_poses(5), group="g", num_context=3)
        with pytest.raises(DatasetError, match="expected the context frames of all futures of g"):
            writer.add("g_right", drive_frames(5, 1), drive_poses(5), group="g", num_context=3)


def test_equal_frames_give_equal_bytes(tmp_path):
    for name in ("one", "other"):
        write_driving(tmp_path / name)
        write_card(tmp_path / name)
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert len(files) == 14
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name


# Numbers and pictures


def test_statistics_count_what_is_there(written):
    episodes = read_split(written, "train").episodes
    stats = split_statistics(episodes)
    assert (stats.num_shards, stats.num_episodes, stats.num_frames) == (2, 4, 16)
    assert stats.hours == pytest.approx(1.6 / 3600)
    assert stats.meters == pytest.approx(4 * 3 * 0.6, rel=1e-3)
    assert sum(stats.speeds) == 16
    assert stats.speeds[SPEED_EDGES.index(5.0)] == 16
    assert (stats.turning, stats.lengths) == ((16, 0), (4, 4, 4))
    assert (stats.events, stats.weathers, stats.places) == ({"left": 4}, {"day": 4}, {"town": 2})


def test_the_card_says_what_is_there_and_what_is_damaged(dataset):
    write_card(dataset)
    text = (dataset / "README.md").read_text()
    assert "| episodes | 2 | 2 |" in text
    assert "| frames, turning left | 100.0% | 100.0% |" in text
    assert "- town: none was given." in text
    assert "Nothing is damaged" in text
    assert (dataset / "contact_sheet.png").stat().st_size > 500
    damage(dataset / "train" / "town_000000" / "town_000000_00.mp4")
    (dataset / "train" / "town_000000" / "town_000000_01.mp4").unlink()
    write_card(dataset)
    text = (dataset / "README.md").read_text()
    assert "- " + str(dataset / "train" / "town_000000" / "town_000000_01.mp4") + ": expected a video" in text
    create_dataset(dataset, 10.0, SIZE, "kitti", "under the same licenses")
    # A split of which nothing can be read keeps nobody from describing the other.
    (dataset / "train" / "town_000000" / "poses.parquet").unlink()
    write_card(dataset)
    text = (dataset / "README.md").read_text()
    assert "- kitti: under the same licenses." in text
    assert "| episodes | 0 | 2 |" in text


def test_verification_finds_what_reading_facts_does_not(dataset):
    assert verify_dataset(dataset) == ()
    damage(dataset / "train" / "town_000000" / "town_000000_00.mp4")
    (dataset / "train" / "town_000000" / "town_000000_05.mp4").write_bytes(b"")
    (dataset / "held_out" / "town_900000" / "poses.parquet").unlink()
    lines = verify_dataset(dataset)
    assert len(lines) == 3
    for words in (
        "00.mp4: expected the file with SHA-256",
        "05.mp4: expected the videos of shard.json only",
        "poses.parquet",
    ):
        assert any(words in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_verification_finds_absurd_motion(tmp_path):
    create_dataset(tmp_path, 10.0, SIZE, "town")
    poses = drive_poses(4)
    with shard_writer(tmp_path, "train", "000000") as writer:
        writer.add("town_000000_00", drive_frames(4), replace(poses, x=poses.x + 50 * (np.arange(34) > 2)))
    (line,) = verify_dataset(tmp_path)
    assert "expected at most 80 m/s" in line


# Motion


def test_sound_motion_raises_no_doubt(written):
    for turning in (0.3, -0.3, 0.0):
        report = check_motion(drive_poses(60, turning=turning), "drive")
        assert report.warnings == ()
        assert report.misalignment == pytest.approx(0, abs=1e-6)
        assert report.speed_error < 0.01
        assert np.isnan(report.turn_agreement) if turning == 0 else report.turn_agreement == pytest.approx(1, abs=1e-6)
    assert inspect_dataset(written).doubts == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, heading=-p.heading), "is an axis mirrored"),
        (lambda p: replace(p, y=-p.y), "is an axis mirrored"),
        (lambda p: replace(p, x=p.y, y=p.x), "are axes swapped"),
        (lambda p: replace(p, heading=np.degrees(p.heading)), "off its heading"),
        (lambda p: replace(p, speed=p.speed * 3.6), "260% off the moves"),
        (lambda p: replace(p, x=p.x * 100, y=p.y * 100), "m/s (are positions in another unit"),
        (lambda p: replace(p, time=p.time + 2.0 * (p.time > 3)), "no pose for 2.10 s"),
    ],
)
def test_motion_that_cannot_be_is_doubted(change, words):
    warnings = check_motion(change(drive_poses(60, turning=0.4)), "drive").warnings
    assert any(words in line for line in warnings), warnings
    assert all(line.startswith("drive: ") for line in warnings)


def test_a_path_to_the_left_is_drawn_to_the_left():
    left, right = drive_poses(30, turning=0.5), drive_poses(30, turning=-0.5)
    picture = draw_paths([left, right], side=200).astype(int)
    first, second = (np.argwhere(picture[..., one] - picture[..., other] > 60) for one, other in ((0, 2), (2, 0)))
    assert min(len(first), len(second)) > 50
    assert first[:, 1].max() <= 101 <= second[:, 1].min() + 2
    # Both begin upwards from the start, which is at the bottom where all paths are ahead of it.
    assert draw_paths([drive_poses(30, turning=0)], side=200)[150, 100].tolist() != [255, 255, 255]


# Workers


def double(job, worker, advance):
    if job == 3:
        raise DatasetError("three is damaged")
    if job == 5:
        os._exit(9)
    if job == 99:
        time.sleep(60)
    advance(10)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_job_is_noted_and_the_rest_goes_on(workers):
    seen = []
    outcome = run_jobs(range(5), double, workers=workers, show=lambda parts, jobs: seen.append((parts, jobs)))
    assert (outcome.num_done, outcome.failed, outcome.num_left) == (4, ["three is damaged"], 0)
    assert max(seen) == (40, 5)


@pytest.mark.slow
def test_a_process_that_dies_is_noted_and_replaced():
    outcome = run_jobs(range(4, 9), double, workers=2, describe=lambda job: f"job {job}")
    assert (outcome.num_done, outcome.failed) == (4, ["job 5: its process ended with status 9"])


@pytest.mark.parametrize("workers", [0, 1])
def test_no_job_is_begun_after_the_time_is_over(workers):
    outcome = run_jobs(range(3), double, workers=workers, max_seconds=-1.0)
    assert (outcome.num_done, outcome.failed, outcome.num_left) == (0, [], 3)


def test_the_script_cuts_and_the_command_inspects(dataset, tmp_path, capsys):
    cut = load_script("context_cut")
    video = dataset / "train" / "town_000000" / "town_000000_00.mp4"
    cut.cut(video, 1, 2, tmp_path / "cut")
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == [
        "frame_0000.png",
        "frame_0001.png",
        "trajectory.json",
    ]
    expected = episode_actions(read_episode(video))[1:]
    np.testing.assert_allclose(load_trajectory(tmp_path / "cut" / "trajectory.json").actions(3), expected, atol=1e-5)
    config = read_settings(
        "inspect", [f"data={dataset}", "verify=true", "workers=0", f"output={tmp_path / 'pictures'}"]
    )
    assert run_inspection(config) == 0
    assert re.search(r"^frames +8 +8$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "pictures" / "paths.png").is_file()
    damage(video)
    assert run_inspection(config) == 2
    assert "doubt: " in capsys.readouterr().out
