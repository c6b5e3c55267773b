import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from decoder.overlay import Camera, compose_rollout, draw_path, project, side_by_side, top_down
from decoder.video import write_video
from terra.errors import ConfigError
from tokenizer.settings import checked

LEVEL = Camera(fov_degrees=90.0, height_meters=1.5, pitch_radians=0.0)
DEMO = Camera(fov_degrees=75.0, height_meters=1.4, pitch_radians=-0.03)
SIZE = (256, 144)


def arc(curvature: float, length: float = 30.0) -> np.ndarray:
    along = np.linspace(0.5, length, 60)
    if not curvature:
        return np.stack([along, np.zeros(60)], axis=-1)
    return np.stack([np.sin(curvature * along), 1 - np.cos(curvature * along)], axis=-1) / curvature


def gray_frames(num_frames: int = 1, width: int = 256, height: int = 144) -> np.ndarray:
    return np.full((num_frames, height, width, 3), 90, np.uint8)


def painted(frame: np.ndarray) -> np.ndarray:
    """(row, column) of the pixels that are no longer gray."""
    return np.argwhere((frame != 90).any(axis=-1))


def test_a_point_ahead_of_a_level_camera_lands_at_f_h_over_d():
    # 90 degrees: the focal length is half the width, 128 pixels.
    for meters in (3.0, 8.0, 50.0):
        column, row = project(np.array([[meters, 0.0]]), LEVEL, SIZE)[0]
        assert column == pytest.approx(128)
        assert row == pytest.approx(72 + 128 * 1.5 / meters)
    # At 10 m ahead, 2 m to the left are 2 / 10 of the focal length left of the center.
    assert project(np.array([[10.0, 2.0]]), LEVEL, SIZE)[0, 0] == pytest.approx(128 - 25.6)


def test_a_pitched_camera_looks_at_the_ground_where_its_axis_meets_it():
    camera = Camera(fov_degrees=60.0, height_meters=1.4, pitch_radians=-0.1, x_forward_meters=1.7)
    meets = 1.7 + 1.4 / math.tan(0.1)
    assert project(np.array([[meets, 0.0]]), camera, SIZE)[0] == pytest.approx([128, 72])
    # The horizon is above the center by f tan(pitch).
    focal = 128 / math.tan(math.radians(30))
    assert project(np.array([[1e9, 0.0]]), camera, SIZE)[0, 1] == pytest.approx(72 - focal * math.tan(0.1), abs=1e-3)


@given(x=st.floats(2, 80), y=st.floats(-20, 20), fov=st.floats(30, 120), pitch=st.floats(-0.3, 0.1))
def test_projection_agrees_with_rotation_matrices(x, y, fov, pitch):
    camera = Camera(fov_degrees=fov, height_meters=1.4, pitch_radians=pitch, x_forward_meters=0.5)
    turn = np.array(
        [[math.cos(pitch), 0, math.sin(pitch)], [0, 1, 0], [-math.sin(pitch), 0, math.cos(pitch)]]
    )  # rows: ahead, left and up of the camera
    depth, left, up = turn @ (np.array([x, y, 0]) - np.array([0.5, 0, 1.4]))
    got = project(np.array([[x, y]]), camera, SIZE)[0]
    if depth <= 1e-6:
        assert np.isnan(got).all()
    else:
        half = math.tan(math.radians(fov) / 2)
        assert got == pytest.approx([128 * (1 - left / depth / half), 72 - 128 * up / depth / half], rel=1e-6, abs=1e-6)


def test_points_behind_are_nan_and_left_is_left():
    pixels = project(np.array([[-3.0, 0.0], [10.0, 1.0], [10.0, -1.0], [0.0, 2.0]]), LEVEL, SIZE)
    assert np.isnan(pixels[[0, 3]]).all()
    assert pixels[1, 0] < 128 < pixels[2, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"fov_degrees": 0.0},
        {"fov_degrees": 180.0},
        {"fov_degrees": "75"},
        {"height_meters": 0.0},
        {"height_meters": math.nan},
        {"pitch_radians": 1.6},
        {"pitch_radians": True},
    ],
)
def test_impossible_cameras_are_refused(change):
    with pytest.raises(ConfigError, match=rf"^{next(iter(change))}: expected"):
        Camera(**{**DEMO.to_dict(), **change})


def test_a_camera_survives_json():
    assert Camera.from_dict(json.loads(json.dumps(DEMO.to_dict()))) == DEMO
    assert Camera.from_dict({"fov_degrees": 75, "height_meters": 1.4, "pitch_radians": -0.03}) == DEMO
    assert Camera.from_dict({"fov_degrees": 75, "height_metres": 1.4, "pitch_radians": -0.03}) == DEMO


def test_a_camera_of_an_older_dataset_is_read():
    older = {"fov_degrees": 75.0, "height_metres": 1.4, "pitch_radians": -0.03, "x_forward_metres": 0.0}
    assert Camera.from_dict(older) == DEMO


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "expected settings, got [1]"),
        (
            {"fov_degrees": 75, "height_meters": 1.4},
            "pitch_radians: expected a number above -1.5708 and below 1.5708, got none",
        ),
        (
            {"fov_degrees": 75, "height_meters": 1.4, "pitch_radians": 0, "roll": 0},
            "expected fov_degrees, height_meters, pitch_radians, x_forward_meters, got 'roll'",
        ),
        (
            {"fov_degrees": 75, "height_meters": 1.4, "pitch_radian": 0},
            "pitch_radian: no such setting; did you mean pitch_radians?",
        ),
        (
            {"fov_degrees": 75, "height_meters": math.nan, "pitch_radians": 0},
            "height_meters: expected a finite number above 0, got nan",
        ),
        (
            {"fov_degrees": 75, "height_meters": -1, "pitch_radians": 0},
            "height_meters: expected a number above 0, got -1",
        ),
        (
            {"fov_degrees": "75", "height_meters": 1, "pitch_radians": 0},
            "fov_degrees: expected a number above 0 and below 180, got '75'",
        ),
    ],
)
def test_cameras_are_read_strictly(values, message):
    with pytest.raises(ConfigError) as caught:
        checked(Camera, values, "camera.json")
    assert str(caught.value) == f"camera.json: {message}"


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_a_straight_path_lies_between_the_cars_sides(scale):
    frame = gray_frames()[0]
    drawn = draw_path(frame, arc(0), DEMO, scale=scale)
    assert drawn.shape == (144 * scale, 256 * scale, 3)
    pixels = painted(drawn) / scale
    assert len(pixels) > 500
    # At each row the ribbon is as wide as 1.8 m there: row and distance are one to one on flat ground.
    distances = np.linspace(2.0, 40.0, 4000)
    left = project(np.stack([distances, np.full(4000, 0.9)], axis=-1), DEMO, SIZE)
    for row in np.unique(pixels[:, 0].astype(int)):
        inside = pixels[pixels[:, 0].astype(int) == row, 1] + 0.5 / scale
        edge = np.interp(-(row + 0.5), -left[:, 1], left[:, 0])
        assert inside.min() == pytest.approx(edge, abs=2.5)
        assert inside.max() == pytest.approx(256 - edge, abs=2.5)
    # It reaches from the bottom of the picture to where 30 m ahead are.
    assert pixels[:, 0].max() == pytest.approx(143, abs=1)
    assert pixels[:, 0].min() == pytest.approx(project(np.array([[30.0, 0.0]]), DEMO, SIZE)[0, 1], abs=2)
    assert (frame == 90).all()


def test_a_left_curve_goes_left_and_mirrors_the_right_one():
    frame = gray_frames()[0]
    left, right = (draw_path(frame, arc(curvature), DEMO) for curvature in (0.03, -0.03))
    top = painted(left)[:200]
    assert top[:, 1].mean() < 110
    assert np.abs(left.astype(int) - right[:, ::-1]).mean() < 0.5


@pytest.mark.parametrize(
    "path",
    [np.zeros((60, 2)), np.empty((0, 2)), np.full((5, 2), np.nan), arc(0) * 0.05, -arc(0)],
    ids=["standing", "empty", "nan", "creeping", "backwards"],
)
def test_paths_without_ground_ahead_leave_the_frame_as_it_is(path):
    frame = gray_frames()[0]
    assert np.array_equal(draw_path(frame, path, DEMO), frame)
    assert top_down(path, (60, 60), 30.0).shape == (60, 60, 3)


def test_a_waypoint_is_a_dot_around_it_twice_as_wide_as_high():
    drawn = draw_path(np.zeros((144, 256, 3), np.uint8), np.array([[4.0, 0.5]]), DEMO, color=(255, 0, 0), scale=6)
    rows, columns = np.nonzero(drawn[..., 1] > 165)  # which are brighter than the ribbon's sides
    middle = project(np.array([[4.0, 0.5]]), DEMO, (6 * 256, 6 * 144))[0]
    assert [columns.mean() + 0.5, rows.mean() + 0.5] == pytest.approx(middle, abs=1)
    width, height = np.ptp(columns) + 1, np.ptp(rows) + 1
    assert height > 4
    assert width == pytest.approx(2 * height, abs=3)


@pytest.mark.slow
@given(
    points=st.lists(st.tuples(st.floats(-60, 60), st.floats(-60, 60)), max_size=8),
    pitch=st.floats(-1.0, 1.0),
)
def test_any_path_can_be_drawn(points, pitch):
    path = np.array(points, float).reshape(-1, 2)
    camera = Camera(fov_degrees=75.0, height_meters=1.4, pitch_radians=pitch)
    assert draw_path(gray_frames(1, 64, 36)[0], path, camera).shape == (36, 64, 3)
    assert top_down(path, (40, 50), 20.0).shape == (50, 40, 3)


def test_the_map_has_ahead_up_and_left_left():
    def path_pixels(path: np.ndarray) -> np.ndarray:
        shown = top_down(path, (120, 120), 40.0, color=(255, 0, 0)).astype(int)
        return np.argwhere((shown[..., 0] > 200) & (shown[..., 1] < 60))

    straight, left = path_pixels(arc(0)), path_pixels(arc(0.04))
    assert np.abs(straight[:, 1] - 59.5).max() <= 2
    # 30 of 40 m ahead, with 6.6 m below the car's middle: 46.6 m on 120 pixels.
    assert straight[:, 0].min() == pytest.approx(120 * 10 / 46.6, abs=2)
    assert left[:, 1].min() < 30
    assert left[:, 1].max() <= 62


def test_side_by_side_keeps_the_pictures_and_makes_even_sizes():
    left, right = gray_frames(2, 101, 55), gray_frames(2, 101, 55) + 100
    both = side_by_side(left, right, ("a", "b"))
    assert both.shape == (2, 56, 206, 3)
    assert (both[:, 40:55, :101] == 90).all()
    assert (both[:, 40:55, 105:] == 190).all()
    assert (both[:, 8:25, 8:20] != 90).any()
    with pytest.raises(ValueError, match="one shape"):
        side_by_side(left, right[:1], ("a", "b"))


def test_a_label_s_plate_lets_the_picture_through():
    black, white = np.zeros((1, 60, 120, 3), np.uint8), np.full((1, 60, 120, 3), 255, np.uint8)
    both = side_by_side(black, white, ("label", "label"))[0].astype(int)
    apart = both[:, 124:] - both[:, :120]
    assert (apart[[0, 59]] == 255).all()
    assert apart.min() == pytest.approx(255 - 190, abs=1)  # the plate's opacity is 190 of 255


@pytest.mark.parametrize(("width", "height"), [(256, 144), (512, 288), (63, 35), (720, 405)])
def test_a_composed_rollout_is_readable_and_fits_h264(tmp_path, width, height):
    frames = gray_frames(4, width, height)
    paths = np.stack([arc(curvature) for curvature in (0, 0.01, 0.02, 0.04)])
    video = compose_rollout(frames, paths, DEMO, num_context=2, fps=10.0)
    assert video.dtype == np.uint8
    assert len(video) == 4
    assert 800 < video.shape[2] < 1500
    write_video(video, tmp_path / "overlay.mp4", fps=10.0)
    panel = (video.shape[2] - 4) // 2
    middle = video[:, 30 : round(panel * height / width)]
    assert (middle[:, :, :panel] == 90).all()
    assert (middle[:, :, panel + 4 :] != 90).any(axis=(1, 2, 3)).all()
    bars = video[:, -40:]
    assert all((bars[index] != bars[index + 1]).any() for index in range(3))


@pytest.mark.parametrize(("length", "shown"), [(5.0, 20.0), (27.5, 30.0), (28.5, 40.0)])
def test_maps_of_a_rollout_show_as_many_tens_of_meters_as_its_longest_path_needs_with_two_to_spare(length, shown):
    frames, paths = gray_frames(2), np.stack([arc(0, 2.0), arc(0, length)])
    video = compose_rollout(frames, paths, DEMO, num_context=1, fps=10.0)
    size = (round(0.24 * 512), round(0.42 * 288))
    right = 512 + 4 + 512 - 8
    for frame, path in zip(video, paths, strict=True):
        assert np.array_equal(frame[8 : 8 + size[1], right - size[0] : right], top_down(path, size, shown))


def test_a_rollout_needs_a_path_for_each_frame_and_some_context():
    frames, paths = gray_frames(3), np.stack([arc(0)] * 3)
    with pytest.raises(ValueError, match="one path for each of 3 frames, got 2"):
        compose_rollout(frames, paths[:2], DEMO, num_context=1, fps=10.0)
    for num_context in (0, 4):
        with pytest.raises(ValueError, match=f"num_context = {num_context}"):
            compose_rollout(frames, paths, DEMO, num_context=num_context, fps=10.0)
