"""Action spaces and their files: rows, units, ranges, times, and one line for whatever is wrong."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from terra.actions import (
    ActionTrack,
    Choice,
    Keys,
    Vector,
    Waypoints,
    describe_space,
    load_actions,
    parse_space,
    read_space,
    require_table,
    require_waypoints,
    save_actions,
)
from terra.errors import ActionError, CheckpointError, TerraError
from tokenizer.limits import LIMITS

ARM = Vector(names=("joint", "grip"), units=("rad", ""), low=(-2.0, 0.0), high=(2.0, 1.0))
GAME = Keys(names=("forward", "left", "fire"))
PAD = Choice(names=("noop", "jump", "duck"))
SPACES = (ARM, GAME, PAD)

names = st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,20}", fullmatch=True), min_size=1, max_size=20, unique=True)


@st.composite
def table_spaces(draw: st.DrawFn) -> Vector | Keys | Choice:
    chosen = [name for name in draw(names) if name != "time_s"] or ["a"]
    kind = draw(st.sampled_from(["vector", "keys", "choice"]))
    if kind != "vector":
        return (Keys if kind == "keys" else Choice)(names=chosen)
    low = [draw(st.floats(-1e6, 1e6)) for _ in chosen]
    high = [each + draw(st.floats(0.1, 1e6)) for each in low]
    return Vector(names=chosen, units=["m"] * len(chosen), low=low, high=high)


def draw_values(draw: st.DrawFn, space: Vector | Keys | Choice, steps: int) -> np.ndarray:
    shares = np.array([[draw(st.floats(0, 1)) for _ in space.columns] for _ in range(steps)]).reshape(steps, -1)
    if isinstance(space, Vector):
        return np.clip(
            np.array(space.low) + shares * (np.array(space.high) - np.array(space.low)), space.low, space.high
        )
    return np.round(shares) if isinstance(space, Keys) else np.floor(shares * (len(space.names) - 1))


class TestSpaces:
    @given(data=st.data())
    def test_values_rows_and_json_are_one(self, data):
        space = data.draw(table_spaces())
        values = draw_values(data.draw, space, 3)
        rows = space.rows(values)
        assert rows.shape == (3, *space.shape)
        assert rows.dtype == np.float32
        assert np.abs(rows).max() <= 1.0
        width = np.array(space.high) - np.array(space.low) if isinstance(space, Vector) else 1.0
        np.testing.assert_allclose(space.values(rows) / width, values / width, atol=1e-6)
        for each in values:
            np.testing.assert_array_equal(space.from_json(space.to_json(each), "a"), each)
            assert space.problem(each) is None
            assert space.text(each)
        assert space.problem(space.neutral) is None
        again = read_space(json.loads(json.dumps(describe_space(space))), "f", CheckpointError)
        assert again == space

    def test_rows_are_what_the_model_sees(self):
        np.testing.assert_array_equal(ARM.rows(np.array([[2.0, 0.5], [-2.0, 0.0]])), [[[1.0, 0.0]], [[-1.0, -1.0]]])
        np.testing.assert_array_equal(GAME.rows(np.array([[1.0, 0.0, 1.0]])), [[[1.0, 0.0, 1.0]]])
        np.testing.assert_array_equal(PAD.rows(np.array([[2.0]])), [[[0.0, 0.0, 1.0]]])

    def test_published_checkpoints_have_waypoints(self):
        assert read_space({}, "config.json", CheckpointError) == Waypoints()
        assert read_space({"waypoint_times": [0.5, 1.0]}, "config.json", CheckpointError) == Waypoints(times=(0.5, 1.0))
        assert describe_space(Waypoints()) == {"waypoint_times": list(Waypoints().times)}
        assert Waypoints().shape == (6, 3)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (7, "kind: expected one of waypoints, vector, keys, choice, got 7"),
            ({"kind": "joystick"}, "kind: expected one of waypoints, vector, keys, choice, got 'joystick'"),
            ({"kind": "keys"}, "names: expected"),
            ({"kind": "keys", "names": []}, "names: expected"),
            ({"kind": "keys", "names": ["a", "a"]}, "names: expected each once, and none of them time_s, got a"),
            ({"kind": "keys", "names": ["time_s"]}, "names: expected each once, and none of them time_s, got time_s"),
            ({"kind": "keys", "names": ["a b"]}, "expected a name: a letter, then"),
            ({"kind": "keys", "names": [f"a{index}" for index in range(257)]}, "names: expected"),
            ({"kind": "keys", "names": ["a"], "low": [0]}, "low"),
            (
                {"kind": "vector", "names": ["a"], "units": [], "low": [0], "high": [1]},
                "units: expected 1, one for each",
            ),
            (
                {"kind": "vector", "names": ["a"], "units": ["m"], "low": [1], "high": [1]},
                "expected less than high, got 1",
            ),
            ({"kind": "vector", "names": ["a"], "units": ["m"], "low": [math.nan], "high": [1]}, "low"),
            ({"kind": "waypoints", "times": [1.0, 0.5]}, "times: expected increasing seconds"),
            ({"kind": "waypoints", "times": [60.001]}, "times"),
            ({"kind": "waypoints", "times": list(range(65))}, "times"),
        ],
    )
    def test_other_spaces_are_refused_in_one_line(self, value, message):
        with pytest.raises(ActionError, match=r"^f: ") as caught:
            parse_space(value, "f")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_largest_spaces_are_read(self):
        for space in (
            {"kind": "waypoints", "times": [*(index / 2 for index in range(63)), 60]},
            {"kind": "keys", "names": ["a" * 64, *(f"a{index}" for index in range(255))]},
        ):
            assert parse_space(space, "f").shape

    def test_a_use_that_needs_another_space_says_so(self):
        with pytest.raises(ActionError, match=r"planning: expected a world of waypoints, got one of keys of for"):
            require_waypoints(GAME, "planning")
        with pytest.raises(ActionError, match=r"x: expected a world of vectors, keys or choices, got one of way"):
            require_table(Waypoints(), "x")


class TestResampling:
    def track(self, space, times, values) -> ActionTrack:
        return ActionTrack(space, np.array(times), np.array(values, float), "f.csv")

    def test_vectors_are_interpolated(self):
        track = self.track(ARM, [5.0, 6.0, 7.0], [[0, 0], [1, 1], [2, 0]])
        np.testing.assert_allclose(track.at_rate(2.0, 6), [[0, 0], [0.5, 0.5], [1, 1], [1.5, 0.5], [2, 0], [2, 0]])

    def test_a_key_that_is_down_between_two_frames_is_not_lost(self):
        times = np.arange(6) / 10
        track = self.track(GAME, times, [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
        np.testing.assert_array_equal(track.at_rate(5.0, 3), [[1, 1, 0], [0, 0, 1], [0, 0, 0]])
        np.testing.assert_array_equal(track.at_rate(10.0, 6), track.values)
        np.testing.assert_array_equal(track.at_rate(20.0, 12), np.repeat(track.values, 2, axis=0))

    def test_choices_are_held(self):
        track = self.track(PAD, [0.0, 0.5, 1.0], [[0], [1], [2]])
        np.testing.assert_array_equal(track.at_rate(4.0, 6)[:, 0], [0, 0, 1, 1, 2, 2])

    @given(fps=st.floats(1, 60), count=st.integers(1, 50), data=st.data())
    def test_the_same_rate_changes_nothing(self, fps, count, data):
        space = data.draw(st.sampled_from(SPACES))
        values = draw_values(data.draw, space, count)
        track = self.track(space, np.arange(count) / fps + 100, values)
        np.testing.assert_allclose(track.at_rate(fps, count), values, atol=1e-6)

    def test_a_file_that_ends_too_early_says_so(self):
        track = self.track(PAD, np.arange(5) / 10, np.zeros((5, 1)))
        track.at_rate(10.0, 5)
        with pytest.raises(ActionError, match=r"f\.csv: covers 0\.5 s, 6 actions at 10 a second need 0\.6 s"):
            track.at_rate(10.0, 6)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestFiles:
    @settings(max_examples=30)
    @given(data=st.data())
    def test_all_formats_are_one(self, data, tmp_path_factory):
        folder = tmp_path_factory.mktemp("actions")
        space = data.draw(table_spaces())
        count, fps = data.draw(st.integers(2, 12)), 8.0
        values, times = draw_values(data.draw, space, count), np.arange(count) / fps
        save_actions(folder / "a.json", space, fps, values)
        cells = [[space.text(each)] if isinstance(space, Choice) else [repr(float(v)) for v in each] for each in values]
        lines = [",".join(["time_s", *space.columns])]
        lines += [",".join([repr(float(time)), *row]) for time, row in zip(times, cells, strict=True)]
        write(folder / "a.csv", "# a comment\n" + "\n".join(lines) + "\n")
        columns = {name: np.array([row[index] for row in cells]) for index, name in enumerate(space.columns)}
        if not isinstance(space, Choice):
            columns = {name: column.astype(float) for name, column in columns.items()}
        np.savez(folder / "a.npz", time_s=times, **columns)
        for suffix in (".json", ".csv", ".npz"):
            track = load_actions(folder / f"a{suffix}", space)
            np.testing.assert_array_equal(track.values, values)
            np.testing.assert_allclose(track.times, times)
        assert load_actions(folder / "a.csv", space).rows(fps, count).shape == (count, *space.shape)

    @pytest.mark.parametrize(
        ("space", "text", "message"),
        [
            (ARM, "", "expected a header with the columns time_s, joint, grip, got an empty file"),
            (ARM, "time_s,joint\n", "line 1: expected the columns time_s, joint, grip, got none of grip"),
            (ARM, "time_s,joint,grip,grip\n", "line 1: column 'grip': expected it once, got it twice"),
            (ARM, "time_s,joint,grip,x\n", "line 1: expected the columns time_s, joint, grip, got 'x'"),
            (ARM, "joint,grip\n", "line 1: expected the columns time_s, joint, grip, got none of time_s"),
            (
                ARM,
                "timestamp,joint,grip\n",
                "got none of time_s but 'timestamp': rename that column, if it is time_s, in seconds",
            ),
            (ARM, "time_s,arm,grip\n", "got none of joint but 'arm': rename that column, if it is joint"),
            (ARM, "time_s,arm,hand\n", "line 1: expected the columns time_s, joint, grip, got none of joint"),
            (ARM, "time_s,joint,grip\n", "expected rows of actions, got none"),
            (ARM, "time_s,joint,grip\n0,1\n", "line 2: expected 3 columns (time_s, joint, grip), got 2"),
            (ARM, "time_s,joint,grip\n0,3,0\n", "line 2: joint: expected -2 to 2 rad, got 3"),
            (ARM, "time_s,joint,grip\n0,nan,0\n", "line 2: joint: expected a finite number, got 'nan'"),
            (ARM, "time_s,joint,grip\nx,1,0\n", "line 2: time_s: expected a finite number, got 'x'"),
            (ARM, "time_s,joint,grip\n0,1,0\n0,1,0\n", "line 3: expected a time after 0.0 s, got 0.0 s (repeated)"),
            (GAME, "time_s,forward,left,fire\n0,1,0,2\n", "line 2: fire: expected 1 (pressed) or 0, got 2"),
            (PAD, "time_s,action\n0,hop\n", "line 2: action: expected one of noop, jump, duck, got 'hop'"),
        ],
    )
    def test_a_bad_csv_is_one_line(self, tmp_path, space, text, message):
        with pytest.raises(ActionError) as caught:
            load_actions(write(tmp_path / "a.csv", text), space)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"format": "terra-trajectory"},
                "expected format terra-actions version 1, got 'terra-trajectory' version 1",
            ),
            (
                {"space": {"kind": "keys", "names": ["a"]}},
                "expected actions of the model's choice of noop, jump, duck, got",
            ),
            ({"actions": 7}, "actions: expected a list, got 7"),
            ({"actions": ["hop"]}, "actions[0]: expected one of noop, jump, duck, got 'hop'"),
            ({"fps": 1e9}, "fps: expected a number from 0.01 to 100"),
            ({"times_s": [0.0]}, "expected one of times_s and fps"),
            ({"fps": None, "times_s": [0.0, 1.0]}, "times_s: expected 1 numbers, as many as actions, got 2"),
            ({"fps": None, "times_s": [None]}, "times_s[0]: expected a finite number, got None"),
            ({"nonsense": 1}, "expected space, times_s or fps, and actions, got 'nonsense'"),
        ],
    )
    def test_a_bad_document_is_one_line(self, tmp_path, changes, message):
        document = {"format": "terra-actions", "version": 1, "fps": 10, "actions": ["noop"], **changes}
        document = {name: value for name, value in document.items() if value is not None}
        with pytest.raises(ActionError) as caught:
            load_actions(write(tmp_path / "a.json", json.dumps(document)), PAD)
        assert message in str(caught.value)

    @settings(max_examples=200)
    @given(content=st.binary(max_size=300), suffix=st.sampled_from([".csv", ".json", ".npz", ".txt"]), data=st.data())
    def test_any_bytes_give_actions_or_one_line(self, content, suffix, data, tmp_path_factory):
        space = data.draw(st.sampled_from(SPACES))
        prefix = data.draw(st.sampled_from([b"", f"time_s,{','.join(space.columns)}\n0,".encode(), b'{"format":']))
        path = tmp_path_factory.mktemp("any") / f"a{suffix}"
        path.write_bytes(prefix + content)
        line = ""
        try:
            assert len(load_actions(path, space).times) > 0
        except TerraError as error:
            line = str(error)
        assert "\n" not in line


def test_a_document_of_too_many_numbers_is_one_line(tmp_path):
    save_actions(tmp_path / "a.json", GAME, 10.0, np.zeros((2, 3)))
    with pytest.raises(ActionError, match=r"a.json: actions: expected at most 5 numbers, got 6"):
        load_actions(tmp_path / "a.json", GAME, limits=LIMITS.replace(trajectory_numbers=5))
