"""Plausibility of a drive's motion: whether its axes, signs and units agree with one another."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from terra.dataset.poses import Poses

MOVING_SPEED = 1.0  # m/s; a slower car's direction of motion is mostly noise
MAX_MISALIGNMENT = math.radians(15.0)
MAX_SPEED_ERROR = 0.25  # share of the speed
MAX_SPEED = 60.0  # m/s
MAX_LATERAL = 12.0  # m/s^2, beyond any tyre on a road
MIN_TURNING = math.radians(2.0)  # rad/s; slower turning says nothing about signs
_MIN_ROWS = 10


@dataclass(frozen=True)
class MotionReport:
    """Statistics of the poses of one drive.

    Attributes:
        seconds: time from the first pose to the last.
        rate: median number of poses per second.
        largest_gap: longest time between two consecutive poses, in seconds.
        meters: distance driven.
        top_speed: highest speed between two consecutive poses, m/s.
        misalignment: median angle (radians) between heading and direction of motion while the car moves; NaN if it
            never moves.
        turn_agreement: correlation, in [-1, 1], of the heading's turning rate with that of the direction of motion; -1
            means a mirrored axis or a clockwise heading; NaN if there is no turn.
        speed_error: median relative error of the stored speed against the positions; NaN if the car never moves.
        warnings: one line for each implausible value.
    """

    seconds: float
    rate: float
    largest_gap: float
    meters: float
    top_speed: float
    misalignment: float
    turn_agreement: float
    speed_error: float
    warnings: tuple[str, ...]


def check_motion(poses: Poses, name: str) -> MotionReport:
    """Compare positions, headings, speeds and times with one another; each warning begins with `name`."""
    gaps = np.diff(poses.time)
    if len(gaps) < 1 or (gaps <= 0).any():
        nan = math.nan
        warning = f"{name}: expected 2 or more poses at increasing times, got {len(poses.time)}"
        return MotionReport(0.0, nan, nan, 0.0, nan, nan, nan, nan, (warning,))
    moves = np.stack([np.diff(poses.x), np.diff(poses.y)], axis=1)
    rates = np.hypot(moves[:, 0], moves[:, 1]) / gaps
    heading = np.unwrap(poses.heading)
    middle = (heading[1:] + heading[:-1]) / 2
    moving = rates > MOVING_SPEED
    # A car that reverses also moves along its heading.
    backwards = (poses.speed[1:] + poses.speed[:-1]) < 0
    course = np.arctan2(moves[:, 1], moves[:, 0]) + np.pi * backwards
    off = np.abs(np.mod(course - middle + np.pi, 2 * np.pi) - np.pi)[moving]
    stored = np.abs(poses.speed[1:] + poses.speed[:-1]) / 2
    errors = (np.abs(stored - rates) / np.maximum(rates, MOVING_SPEED))[moving]
    turn_agreement = _turn_agreement(poses.time, course, heading, moving)
    report = MotionReport(
        seconds=float(poses.time[-1] - poses.time[0]),
        rate=float(1 / np.median(gaps)),
        largest_gap=float(gaps.max()),
        meters=float((rates * gaps).sum()),
        top_speed=float(rates.max()),
        misalignment=float(np.median(off)) if len(off) >= _MIN_ROWS else math.nan,
        turn_agreement=turn_agreement,
        speed_error=float(np.median(errors)) if len(errors) >= _MIN_ROWS else math.nan,
        warnings=(),
    )
    lateral = float((rates * np.abs(np.diff(heading)) / gaps).max())
    return MotionReport(**{**vars(report), "warnings": tuple(f"{name}: {line}" for line in _warnings(report, lateral))})


def _turn_agreement(
    times: Float[np.ndarray, " poses"],
    course: Float[np.ndarray, " moves"],
    heading: Float[np.ndarray, " poses"],
    moving: np.ndarray,
) -> float:
    """Correlation (without subtracting means) of the two turning rates while the car moves and turns."""
    middle = (times[1:] + times[:-1]) / 2
    spans = np.diff(middle)
    course_rate = np.mod(np.diff(course) + np.pi, 2 * np.pi) - np.pi
    heading_rate = np.diff((heading[1:] + heading[:-1]) / 2)
    used = moving[1:] & moving[:-1] & (np.abs(heading_rate / spans) > MIN_TURNING)
    if used.sum() < _MIN_ROWS:
        return math.nan
    one, other = (course_rate / spans)[used], (heading_rate / spans)[used]
    return float((one * other).sum() / max(math.sqrt((one**2).sum() * (other**2).sum()), 1e-12))


def _warnings(report: MotionReport, lateral: float) -> list[str]:
    found = []
    if report.misalignment > MAX_MISALIGNMENT:
        found.append(
            f"the car moves {math.degrees(report.misalignment):.0f} degrees off its heading"
            " (are axes swapped, or headings from north, clockwise or in degrees?)"
        )
    if report.turn_agreement < 0:
        found.append(
            "the heading turns left where the car turns right (is an axis mirrored, or the heading clockwise?)"
        )
    if report.speed_error > MAX_SPEED_ERROR:
        found.append(f"the stored speed is {report.speed_error:.0%} off the moves (another unit, or another clock?)")
    if report.top_speed > MAX_SPEED:
        found.append(f"the car moves at {report.top_speed:.0f} m/s (are positions in another unit, or does it jump?)")
    if lateral > MAX_LATERAL:
        found.append(f"a lateral acceleration of {lateral:.0f} m/s^2 (does the heading jump?)")
    if report.largest_gap > 3 / report.rate:
        found.append(f"no pose for {report.largest_gap:.2f} s, at {report.rate:.1f} a second")
    return found
