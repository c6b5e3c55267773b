"""The picture of actions over time: where its lines, bars and frames stand."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from decoder.video import VideoError
from terra.actions import ActionTrack, Choice, Keys, Vector
from terra.dataset.action_pictures import Curve, draw_curves

SPACE = Vector(names=["steering"], units=["rad"], low=[-2], high=[2])
BLUE = (0, 84, 166)
LEFT, RIGHT = 150, 900  # pixels of the plots' ends


def rows_of(picture: np.ndarray, x: int, color: tuple[int, int, int] = BLUE) -> list[int]:
    return np.flatnonzero((picture[:, x] == color).all(axis=1)).tolist()


def at(time: float, seconds: float) -> int:
    return round(LEFT + time / seconds * (RIGHT - LEFT))


def curve(values: list[float], **changes) -> Curve:
    times = np.arange(len(values) + 1) / 10
    return Curve("drive", SPACE, times, np.array(values)[:, None], 10.0, **changes)


def frames(count: int) -> Iterator[np.ndarray]:
    for index in range(count):
        yield np.full((9, 16, 3), 10 * index, np.uint8)


def test_a_line_lies_above_zero_where_the_value_is_positive():
    picture = draw_curves([curve([1.0] * 10 + [0.0] * 10 + [-0.5] * 10)])
    positive, zero, negative = (np.mean(rows_of(picture, at(time, 3.0))) for time in (0.5, 1.5, 2.5))
    assert positive < zero < negative
    assert (zero - positive) / (negative - zero) == pytest.approx(2, abs=0.15)
    assert rows_of(picture, at(0.55, 3.0), (150, 150, 150)) == [pytest.approx(zero, abs=1)]  # the line of zero


def test_all_recordings_have_one_range_and_one_scale_of_time():
    picture = draw_curves([curve([1.0] * 20), curve([0.5] * 10)])
    first, second = np.split(picture, 2)
    zero = rows_of(first, at(1.95, 2.0), (150, 150, 150))
    tall, low = (np.mean(zero) - np.mean(rows_of(part, at(0.5, 2.0))) for part in (first, second))
    assert tall / low == pytest.approx(2, abs=0.1)
    assert rows_of(first, at(1.5, 2.0))
    assert not rows_of(second, at(1.5, 2.0))  # which ended at 1 s


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (Keys(names=["forward", "left"]), [[1, 0]] * 10 + [[1, 1]] * 5 + [[0, 0]] * 5),
        (Choice(names=["forward", "left"]), [[0]] * 10 + [[1]] * 5 + [[0]] * 5),
    ],
)
def test_bars_are_filled_while_keys_are_pressed(space, values):
    picture = draw_curves([Curve("game", space, np.arange(21) / 10, np.array(values, float))])
    colored = np.ptp(picture.astype(int), axis=2) > 30
    filled = [[bool(colored[row, at(time, 2.0)]) for time in (0.5, 1.25, 1.75)] for row in (20 + 7, 20 + 15 + 7)]
    assert filled == space.rows(np.array(values, float))[[5, 12, 17], 0].T.astype(bool).tolist()


def test_frames_stand_at_their_times():
    picture = draw_curves([curve([0.1] * 20, frames=lambda: frames(21))])
    row = picture[40]
    edges = [LEFT + index * 94 for index in range(8)]
    shown = [int(row[edge + 40, 0]) / 10 for edge in edges]
    assert shown == [round(10 * (edge - LEFT) / (RIGHT - LEFT) * 2.0) for edge in edges]


def test_a_damaged_video_takes_no_plot_away():
    def damaged() -> Iterator[np.ndarray]:
        yield from frames(2)
        raise VideoError("x.mp4: expected a video, got half of it")

    values = [1.0] * 10 + [-1.0] * 10
    assert rows_of(draw_curves([curve(values, frames=damaged)]), at(0.5, 2.0))


def test_of_a_long_recording_the_first_30_s_are_drawn():
    values = np.repeat([0.5, 1.0], [300, 3000])[:, None]
    long = Curve("long", SPACE, np.arange(3301) / 10, values)
    picture = draw_curves([long])
    assert np.array_equal(rows_of(picture, at(1, 30.0)), rows_of(picture, at(29, 30.0)))


def test_actions_of_a_file_start_at_zero_and_the_last_one_is_held():
    track = ActionTrack(SPACE, np.array([5.0, 5.5, 6.0]), np.array([[0.1], [0.2], [0.3]]), "a.csv")
    assert Curve.of_track("a", track).times.tolist() == [0.0, 0.5, 1.0, 1.5]
    single = ActionTrack(SPACE, np.array([5.0]), np.array([[0.1]]), "a.csv")
    assert math.isinf(single.end)
    assert draw_curves([Curve.of_track("a", single)]).shape[1] == 960


def test_frames_of_a_source_stand_at_their_own_times():
    # Ten frames in the first second, then one a second; actions by the same clock, from 100 s on.
    seconds = np.concatenate([np.arange(10) / 10, np.arange(1.0, 11.0)])
    track = ActionTrack(SPACE, 100 + np.arange(11.0), np.linspace(-1, 1, 11)[:, None], "a.csv")
    frames = lambda: iter(np.full((46, 92, 3), 10 * index, np.uint8) for index in range(20))  # noqa: E731
    picture = draw_curves([Curve.of_track("a", track, frames, 100 + seconds)])
    whole, left, right, apart = 11.0, 150, 60, 94  # s that are drawn, and pixels of the layout
    for number in range(8):
        time = number * apart / (960 - left - right) * whole
        nearest = int(np.abs(seconds - time).argmin())
        np.testing.assert_array_equal(picture[30, left + apart * number + 46], [10 * nearest] * 3)
