import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from entry import compose, read_settings
from hypothesis import given, settings, strategies as st
from PIL import Image
from tiny_driving import drive_poses

from decoder.camera import project
from decoder.pictures import read_picture
from decoder.video import VideoWriter, probe_video
from terra.actions import Keys, Vector, load_actions
from terra.dataset import Poses, read_frames, read_split
from terra.dataset.checks import Names
from terra.dataset.importing import (
    ImportSettings,
    KittiSource,
    LeRobotColumns,
    LeRobotSource,
    Mount,
    SourceDrive,
    VideoPosesSource,
    import_drives,
)
from terra.dataset.importing.alignment import align, cut
from terra.dataset.importing.command import run
from terra.dataset.importing.fitting import crop_box, fit_picture, fitted_camera
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.source import Intrinsics, motion
from terra.dataset.importing.video_actions import VideoActionsSource
from terra.dataset.inspect import inspect_source
from terra.errors import ActionError, ConfigError, DatasetError, TrajectoryError, VideoError
from terra.trajectory import save_poses
from tokenizer.settings import checked

PICTURE = (36, 96)  # wider than ours, as road pictures are
SIZE = (16, 32)
COLUMNS = LeRobotColumns(
    video="observation.images.front",
    x="observation.state[0]",
    y="observation.state[pos_y]",
    position_unit="m",
    heading="observation.state[2]",
    heading_unit="rad",
    heading_from="x_ccw",
    speed=None,
    speed_unit="m/s",
)


def settings_for(source, output: Path, **changes) -> ImportSettings:
    values = {"source": source, "name": "test", "output": output, "fps": 10.0, "image_size": SIZE, "held_out": ()}
    values |= {"frames_per_episode": 300, "drives": None, "mount": Mount()}
    return ImportSettings(**(values | changes))


def write_mp4(path: Path, frames, fps: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with VideoWriter(path, fps, size=(PICTURE[1], PICTURE[0]), crf=8) as writer:
        for frame in frames:
            writer.append(frame)


def numbered(count: int, first: int = 0):
    """Plain pictures that tell which one they are: the levels of red, green and blue are its digits to base 5."""
    for number in range(first, first + count):
        color = [30 + 45 * (number // power % 5) for power in (25, 5, 1)]
        yield np.full((*PICTURE, 3), color, np.uint8)


def numbers_of(frames) -> list[int]:
    digits = np.round((frames.mean(axis=(1, 2)) - 30) / 45).astype(int)
    return (digits @ [25, 5, 1]).tolist()


# A folder of videos with poses


def write_video_poses(folder: Path, names=("a", "b"), fps: float = 10.0, num_frames: int = 45) -> Path:
    for index, name in enumerate(names):
        write_mp4(folder / f"{name}.mp4", numbered(num_frames), fps)
        time = np.arange(num_frames) / fps + 100
        turning = 0.1 * (-1) ** index
        heading = turning * (time - 100)
        x, y = 6.0 / turning * np.sin(heading), 6.0 / turning * (1 - np.cos(heading))
        save_poses(folder / f"{name}.json", time, np.column_stack([x, y]), heading, fps)
    return folder


def test_videos_with_poses_come_in_frame_by_frame(tmp_path):
    source = VideoPosesSource(write_video_poses(tmp_path / "in"))
    outcome = import_drives(settings_for(source, tmp_path / "out", held_out=("b",)), workers=0)
    assert (outcome.num_done, outcome.failed) == (2, [])
    (episode,) = read_split(tmp_path / "out", "train").episodes
    # 4.5 s of poses, of which the last 3 s are future.
    assert (episode.id, episode.num_frames, episode.source, episode.place) == ("test_a_000", 15, "test", "a")
    assert numbers_of(read_frames(episode)) == list(range(15))
    expected = drive_poses(15)
    for name in ("time", "x", "y", "heading"):
        np.testing.assert_allclose(getattr(episode.poses, name), getattr(expected, name), atol=1e-9)
    np.testing.assert_allclose(episode.poses.speed, 6.0, atol=0.02)
    (other,) = read_split(tmp_path / "out", "held_out").episodes
    assert other.poses.heading[-1] < 0
    assert episode.camera is None


def test_an_import_goes_on_where_it_was_and_changes_no_byte(tmp_path):
    source = VideoPosesSource(write_video_poses(tmp_path / "in"))
    one, other = (settings_for(source, tmp_path / name, frames_per_episode=8) for name in ("one", "other"))
    import_drives(one.replace(drives=("a",)), workers=0)
    assert import_drives(one, workers=0).num_done == 1
    assert import_drives(one, workers=0).num_done == 0
    import_drives(other, workers=2)
    files = {path.relative_to(one.output) for path in one.output.rglob("*") if path.is_file()}
    assert len(files) == 4 + 2 * 5
    for name in files:
        assert (one.output / name).read_bytes() == (other.output / name).read_bytes(), name
    with pytest.raises(DatasetError, match="expected a shard made by"):
        import_drives(one.replace(frames_per_episode=9), workers=0)
    # So do shards of another camera, which would be in its camera.json.
    with pytest.raises(DatasetError, match="expected a shard made by"):
        import_drives(one.replace(mount=Mount(fov_degrees=70.0, height_meters=1.5)), workers=0)


def test_videos_of_other_containers_come_in_alike(tmp_path):
    folder = write_video_poses(tmp_path / "in", names=("a", "b", "c", "d", "e"))
    for name, suffix in {"a": ".avi", "b": ".mkv", "c": ".ts", "d": ".MOV"}.items():
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", folder / f"{name}.mp4", "-c", "copy"]
        subprocess.run([*map(str, command), str(folder / (name + suffix))], check=True)
        (folder / f"{name}.mp4").unlink()
    outcome = import_drives(settings_for(VideoPosesSource(folder), tmp_path / "out"), workers=0)
    assert (outcome.num_done, outcome.failed) == (5, [])
    episodes = read_split(tmp_path / "out", "train").episodes
    assert [numbers_of(read_frames(episode)) for episode in episodes] == [list(range(15))] * 5
    (folder / "e.webm").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"expected one video of a name, got e\.mp4 and e\.webm"):
        VideoPosesSource(folder).list_drives()
    (tmp_path / "none").mkdir()
    with pytest.raises(DatasetError, match=r"expected a folder with videos \(\.avi, .*\), got none"):
        VideoPosesSource(tmp_path / "none").list_drives()


def test_what_is_left_out_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = write_video_poses(tmp_path / "in", names=("a",))
    for name in ("b.mpg", "notes.txt", "c.csv", "._a.mp4"):
        (folder / name).write_bytes(b"")
    assert import_drives(settings_for(VideoPosesSource(folder), tmp_path / "out"), workers=0).num_done == 1
    assert "not used as videos or their poses (.csv, .json): b.mpg, c.csv, notes.txt" in caplog.text
    assert "30 left out: less than 3 s of poses follow" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_one_line_tells_what_was_kept_of_all_drives(tmp_path, caplog, workers):
    caplog.set_level("INFO")
    for name, count in {"a": 30, "b": 30, "late": 30}.items():
        write_mp4(tmp_path / "in" / f"{name}.mp4", numbered(count), 10.0)
        times = np.arange(10 if name == "late" else 0, 30) / 10
        (tmp_path / "in" / f"{name}.csv").write_text("time_s,go\n" + "".join(f"{time},1\n" for time in times))
    source = VideoActionsSource(tmp_path / "in", Keys(names=["go"]), None)
    outcome = import_drives(settings_for(source, tmp_path / "out"), workers=workers)
    assert sorted((losses.read, losses.kept) for losses in outcome.results) == [(30, 20), (30, 30), (30, 30)]
    assert "test: at 10 frames a second: 90 frames read of 3 drives, 80 kept (8.0 s)" in caplog.text
    lines = [line for line in caplog.text.splitlines() if " 30 frames read" in line and "left out" in line]
    assert len(lines) == (1 if workers == 0 else 0)  # other drives are whole; the log of a process is not captured
    for line in lines:
        assert "late.csv: 30 frames read, 20 kept (2.0 s), 10 left out: before the first action" in line


def test_an_unknown_drive_is_named_beside_those_there_are(tmp_path):
    source = VideoPosesSource(write_video_poses(tmp_path / "in", names=("sunday", "monday")))
    with pytest.raises(
        ConfigError, match=r"held_out: expected drives of monday, sunday, got 'sundy'; did you mean sunday\?"
    ):
        import_drives(settings_for(source, tmp_path / "out", held_out=("sundy",)), workers=0)
    with pytest.raises(ConfigError, match=r"drives: expected drives of monday, sunday, got 'x'$"):
        import_drives(settings_for(source, tmp_path / "out", drives=("x",)), workers=0)


def test_a_part_of_a_drive_and_of_its_pictures(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = write_video_poses(tmp_path / "in", names=("a",), num_frames=80)
    given_ = ["kind=video_poses", f"input={folder}", "image_size=[16,32]", "workers=0"]

    def imported(name: str, *more: str):
        assert run(read_settings("import", [*given_, f"output={tmp_path / name}", *more])) == 0
        return read_split(tmp_path / name, "train").episodes[0]

    # The frames up to end= are kept whole, because the poses go on after it.
    part = imported("part", "start=1", "end=3")
    assert numbers_of(read_frames(part)) == list(range(10, 31))
    np.testing.assert_allclose(part.poses.heading[0], 0.1, atol=1e-6)
    assert "10 frames before start= and 49 after end= left out" in caplog.text
    assert numbers_of(read_frames(imported("rest", "start=2.05"))) == list(range(21, 50))
    camera = ("camera.fov_degrees=75", "camera.height_meters=1.4")
    square, box = imported("square", "crop=1:1", *camera), imported("box", "crop=[30,0,66,36]", *camera)
    assert "pictures cropped to [30, 0, 66, 36]" in caplog.text
    assert square.camera == box.camera
    whole = imported("whole", *camera).camera
    assert square.camera is not None
    assert whole is not None
    # The kept picture is half as wide as what is kept of the whole: 36 of 72 pixels.
    tangents = [math.tan(math.radians(each.fov_degrees / 2)) for each in (square.camera, whole)]
    assert tangents[0] / tangents[1] == pytest.approx(0.5)
    assert imported("whole", *camera).id == "video_poses_a_000"  # complete already
    with pytest.raises(DatasetError, match="expected a shard made by"):
        imported("whole", *camera, "start=1")
    for more, message in (
        (("start=1", "end=1"), "end: expected more than start=1, got 1"),
        (("crop=[5,0,5,9]",), r"crop: expected \[left,top,right,bottom\] in pixels, or an aspect such as 16:9, got"),
        (("crop=wide",), "crop: expected .* in pixels, or an aspect such as 16:9, got 'wide'"),
        (("crop=0:9",), "crop: expected .* got '0:9'"),
        (("start=-1",), "start: expected a number of at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            imported("none", *more)
    for more, message in (
        (("crop=[0,0,97,36]",), "expected a crop within 96 x 36 pixels, got [0, 0, 97, 36]"),
        (("start=60",), "expected 2 or more frames from 60 s to the end, got 7.9 s of frames in all"),
        (("start=6",), "expected frames with 3 s of poses after them"),
    ):
        assert run(read_settings("import", [*given_, f"output={tmp_path / 'bad'}", *more])) == 2
        assert message in caplog.text
        assert not list((tmp_path / "bad" / "train").glob("*"))


def test_a_picture_that_would_take_gigabytes_is_refused_before_it_is_unpacked(tmp_path):
    Image.new("1", (8_500, 8_500)).save(tmp_path / "large.png")
    with pytest.raises(VideoError, match="expected at most 64 megapixels, got 8500x8500 = 72 megapixels"):
        read_picture(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(VideoError, match="expected a whole PNG, JPEG or WebP picture, got: cannot identify"):
        read_picture(tmp_path / "text.png")


def test_a_damaged_drive_is_noted_and_the_rest_goes_on(tmp_path):
    folder = write_video_poses(tmp_path / "in", names=("a", "b", "c", "d"))
    (folder / "a.json").unlink()
    content = (folder / "b.mp4").read_bytes()
    (folder / "b.mp4").write_bytes(content[: len(content) // 2])
    text = (folder / "c.json").read_text()
    (folder / "c.json").write_text(text.replace('"fps": 10.0', '"fps": 20.0'))
    outcome = import_drives(settings_for(VideoPosesSource(folder), tmp_path / "out"), workers=0)
    assert outcome.num_done == 1
    words = ("expected a.csv or a.json beside it, got 0", "the video was cut off", "expected 20 frames a second")
    for line, word in zip(outcome.failed, words, strict=True):
        assert word in line
    assert [path.name for path in (tmp_path / "out" / "train").iterdir()] == ["test_d"]
    doubts = inspect_source(VideoPosesSource(folder)).doubts
    assert len(doubts) == 3


# Choosing frames


def source_drive(frame_times, poses: Poses, count: int | None = None) -> SourceDrive:
    frames = numbered(len(frame_times) if count is None else count)
    return SourceDrive("d", poses, np.asarray(frame_times), lambda: frames, None, "d.csv")


@settings(max_examples=40)
@given(
    source_fps=st.floats(10.0, 60.0),
    fps=st.floats(2.0, 10.0),
    seconds=st.floats(4.0, 9.0),
    shift=st.floats(-0.4, 0.4),
    origin=st.floats(0, 1e9),
)
def test_each_frame_is_the_nearest_and_each_pose_is_of_its_instant(source_fps, fps, seconds, shift, origin):
    frame_times = origin + np.arange(int(seconds * source_fps)) / source_fps
    time = origin + shift + np.arange(int(seconds * 50)) / 50
    heading = 0.2 * (time - time[0])
    poses = motion(time, 30 * np.stack([np.sin(heading), 1 - np.cos(heading)], 1), heading)
    aligned = align(source_drive(frame_times, poses), fps)
    start = frame_times[np.argmax(frame_times >= time[0] - 0.02 / fps)]  # the first frame that has a pose
    count = len(aligned.frame_index)
    instants = start + np.arange(count) / fps
    nearest = np.abs(frame_times - instants[:, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(frame_times[aligned.frame_index] - instants), nearest, atol=0.05 / fps)
    assert aligned.losses.moved_seconds <= 0.5 / source_fps + 0.02 / fps
    assert aligned.losses.repeated == 0 or fps > 0.95 * source_fps
    (part,) = aligned.parts
    assert isinstance(part.track, Poses)
    assert len(part.track.time) == count + math.ceil(3 * fps - 1e-9)
    np.testing.assert_allclose(part.track.heading, 0.2 * (part.track.time + start - time[0]), atol=0.004 / fps)
    np.testing.assert_allclose(np.diff(part.track.time), 1 / fps)
    # Not a frame more would have its path.
    assert start + count / fps + 3 > min(time[-1], frame_times[-1] + 3) - 2 / fps


def test_drives_that_cannot_be_resampled_are_refused():
    poses = drive_poses(60)
    times = np.arange(60) / 10
    with pytest.raises(DatasetError, match=r"expected fps of at most its frames' rate, 10\.00, got 20"):
        align(source_drive(times, poses), 20.0)
    with pytest.raises(DatasetError, match="expected frames with 3 s of poses after them"):
        align(source_drive(times + 8, poses), 10.0)
    with pytest.raises(TrajectoryError, match=r"d\.csv: pose 5: expected at most 80 m/s"):
        align(source_drive(times, replace(poses, x=poses.x + 99 * np.maximum(np.arange(90) - 4, 0))), 10.0)


@given(num_frames=st.integers(1, 700), most=st.integers(1, 300))
def test_parts_tile_a_drive(num_frames, most):
    poses = drive_poses(num_frames)
    parts = cut(poses, num_frames, 10.0, most)
    lengths = [length for length, _ in parts]
    assert sum(lengths) == num_frames
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    start = 0
    for length, part in parts:
        np.testing.assert_array_equal(part.x, poses.x[start : start + length + 30])
        np.testing.assert_array_equal(part.time, np.arange(length + 30) / 10)
        start += length


# Cropping


@given(
    picture=st.tuples(st.integers(20, 2000), st.integers(20, 2000)),
    size=st.tuples(st.integers(8, 300), st.integers(8, 500)),
    center=st.none() | st.floats(0, 2000),
)
def test_the_crop_lies_within_and_has_our_aspect(picture, size, center):
    intrinsics = None if center is None else Intrinsics(700.0, center, 100.0)
    left, top, right, bottom = crop_box(picture, size, intrinsics)
    assert left >= 0
    assert top >= 0
    assert right <= picture[1] + 1e-6
    assert bottom <= picture[0] + 1e-6
    assert (right - left) / (bottom - top) == pytest.approx(size[1] / size[0], rel=1e-6)
    assert math.isclose(right - left, picture[1]) or math.isclose(bottom - top, picture[0])


def test_a_point_of_the_ground_stays_where_its_pixel_goes():
    # KITTI's numbers: a wide picture whose principal point is neither in its middle nor half way up.
    picture_size, intrinsics = (376, 1241), Intrinsics(718.856, 607.1928, 185.2157)
    camera = fitted_camera(
        picture_size, (144, 256), intrinsics, height_meters=1.65, pitch_radians=0.0, x_forward_meters=0.0
    )
    left, top, right, _ = crop_box(picture_size, (144, 256), intrinsics)
    scale = 256 / (right - left)
    for ahead, aside in ((8.0, 0.0), (15.0, 3.0), (40.0, -5.0)):
        column = intrinsics.center_x - intrinsics.focal * aside / ahead
        row = intrinsics.center_y + intrinsics.focal * 1.65 / ahead
        expected = [(column - left) * scale, (row - top) * scale]
        np.testing.assert_allclose(project(np.array([[ahead, aside]]), camera, (256, 144))[0], expected, atol=0.5)


def test_pictures_are_cropped_not_squeezed():
    picture = np.zeros((*PICTURE, 3), np.uint8)
    picture[:, 12:84] = 200  # what remains of 96 columns at the aspect of 16 x 32
    fitted = fit_picture(picture, SIZE, None)
    assert fitted.shape == (*SIZE, 3)
    assert fitted.min() > 150


# KITTI


def write_kitti(root: Path, name: str = "04", count: int = 60, fps: float = 10.0) -> Path:
    """A left turn on a climbing road, in KITTI's axes."""
    sequence = root / "sequences" / name
    (sequence / "image_2").mkdir(parents=True)
    (root / "poses").mkdir(exist_ok=True)
    lines = []
    for index, frame in enumerate(numbered(count)):
        Image.fromarray(frame).save(sequence / "image_2" / f"{index:06d}.png")
        angle, climb = 0.02 * index, 0.05
        x, y, z = 30 * math.sin(angle), 30 * (1 - math.cos(angle)), 30 * angle * math.tan(climb)
        ahead = [math.cos(angle) * math.cos(climb), math.sin(angle) * math.cos(climb), math.sin(climb)]
        side = [math.sin(angle), -math.cos(angle), 0.0]
        down = np.cross(ahead, side)
        # Columns: the camera's right, down and forward, in the first camera's axes (-y, -z, x of ours).
        rotation = np.array([side, down, ahead]).T[[1, 2, 0]] * np.array([[-1], [-1], [1]])
        matrix = np.column_stack([rotation, [-y, -z, x]])
        lines.append(" ".join(f"{number:.9e}" for number in matrix.ravel()))
    (root / "poses" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (sequence / "times.txt").write_text("\n".join(f"{index / fps:.6e}" for index in range(count)) + "\n")
    projection = "50 0 47 0 0 50 18 0 0 0 1 0"
    (sequence / "calib.txt").write_text(f"P0: {projection}\nP2: {projection}\n")
    return root


def test_kitti_axes_become_ours(tmp_path):
    root = write_kitti(tmp_path / "kitti")
    drive = KittiSource(root).open_drive("04")
    angle = 0.02 * np.arange(60)
    np.testing.assert_allclose(drive.poses.heading, angle, atol=1e-6)
    np.testing.assert_allclose(drive.poses.pitch, 0.05, atol=1e-6)
    np.testing.assert_allclose(drive.poses.x, 30 * np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(drive.poses.y, 30 * (1 - np.cos(angle)), atol=1e-6)
    assert (np.diff(drive.poses.z) > 0).all()
    np.testing.assert_allclose(drive.poses.speed, 6.0, rtol=0.01)
    inspection = inspect_source(KittiSource(root))
    assert inspection.doubts == ()
    assert "           60 frames, 5.9 s" in inspection.lines


def test_kitti_is_imported_with_its_camera(tmp_path):
    source = KittiSource(write_kitti(tmp_path / "kitti", fps=9.64))
    mount = Mount(height_meters=1.65)
    outcome = import_drives(settings_for(source, tmp_path / "out", held_out=("04",), mount=mount), workers=0)
    assert outcome.failed == []
    (episode,) = read_split(tmp_path / "out", "held_out").episodes
    assert episode.camera is not None
    assert episode.camera.height_meters == 1.65
    assert episode.camera.fov_degrees == pytest.approx(math.degrees(2 * math.atan(36 / 50)))
    # Frames come at 9.64 a second, and at 10 one of 28 is shown twice.
    numbers = numbers_of(read_frames(episode))
    assert numbers[0] == 0
    assert set(np.diff(numbers)) == {0, 1}
    assert abs(numbers[-1] / 9.64 - (len(numbers) - 1) / 10) <= 0.06
    with pytest.raises(ConfigError, match=r"held_out: expected drives of 04, got '17'"):
        import_drives(settings_for(source, tmp_path / "out", held_out=("17",)), workers=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sequences/04/times.txt", "0\n0.1\n", "expected as many poses as times, got 60 and 2"),
        ("sequences/04/times.txt", "zero\n", r"times\.txt: line 1: expected 1 numbers"),
        ("poses/04.txt", "1 2 3\n", r"04\.txt: line 1: expected 12 finite numbers, got 3"),
        ("sequences/04/calib.txt", "P0: 1\n", "expected a line 'P2: '"),
    ],
)
def test_bad_kitti_files_are_named(tmp_path, name, content, message):
    root = write_kitti(tmp_path)
    (root / name).write_text(content)
    with pytest.raises(DatasetError, match=message):
        KittiSource(root).open_drive("04")


# LeRobot


def write_lerobot(root: Path, *, lengths=(45, 50), version="v3.0", to_state=None) -> Path:
    """Two episodes that share one file of data and one video, at 10 frames a second."""
    names = ["pos_x", "pos_y", "yaw", "speed_kmh"]
    features = {"observation.state": {"dtype": "float32", "shape": [4], "names": {"axes": names}}}
    features["observation.images.front"] = {"dtype": "video", "shape": [*PICTURE, 3], "names": None}
    info = {"codebase_version": version, "fps": 10, "features": features, "total_episodes": len(lengths)}
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    write_mp4(root / "videos" / "observation.images.front" / "chunk-000" / "file-000.mp4", numbered(sum(lengths)), 10.0)
    rows, episodes, start = [], [], 0
    for index, length in enumerate(lengths):
        poses = drive_poses(length - 30, turning=0.1)
        state = np.column_stack([poses.x, poses.y, poses.heading, poses.speed * 3.6])
        state = state if to_state is None else to_state(state)
        rows += [
            {
                "timestamp": frame / 10,
                "frame_index": frame,
                "episode_index": index,
                "observation.state": list(state[frame]),
            }
            for frame in range(length)
        ]
        prefix = "videos/observation.images.front"
        episode = {"episode_index": index, "length": length, "data/chunk_index": 0, "data/file_index": 0}
        episode |= {f"{prefix}/chunk_index": 0, f"{prefix}/file_index": 0}
        episodes.append(
            episode | {f"{prefix}/from_timestamp": start / 10, f"{prefix}/to_timestamp": (start + length) / 10}
        )
        start += length
    pq.write_table(pa.Table.from_pylist(rows), root / "data" / "chunk-000" / "file-000.parquet")
    pq.write_table(pa.Table.from_pylist(episodes), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    return root


def test_lerobot_episodes_come_out_of_their_shared_files(tmp_path):
    source = LeRobotSource(write_lerobot(tmp_path / "in"), COLUMNS)
    assert inspect_source(source).doubts == ()
    outcome = import_drives(settings_for(source, tmp_path / "out", held_out=("episode_000001",)), workers=0)
    assert outcome.failed == []
    first, second = (read_split(tmp_path / "out", split).episodes[0] for split in ("train", "held_out"))
    assert (first.num_frames, second.num_frames) == (15, 20)
    assert numbers_of(read_frames(first)) == list(range(15))
    assert numbers_of(read_frames(second)) == list(range(45, 65))
    np.testing.assert_allclose(second.poses.y, drive_poses(20).y, atol=1e-4)


@pytest.mark.parametrize("integrated", [False, True])
def test_degrees_of_the_earth_and_of_the_compass_become_meters_and_radians(tmp_path, integrated):
    def to_state(state):
        meters = 40_075_000 / 360
        latitude = 48 + state[:, 1] / meters
        longitude = 11 + state[:, 0] / meters / math.cos(math.radians(48))
        return np.column_stack([longitude, latitude, 90 - np.degrees(state[:, 2]), state[:, 3]])

    places = {"x": None, "y": None} if integrated else {}
    columns = replace(
        COLUMNS,
        **places,
        position_unit="deg",
        heading_unit="deg",
        heading_from="north_cw",
        speed="observation.state[speed_kmh]",
        speed_unit="km/h",
    )
    drive = LeRobotSource(write_lerobot(tmp_path, to_state=to_state), columns).open_drive("episode_000000")
    expected = drive_poses(15)
    np.testing.assert_allclose(drive.poses.x, expected.x, atol=0.01)
    np.testing.assert_allclose(drive.poses.y, expected.y, atol=0.01)
    np.testing.assert_allclose(drive.poses.heading, expected.heading, atol=1e-6)
    np.testing.assert_allclose(drive.poses.speed, 6.0, atol=1e-6)


def test_what_lerobot_does_not_declare_is_not_guessed(tmp_path):
    root = write_lerobot(tmp_path / "good")
    for changes, message in (
        ({"x": "observation.state[7]"}, r"observation\.state\[7\]: expected one of the 4 numbers"),
        ({"x": "observation.state"}, "expected one of the 4 numbers"),
        ({"heading": "action[0]"}, r"expected a column action\[0\], got timestamp, "),
        (
            {"video": "observation.images.rear"},
            r"expected observation\.images\.rear among the features with pictures .*, got observation\.images\.front",
        ),
    ):
        with pytest.raises(DatasetError, match=message):
            LeRobotSource(root, replace(COLUMNS, **changes)).open_drive("episode_000000")
    with pytest.raises(DatasetError, match=r"codebase_version: expected v2\.x or v3\.x, got 'v1\.6'"):
        LeRobotSource(write_lerobot(tmp_path / "old", version="v1.6"), COLUMNS).list_drives()
    with pytest.raises(ConfigError, match="heading_from: expected one of x_ccw, north_cw, got 'north'"):
        replace(COLUMNS, heading_from="north")
    with pytest.raises(ConfigError, match="expected columns x and y, or neither and a speed"):
        replace(COLUMNS, x=None, y=None)
    with pytest.raises(ConfigError, match="lerobot: expected "):
        LeRobotColumns.from_dict({"x": "observation.state[0]"})


def write_lerobot_2(root: Path, lengths=(12, 9)) -> Path:
    """Two episodes of version 2.1, each with files of its own, at 10 frames a second; actions of [pan, grip, 0]."""
    features = {"action": {"dtype": "float32", "shape": [3], "names": ["pan", "grip.pos", "still"]}}
    features["observation.images.front"] = {"dtype": "video", "shape": [*PICTURE, 3], "names": None}
    info = {"codebase_version": "v2.1", "fps": 10, "features": features, "chunks_size": 1000}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    episodes, stats = [], []
    for index, length in enumerate(lengths):
        name = f"episode_{index:06d}"
        write_mp4(root / f"videos/chunk-000/observation.images.front/{name}.mp4", numbered(length, 20 * index), 10.0)
        action = np.float32([[0.1 * frame, index - frame, 0.0] for frame in range(length)])
        rows = {"timestamp": np.arange(length) / 10, "episode_index": [index] * length, "action": list(action)}
        pq.write_table(pa.table(rows), root / "data" / "chunk-000" / f"{name}.parquet")
        episodes.append({"episode_index": index, "length": length, "tasks": ["push"]})
        reach = {"min": action.min(axis=0).tolist(), "max": action.max(axis=0).tolist()}
        stats.append({"episode_index": index, "stats": {"action": reach}})
    (root / "meta" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    (root / "meta" / "episodes_stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stats))
    return root


def import_lerobot(root: Path, output: Path, *more: str) -> int:
    given = ["kind=lerobot", "lerobot=actions", f"input={root}", f"output={output}", "image_size=[16,32]", "workers=0"]
    return run(read_settings("import", [*given, *more]))


def test_actions_of_a_robot_come_with_their_names_and_their_range(tmp_path, caplog):
    assert import_lerobot(write_lerobot_2(tmp_path / "in"), tmp_path / "out", "held_out=[episode_000001]") == 0
    (episode,) = read_split(tmp_path / "out", "held_out").episodes
    assert isinstance(episode.space, Vector)
    assert episode.space.names == ("pan", "grip.pos", "still")
    np.testing.assert_allclose([episode.space.low, episode.space.high], [[0, -11, -1], [1.1, 1, 1]], rtol=1e-6)
    assert "always the same: still; its range is taken to be 1 below to 1 above" in caplog.text
    assert numbers_of(read_frames(episode)) == list(range(20, 29))
    expected = [[0.1 * frame, 1 - frame, 0.0] for frame in range(9)]
    np.testing.assert_allclose(episode.actions, expected, atol=1e-6)


def test_actions_of_version_3_and_a_declared_space(tmp_path):
    root = write_lerobot(tmp_path / "in")
    reach = {"min": [-100.0] * 4, "max": [100.0] * 4}
    (root / "meta" / "stats.json").write_text(json.dumps({"observation.state": reach}))
    assert import_lerobot(root, tmp_path / "out", "lerobot.action=observation.state") == 0
    first, second = read_split(tmp_path / "out", "train").episodes
    assert first.space.names == ("pos_x", "pos_y", "yaw", "speed_kmh")
    assert (first.num_frames, second.num_frames) == (45, 50)
    assert numbers_of(read_frames(second)) == list(range(45, 95))
    np.testing.assert_allclose(second.actions[:, 0], drive_poses(20).x, atol=1e-4)
    declared = "{kind:vector,names:[x,y,yaw,v],units:[m,m,rad,km/h],low:[-99,-99,-9,0],high:[99,99,9,50]}"
    given = ("lerobot.action=observation.state", f"action_space={declared}")
    assert import_lerobot(root, tmp_path / "own", *given) == 0
    assert read_split(tmp_path / "own", "train").episodes[0].space.units == ("m", "m", "rad", "km/h")
    narrow = declared.replace("high:[99,99,9,50]", "high:[99,99,9,20]")
    assert import_lerobot(root, tmp_path / "narrow", given[0], f"action_space={narrow}") == 2
    with pytest.raises(DatasetError, match=r"expected a feature for lerobot\.action, got observation\.state, "):
        import_lerobot(root, tmp_path / "none")
    other = write_lerobot(tmp_path / "other")
    with pytest.raises(DatasetError, match="expected statistics that hold the range of observation"):
        import_lerobot(other, tmp_path / "none", given[0])
    (other / "meta" / "stats.json").write_text(json.dumps({"observation.state": {"min": [0, "a"]}}))
    with pytest.raises(DatasetError, match="expected min and max of each number, got none; declare one with action_sp"):
        import_lerobot(other, tmp_path / "none", given[0])
    with pytest.raises(ConfigError, match=r"lerobot\.video: expected the name of a feature, got 3"):
        import_lerobot(root, tmp_path / "none", "lerobot.video=3")
    assert not (tmp_path / "none").exists()


# The command


def test_the_command_and_its_configuration_agree(tmp_path):
    write_kitti(tmp_path / "kitti")
    overrides = [
        "kind=kitti",
        f"input={tmp_path / 'kitti'}",
        f"output={tmp_path / 'out'}",
        "held_out=[04]",
        "workers=0",
    ]
    run(read_settings("import", [*overrides, "image_size=[16,32]"]))
    assert read_split(tmp_path / "out", "held_out").episodes[0].id == "kitti_04_000"
    for name in ("state", "l2d"):
        config = compose("import", ["kind=lerobot", "input=a", "output=b", f"lerobot={name}"])
        LeRobotColumns.from_dict(dict(config.lerobot))
    assert checked(Names, ["07", 10], "drives") == ("07", "10")
    with pytest.raises(ConfigError, match=r"drives\[0\]: expected text, got 1\.5"):
        checked(Names, [1.5], "drives")
    with pytest.raises(ConfigError, match="kind: expected one of video_poses, video_actions, lerobot"):
        open_source("rosbag", tmp_path)
    with pytest.raises(DatasetError, match="expected a folder with recordings, got nothing"):
        open_source("kitti", tmp_path / "nowhere")


def test_a_damaged_picture_is_left_out_and_cuts_there(tmp_path, caplog):
    folder = tmp_path / "in" / "drive"
    folder.mkdir(parents=True)
    for index, frame in enumerate(numbered(60)):
        Image.fromarray(frame).save(folder / f"{index}.png")
    whole = (folder / "25.png").read_bytes()
    for index, content in {25: b"", 26: whole[:-40], 40: b"no picture"}.items():
        (folder / f"{index}.png").write_bytes(content)
    (tmp_path / "in" / "drive.csv").write_text("time_s,go\n" + "".join(f"{k / 10},1\n" for k in range(60)))
    source = VideoActionsSource(tmp_path / "in", Keys(names=["go"]), 10.0)
    settings_ = settings_for(source, tmp_path / "out").replace(min_frames=5)
    (losses,) = import_drives(settings_, workers=0).results
    assert losses.left_out == {"damaged pictures": 3}
    assert "25.png: left out (and 2 more): an empty file" in caplog.text
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- test: {losses}." in card
    assert "60 frames read, 57 kept (5.7 s) in 3 stretches, 1 gap cut out, the longest of 0.30 s" in card
    assert "3 left out: damaged pictures" in card
    assert "picture_fps=10, as declared" in str(losses)
    episodes = read_split(tmp_path / "out", "train").episodes
    assert [numbers_of(read_frames(each)) for each in episodes] == [
        [*range(25)],
        [*range(27, 40)],
        [*range(41, 60)],
    ]


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_rows_of_a_log_without_a_value_are_left_out(tmp_path, caplog, suffix):
    write_mp4(tmp_path / "in" / "a.mp4", numbered(60), 10.0)
    times, go = np.arange(60) / 10, np.arange(60.0)
    go[20:30] = np.nan
    times[41] = times[40]
    if suffix == ".npz":
        np.savez(tmp_path / "in" / "a.npz", time_s=times, go=go)
    else:
        cells = ["" if value != value else str(value) for value in go]
        lines = [f"{time},{cell}" for time, cell in zip(times, cells, strict=True)]
        (tmp_path / "in" / "a.csv").write_text("\n".join(["time_s,go", *lines, "6.0"]))
    source = VideoActionsSource(tmp_path / "in", Vector(names=["go"], units=[""], low=[0], high=[99]), None)
    import_drives(settings_for(source, tmp_path / "out"), workers=0)
    assert (
        f"a{suffix}: {11 if suffix == '.npz' else 12} of {60 if suffix == '.npz' else 61} rows left out" in caplog.text
    )
    first, second = read_split(tmp_path / "out", "train").episodes
    for episode, start in ((first, 0), (second, 30)):
        shown = numbers_of(read_frames(episode))
        assert shown[0] == start
        np.testing.assert_allclose(episode.actions[:-1, 0], shown[:-1], atol=1.0 if start else 1e-9)
    assert first.num_frames == 21
    with pytest.raises(ActionError, match=r"line 22|row 20"):
        load_actions(tmp_path / "in" / f"a{suffix}", source.space)


def test_poses_of_a_log_without_a_value_are_left_out(tmp_path, caplog):
    write_mp4(tmp_path / "in" / "a.mp4", numbered(45), 10.0)
    rows = [f"{k / 10},{0.6 * k},0,0" for k in range(45)]
    rows[9] = "0.9,nan,nan,nan"
    (tmp_path / "in" / "a.csv").write_text("\n".join(["# fps: 10", "time_s,x_m,y_m,heading_rad", *rows, "4.5,27"]))
    assert import_drives(settings_for(VideoPosesSource(tmp_path / "in"), tmp_path / "out"), workers=0).num_done == 1
    assert "a.csv: 2 of 46 rows left out, which lack a value or repeat a time, such as line 12" in caplog.text
    (episode,) = read_split(tmp_path / "out", "train").episodes
    assert episode.num_frames == 15
    np.testing.assert_allclose(episode.poses.x[:15], 0.6 * np.arange(15), atol=1e-6)


def actions_beside(path: Path, seconds: float, name: str = "t") -> None:
    """A log of 20 rows a second that tells its own time."""
    rows = [f"{k / 20:.2f},{k / 20:.2f}" for k in range(round(20 * seconds) + 1)]
    path.write_text("\n".join([f"time_s,{name}", *rows]))


TIME = Vector(names=["t"], units=["s"], low=[-1000], high=[1000])


def imported(
    folder: Path, output: Path, picture_fps: float | None = None, **facts
) -> list[tuple[list[int], np.ndarray]]:
    """What comes of a folder of actions: the numbers of the frames, and the times that the actions tell."""
    wanted = settings_for(VideoActionsSource(folder, TIME, picture_fps), output).replace(**facts)
    outcome = import_drives(wanted, workers=0)
    assert not outcome.failed, outcome.failed
    episodes = read_split(output, "train").episodes
    return [(numbers_of(read_frames(each)), each.actions[:, 0]) for each in episodes]


def test_pictures_that_are_missing_leave_their_time(tmp_path):
    folder = tmp_path / "in" / "drive"
    folder.mkdir(parents=True)
    for index, frame in enumerate(numbered(90)):
        if not 30 <= index < 50:
            Image.fromarray(frame).save(
                folder / f"frame_{5 * index:04d}.{'webp' if index % 3 else 'png'}", lossless=True
            )
    actions_beside(tmp_path / "in" / "drive.csv", 9)
    first, second = imported(tmp_path / "in", tmp_path / "out", 10.0)
    assert (first[0], second[0]) == (list(range(30)), list(range(50, 90)))
    for numbers, times in (first, second):
        np.testing.assert_allclose(times, np.array(numbers) / 10, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            [f"{i}.png" for i in range(5)] + ["3.jpg"],
            r"expected one picture of a name, got 3\.(jpg|png) and 3\.(jpg|png)",
        ),
        ([f"{side}_{i}.png" for side in ("left", "right") for i in range(4)], "those of two, left_... and right_..."),
    ],
)
def test_pictures_of_two_sequences_in_a_folder_are_refused(tmp_path, names, message):
    (tmp_path / "in" / "drive").mkdir(parents=True)
    for name in names:
        Image.fromarray(next(iter(numbered(1)))).save(tmp_path / "in" / "drive" / name)
    actions_beside(tmp_path / "in" / "drive.csv", 1)
    (reason,) = import_drives(
        settings_for(VideoActionsSource(tmp_path / "in", TIME, 10.0), tmp_path / "out"), workers=0
    ).failed
    assert re.search(message, reason)


def test_a_long_gap_of_a_transport_stream_stays(tmp_path):
    plain, source = tmp_path / "a.mp4", tmp_path / "in" / "a.ts"
    source.parent.mkdir()
    write_mp4(plain, numbered(60), 10.0)
    run = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", plain, "-bsf:v", "setts=ts='TS+if(gte(N,30),20/TB,0)'"]
    subprocess.run([*map(str, run), "-c", "copy", "-f", "mpegts", str(source)], check=True)
    actions_beside(tmp_path / "in" / "a.csv", 27)
    first, second = imported(tmp_path / "in", tmp_path / "out")
    assert (first[0], second[0]) == (list(range(30)), list(range(30, 60)))
    np.testing.assert_allclose(second[1], np.arange(30, 60) / 10 + 20, atol=0.01)


def test_joined_streams_whose_clock_restarts_are_refused(tmp_path):
    plain = tmp_path / "a.mp4"
    write_mp4(plain, numbered(30), 10.0)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(plain), "-c", "copy", "-f", "mpegts", "-"]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    (tmp_path / "joined.ts").write_bytes(data + data)
    with pytest.raises(VideoError, match=r"joined\.ts: expected "):
        probe_video(tmp_path / "joined.ts")


def test_a_video_whose_frames_grow_is_whole_in_each(tmp_path):
    import shutil

    folder = tmp_path / "in"
    folder.mkdir()
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    for name, size in {"small": "32x16", "big": "64x32"}.items():
        write_mp4(tmp_path / "plain.mp4", numbered(40), 10.0)
        scale = f"scale={size.replace('x', ':')}:flags=neighbor:out_color_matrix=bt601:out_range=pc"
        run = [
            ffmpeg,
            "-v",
            "error",
            "-y",
            "-i",
            str(tmp_path / "plain.mp4"),
            "-vf",
            scale,
            "-c:v",
            "mjpeg",
            "-q:v",
            "2",
        ]
        subprocess.run([*run, str(tmp_path / f"{name}_%03d.jpg")], check=True)
    (tmp_path / "all").mkdir()
    for index in range(40):
        size = "small" if index < 20 else "big"
        shutil.copy(tmp_path / f"{size}_{index + 1:03d}.jpg", tmp_path / "all" / f"{index:03d}.jpg")
    run = [ffmpeg, "-v", "error", "-framerate", "10", "-i", str(tmp_path / "all" / "%03d.jpg"), "-c", "copy"]
    subprocess.run([*run, str(folder / "a.mkv")], check=True)
    actions_beside(folder / "a.csv", 4)
    ((numbers, _),) = imported(folder, tmp_path / "out")
    assert numbers == list(range(40))


def test_the_first_row_of_poses_tells_the_videos_begin(tmp_path):
    write_mp4(tmp_path / "in" / "a.mp4", numbered(60), 10.0)
    rows = [f"{k / 10}," + ("nan,nan,nan" if k < 10 else f"{0.6 * k},0,0") for k in range(60)]
    (tmp_path / "in" / "a.csv").write_text("\n".join(["# fps: 10", "time_s,x_m,y_m,heading_rad", *rows]))
    import_drives(settings_for(VideoPosesSource(tmp_path / "in"), tmp_path / "out"), workers=0)
    (episode,) = read_split(tmp_path / "out", "train").episodes
    assert numbers_of(read_frames(episode)) == list(range(10, 30))
    np.testing.assert_allclose(episode.poses.x[:20], 0.6 * np.arange(10, 30), atol=1e-6)


def test_names_that_no_file_of_a_dataset_can_have_become_plain(tmp_path):
    write_mp4(tmp_path / "in" / "fahrt am Müggelsee.mp4", numbered(20), 10.0)
    actions_beside(tmp_path / "in" / "fahrt am Müggelsee.csv", 2)
    assert VideoActionsSource(tmp_path / "in", TIME, None).list_drives() == ("fahrt_am_Muggelsee",)
    ((numbers, _),) = imported(tmp_path / "in", tmp_path / "out")
    assert numbers == list(range(20))


def test_a_log_in_milliseconds_is_doubted(tmp_path, caplog):
    write_mp4(tmp_path / "in" / "a.mp4", numbered(50), 10.0)
    (tmp_path / "in" / "a.csv").write_text("time_s,t\n" + "".join(f"{100 * k},{k / 10}\n" for k in range(50)))
    imported(tmp_path / "in", tmp_path / "out")
    assert "a.csv: 4900 s of actions beside 4.9 s of frames: are the times in seconds?" in caplog.text


def test_what_short_stretches_cost_is_counted_in_frames_of_the_source(tmp_path):
    times = np.arange(150) / 30
    wanted = (times < 1.0) | (times > 2.0)
    path = tmp_path / "in" / "drive"
    path.mkdir(parents=True)
    for index, frame in enumerate(numbered(150)):
        if wanted[index]:
            Image.fromarray(frame).save(path / f"{index:04d}.png")
    actions_beside(tmp_path / "in" / "drive.csv", 5)
    settings_ = settings_for(VideoActionsSource(tmp_path / "in", TIME, 30.0), tmp_path / "out")
    (losses,) = import_drives(settings_, workers=0).results
    assert losses.left_out == {"in 1 stretch of fewer than 16 frames": 28}
