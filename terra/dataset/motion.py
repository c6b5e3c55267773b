"""Does a drive's motion make sense: do axes, signs and units agree with each other?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

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
    """What the poses of one drive say.

    Attributes:
        seconds: how long the poses are.
        rate: poses a second, the median.
        largest_gap: seconds between two poses.
        metres: the way driven.
        top_speed: the fastest move between two poses, m/s.
        misalignment: radians from heading to direction of motion, the median of its size while moving; NaN if never.
        turn_agreement: correlation of the turning of the heading with that of the motion, in [-1, 1]: -1 means a
            mirrored axis or a clockwise heading; NaN if there is no turn.
        speed_error: the stored speed against the moves, the median share; NaN if the car never moves.
        warnings: what is implausible, a line each.
    """

    seconds: float
    rate: float
    largest_gap: float
    metres: float
    top_speed: float
    misalignment: float
    turn_agreement: float
    speed_error: float
    warnings: tuple[str, ...]


def check_motion(poses: Poses, name: str) -> MotionReport:
    """Compare positions, headings, speeds and times with each other; `name` begins each warning."""
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
    # Backwards is along the heading too.
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
        metres=float((rates * gaps).sum()),
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
    """Correlation, about zero, of both turning rates where the car moves and turns."""
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


def draw_paths(drives: Sequence[Poses], side: int = 640) -> UInt8[np.ndarray, "side side 3"]:
    """All drives' paths from one start, each turned so that it begins straight up; left is left. One colour a drive."""
    paths = [_from_start(poses) for poses in drives]
    reach = max([float(np.abs(path).max()) for path in paths] + [1.0]) * 1.05
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    step = 10.0 ** math.floor(math.log10(reach))
    for line in np.arange(-math.floor(reach / step), math.floor(reach / step) + 1) * step:
        at = side / 2 + line / reach * side / 2
        draw.line([(at, 0), (at, side)], fill=(225, 225, 225))
        draw.line([(0, at), (side, at)], fill=(225, 225, 225))
    for number, path in enumerate(paths):
        color = tuple(int(127 + 100 * math.cos(2.4 * number + shift)) for shift in (0.0, 2.1, 4.2))
        points = np.stack([side / 2 - path[:, 1] / reach * side / 2, side / 2 - path[:, 0] / reach * side / 2], axis=1)
        draw.line([tuple(point) for point in points.tolist()], fill=color, width=2)
    draw.text((4, 4), f"grid {step:g} m, start in the middle heading up", fill="black")
    return np.asarray(image)


def _from_start(poses: Poses) -> Float[np.ndarray, "poses 2"]:
    """[forward, left] of the first pose's heading, in metres."""
    x, y = poses.x - poses.x[0], poses.y - poses.y[0]
    cos, sin = math.cos(poses.heading[0]), math.sin(poses.heading[0])
    return np.stack([x * cos + y * sin, y * cos - x * sin], axis=1)
