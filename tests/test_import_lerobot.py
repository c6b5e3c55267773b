import json
import shutil
import subprocess

import imageio_ffmpeg
import numpy as np
import pyarrow.parquet as pq
import pytest
from entry import read_settings
from lerobot_data import (
    CAMERA,
    HEIGHT,
    WIDTH,
    coded,
    numbers_in,
    png,
    read_episodes,
    write_dataset,
    write_episodes,
    write_video,
)

from terra.dataset import read_frames, read_split
from terra.dataset.importing import LeRobotActions, LeRobotSource
from terra.dataset.importing.command import run
from terra.errors import ConfigError, DatasetError

VERSIONS = ("v2.0", "v2.1", "v3.0")


def bring_in(root, output, *more: str) -> int:
    given = ["kind=lerobot", "lerobot=actions", f"input={root}", f"output={output}", "fps=10", "workers=0"]
    return run(read_settings("import", [*given, f"image_size=[{HEIGHT},{WIDTH}]", *more]))


def found(output) -> dict[int, tuple[list[int], list[int]]]:
    """The numbers of the pictures and of the actions, by the index of the LeRobot episode."""
    return {
        int(episode.place.removeprefix("episode_")): (
            numbers_in(read_frames(episode)),
            np.rint(episode.actions[:, 0]).astype(int).tolist(),
        )
        for split in ("train", "held_out")
        if (output / split).is_dir()
        for episode in read_split(output, split).episodes
    }


def whole(rows, without=()) -> dict[int, tuple[list[int], list[int]]]:
    every = {episode: [100 * episode + row for row in range(count)] for episode, count in enumerate(rows)}
    return {episode: (numbers, numbers) for episode, numbers in every.items() if episode not in without}


def open_episode(root, index: int = 0):
    return LeRobotSource(root, LeRobotActions()).open_drive(f"episode_{index:06d}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["video", "image"])
def test_each_row_has_its_own_picture(tmp_path, version, kind):
    changes = {"video_path": None} if kind == "image" else {}
    root = write_dataset(tmp_path / "in", version=version, camera={"dtype": kind}, **changes)
    assert bring_in(root, tmp_path / "out") == 0
    assert found(tmp_path / "out") == whole((12, 9, 14))


# Frames and rows


@pytest.mark.parametrize("version", VERSIONS)
def test_an_episode_with_fewer_frames_than_rows_is_refused_alone(tmp_path, version, caplog):
    root = write_dataset(tmp_path / "in", (12, 9, 14), (12, 7, 14), version=version)
    assert bring_in(root, tmp_path / "out") == 2
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])
    assert "episode_000001: expected a frame for each of its 9 rows, got 7 frames" in caplog.text


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_behind_those_of_the_rows_belong_to_no_episode(tmp_path, version, caplog):
    root = write_dataset(tmp_path / "in", (12, 9, 14), (12, 13, 14), version=version)
    assert bring_in(root, tmp_path / "out") == 0
    assert found(tmp_path / "out") == whole((12, 9, 14))
    told = "episode_000001: 13 frames read, 9 kept (0.9 s), 4 left out: frames of the video behind those of the rows"
    assert [each for each in caplog.messages if "episode_" in each and "left out" in each] == [
        f"{open_episode(root, 1).origin.removesuffix('episode_000001')}{told}"
    ]


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_frames_are_counted_where_time_stamps_have_drifted_by_more_than_half_a_frame(tmp_path, factor):
    spans = [(start * factor, end * factor) for start, end in ((0.0, 1.2), (1.2, 2.1), (2.1, 3.5))]
    root = write_dataset(tmp_path / "in", spans=spans)
    assert bring_in(root, tmp_path / "out") == 0
    assert found(tmp_path / "out") == whole((12, 9, 14))


def test_frames_that_no_episode_has_are_passed_over(tmp_path):
    # As where an episode is deleted from meta/ alone.
    root = write_dataset(tmp_path / "in")
    write_episodes(root, [episode for episode in read_episodes(root) if episode["episode_index"] != 1])
    assert bring_in(root, tmp_path / "out") == 0
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("frame_index", [0, 1, 3, 2, 4, 5, 6, 7, 8], "frame_index: expected 2 in row 2, got 3"),
        ("index", np.arange(13, 22), "index: expected 12 in row 0, got 13"),
        ("timestamp", [0, 0.1, 0.2, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8], "seconds that increase, got 0.2 after 0.2 in row 3"),
        ("timestamp", [0, 0.1, float("nan"), 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "increase, got nan after 0.1 in row 2"),
    ],
)
def test_rows_out_of_order_are_refused_alone(tmp_path, caplog, name, values, message):
    own = {"frame_index": np.arange, "index": lambda count: (0 if count == 12 else 21) + np.arange(count)}
    own["timestamp"] = lambda count: np.arange(count) / 10
    columns = {name: lambda episode: np.asarray(values if episode == 1 else own[name]((12, 9, 14)[episode]))}
    root = write_dataset(tmp_path / "in", columns=columns)
    assert bring_in(root, tmp_path / "out") == 2
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])
    assert message in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 8}, "expected 8 rows, got 9"),
        ({"length": None}, "length: expected a number, got None"),
        ({"dataset_to_index": 20}, "expected dataset_from_index and dataset_to_index 9 apart, got 12 and 20"),
        ({f"videos/{CAMERA}/from_timestamp": None}, "from_timestamp: expected a number, got None"),
    ],
)
def test_facts_of_an_episode_that_do_not_agree_are_refused_alone(tmp_path, caplog, changes, message):
    root = write_dataset(tmp_path / "in")
    episodes = read_episodes(root)
    episodes[1] |= changes
    write_episodes(root, episodes)
    assert bring_in(root, tmp_path / "out") == 2
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])
    assert message in caplog.text


def test_an_episode_that_is_described_twice_is_refused(tmp_path):
    root = write_dataset(tmp_path)
    write_episodes(root, [*read_episodes(root), read_episodes(root)[2]])
    with pytest.raises(DatasetError, match="expected each episode once, got several rows of episode_index 2"):
        LeRobotSource(root, LeRobotActions()).list_drives()


def test_a_recording_that_was_never_ended_is_told(tmp_path, caplog):
    root = write_dataset(tmp_path / "in")
    data = root / "data" / "chunk-000" / "file-000.parquet"
    data.write_bytes(data.read_bytes()[:-100])
    assert bring_in(root, tmp_path / "out") == 2
    ended = "cut off, or never ended by LeRobotDataset.finalize()"
    assert f"{data}: expected a Parquet table, got: a file without its end: {ended}" in caplog.text
    shutil.rmtree(root / "meta" / "episodes")
    unended = shutil.copytree(root, tmp_path / "unended")
    with pytest.raises(DatasetError, match=r"got none: a recording that was not ended by .*\.finalize\(\) has none"):
        bring_in(unended, tmp_path / "none")


# Times


@pytest.mark.parametrize("since", [0.0, 100.0, 4000.0])
def test_rounded_time_stamps_are_those_of_the_rate(tmp_path, since):
    root = write_dataset(tmp_path, (50,), fps=30.0, times=lambda episode, row: since + row / 30)
    np.testing.assert_array_equal(open_episode(root).frame_times, np.arange(50) / 30)


def test_time_stamps_too_coarse_to_tell_are_kept(tmp_path):
    # Float32 seconds after three days are 1/64 s apart: whether a frame came late can't be told.
    stamps = np.float32(250_000 + np.arange(9) / 10)
    root = write_dataset(tmp_path, (9,), times=lambda episode, row: stamps[row])
    np.testing.assert_array_equal(open_episode(root).frame_times, stamps.astype(float) - float(stamps[0]))


def test_time_stamps_that_a_camera_gave_are_kept(tmp_path):
    real = np.cumsum([0.1, 0.13, 0.08, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1])
    root = write_dataset(tmp_path, (9,), times=lambda episode, row: 3 + real[row])
    np.testing.assert_allclose(open_episode(root).frame_times, real - 0.1, atol=1e-6)


# Pictures in the rows


def test_pictures_may_lie_beside_the_rows_but_not_elsewhere(tmp_path, caplog):
    def places(episode):
        names = [f"images/{100 * episode + row}.png" for row in range((12, 9, 14)[episode])]
        for name in names:
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_bytes(png(int(name[7:-4])))
        if episode == 1:
            names[4] = "../104.png"
        return [{"bytes": None, "path": name} for name in names]

    (tmp_path / "104.png").write_bytes(png(104))
    root = write_dataset(tmp_path / "in", camera={"dtype": "image"}, columns={CAMERA: places})
    assert bring_in(root, tmp_path / "out") == 2
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])
    assert f"row 4: expected a path within {root}, got '../104.png'" in caplog.text


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ({"bytes": None, "path": None}, "row 3: expected a picture, got none"),
        (None, "row 3: expected a picture, got none"),
        ({"bytes": b"no picture", "path": None}, "row 3: expected a whole PNG, JPEG or WebP picture"),
        ({"bytes": None, "path": "gone.png"}, "gone.png: expected a whole PNG, JPEG or WebP picture"),
    ],
)
def test_a_bad_picture_costs_its_episode_alone(tmp_path, caplog, picture, message):
    def values(episode):
        rows = [{"bytes": png(100 * episode + row), "path": "x.png"} for row in range((12, 9, 14)[episode])]
        return [picture if (episode, row) == (1, 3) else each for row, each in enumerate(rows)]

    root = write_dataset(tmp_path / "in", camera={"dtype": "image"}, columns={CAMERA: values})
    assert bring_in(root, tmp_path / "out") == 2
    assert found(tmp_path / "out") == whole((12, 9, 14), without=[1])
    assert message in caplog.text


def test_row_groups_of_other_episodes_are_passed_over(tmp_path):
    root = write_dataset(tmp_path / "in", camera={"dtype": "image"})
    path = root / "data" / "chunk-000" / "file-000.parquet"
    for more in ({}, {"write_statistics": False}):
        pq.write_table(pq.read_table(path), path, row_group_size=5, **more)
        assert [numbers_in(np.stack([*open_episode(root, index).frames()])) for index in range(3)] == [
            whole((12, 9, 14))[index][0] for index in range(3)
        ]


def test_rows_without_the_pictures_that_are_declared(tmp_path, caplog):
    root = write_dataset(tmp_path / "in", camera={"dtype": "image"})
    path = root / "data" / "chunk-000" / "file-000.parquet"
    pq.write_table(pq.read_table(path).drop([CAMERA]), path)
    assert bring_in(root, tmp_path / "out") == 2
    assert f"expected a column {CAMERA}, got action, timestamp, " in caplog.text


# What is a picture


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ({"info": {"is_depth_map": True}}, r"got depths \(is_depth_map\)"),
        ({"info": {"video.is_depth_map": True}}, r"got depths \(is_depth_map\)"),
        ({"video_info": {"video.is_depth_map": True}, "info": None}, r"got depths \(is_depth_map\)"),
        ({"info": {"video.pix_fmt": "gray12le"}}, r"got numbers of more than 8 bits \(video.pix_fmt gray12le\)"),
        ({"shape": [HEIGHT, WIDTH, 2]}, "got 2 channels"),
        ({"shape": [6, HEIGHT, WIDTH], "names": ["channels", "height", "width"]}, "got 6 channels"),
    ],
)
@pytest.mark.parametrize("kind", ["video", "image"])
def test_depths_are_no_pictures(tmp_path, camera, message, kind):
    root = write_dataset(tmp_path / "in", (9,), camera={"dtype": kind, **camera})
    for more in ((), (f"lerobot.video={CAMERA}",)):
        with pytest.raises(DatasetError, match=f"info.json: {CAMERA}: expected pictures, {message}"):
            bring_in(root, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_depths_that_info_does_not_tell_of_are_no_pictures_either(tmp_path, caplog):
    root = write_dataset(tmp_path / "in", (9,))
    video = root / "videos" / CAMERA / "chunk-000" / "file-000.mp4"
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-y",
        "-i",
        video,
        "-pix_fmt",
        "gray12le",
        "-c:v",
        "ffv1",
    ]
    subprocess.run([*command, tmp_path / "depth.mkv"], check=True)
    (tmp_path / "depth.mkv").replace(video)
    assert bring_in(root, tmp_path / "out") == 2
    assert f"{video}: expected pictures, got numbers of more than 8 bits (gray12le)" in caplog.text


def test_the_only_camera_and_the_only_action_are_taken(tmp_path):
    root = write_dataset(tmp_path / "in", (9,))
    path = root / "meta" / "info.json"
    info = json.loads(path.read_text())
    features = info["features"]
    depth = {"dtype": "video", "shape": [HEIGHT, WIDTH, 1], "info": {"is_depth_map": True}}
    path.write_text(json.dumps(info | {"features": features | {"observation.images.depth": depth}}))
    assert LeRobotSource(root, LeRobotActions()).declared == {"video": CAMERA, "action": "action"}
    wrist, gripper = f"lerobot.video: expected one of {CAMERA}, observation.images.wrist", "action, action.gripper, got"
    for name, feature, message in (
        ("observation.images.wrist", features[CAMERA], wrist),
        ("action.gripper", features["action"], f"lerobot.action: expected one of {gripper}"),
    ):
        other, out = tmp_path / name, tmp_path / f"out_{name}"
        shutil.copytree(root, other)
        (other / "meta" / "info.json").write_text(json.dumps(info | {"features": features | {name: feature}}))
        with pytest.raises(ConfigError, match=message):
            bring_in(other, out)
        assert bring_in(other, out, f"lerobot.video={CAMERA}", "lerobot.action=action") == 0
    none = shutil.copytree(root, tmp_path / "none")
    (none / "meta" / "info.json").write_text(json.dumps(info | {"features": {"action": features["action"]}}))
    with pytest.raises(DatasetError, match=r"expected a feature for lerobot\.video, got action"):
        bring_in(none, tmp_path / "out")


def test_another_size_than_declared_is_said(tmp_path, caplog):
    root = write_dataset(tmp_path / "in", (9,), camera={"shape": [3, 64, 96], "names": ["channels", "height", "width"]})
    assert bring_in(root, tmp_path / "out") == 0
    assert f"info.json says 96 x 64 pixels of {CAMERA}, got {WIDTH} x {HEIGHT}" in caplog.text


# Files that are not there


@pytest.mark.parametrize("kind", ["video", "data"])
def test_episodes_without_a_file_are_named_in_one_line(tmp_path, caplog, kind):
    rows = (5, 6, 7, 8, 9, 10)
    root = write_dataset(tmp_path / "in", rows, version="v2.1")
    paths = sorted(root.glob(f"{kind}*/**/episode_*"))
    for index in (0, 1, 3, 4):
        paths[index].unlink()
    assert bring_in(root, tmp_path / "out") == 0
    assert found(tmp_path / "out") == whole(rows, without=[0, 1, 3, 4])
    lines = [record.message for record in caplog.records if "left out" in record.message]
    what = f"video of {CAMERA}" if kind == "video" else "file of rows"
    told = f"4 of 6 episodes have no {what}, such as {paths[0]}; left out: "
    assert lines == [f"{root}: {told}episode_000000, episode_000001, episode_000003 and 1 more"]
    for path in paths:
        path.unlink(missing_ok=True)
    other = shutil.copytree(root, tmp_path / "other")
    with pytest.raises(DatasetError, match=f"6 of 6 episodes have no {what}"):
        bring_in(other, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_paths_of_info_do_not_lead_out_of_the_folder(tmp_path):
    root = write_dataset(tmp_path / "in", video_path="../{video_key}.mp4")
    write_video(tmp_path / f"{CAMERA}.mp4", [coded(0)] * 9, 10.0)
    with pytest.raises(DatasetError, match=r"video_path: expected a path within .*, got '\.\./observation"):
        LeRobotSource(root, LeRobotActions()).list_drives()


def test_fewer_episodes_than_declared_are_said(tmp_path, caplog):
    root = write_dataset(tmp_path / "in", total_episodes=5)
    assert bring_in(root, tmp_path / "out") == 0
    assert f"{root}: expected 5 episodes (total_episodes), got 3" in caplog.text


# Names and splits


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["pan", "lift.pos"], ("pan", "lift.pos")),
        ([["pan", "lift"]], ("pan", "lift")),
        ({"motors": ["pan", "lift"]}, ("pan", "lift")),
        ({"axes": [["pan", "lift"]]}, ("pan", "lift")),
        ({"left": ["pan"], "right": ["lift"]}, ("pan", "lift")),
        ({"lift": 1, "pan": 0}, ("pan", "lift")),
        ({"lift": 2, "pan": 0}, ("action_0", "action_1")),
        (["arm/pan", "arm lift"], ("arm_pan", "arm_lift")),
        (["arm/pan", "arm pan"], ("action_0", "action_1")),
        ([0, 1], ("action_0", "action_1")),
        (["pan", "pan"], ("action_0", "action_1")),
        (["pan"], ("action_0", "action_1")),
        (None, ("action_0", "action_1")),
    ],
)
def test_the_names_of_joints_are_kept(tmp_path, names, expected):
    pair = {"action": lambda episode: [[float(row), -float(row)] for row in range(9)]}
    root = write_dataset(tmp_path, (9,), names=names, columns=pair)
    stats = {"action": {"min": [0.0, -9.0], "max": [9.0, 0.0]}}
    (root / "meta" / "stats.json").write_text(json.dumps(stats))
    assert LeRobotSource(root, LeRobotActions()).space.names == expected
    np.testing.assert_array_equal(open_episode(root).track.values[:, 1], -np.arange(9.0))


def test_splits_name_their_episodes(tmp_path):
    splits = {"train": "0:2", "val": "2:3", "old": "7:9"}
    root = write_dataset(tmp_path / "in", splits=splits)
    assert LeRobotSource(root, LeRobotActions()).recordings == {"val": ("episode_000002",)}
    assert bring_in(root, tmp_path / "out", "held_out=[val]") == 0
    assert [each.place for each in read_split(tmp_path / "out", "held_out").episodes] == ["episode_000002"]
    assert len(read_split(tmp_path / "out", "train").episodes) == 2
