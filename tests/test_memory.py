import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from terra.actions import Waypoints
from terra.driving.control import Driver, Pose, Steering
from terra.errors import ConfigError
from terra.memory import MemoryRule, advance, choose, place_action, poses_along, relative, target_poses

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


def ahead(poses: np.ndarray, num: int = 3) -> np.ndarray:
    """Targets of a car that goes on for 3 s as between its last two poses."""
    move = relative(poses[-1], poses[-2])
    return drive(math.copysign(math.hypot(*move[:2]), move[0]), move[2], 30, poses[-1])[
        np.linspace(0, 29, num, dtype=int)
    ]


def chosen(poses: np.ndarray, own: int = 3, rule: MemoryRule = RULE) -> np.ndarray:
    """The memory frames of a window after the last pose, which reads the last `own` again."""
    return choose(rule, poses[None], np.array([len(poses) - own]), ahead(poses)[None])[0]


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


def test_place_action_is_the_next_pose_in_the_axes_of_the_memory_frame():
    here, there = np.array([10.0, 5.0, math.pi / 2]), np.array([10.0, 8.0, math.pi])
    rows = place_action(here, there, SPACE)
    assert rows.dtype == np.float32
    # 3 m ahead, from where the next camera looks left: its points go left.
    assert rows == pytest.approx(np.stack([2.0 * np.arange(6), np.full(6, 3.0), np.zeros(6)], 1), abs=1e-6)
    many = place_action(np.stack([here, there]), there, SPACE)
    assert many.shape == (2, 6, 3)
    assert (many[0] == rows).all()


def test_target_poses_follow_the_path():
    action = Driver(Steering(0.0, 10.0), FPS).action(SPACE.times)
    targets = target_poses(np.array([1.0, 2.0, math.pi / 2]), action)
    assert targets == pytest.approx(np.array([[1, 2, math.pi / 2], [1, 16.5, math.pi / 2], [1, 31.5, math.pi / 2]]))
    back = Driver(Steering(0.0, -10.0), FPS).action(SPACE.times)
    assert target_poses(np.zeros(3), back) == pytest.approx(np.array([[0, 0, 0], [-14.5, 0, 0], [-29.5, 0, 0]]))
    assert target_poses(np.ones(3), None).tolist() == [[1, 1, 1]]


@settings(max_examples=60, deadline=None)
@given(drives(), st.sampled_from(["view", "recent"]), st.integers(1, 5), st.floats(-4, 4), st.floats(-500, 500))
def test_choice_is_of_candidates_sorted_and_the_same_from_everywhere(poses, kind, frames, angle, shift):
    rule = MemoryRule(frames=frames, kind=kind)
    found = chosen(poses, rule=rule)
    assert len(found) == frames
    assert (np.diff(found) > 0).all()
    assert found[0] >= 0
    assert found[-1] < len(poses) - 3
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


def test_after_a_whole_turn_the_frames_that_looked_there_come_first():
    # 10 s of a circle, a little more than once around: the next 3 s look where frames 9 to 38 did.
    poses = drive(0.5, math.radians(4.0), 100)
    found = chosen(poses)
    assert np.abs(found - 24).min() <= 2
    assert np.abs(found - 38).min() <= 2
    (first,) = chosen(poses, rule=MemoryRule(frames=1))
    assert 20 <= first <= 40


def test_on_the_way_back_the_way_out_is_chosen():
    out = drive(1.0, 0.0, 60)
    turn = drive(0.5, math.radians(9.0), 21, out[-1])[1:]
    poses = np.concatenate([out, turn, drive(1.0, 0.0, 15, turn[-1])[1:]])
    found = chosen(poses)
    # The car looks back along its way from x = 45; the way out saw both sides of it, from the other direction.
    assert (found < 80).all()
    assert (found < 60).sum() >= 3


def test_frames_that_add_nothing_are_evenly_spaced():
    assert chosen(drive(1.0, 0.0, 83)).tolist() == [10, 30, 50, 70]
    standing = np.zeros((23, 3))
    assert chosen(standing).tolist() == [2, 7, 12, 17]


def test_what_the_window_has_anyway_covers_for_nothing():
    # It looked left, right and ahead, and looks ahead now: what lies there is in the window.
    poses = np.array([[0, 0, 1.2], [0, 0, -1.2], *[[0, 0, 0.0]] * 10])
    targets = np.array([[[0, 0, 0.9], [0, 0, 0.0], [0, 0, -0.9]]])
    (found,) = choose(MemoryRule(frames=2), poses[None], np.array([9]), targets)
    assert found.tolist() == [0, 1]


def test_of_equal_frames_the_newest_is_chosen():
    poses = np.array([*[[0, 0, 1.2]] * 5, *[[0, 0, 0.0]] * 6])
    targets = np.array([[[0, 0, 0.0], [0, 0, 0.9]]])
    assert choose(MemoryRule(frames=1), poses[None], np.array([8]), targets).tolist() == [[4]]


def test_bad_rules_and_too_few_candidates_are_refused():
    with pytest.raises(ConfigError, match="frames: expected"):
        MemoryRule(frames=0)
    with pytest.raises(ConfigError, match="field_of_view: expected"):
        MemoryRule(frames=1, field_of_view=180.0)
    with pytest.raises(ConfigError, match="kind: expected"):
        MemoryRule(frames=1, kind="old")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="candidates: expected at least 4, got 2"):
        chosen(np.zeros((5, 3)))
