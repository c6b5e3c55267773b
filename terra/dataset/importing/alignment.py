"""Alignment of a drive to the dataset's frame rate: it is cut where it is interrupted, and frames are chosen by time.

    frames of the source   | | | |   | | |      | | | | | |     |: a frame at its own time
                           `stretch' `---'  gap `---------'     a break, a gap, a clock that goes back: a cut
    instants of the dataset|   |       |        |   |   |       each 1 / fps s: the nearest frame, and the action then
                           `--- part ---'       `- part -'      each part becomes one or more episodes

Where the track has a gap (poses, or actions that are logged at a rate), a part ends, too.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import numpy as np
from jaxtyping import Bool, Float64, Int

from terra.actions import ActionTrack
from terra.actions.space import ROUNDING, Values
from terra.dataset.format import FUTURE_SECONDS, num_future_poses
from terra.dataset.importing.source import SourceDrive, VideoFrames
from terra.dataset.losses import Losses, count_of
from terra.dataset.poses import Poses
from terra.errors import DatasetError
from terra.trajectory.checks import MAX_HEADING_JUMP, MAX_POSE_GAP, MAX_SPEED, check_poses, stack_poses

logger = logging.getLogger(__name__)

_INSTANT = 1e-6  # s
_POSE_TOLERANCE = 0.02  # of a frame: poses are not known any longer
_GAP_FRAMES = 2.5  # without a gap_seconds=, a gap is longer than so many frames, of the source or of the dataset
_REGULAR = 0.9  # of the steps of a log that has a row each period, are near it
_MUCH_LONGER = 5.0  # times as long as the frames
_JUMPS = 0.01  # of the poses; if more of them jump, their units or axes are wrong
MIN_FRAMES = 16
"""Stretches of a drive that was cut are left out if they have fewer frames, unless an import says otherwise."""

# A drive may have up to this factor fewer frames per second than the dataset; some of its frames are then used twice.
# KITTI, for example, has 9.6 frames per second and is used at 10.
RATE_TOLERANCE = 1.05


@dataclass(frozen=True, eq=False)
class Part:
    """Frames of a drive without an interruption, at the dataset's frame rate.

    Attributes:
        frame_index: index of the source's frame for each frame of the dataset.
        track: the pose at each frame of the dataset and for 3 s after the last frame; or the values of the action
            space at each frame.
        instants: the time that each frame stands for, by the source's clock.
        others: index of the frame of each further camera, by its name, see `terra.dataset.importing.cameras`.
    """

    frame_index: Int[np.ndarray, " frames"]
    track: Poses | Values
    instants: Float64[np.ndarray, " frames"]
    others: Mapping[str, Int[np.ndarray, " frames"]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Alignment:
    """A drive at the dataset's frame rate: its parts, and what was lost."""

    parts: tuple[Part, ...]
    losses: Losses

    @property
    def frame_index(self) -> Int[np.ndarray, " frames"]:
        """The source's frames of all parts, in order."""
        return np.concatenate([part.frame_index for part in self.parts])


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Frames of the source (their indices) at increasing times, between two cuts; `lap` counts how often the clock went
    back before."""

    index: Int[np.ndarray, " frames"]
    times: Float64[np.ndarray, " frames"]
    lap: int


@dataclass(frozen=True, eq=False)
class _Piece:
    """A track without a gap, from when to when a frame can have it, and whether it is logged at a rate."""

    track: Poses | ActionTrack
    start: float
    end: float
    lap: int
    is_regular: bool = True


def align(
    drive: SourceDrive, fps: float, *, gap_seconds: float | None = None, min_frames: int = MIN_FRAMES
) -> Alignment:
    """Cut a drive where it is interrupted, and take the nearest frame each 1 / fps s, with its pose or its action.

    Poses are interpolated linearly between those of the source, and a frame needs those of the next 3 s. Actions are
    resampled as their space has it (`terra.actions.space`). Numbers that are logged only when they change hold until
    the next row. The last frame needs no action.

    Args:
        drive: the drive.
        fps: frames a second of the dataset.
        gap_seconds: two frames that lie further apart, or two rows of the track, are a gap; None: 2.5 of the source's
            frames, or of the dataset's, if these lie further apart. Poses may lie 3 s apart, and an action that is
            logged only when it changes holds.
        min_frames: a drive that is cut leaves out stretches of fewer frames.

    Raises:
        TrajectoryError: the poses are not the motion of a vehicle.
        DatasetError: the drive is too short, has fewer frames per second than `fps`, or only short stretches.
    """
    period = frame_period(drive, fps)
    gap = gap_of(period, fps, gap_seconds)
    left_out = Counter(drive.left_out)
    stretches = stretches_of(drive, gap, left_out)
    pieces = _pieces(drive, fps, gap)
    if stretches[-1].lap != pieces[-1].lap:
        got = f"{stretches[-1].lap} and {pieces[-1].lap} times"
        raise DatasetError(
            f"{drive.origin}: expected frames and {_kind(drive)} whose clocks go back together, got {got}"
        )
    _doubt_units(drive)
    found: list[Part] = []
    for stretch in stretches:
        parts = [part for piece in pieces if piece.lap == stretch.lap and (part := _part(stretch, piece, period, fps))]
        _count_unknown(drive, stretch, parts, period, fps, left_out)
        found += parts
    parts = found if len(stretches) == len(pieces) == 1 else long_enough(found, min_frames, left_out)
    if not parts:
        raise DatasetError(f"{drive.origin}: {_too_short(drive, found, min_frames)}")
    gaps = [
        b.times[0] - a.times[-1] for a, b in pairwise(stretches) if a.lap == b.lap and b.times[0] - a.times[-1] > gap
    ]
    times = drive.frame_times
    losses = Losses(
        read=len(times) + sum(drive.left_out.values()),
        kept=sum(len(part.frame_index) for part in parts),
        parts=len(parts),
        seconds=sum(len(part.frame_index) for part in parts) / fps,
        read_fps=_steady_rate(times, period),
        repeated=sum(int((np.diff(part.frame_index) == 0).sum()) for part in parts),
        moved_seconds=max(float(np.abs(times[part.frame_index] - part.instants).max()) for part in parts),
        gaps=len(gaps),
        longest_gap=float(max(gaps, default=0.0)),
        left_out={reason: count for reason, count in left_out.items() if count},
        clock=drive.clock,
    )
    return Alignment(tuple(parts), losses)


def shorten(drive: SourceDrive, start: float, end: float | None) -> SourceDrive:
    """The part of a drive from `start` to `end`, in seconds after its first frame; the poses go on for 3 s more.

    Raises:
        DatasetError: fewer than two frames in this part, or a drive whose clock goes back.
    """
    times = drive.frame_times
    if (np.diff(times) < 0).any():
        raise DatasetError(f"{drive.origin}: expected no start= or end= for a drive whose clock goes back, got one")
    first = int(np.searchsorted(times, times[0] + start - _INSTANT))
    last = len(times) if end is None else int(np.searchsorted(times, times[0] + end + _INSTANT, side="right"))
    if last - first < 2:
        expected = f"2 or more frames from {start:g} s to {'the end' if end is None else f'{end:g} s'}"
        raise DatasetError(f"{drive.origin}: expected {expected}, got {times[-1] - times[0]:.1f} s of frames in all")
    logger.info("%s: %d frames before start= and %d after end= left out", drive.origin, first, len(times) - last)
    track = drive.track
    if isinstance(track, Poses):
        since = max(int(np.searchsorted(track.time, times[first], side="right")) - 1, 0)
        until = int(np.searchsorted(track.time, times[last - 1] + FUTURE_SECONDS + 1)) + 1
        track = Poses(**{name: values[since:until] for name, values in vars(track).items()})
    frames = drive.frames
    breaks = tuple(replace(each, frame=each.frame - first) for each in drive.breaks if first < each.frame < last)
    return replace(
        drive,
        track=track,
        frame_times=times[first:last],
        frames=frames.part(first, last) if isinstance(frames, VideoFrames) else lambda: islice(frames(), first, last),
        breaks=breaks,
        # How many frames are missing is known of the whole drive only.
        left_out=drive.left_out if breaks else {},
    )


def cut(track: Poses | Values, num_frames: int, fps: float, most: int) -> list[tuple[int, Poses | Values]]:
    """Cut a drive into parts of nearly equal length, at most `most` frames: (number of frames, track) of each part."""
    num_parts = math.ceil(num_frames / most)
    bounds = [num_frames * part // num_parts for part in range(num_parts + 1)]
    return [(end - start, _rows(track, start, end, fps)) for start, end in pairwise(bounds)]


def long_enough(parts: Sequence[Part], min_frames: int, left_out: Counter[str]) -> list[Part]:
    """The parts of `min_frames` frames or more; those of the others are counted in `left_out`."""
    short = [part for part in parts if len(part.frame_index) < min_frames]
    if short:
        reason = f"in {count_of(len(short), 'stretch', 'es')} of fewer than {min_frames} frames"
        left_out[reason] += sum(int(np.ptp(part.frame_index)) + 1 for part in short)
    return [part for part in parts if len(part.frame_index) >= min_frames]


def part_of(part: Part, start: int, end: int, fps: float) -> Part:
    """The frames `start` to `end` of a part."""
    return Part(part.frame_index[start:end], _rows(part.track, start, end, fps), part.instants[start:end])


def _rows(track: Poses | Values, start: int, end: int, fps: float) -> Poses | Values:
    """The track of the frames `start` to `end`, with the future of the last one; its time starts at 0, as a drive's."""
    if not isinstance(track, Poses):
        return track[start:end]
    rows = slice(start, end + num_future_poses(fps))
    columns = {name: values[rows] for name, values in vars(track).items()}
    columns["time"] = np.arange(rows.stop - rows.start) / fps
    return Poses(**columns)


def gap_of(period: float, fps: float, gap_seconds: float | None) -> float:
    """Seconds beyond which frames that come each `period` have a gap, as `align` has it."""
    return _GAP_FRAMES * max(period, 1 / fps) if gap_seconds is None else gap_seconds


def frame_period(drive: SourceDrive, fps: float) -> float:
    """Seconds between two frames of the source, in the median. Raises DatasetError if these are too many."""
    steps = np.diff(drive.frame_times)
    if not (steps > 0).any():
        raise DatasetError(
            f"{drive.origin}: expected 2 or more frames at increasing times, got {len(drive.frame_times)}"
        )
    period = float(np.median(steps[steps > 0]))
    if fps > RATE_TOLERANCE / period:
        raise DatasetError(f"{drive.origin}: expected fps of at most its frames' rate, {1 / period:.2f}, got {fps:g}")
    return period


def _steady_rate(times: Float64[np.ndarray, " frames"], period: float) -> float:
    """Frames a second without the gaps; a median would be that of rounded times."""
    steps = np.diff(times)
    return float(1 / steps[(steps > 0) & (steps < 1.5 * period)].mean())


def stretches_of(drive: SourceDrive, gap: float, left_out: Counter[str]) -> list[_Stretch]:
    """The frames between breaks, gaps and a clock that goes back; a frame at the time of the one before is left out."""
    times = drive.frame_times
    breaks = {each.frame for each in drive.breaks}
    stretches: list[_Stretch] = []
    kept: list[int] = []
    lap = 0

    def close() -> None:
        if kept:
            index = np.array(kept)
            stretches.append(_Stretch(index, times[index], lap))
            kept.clear()

    for frame in range(len(times)):
        if kept:
            step = times[frame] - times[kept[-1]]
            if step == 0 and frame not in breaks:
                left_out["frames at the time of the one before"] += 1
                continue
            if frame in breaks or step <= 0 or step > gap + _INSTANT:
                close()
                lap += step < 0
        kept.append(frame)
    close()
    return stretches


def _pieces(drive: SourceDrive, fps: float, gap: float) -> list[_Piece]:
    """The track between its gaps, and where the clock goes back. Raises TrajectoryError."""
    track = drive.track
    times = track.time if isinstance(track, Poses) else track.times
    steps = np.diff(times)
    ends = steps < 0
    period = float(np.median(steps[steps > 0])) if (steps > 0).any() else math.inf
    if isinstance(track, Poses):
        ends = ends | (steps > MAX_POSE_GAP) | _jumps(track, drive.origin)
    # A log that is written when something changes has no gaps: what holds, holds on.
    is_regular = len(steps) == 0 or bool((np.abs(steps - period) < period / 2).mean() > _REGULAR)
    if not isinstance(track, Poses) and is_regular:
        ends = ends | (steps > max(gap, _GAP_FRAMES * period) + _INSTANT)
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(times)]
    laps = np.append(0, np.cumsum(steps < 0)).tolist()
    future = num_future_poses(fps) / fps
    pieces: list[_Piece] = []
    for first, last in pairwise(bounds):
        start, end = float(times[first]), float(times[last - 1])
        if not isinstance(track, Poses):
            part = replace(track, times=times[first:last], values=track.values[first:last])
            # The last row holds as long as rows do, unless the next one comes before.
            until = (
                end + period
                if last == len(times) or laps[last] != laps[first]
                else min(end + period, float(times[last]))
            )
            pieces.append(_Piece(part, start, until, laps[first], is_regular))
        elif last - first > 1:
            poses = Poses(**{name: values[first:last] for name, values in vars(track).items()})
            rows = stack_poses(poses.time, np.column_stack([poses.x, poses.y]), poses.heading, drive.origin)
            check_poses(rows, drive.origin, _locate(drive.origin, first))
            pieces.append(_Piece(poses, start, end - future, laps[first]))
    if not pieces:
        raise DatasetError(f"{drive.origin}: expected 2 or more poses within {MAX_POSE_GAP:g} s, got none")
    return pieces


def _jumps(poses: Poses, origin: str) -> Bool[np.ndarray, " steps"]:
    """Where a pose can't follow the one before; nowhere, if there is more than a few: then the poses are wrong."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        speeds = np.hypot(np.diff(poses.x), np.diff(poses.y)) / np.diff(poses.time)
        turns = np.abs(np.mod(np.diff(poses.heading) + math.pi, math.tau) - math.pi)
        jumps = (speeds > MAX_SPEED) | (turns > MAX_HEADING_JUMP)
    if not 0 < jumps.sum() <= max(2, _JUMPS * len(jumps)):
        return np.zeros_like(jumps)
    row = int(np.argmax(jumps))
    logger.warning(
        "%s: pose %d: %.0f m/s and %.0f degrees from the one before, no car's motion: cut there%s",
        *(origin, row + 1, speeds[row], math.degrees(turns[row])),
        "" if jumps.sum() == 1 else f" and at {jumps.sum() - 1} more",
    )
    return jumps


def _doubt_units(drive: SourceDrive) -> None:
    """Say it where a log of actions goes on for much longer than the frames, as one in milliseconds does."""
    if isinstance(drive.track, Poses) or len(drive.track.times) < 2:
        return
    logged, seen = float(np.ptp(drive.track.times)), float(np.ptp(drive.frame_times))
    if logged > _MUCH_LONGER * seen:
        logger.warning(
            "%s: %.0f s of actions beside %.1f s of frames: are the times in seconds?", drive.origin, logged, seen
        )


def _locate(origin: str, first: int) -> Callable[[int], str]:
    return lambda row: f"{origin}: pose {first + row}"


def _part(stretch: _Stretch, piece: _Piece, period: float, fps: float) -> Part | None:
    """The frames of a stretch that have a track; None if these are too few."""
    is_driven = isinstance(piece.track, Poses)
    tolerance = _POSE_TOLERANCE / fps if is_driven else ROUNDING * min(period, 1 / fps)
    times = stretch.times
    # On a frame, so that at the source's own rate each one is shown once.
    known = times[times >= piece.start - tolerance]
    if not len(known):
        return None
    start = float(known[0])
    end = min(float(times[-1]), piece.end)
    num_frames = math.floor((end + tolerance - start) * fps) + 1
    if len(times) < 2 or num_frames < (1 if is_driven else 2) or start > times[-1]:
        return None
    instants = start + np.arange(num_frames) / fps
    index = nearest(times, instants)
    return Part(stretch.index[index], _resampled(piece, instants, fps), instants)


def _resampled(piece: _Piece, instants: Float64[np.ndarray, " frames"], fps: float) -> Poses | Values:
    track = piece.track
    if isinstance(track, ActionTrack):
        until = float(instants[-1]) + 1 / fps
        return track.space.resampled(track.times, track.values, instants, until, holds=not piece.is_regular)
    known = instants[0] + np.arange(len(instants) + num_future_poses(fps)) / fps
    columns = {name: np.interp(known, track.time, values) for name, values in vars(track).items()}
    columns["time"] = np.arange(len(known)) / fps
    return Poses(**columns)


def _count_unknown(
    drive: SourceDrive, stretch: _Stretch, parts: list[Part], period: float, fps: float, left_out: Counter[str]
) -> None:
    """Count the frames of a stretch that no part reaches, because nothing is known of what moved there."""
    kind = _kind(drive)
    after = f"less than {FUTURE_SECONDS:g} s of poses follow" if kind == "poses" else "after the last action"
    if not parts:
        left_out["alone between gaps" if len(stretch.times) == 1 else f"without {kind}"] += len(stretch.times)
        return
    left_out[f"before the first {kind[:-1]}"] += int((stretch.times < parts[0].instants[0] - period / 2).sum())
    for part, later in [*pairwise(parts), (parts[-1], None)]:
        unreached = stretch.times > part.instants[-1] + 1 / fps - period / 2
        if later is None:
            left_out[after] += int(unreached.sum())
        else:
            left_out[f"without {kind}"] += int((unreached & (stretch.times < later.instants[0] - period / 2)).sum())


def _kind(drive: SourceDrive) -> str:
    return "poses" if isinstance(drive.track, Poses) else "actions"


def _too_short(drive: SourceDrive, found: list[Part], min_frames: int) -> str:
    if found:
        most = max(len(part.frame_index) for part in found)
        return f"expected a stretch of min_frames={min_frames} or more, got at most {most} frames between interruptions"
    times = drive.frame_times
    expected = "frames with 3 s of poses after them"
    known = drive.track.time if isinstance(drive.track, Poses) else drive.track.times
    if not isinstance(drive.track, Poses):
        expected = "two frames with an action between them"
    covers = f"{np.ptp(times):.1f} s of frames, {np.ptp(known):.1f} s of {_kind(drive)}"
    if known[0] > times.max() or known.max() < times[0]:
        covers = f"frames from {times[0]:.1f} to {times.max():.1f} s, {_kind(drive)} from {known[0]:.1f} to"
        covers += f" {known.max():.1f} s: clocks that do not meet"
    return f"expected {expected}, got {covers}"


def nearest(times: np.ndarray, instants: np.ndarray) -> Int[np.ndarray, " instants"]:
    """Indices of the times that are nearest to the instants."""
    after = np.clip(np.searchsorted(times, instants), 1, len(times) - 1)
    earlier = instants - times[after - 1] <= times[after] - instants
    return after - earlier
