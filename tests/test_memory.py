import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from terra.actions import Waypoints
from terra.driving.control import Driver, Pose, Steering
from terra.errors import ConfigError
from terra.memory import (
    MemoryRule,
    advance,
    choose,
    expected_poses,
    memory_times,
    place_action,
    poses_along,
    relative,
)

SPACE, FPS = Waypoints(), 10.0
RULE = MemoryRule(frames=4)


def drive(speed: float, turn: float, frames: int, start: np.ndarray | None = None) -> np.ndarray:
    """Poses of a car at `speed` m a frame that turns by `turn` rad a frame."""
    pose, poses = np.zeros(3) if start is None else start, []
    for _ in range(frames):
        poses.append(pose)
        middle = pose[2] + turn / 2
        pose = pose + np.array([speed * math.cos(middle), speed * math.sin(middle), turn])
    return np.stack(poses)


def ahead(poses: np.ndarray, frames: int = 4) -> np.ndarray:
    """Where a car will be that goes on for 2 s as between its last two poses."""
    move = relative(poses[-1], poses[-2])
    speed = math.copysign(math.hypot(*move[:2]), move[0])
    return drive(speed, move[2], 20, poses[-1])[np.linspace(2, 19, frames, dtype=int)]


def chosen(poses: np.ndarray, own: int = 3, rule: MemoryRule = RULE) -> np.ndarray:
    """The memory frames of a window after the last pose, which reads the last `own` again."""
    return choose(rule, poses[None], np.array([len(poses) - own]), ahead(poses, rule.frames)[None])[0]


@st.composite
def drives(draw) -> np.ndarray:
    parts = draw(
        st.lists(st.tuples(st.floats(-1, 2), st.floats(-0.2, 0.2), st.integers(1, 40)), min_size=1, max_size=5)
    )
    poses = np.zeros((0, 3))
    for speed, turn, frames in parts:
        poses = np.concatenate([poses, drive(speed, turn, frames + 1, poses[-1] if len(poses) else None)[1:]])
    return np.concatenate([drive(1.0, 0.0, 8), poses + np.array([7.0, 0, 0])])


@given(st.floats(-0.9, 0.9), st.floats(0, 30))
def test_advance_follows_an_arc(angle, speed):
    driver = Driver(Steering(angle, speed), FPS, Pose(3.0, -2.0, 0.5))
    if speed * 0.95 * abs(math.tan(angle)) / 2.7 > 3:  # more than half a circle until the second waypoint
        return
    moved = driver.moved().pose
    found = advance(np.array([3.0, -2.0, 0.5]), driver.action(SPACE.times), SPACE, FPS)
    assert found[:2] == pytest.approx([moved.x, moved.y], abs=2e-3)
    # What noise of float32 says of the curve of a car that barely moves is bounded, and moves it by nothing.
    assert found[2] == pytest.approx(moved.heading, abs=5e-3)


def test_advance_brakes_reverses_and_stands():
    times = np.array(SPACE.times)
    braking = np.stack([0 * times, np.minimum(4 * times - times**2, 4.0), times], 1)
    assert advance(np.zeros(3), braking, SPACE, FPS) == pytest.approx([0.39, 0, 0], abs=1e-9)
    back = np.stack([0.1 * times**2, -3 * times, times], 1)
    assert advance(np.zeros(3), back, SPACE, FPS)[0] == pytest.approx(-0.3, abs=0.01)
    assert advance(np.zeros(3), back, SPACE, FPS)[2] < 0
    noise = np.stack([1e-4 * np.sin(9 * times), 1e-4 * np.cos(5 * times), times], 1)
    assert advance(np.zeros(3), noise, SPACE, FPS) == pytest.approx([0, 0, 0], abs=1e-3)
    assert advance(np.ones(3), 0 * back, SPACE, FPS) == pytest.approx([1, 1, 1])
    assert poses_along([braking] * 3, SPACE, FPS)[:, 0] == pytest.approx([0, 0.39, 0.78, 1.17])
    one = Waypoints(times=(0.0, 0.5))
    assert advance(np.zeros(3), np.array([[0, 0, 0], [0, 2.0, 0.5]]), one, FPS) == pytest.approx([0.4, 0, 0])


def test_place_action_is_the_memory_frame_s_pose_in_the_axes_of_the_expected_one():
    expected, seen_from = np.array([10.0, 5.0, math.pi / 2]), np.array([10.0, 8.0, math.pi])
    rows = place_action(expected, seen_from, SPACE)
    assert rows.dtype == np.float32
    # Seen from 3 m ahead, by a camera that looked left: its points go left.
    assert rows == pytest.approx(np.stack([2.0 * np.arange(6), np.full(6, 3.0), np.zeros(6)], 1), abs=1e-6)
    many = place_action(np.stack([expected, seen_from]), seen_from, SPACE)
    assert many.shape == (2, 6, 3)
    assert (many[0] == rows).all()
    assert many[1] == pytest.approx(np.stack([np.zeros(6), 2.0 * np.arange(6), np.zeros(6)], 1))


def test_memory_times_are_the_middles_of_equal_parts():
    assert memory_times(4, 16, FPS) == pytest.approx([0.25, 0.65, 1.05, 1.45])
    assert memory_times(1, 1, FPS) == pytest.approx([0.1])


def test_expected_poses_follow_the_path():
    times = np.array([0.2, 1.0, 9.0])
    action = Driver(Steering(0.0, 10.0), FPS).action(SPACE.times)
    poses = expected_poses(np.array([1.0, 2.0, math.pi / 2]), action, SPACE, times)
    assert poses == pytest.approx(np.array([[1, 4, math.pi / 2], [1, 12, math.pi / 2], [1, 31.5, math.pi / 2]]))
    back = Driver(Steering(0.0, -10.0), FPS).action(SPACE.times)
    assert expected_poses(np.zeros(3), back, SPACE, times) == pytest.approx(
        np.array([[-2, 0, 0], [-10, 0, 0], [-29.5, 0, 0]])
    )
    standing = 0 * action
    assert expected_poses(np.ones(3), standing, SPACE, times).tolist() == 3 * [[1, 1, 1]]
    left = np.stack([[0, 0.5, 0.5], [0.5, 0.5, 1.0]])  # ahead, and then at a right angle to the left
    (first, last) = expected_poses(np.zeros(3), left, Waypoints(times=(0.5, 1.0)), np.array([0.25, 0.75]))
    assert first == pytest.approx([0.25, 0, 0])
    assert last == pytest.approx([0.5, 0.25, math.pi / 2])


@settings(max_examples=60, deadline=None)
@given(drives(), st.sampled_from(["view", "recent"]), st.integers(1, 5), st.floats(-4, 4), st.floats(-500, 500))
def test_choice_is_of_different_candidates_and_the_same_from_everywhere(poses, kind, frames, angle, shift):
    rule = MemoryRule(frames=frames, kind=kind)
    found = chosen(poses, rule=rule)
    assert len(found) == frames
    assert len(set(found)) == frames
    assert found.min() >= 0
    assert found.max() < len(poses) - 3
    assert (chosen(poses, rule=rule) == found).all()
    elsewhere = relative(poses, np.array([shift, -shift / 2, angle]))
    assert (chosen(elsewhere, rule=rule) == found).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(drives(), min_size=1, max_size=6))
def test_a_batch_chooses_as_each_window_alone(each):
    padded = np.full((len(each), max(map(len, each)), 3), np.nan)
    for row, poses in zip(padded, each, strict=True):
        row[: len(poses)] = poses
    counts = np.array([len(poses) - 3 for poses in each])
    together = choose(RULE, padded, counts, np.stack([ahead(poses) for poses in each]))
    assert together.tolist() == [chosen(poses).tolist() for poses in each]


def test_recent_is_the_newest():
    assert chosen(drive(1.0, 0.0, 30), rule=MemoryRule(frames=4, kind="recent")).tolist() == [23, 24, 25, 26]


def test_after_a_whole_turn_each_time_has_the_frame_that_looked_there():
    # A little more than once around a circle of 90 frames: the next 2 s look where frames 12 to 29 did.
    poses = drive(0.5, math.radians(4.0), 100)
    assert np.abs(chosen(poses) - np.linspace(11, 28, 4)).max() <= 1
    (first,) = chosen(poses, rule=MemoryRule(frames=1))
    assert abs(first - 11) <= 1


def test_the_second_time_along_a_road_the_first_time_is_chosen():
    there = drive(1.0, 0.0, 60)
    turned = drive(0.5, math.radians(9.0), 21, there[-1])[1:]
    back = drive(1.0, 0.0, 60, turned[-1])[1:]
    turned_again = drive(0.5, math.radians(9.0), 21, back[-1])[1:]
    poses = np.concatenate([there, turned, back, turned_again, drive(1.0, 0.0, 15, turned_again[-1])[1:]])
    near = np.round(ahead(poses)[:, 0] - there[0, 0])  # a frame a meter
    assert np.abs(chosen(poses) - near).max() <= 3


def test_where_nothing_adds_anything_the_newest_are_chosen():
    assert chosen(drive(1.0, 0.0, 83)).tolist() == [79, 78, 77, 76]
    assert chosen(np.zeros((23, 3))).tolist() == [19, 18, 17, 16]


def test_each_time_has_the_frame_that_adds_most():
    # It looked left, right and ahead, stands, and will look right, ahead and left; what lies ahead is in the window.
    poses = np.array([[0, 0, 0.9], [0, 0, -0.9], [5, 0, 0.0], [0, 0, 0.0]])
    expected = np.array([[[0, 0, -0.9], [0, 0, 0.0], [0, 0, 0.9]]])
    assert choose(MemoryRule(frames=3), poses[None], np.array([3]), expected).tolist() == [[1, 2, 0]]


def test_of_equal_frames_the_newest_is_chosen():
    poses = np.array([*[[0, 0, 1.2]] * 5, *[[0, 0, 0.0]] * 6])
    assert choose(MemoryRule(frames=1), poses[None], np.array([8]), np.array([[[0, 0, 0.9]]])).tolist() == [[4]]


def test_bad_rules_and_too_few_candidates_are_refused():
    with pytest.raises(ConfigError, match="frames: expected"):
        MemoryRule(frames=0)
    with pytest.raises(ConfigError, match="field_of_view: expected"):
        MemoryRule(frames=1, field_of_view=180.0)
    with pytest.raises(ConfigError, match="kind: expected"):
        MemoryRule(frames=1, kind="old")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="candidates: expected at least 4, got 2"):
        chosen(np.zeros((5, 3)))
