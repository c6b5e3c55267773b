import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from terra.errors import ConfigError, OutputError, TrajectoryError
from terra.trajectory import WAYPOINT_TIMES, Trajectory, load_trajectory, save_poses
from terra.trajectory.model import TIME_TOLERANCE

TIMES = np.arange(60) * 0.05
speeds = st.floats(0.0, 40.0)
angles = st.floats(-10.0, 10.0)


def arc(speed, curvature, duration=5.0, rate=100.0, start=(0.0, 0.0), heading=0.0):
    times = np.arange(round(duration * rate) + 1) / rate
    distance = speed * times
    headings = heading + curvature * distance
    # sinc form: exact for a straight line too
    half = curvature * distance / 2
    chord = distance * np.sinc(half / np.pi)
    positions = np.stack([chord * np.cos(heading + half), chord * np.sin(heading + half)], axis=1) + start
    return times, positions, headings


def drive(num_poses=50, rate=10.0):
    return arc(8.0, 0.02, duration=(num_poses - 1) / rate, rate=rate)


def pose_document(**changes):
    times, positions, headings = drive()
    document = {
        "format": "terra-trajectory",
        "frame": "world",
        "axes": "x_y_heading_ccw",
        "units": {"position": "m", "angle": "rad", "time": "s"},
        "fps": 10,
        "poses": np.column_stack([times, positions, headings]).tolist(),
    }
    return without_none({**document, **changes})


def path_document(**changes):
    paths = Trajectory.from_poses(*drive(), fps=10.0).paths.tolist()
    document = {
        "format": "terra-trajectory",
        "frame": "ego",
        "axes": "x_forward_y_left",
        "units": {"position": "m", "time": "s"},
        "fps": 10,
        "times": TIMES.tolist(),
        "paths": paths,
    }
    return without_none({**document, **changes})


def without_none(document):
    return {key: value for key, value in document.items() if value is not None}


def write_json(folder: Path, document) -> Path:
    path = folder / "drive.json"
    path.write_text(json.dumps(document))
    return path


def write_csv(folder: Path, header="time_s,x_m,y_m,heading_rad", rows=None, comment="# fps: 10") -> Path:
    path = folder / "drive.csv"
    rows = np.column_stack(drive()).tolist() if rows is None else rows
    lines = [comment, header, *(",".join(map(repr, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_npz(folder: Path, document) -> Path:
    path = folder / "drive.npz"
    units = {f"units_{kind}": unit for kind, unit in document["units"].items()}
    np.savez(path, **{key: value for key, value in document.items() if key != "units"}, **units)
    return path


def write_jsonl(folder: Path, records) -> Path:
    path = folder / "act_bench.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def act_bench_record(sample_id, num_frames=5, seed=0):
    rng = np.random.default_rng(seed)
    steps = rng.uniform(0.0, 1.0, (num_frames, 59, 3)).round(4)
    points = np.concatenate([np.zeros((num_frames, 1, 3)), steps.cumsum(axis=1)], axis=1)
    return {"sample_id": sample_id, "label": "straight", "instruction_trajs": points.tolist()}


def refused(call) -> str:
    with pytest.raises(TrajectoryError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


class TestFromPoses:
    @given(speed=speeds, fps=st.floats(1.0, 30.0))
    def test_straight_line(self, speed, fps):
        trajectory = Trajectory.from_poses(*arc(speed, 0.0), fps=fps)
        actions = trajectory.actions(trajectory.num_frames, WAYPOINT_TIMES)
        times = np.array(WAYPOINT_TIMES)
        expected = np.stack([0 * times, speed * times, times], axis=1)
        # A frame's time within TIME_TOLERANCE of a pose takes the pose, so that it may be that many seconds off.
        off = TIME_TOLERANCE * speed
        np.testing.assert_allclose(actions, np.broadcast_to(expected, actions.shape), atol=1e-5 + off)

    @given(speed=st.floats(1.0, 20.0), radius=st.floats(15.0, 300.0), turn=st.sampled_from([-1, 1]))
    def test_circle(self, speed, radius, turn):
        trajectory = Trajectory.from_poses(*arc(speed, turn / radius), fps=10.0)
        actions = trajectory.actions(trajectory.num_frames, WAYPOINT_TIMES)
        times = np.array(WAYPOINT_TIMES)
        turned = speed * times / radius
        expected = np.stack([turn * radius * (1 - np.cos(turned)), radius * np.sin(turned), times], axis=1)
        # a chord of 1 / 100 s lies at most (v dt)^2 / 8 R < 0.4 mm inside its arc
        np.testing.assert_allclose(actions, np.broadcast_to(expected, actions.shape), atol=1e-3)

    def test_left_turn_has_positive_y_and_right_turn_negative(self):
        left = Trajectory.from_poses(*arc(10.0, 0.05), fps=10.0).actions(5, WAYPOINT_TIMES)
        right = Trajectory.from_poses(*arc(10.0, -0.05), fps=10.0).actions(5, WAYPOINT_TIMES)
        assert (left[..., 0] > 0).all()
        assert (right[..., 0] < 0).all()
        assert (left[..., 1] > 0).all()

    @given(dx=st.floats(-1e4, 1e4), dy=st.floats(-1e4, 1e4), angle=angles, dt=st.floats(-1e6, 1e6))
    def test_place_direction_and_clock_of_the_world_do_not_matter(self, dx, dy, angle, dt):
        times, positions, headings = arc(9.0, 0.03, rate=20.0)
        rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        moved = positions @ rotation.T + [dx, dy]
        wrapped = np.mod(headings + angle, math.tau)
        original = Trajectory.from_poses(times, positions, headings, fps=10.0)
        other = Trajectory.from_poses(times + dt, moved, wrapped, fps=10.0)
        np.testing.assert_allclose(other.paths, original.paths, atol=1e-6)

    @pytest.mark.parametrize("turning", [0.5, -0.5])  # rad/s, across +pi and across -pi
    @pytest.mark.parametrize("shift", [0.0, 0.03])
    def test_a_heading_that_wraps_between_two_poses_off_the_frame_grid(self, turning, shift):
        # Poses are 0.3 s apart and frames 0.1 s: most frames' headings are interpolated, some of them across the jump.
        speed, rate = 8.0, 1 / 0.3
        start = math.copysign(math.pi - 0.7 + shift, turning)
        times, positions, headings = arc(speed, turning / speed, duration=9.0, rate=rate, heading=start)
        wrapped = np.arctan2(np.sin(headings), np.cos(headings))
        assert (np.abs(np.diff(wrapped)) > 6).sum() == 1
        expected = Trajectory.from_poses(times, positions, headings, fps=10.0)
        found = Trajectory.from_poses(times, positions, wrapped, fps=10.0)
        np.testing.assert_allclose(found.actions(50, WAYPOINT_TIMES), expected.actions(50, WAYPOINT_TIMES), atol=1e-5)
        # A car on a circle of 16 m is 15.2 m ahead after 2 s, whatever its heading is: a chord of 0.3 s is 5 cm off.
        ahead = found.paths[:, 40, 0]
        np.testing.assert_allclose(ahead, speed / 0.5 * math.sin(2.0 * 0.5), atol=0.1)

    @given(duration=st.floats(2.95, 8.0), fps=st.sampled_from([1.0, 3.0, 10.0, 12.5, 30.0]))
    def test_takes_every_frame_whose_whole_path_is_covered(self, duration, fps):
        times = np.linspace(0.0, duration, 200)
        positions = np.stack([5.0 * times, 0 * times], axis=1)
        trajectory = Trajectory.from_poses(times, positions, 0 * times, fps=fps)
        last_start = (trajectory.num_frames - 1) / fps
        assert last_start + 2.95 <= duration + 1e-4
        assert last_start + 1 / fps + 2.95 > duration - 1e-4

    def test_uneven_pose_times_give_the_same_straight_drive(self):
        rng = np.random.default_rng(0)
        times = np.concatenate([[0.0], np.sort(rng.uniform(0.0, 5.0, 80)), [5.0]])
        positions = np.stack([0 * times, 7.0 * times], axis=1)
        headings = np.full_like(times, math.pi / 2)
        trajectory = Trajectory.from_poses(times, positions, headings, fps=10.0)
        np.testing.assert_allclose(trajectory.paths[..., 0], np.broadcast_to(7.0 * TIMES, (21, 60)), atol=1e-9)
        np.testing.assert_allclose(trajectory.paths[..., 1], 0.0, atol=1e-9)

    def test_other_horizon_and_step(self):
        trajectory = Trajectory.from_poses(*arc(5.0, 0.0), fps=10.0, horizon=1.0, step=0.25)
        assert trajectory.times.tolist() == [0.0, 0.25, 0.5, 0.75]
        with pytest.raises(ConfigError, match="step"):
            Trajectory.from_poses(*drive(), fps=10.0, horizon=1.0, step=1.0)

    def test_reversing_is_a_path_behind(self):
        times, positions, headings = arc(2.0, 0.0)
        assert (Trajectory.from_poses(times, -positions, headings, fps=10.0).paths[:, 1:, 0] < 0).all()

    def test_a_path_at_the_times_of_the_poses_is_those_poses_bit_by_bit(self):
        ahead = np.concatenate([[0.0], np.cumsum(np.random.default_rng(0).uniform(0.2, 0.8, 199))])
        positions = np.stack([ahead, np.zeros(200)], axis=1)
        trajectory = Trajectory.from_poses(np.arange(200) * 0.05, positions, np.zeros(200), fps=10.0)
        assert trajectory.num_frames == 71
        for frame, path in enumerate(trajectory.paths):  # times k * 0.05 and n / 10 + k * 0.05 are not always equal
            np.testing.assert_array_equal(path[:, 0], ahead[2 * frame :][:60] - ahead[2 * frame])

    def test_a_car_that_turns_by_80_degrees_from_pose_to_pose_moves_along_its_heading(self):
        Trajectory.from_poses(*arc(3 * math.radians(80), 1 / 3, duration=8.0, rate=1.0), fps=10.0)


class TestResample:
    @given(
        speed=st.floats(0.5, 20.0),
        curvature=st.floats(-0.05, 0.05),
        duration=st.floats(3.0, 7.0),
        factor=st.sampled_from([2, 3, 5]),
    )
    def test_fast_then_resampled_equals_slow(self, speed, curvature, duration, factor):
        poses = arc(speed, curvature, duration=duration, rate=50.0)
        slow = Trajectory.from_poses(*poses, fps=10.0)
        resampled = Trajectory.from_poses(*poses, fps=10.0 * factor).resample(10.0)
        assert resampled.fps == slow.fps
        assert resampled.num_frames == slow.num_frames
        np.testing.assert_allclose(resampled.paths, slow.paths, atol=1e-9)

    def test_same_rate_is_the_same_object(self):
        trajectory = Trajectory.from_poses(*drive(), fps=10.0)
        assert trajectory.resample(10.0) is trajectory

    def test_frames_between_two_others_lie_close_to_the_real_ones(self):
        poses = arc(10.0, 0.03, rate=200.0)
        up = Trajectory.from_poses(*poses, fps=5.0).resample(20.0)
        real = Trajectory.from_poses(*poses, fps=20.0)
        np.testing.assert_allclose(up.paths, real.paths[: up.num_frames], atol=0.02)

    def test_one_frame_stays_one_frame(self):
        one = Trajectory(np.zeros((1, 2, 2)), np.array([0.0, 1.0]), 10.0, "one")
        assert one.resample(30.0).num_frames == 1

    @pytest.mark.parametrize("fps", [0.0, -1.0, math.nan, math.inf, 101.0])
    def test_bad_rate(self, fps):
        trajectory = Trajectory.from_poses(*drive(), fps=10.0)
        assert "0.01 to 100" in refused(lambda: trajectory.resample(fps))


class TestActions:
    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=25)
    def test_equals_the_published_prepare_action(self, seed, tmp_path_factory):
        record = act_bench_record(1, num_frames=4, seed=seed)
        path = write_jsonl(tmp_path_factory.mktemp("act"), [record])
        actions = load_trajectory(path).actions(4, WAYPOINT_TIMES)
        points = np.array(record["instruction_trajs"])[:, 9::10][:, :6]
        times = np.arange(0, 3, 0.05)[9::10]
        expected = np.dstack([points[..., 1], points[..., 0], np.broadcast_to(times, (4, 6))])
        assert actions.dtype == np.float32
        np.testing.assert_array_equal(actions, expected.astype(np.float32))

    def test_other_waypoint_times_are_interpolated(self):
        trajectory = Trajectory.from_poses(*arc(10.0, 0.0), fps=10.0)
        np.testing.assert_allclose(
            trajectory.actions(2, [0.01, 1.234]), [[[0, 0.1, 0.01], [0, 12.34, 1.234]]] * 2, atol=1e-5
        )

    def test_waypoint_beyond_the_paths(self):
        trajectory = Trajectory.from_poses(*drive(), fps=10.0, source="drive.csv")
        message = refused(lambda: trajectory.actions(2, [1.0, 3.5]))
        assert "drive.csv" in message
        assert "3.5 s" in message
        assert "2.95 s" in message

    def test_waypoint_before_the_paths(self):
        late = Trajectory(np.zeros((1, 2, 2)), np.array([0.5, 3.0]), 10.0, "late")
        assert "0.45 s" in refused(lambda: late.actions(1, WAYPOINT_TIMES))

    @pytest.mark.parametrize("times", [[], [1.0, 1.0], [2.0, 1.0], [math.nan]])
    def test_bad_waypoint_times(self, times):
        with pytest.raises(ConfigError, match="waypoint"):
            Trajectory.from_poses(*drive(), fps=10.0).actions(1, times)

    def test_num_frames(self):
        trajectory = Trajectory.from_poses(*drive(42), fps=10.0, source="drive.csv")
        assert trajectory.num_frames == 12
        assert trajectory.actions(0, WAYPOINT_TIMES).shape == (0, 6, 3)
        assert trajectory.actions(12, WAYPOINT_TIMES).shape == (12, 6, 3)
        assert "12 frames" in refused(lambda: trajectory.actions(13, WAYPOINT_TIMES))
        with pytest.raises(ConfigError, match="num_frames"):
            trajectory.actions(-1, WAYPOINT_TIMES)

    def test_a_path_that_starts_late_may_be_as_far_ahead_as_a_car_gets(self):
        times, steps = np.array([0.5, 1.0]), np.array([0.0, 40.0])

        def path(start: float) -> Trajectory:
            return Trajectory(np.stack([start + steps, 0 * steps], axis=1)[None], times, 10.0, "late")

        assert path(44.0).actions(1, [1.0]).tolist() == [[[0.0, 84.0, 1.0]]]  # 5 m, and 0.5 s of 80 m/s
        assert "paths[0][0]: expected a path that starts at its own frame's ego" in refused(lambda: path(46.0))

    def test_require(self):
        trajectory = Trajectory.from_poses(*drive(42), fps=10.0, source="drive.csv")
        trajectory.require(13)  # the last frame needs no action
        message = refused(lambda: trajectory.require(25))
        assert message == (
            "drive.csv: covers 4.05 s = 12 frames at 10 fps and 2.95 s of path after the last of them; "
            "num_frames=25 needs 24 frames, 5.25 s"
        )
        with pytest.raises(ConfigError, match="num_frames"):
            trajectory.require(0)


class TestTrajectory:
    def test_arrays_are_copied_and_read_only(self):
        paths = np.zeros((2, 60, 2))
        trajectory = Trajectory(paths, TIMES, 10.0, "mine")
        paths[0, 0, 0] = 1.0
        assert trajectory.paths[0, 0, 0] == 0.0
        with pytest.raises(ValueError, match="read-only"):
            trajectory.paths[0, 0, 0] = 1.0

    @pytest.mark.parametrize(
        ("paths", "times", "fps", "expected"),
        [
            (np.zeros((2, 60, 3)), TIMES, 10.0, "(frames, 60, 2)"),
            (np.zeros((60, 2)), TIMES, 10.0, "(frames, 60, 2)"),
            (np.zeros((0, 60, 2)), TIMES, 10.0, "(frames, 60, 2)"),
            (np.zeros((2, 59, 2)), TIMES, 10.0, "(frames, 60, 2)"),
            (np.zeros((2, 1, 2)), TIMES[:1], 10.0, "2 or more times"),
            ([[[0.0], [0.0, 1.0]]], TIMES, 10.0, "arrays of numbers"),
            (np.zeros((2, 60, 2)), TIMES[::-1], 10.0, "times[1]"),
            (np.zeros((2, 60, 2)), TIMES - 1.0, 10.0, "times[0]"),
            (np.full((2, 60, 2), np.nan), TIMES, 10.0, "paths[0][0][0]: expected a finite number, got nan"),
            (np.zeros((2, 60, 2)), TIMES, 0.0, "0.01 to 100"),
            (np.zeros((2, 60, 2)), TIMES, 1000.0, "0.01 to 100"),
            (np.full((2, 60, 2), 300.0), TIMES, 10.0, "world coordinates"),
            (np.stack([TIMES * 900.0, 0 * TIMES], axis=1)[None], TIMES, 10.0, "900 m/s"),
            (np.stack([TIMES * 5e307, -TIMES * 5e307], axis=1)[None], TIMES, 10.0, "m/s"),
        ],
    )
    def test_refuses(self, paths, times, fps, expected):
        message = refused(lambda: Trajectory(paths, times, fps, "mine.json"))
        assert message.startswith("mine.json")
        assert expected in message


class TestFormats:
    def test_all_formats_of_one_drive_agree(self, tmp_path):
        expected = Trajectory.from_poses(*drive(), fps=10.0)
        times, positions, headings = drive()
        in_ms_and_degrees = np.column_stack([headings * 180 / np.pi, times * 1000, positions]).tolist()
        save_poses(tmp_path / "saved.json", times, positions, headings, 10.0)
        (tmp_path / "units").mkdir()
        other_units = {"position": "m", "angle": "deg", "time": "ms"}
        poses = np.column_stack([times * 1000, positions, headings * 180 / np.pi]).tolist()
        for path in (
            tmp_path / "saved.json",
            write_json(tmp_path, pose_document()),
            write_csv(tmp_path),
            write_npz(tmp_path, pose_document()),
        ):
            trajectory = load_trajectory(path)
            np.testing.assert_array_equal(trajectory.paths, expected.paths)
            np.testing.assert_array_equal(trajectory.times, TIMES)
            assert trajectory.fps == 10.0
            assert trajectory.source == str(path)
        for path in (
            write_json(tmp_path / "units", pose_document(poses=poses, units=other_units)),
            write_csv(tmp_path / "units", header="heading_deg,time_ms,x_m,y_m", rows=in_ms_and_degrees),
            write_json(tmp_path, path_document()),
            write_json(tmp_path, path_document(times=(TIMES * 1000).tolist(), units={"position": "m", "time": "ms"})),
            write_npz(tmp_path, path_document()),
        ):
            trajectory = load_trajectory(str(path))
            np.testing.assert_allclose(trajectory.paths, expected.paths, atol=1e-9)
            np.testing.assert_allclose(trajectory.times, TIMES, atol=1e-12)

    @given(fps=st.floats(0.5, 100.0), speed=speeds, curvature=st.floats(-0.02, 0.02), heading=angles)
    @settings(max_examples=20)
    def test_saved_poses_come_back_bit_by_bit(self, fps, speed, curvature, heading, tmp_path_factory):
        poses = arc(speed, curvature, duration=4.0, rate=20.0, start=(3e5, -7e5), heading=heading)
        path = tmp_path_factory.mktemp("save") / "poses.json"
        save_poses(path, *poses, fps)
        expected = Trajectory.from_poses(*poses, fps=fps)
        np.testing.assert_array_equal(load_trajectory(path).paths, expected.paths)

    def test_csv_of_a_spreadsheet(self, tmp_path):
        rows = "\r\n".join(",".join(map(repr, row)) for row in np.column_stack(drive()).tolist())
        text = f'\ufeff# a drive\r\n"time_s", "x_m", "y_m", "heading_rad"\r\n\r\n{rows}\r\n#fps:10\r\n'
        (tmp_path / "drive.CSV").write_bytes(text.encode())
        expected = Trajectory.from_poses(*drive(), fps=10.0)
        np.testing.assert_array_equal(load_trajectory(tmp_path / "drive.CSV").paths, expected.paths)

    def test_act_bench_sample_is_chosen(self, tmp_path):
        path = write_jsonl(
            tmp_path, [act_bench_record(7, seed=1), act_bench_record(3, seed=2), act_bench_record("a/b")]
        )
        by_number, by_text = load_trajectory(path, sample_id=3), load_trajectory(path, sample_id="3")
        np.testing.assert_array_equal(by_number.paths, by_text.paths)
        expected = np.array(act_bench_record(3, seed=2)["instruction_trajs"])[..., :2]
        np.testing.assert_array_equal(by_number.paths, expected)
        assert by_number.fps == 10.0
        assert by_number.times[-1] == pytest.approx(2.95)
        assert by_number.source == f"{path}: line 2"
        assert load_trajectory(path, sample_id="a/b").num_frames == 5

    def test_act_bench_file_that_changed_is_read_again(self, tmp_path):
        path = write_jsonl(tmp_path, [act_bench_record(1)])
        load_trajectory(path)
        write_jsonl(tmp_path, [act_bench_record(20), act_bench_record(30, num_frames=2)])
        assert load_trajectory(path, sample_id=30).num_frames == 2


def bad_poses(row, column, value):
    poses = np.column_stack(drive()).tolist()
    poses[row][column] = value
    return poses


class TestErrors:
    @pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.npz"])
    def test_missing_empty_folder_and_binary_files(self, tmp_path, name):
        path = tmp_path / name
        assert "no such file" in refused(lambda: load_trajectory(path))
        path.touch()
        assert str(path) in refused(lambda: load_trajectory(path))
        path.write_bytes(b"\n\n")
        assert str(path) in refused(lambda: load_trajectory(path))
        path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
        assert str(path) in refused(lambda: load_trajectory(path))
        path.unlink()
        path.mkdir()
        assert str(path) in refused(lambda: load_trajectory(path))

    def test_suffix_and_sample_id(self, tmp_path):
        assert ".json, .jsonl, .csv or .npz, got '.txt'" in refused(lambda: load_trajectory(tmp_path / "a.txt"))
        path = write_json(tmp_path, pose_document())
        assert "sample_id = 3" in refused(lambda: load_trajectory(path, sample_id=3))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('{"format": "terra-trajectory",\n "fps": ten}', "line 2, column 9: expected JSON"),
            ("[1, 2]", "expected a JSON object"),
            ('{"fps": 1, "fps": 2}', "'fps' twice"),
            ("[" * 100_000, "JSON"),
            ('{"fps": ' + "1" * 5000 + "}", "JSON"),
        ],
    )
    def test_json_syntax(self, tmp_path, text, expected):
        path = tmp_path / "drive.json"
        path.write_text(text)
        assert expected in refused(lambda: load_trajectory(path))

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"format": None}, "format: expected 'terra-trajectory', got nothing"),
            ({"format": "other"}, "got 'other'"),
            ({"frame": None}, "frame: expected 'world' or 'ego', got nothing (it must be declared)"),
            ({"frame": "camera"}, "got 'camera'"),
            ({"axes": None}, "the key 'axes'"),
            ({"axes": "x_forward_y_left"}, "axes: expected 'x_y_heading_ccw', got 'x_forward_y_left'"),
            ({"units": None}, "the key 'units'"),
            ({"units": "m"}, "units: expected position, angle, time, got 'm'"),
            ({"units": {"position": "m", "time": "s"}}, "units.angle: expected 'rad' or 'deg', got nothing"),
            ({"units": {"position": "cm", "angle": "rad", "time": "s"}}, "units.position: expected 'm', got 'cm'"),
            ({"units": {"position": "m", "angle": "rad", "time": "s", "speed": "mph"}}, "units: expected position"),
            ({"fps": None}, "the key 'fps'"),
            ({"fps": "10"}, "0.01 to 100, got '10'"),
            ({"fps": True}, "0.01 to 100, got True"),
            ({"fps": 0}, "0.01 to 100, got 0"),
            ({"fps": 10**400}, "a number of 401 digits"),
            ({"fps": math.nan}, "0.01 to 100, got nan"),
            ({"poses": None}, "the key 'poses'"),
            ({"poses": []}, "poses: expected a list that is not empty"),
            ({"poses": {}}, "poses: expected a list that is not empty, got {}"),
            ({"poses": [[0.0, 1.0, 2.0]]}, "poses[0]: expected a list of 4, got a list of 3"),
            ({"poses": bad_poses(7, 2, "1")}, "poses[7][2]: expected a number, got '1'"),
            ({"poses": bad_poses(7, 2, None)}, "poses[7][2]: expected a number, got None"),
            ({"poses": bad_poses(7, 2, True)}, "poses[7][2]: expected a number, got True"),
            ({"poses": bad_poses(7, 2, 10**400)}, "a number of 401 digits"),
            ({"poses": bad_poses(7, 2, math.nan)}, "poses[7][2]: expected a finite number, got nan"),
            ({"poses": bad_poses(7, 1, -math.inf)}, "poses[7][1]: expected a finite number, got -inf"),
            ({"poses": bad_poses(7, 0, 0.6)}, "poses[7]: expected a time after 0.6 s, got 0.6 s (repeated)"),
            ({"poses": bad_poses(7, 0, 0.5)}, "poses[7]: expected a time after 0.6 s, got 0.5 s (going backwards)"),
            ({"poses": bad_poses(7, 3, 2.0)}, "poses[7]: heading: expected a turn of at most 90 degrees"),
            ({"poses": bad_poses(7, 1, 100.0)}, "m/s (are positions in centimeters"),
            ({"poses": bad_poses(7, 1, 1e308)}, "poses[7]: expected at most 80 m/s"),
            ({"poses": np.column_stack(drive())[:1].tolist()}, "2 or more poses, got 1"),
            ({"poses": np.column_stack(drive())[:20].tolist()}, "covers 1.9 s, expected at least the 2.95 s"),
            ({"paths": []}, "got the key 'paths'"),
            ({"Poses": []}, "got the key 'Poses'"),
        ],
    )
    def test_pose_documents(self, tmp_path, changes, expected):
        path = write_json(tmp_path, pose_document(**changes))
        message = refused(lambda: load_trajectory(path))
        assert message.startswith(str(path))
        assert expected in message

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"axes": "x_y_heading_ccw"}, "axes: expected 'x_forward_y_left'"),
            ({"units": {"position": "m", "time": "s", "angle": "rad"}}, "units: expected position, time"),
            ({"times": None}, "the key 'times'"),
            ({"times": TIMES[:30].tolist()}, "paths[0]: expected a list of 30, got a list of 60"),
            ({"times": [0.0, *TIMES[:-1].tolist()]}, "times[1]: expected a time after 0.0 s, got 0.0 s (repeated)"),
            ({"times": (TIMES / 1000).tolist()}, "times in another unit?"),
            ({"paths": [[[0.0, 0.0, 0.0]] * 60]}, "paths[0][0]: expected a list of 2, got a list of 3"),
            ({"paths": [[[0.0, math.nan]] * 60]}, "paths[0][0][1]: expected a finite number"),
            ({"paths": [[[500.0, 900.0]] * 60]}, "paths[0][0]: expected a path that starts at its own frame's ego"),
        ],
    )
    def test_path_documents(self, tmp_path, changes, expected):
        path = write_json(tmp_path, path_document(**changes))
        message = refused(lambda: load_trajectory(path))
        assert message.startswith(str(path))
        assert expected in message

    @pytest.mark.parametrize(
        ("header", "expected"),
        [
            ("time_s,x,y_m,heading_rad", "column 'x': expected a unit in the name, got none (rename it to x_m)"),
            ("time,x_m,y_m,heading_rad", "(rename it to time_s or time_ms)"),
            ("time_s,x_m,y_m,heading", "(rename it to heading_rad or heading_deg)"),
            ("time_s,x_cm,y_m,heading_rad", "column 'x_cm': expected x_m, got the unit 'cm'"),
            ("time_s,x_m,y_m,yaw_rad", "heading_rad or heading_deg, got 'yaw_rad'"),
            ("time_s;x_m;y_m;heading_rad", "got the unit 's;x_m;y_m;heading_rad'"),
            ("time_s,x_m,y_m", "expected a column heading_rad or heading_deg"),
            ("time_s,time_ms,x_m,y_m,heading_rad", "time once, got it twice"),
            ("time_s,x_m,y_m,z_m,heading_rad", "got 'z_m'"),
            ("0.0,1.0,2.0,0.0", "got '0.0'"),
        ],
    )
    def test_csv_headers(self, tmp_path, header, expected):
        message = refused(lambda: load_trajectory(write_csv(tmp_path, header=header)))
        assert "drive.csv: line 2" in message
        assert expected in message

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ("0.3,1.0,2.0", "line 6: expected 4 columns (time_s, x_m, y_m, heading_rad), got 3"),
            ("0.3,1.0,two,0.0", "line 6: column 'y_m': expected a number, got 'two'"),
            ("0.3,1.0,,0.0", "line 6: column 'y_m': expected a number, got ''"),
            ("0.3,nan,0.0,0.0", "line 6: column 'x_m': expected a finite number, got nan"),
            ("0.3,0.0,0.0,-inf", "line 6: column 'heading_rad': expected a finite number, got -inf"),
            ("0.2,0.0,0.0,0.0", "line 6: expected a time after 0.2 s, got 0.2 s (repeated)"),
            ("0.1,0.0,0.0,0.0", "line 6: expected a time after 0.2 s, got 0.1 s (going backwards)"),
            ("0.3,50.0,0.0,0.0", "line 6: expected at most 80 m/s from the point before, got 500 m/s"),
            ("0.3,0.0,0.0,2.0", "line 6: heading: expected a turn of at most 90 degrees"),
            ("3.25,0.0,0.0,0.0", "line 6: expected at most 3 s after the pose before, got 3.05 s"),
        ],
    )
    def test_csv_rows_are_named_by_line(self, tmp_path, row, expected):
        path = tmp_path / "drive.csv"
        path.write_text(f"# fps: 10\ntime_s,x_m,y_m,heading_rad\n0.1,0,0,0\n\n0.2,0,0,0\n{row}\n3.3,0,0,0\n")
        assert f"{path}: {expected}" in refused(lambda: load_trajectory(path))

    @pytest.mark.parametrize(
        ("comment", "expected"),
        [
            ("# no rate", "frame rate in a comment such as '# fps: 10', got none"),
            ("# fps: 10 Hz", "fps: expected a number, got '10 Hz'"),
            ("# fps: 0", "fps: expected a number from 0.01 to 100, got 0.0"),
            ("# fps: nan", "0.01 to 100, got nan"),
            ("# fps: 10\n# fps: 20", "got a second one"),
        ],
    )
    def test_csv_frame_rate(self, tmp_path, comment, expected):
        assert expected in refused(lambda: load_trajectory(write_csv(tmp_path, comment=comment)))

    def test_csv_without_rows(self, tmp_path):
        assert "got 0 rows" in refused(lambda: load_trajectory(write_csv(tmp_path, rows=[])))

    def test_wrong_units_are_noticed(self):
        times, positions, headings = arc(8.0, 0.02, rate=10.0)
        degrees = np.degrees(arc(8.0, 0.25, rate=10.0)[2])
        cases = [
            ("centimeters", (times, positions * 100, headings)),
            ("milliseconds", (times * 1e4, positions, headings)),
            ("degrees", (times, positions, degrees)),
            ("degrees", (times, positions, np.degrees(headings))),
            ("degrees declared as radians", (times, positions, np.degrees(headings) * 10)),
            ("swapped", (times, positions[:, ::-1], headings)),
            ("from north", (times, positions, math.pi / 2 - headings)),
        ]
        for hint, poses in cases:
            assert hint in refused(lambda poses=poses: Trajectory.from_poses(*poses, fps=10.0))

    def test_position_noise_of_a_parked_car_is_no_error(self):
        rng = np.random.default_rng(0)
        times = np.arange(600) / 10
        Trajectory.from_poses(times, rng.normal(scale=0.05, size=(600, 2)), 0 * times, fps=10.0)

    def test_pose_arrays_that_do_not_belong_together(self):
        times, positions, headings = drive()
        assert "got shapes (50,), (50, 2), (49,)" in refused(
            lambda: Trajectory.from_poses(times, positions, headings[1:], fps=10.0)
        )

    def test_npz(self, tmp_path):
        objects = tmp_path / "drive.npz"
        np.savez(objects, poses=np.array([{"a": 1}], dtype=object))
        assert "plain arrays" in refused(lambda: load_trajectory(objects))
        behind = write_npz(tmp_path, pose_document())
        archive = behind.read_bytes()
        with behind.open("r+b") as file:  # an archive at the end of a file of 1 TB, which takes no room on the disk
            file.truncate(1 << 40)
            file.seek((1 << 40) - len(archive))
            file.write(archive)
        assert "a file of 1099511627776 bytes, above the" in refused(lambda: load_trajectory(behind))
        undeclared = write_npz(tmp_path, pose_document(axes=None))
        assert "the key 'axes'" in refused(lambda: load_trajectory(undeclared))
        shaped = write_npz(tmp_path, pose_document(poses=np.zeros((5, 3))))
        assert "poses: expected numbers of shape nx4, got float64 of shape 5x3" in refused(
            lambda: load_trajectory(shaped)
        )
        words = write_npz(tmp_path, pose_document(poses=np.full((5, 4), "1")))
        assert "poses: expected numbers" in refused(lambda: load_trajectory(words))
        nan = write_npz(tmp_path, pose_document(poses=bad_poses(4, 1, math.nan)))
        assert "poses[4][1]" in refused(lambda: load_trajectory(nan))

    @given(data=st.data())
    @settings(max_examples=60)
    def test_damaged_npz_never_gives_another_error(self, data, tmp_path_factory):
        path = write_npz(tmp_path_factory.mktemp("npz"), pose_document())
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            load_trajectory(path)
        except TrajectoryError as error:
            assert "\n" not in str(error)  # noqa: PT017 - damage that hits no content may load

    @pytest.mark.parametrize(
        ("lines", "sample_id", "expected"),
        [
            ([act_bench_record(i) for i in range(7)], None, "for 7 samples (ids 0, 1, 2, 3, 4, ...)"),
            ([act_bench_record(1), act_bench_record(2)], 3, "one of 2 sample ids (1, 2), got 3"),
            ([act_bench_record(1), act_bench_record(1)], 1, "line 2: sample_id 1: already on line 1"),
            ([act_bench_record(1), {"label": "x"}], 1, "line 2: expected a JSON object with a sample_id"),
            ([{"sample_id": 1}], None, "line 1: expected the field 'instruction_trajs'"),
            ([{"a": {"sample_id": 1}, "sample_id": 2}], 1, "sample_id: expected 1, got 2"),
            ([{"sample_id": 1, "instruction_trajs": [[[0, 0, 0]] * 59]}], 1, "[0]: expected a list of 60"),
            ([{"sample_id": 1, "instruction_trajs": [[[0, 0]] * 60]}], 1, "[0][0]: expected a list of 3"),
            ([{"sample_id": 1, "instruction_trajs": [[[0, 0, math.nan]] * 60]}], 1, "[0][0][2]: expected a finite"),
        ],
    )
    def test_act_bench(self, tmp_path, lines, sample_id, expected):
        path = write_jsonl(tmp_path, lines)
        message = refused(lambda: load_trajectory(path, sample_id=sample_id))
        assert message.startswith(str(path))
        assert expected in message

    def test_act_bench_broken_lines_are_named(self, tmp_path):
        path = write_jsonl(tmp_path, [act_bench_record(1)])
        path.write_text(path.read_text() + '\n{"sample_id": 2, "instruction_trajs": [[[0,')
        assert load_trajectory(path, sample_id=1).num_frames == 5
        assert "line 3, column" in refused(lambda: load_trajectory(path, sample_id=2))
        path.write_text('{"sample_id": "\\x"}')
        assert "line 1: sample_id" in refused(lambda: load_trajectory(path))


class TestSavePoses:
    def test_nothing_is_left_when_refused(self, tmp_path):
        times, positions, headings = drive()
        path = tmp_path / "drive.json"
        assert "poses[1]" in refused(lambda: save_poses(path, times * 0, positions, headings, 10.0))
        assert "0.01 to 100" in refused(lambda: save_poses(path, times, positions, headings, 0.0))
        assert "shapes" in refused(lambda: save_poses(path, times, positions[:, :1], headings, 10.0))
        with pytest.raises(OutputError, match=r"ends in \.json"):
            save_poses(tmp_path / "drive.csv", times, positions, headings, 10.0)
        with pytest.raises(OutputError, match="No such file"):
            save_poses(tmp_path / "missing" / "drive.json", times, positions, headings, 10.0)
        (tmp_path / "folder.json").mkdir()
        with pytest.raises(OutputError, match=r"folder\.json"):
            save_poses(tmp_path / "folder.json", times, positions, headings, 10.0)
        assert [entry.name for entry in tmp_path.iterdir()] == ["folder.json"]
