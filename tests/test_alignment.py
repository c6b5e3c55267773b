"""Where a drive is cut, and which frames are taken: by the times of frames and track."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny_driving import drive_poses

from terra.actions import ActionTrack, Keys, TableSpace, Vector
from terra.dataset.importing.alignment import Alignment, align, shorten
from terra.dataset.importing.source import Break, SourceDrive
from terra.errors import DatasetError


def played(frame_times, times=None, space: TableSpace | None = None, **facts) -> SourceDrive:
    """A drive whose frames tell their number, and whose action tells its time."""
    times = np.asarray(frame_times if times is None else times, np.float64)
    space = space or Vector(names=["t"], units=["s"], low=[-1e6], high=[1e6])
    track = ActionTrack(space, times, times[:, None], "d.csv")
    return SourceDrive("d", track, np.asarray(frame_times, np.float64), lambda: iter(()), None, "d.csv", **facts)


def indices_of(alignment: Alignment) -> list[list[int]]:
    return [part.frame_index.tolist() for part in alignment.parts]


def test_a_drive_is_cut_at_gaps_and_says_so():
    times = np.delete(np.arange(60) / 10, slice(29, 34))
    aligned = align(played(times), 10.0, min_frames=10)
    assert indices_of(aligned) == [list(range(29)), list(range(29, 55))]
    for part in aligned.parts:
        np.testing.assert_allclose(part.track[:, 0], times[part.frame_index], atol=1e-9)
    assert str(aligned.losses) == "55 frames read, 55 kept (5.5 s) in 2 stretches, 1 gap cut out, the longest of 0.60 s"
    assert indices_of(align(played(times), 10.0, min_frames=27)) == [list(range(29))]
    assert "26 left out: in 1 stretch of fewer than 27 frames" in str(align(played(times), 10.0, min_frames=27).losses)
    with pytest.raises(DatasetError, match=r"expected a stretch of min_frames=40 or more, got at most 29 frames"):
        align(played(times), 10.0, min_frames=40)
    bridged = align(played(times), 10.0, gap_seconds=1.0)
    assert len(bridged.parts) == 1
    assert bridged.losses.repeated == 5
    assert "5 of these shown twice" in str(bridged.losses)


def test_a_missing_frame_is_no_gap_but_is_told():
    aligned = align(played(np.delete(np.arange(60) / 10, [30])), 10.0)
    assert [len(part.frame_index) for part in aligned.parts] == [60]
    assert aligned.losses.repeated == 1
    assert not aligned.losses.is_clean


def test_a_drive_is_cut_at_breaks_and_where_its_clock_goes_back():
    times = np.arange(60) / 10
    aligned = align(played(times, breaks=(Break(20, "deleted records"),), left_out={"deleted records": 40}), 10.0)
    assert indices_of(aligned) == [list(range(20)), list(range(20, 60))]
    assert str(aligned.losses) == "100 frames read, 60 kept (6.0 s) in 2 stretches, 40 left out: deleted records"
    back = np.where(np.arange(60) < 25, times + 1000, times)
    aligned = align(played(back), 10.0)
    assert indices_of(aligned) == [list(range(25)), list(range(25, 60))]
    for part in aligned.parts:
        np.testing.assert_allclose(part.track[:, 0], back[part.frame_index], atol=1e-9)
    with pytest.raises(DatasetError, match="expected frames and actions whose clocks go back together, got 1 and 0"):
        align(played(back, times + 990), 10.0)
    with pytest.raises(DatasetError, match="expected no start= or end= for a drive whose clock goes back"):
        shorten(played(back), 1.0, None)


def test_frames_of_one_time_are_left_out_and_counted():
    times = np.repeat(np.arange(30) / 10, np.where(np.arange(30) == 7, 3, 1))
    aligned = align(played(times, np.arange(30) / 10), 10.0)
    assert indices_of(aligned) == [[*range(8), *range(10, 32)]]
    assert "2 left out: frames at the time of the one before" in str(aligned.losses)


@pytest.mark.parametrize("space", [None, Keys(names=["go"])])
def test_actions_of_a_regular_log_are_not_made_up_in_its_gap(space):
    times = np.arange(100) / 10
    logged = times[(times < 3) | (times > 6)]
    drive = played(times, logged)
    if space is not None:
        drive = replace(drive, track=ActionTrack(space, logged, (logged < 2)[:, None].astype(float), "d.csv"))
    aligned = align(drive, 10.0)
    assert indices_of(aligned) == [list(range(31)), list(range(61, 100))]
    assert "30 left out: without actions" in str(aligned.losses)


def test_a_key_that_is_logged_when_it_changes_holds():
    times, changes = np.arange(100) / 10, np.array([0.0, 0.31, 4.0, 4.12, 9.0])
    track = ActionTrack(Keys(names=["go"]), changes, np.array([[0.0], [1.0], [0.0], [1.0], [0.0]]), "d.csv")
    (part,) = align(replace(played(times), track=track), 10.0).parts
    down = (times + 0.1 > 0.31 + 1e-9) & (times < 9.0 - 1e-9) & (np.abs(times - 4.0) > 1e-9)
    assert part.track[:, 0].tolist() == down.astype(float).tolist()


@settings(max_examples=60)
@given(count=st.integers(2, 900), fps=st.sampled_from([5.0, 10.0, 15.0, 24.0, 25.0, 29.97, 30.0, 50.0, 60.0]))
def test_rounded_times_cost_no_frame(count, fps):
    exact = np.arange(count) / fps
    for times in (exact.astype(np.float32).astype(np.float64), exact.round(3), exact + 1.7e9, exact.round(6)):
        assert indices_of(align(played(times), fps)) == [list(range(count))]


def test_poses_that_jump_once_are_cut_there(caplog):
    poses, times = drive_poses(160), np.arange(160) / 10
    jumping = replace(poses, x=poses.x + 99 * (np.arange(len(poses.x)) >= 60))
    aligned = align(SourceDrive("d", jumping, times, lambda: iter(()), None, "d.csv"), 10.0)
    assert [part.frame_index[0] for part in aligned.parts] == [0, 60]
    assert [len(part.frame_index) for part in aligned.parts] == [30, 100]
    assert "no car's motion: cut there" in caplog.text
