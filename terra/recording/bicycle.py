"""A kinematic bicycle that follows a path by pure pursuit: how every recorded car moves."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from terra.recording.traffic import STEP_SECONDS

WHEELBASE = 2.7
LATERAL_ACCELERATION = 2.8
CURVE_BRAKING = 2.2
STANDSTILL_SPEED = 0.03  # m/s; a braking car that is slower is set to 0
MAX_STEER = 0.6
MAX_STEER_STEP = 0.08
NUM_SUBSTEPS = 5


def roll(
    pose: tuple[float, float, float], speeds: tuple[float, float], steers: tuple[float, float]
) -> tuple[float, float, float]:
    """The pose (x, y in m, heading in rad) of a kinematic bicycle's rear axle 0.1 s after `pose`.

    Speed (m/s) and steering angle (rad) change linearly between their two values.
    """
    x, y, heading = pose
    for k in range(NUM_SUBSTEPS):
        share, seconds = (k + 0.5) / NUM_SUBSTEPS, STEP_SECONDS / NUM_SUBSTEPS
        distance = (speeds[0] + share * (speeds[1] - speeds[0])) * seconds
        turned = distance * math.tan(steers[0] + share * (steers[1] - steers[0])) / WHEELBASE
        x += distance * math.cos(heading + turned / 2)
        y += distance * math.sin(heading + turned / 2)
        heading += turned
    return x, y, heading


class Path:
    """A line to drive along: `points` (m) at the positions `along` (m, increasing)."""

    def __init__(self, points: Float[np.ndarray, "points 2"], along: Float[np.ndarray, " points"]) -> None:
        self._points, self._along = points, along
        steps = np.gradient(self._points, self._along, axis=0)
        self._headings = np.unwrap(np.arctan2(steps[:, 1], steps[:, 0]))
        curvature = np.abs(np.gradient(self._headings, self._along))
        self._limits = np.sqrt(LATERAL_ACCELERATION / np.maximum(curvature, 1e-3))

    def at(self, position: float) -> tuple[float, float, float]:
        """x, y (m) and heading (rad) at `position` meters along the path."""
        x = float(np.interp(position, self._along, self._points[:, 0]))
        y = float(np.interp(position, self._along, self._points[:, 1]))
        return x, y, float(np.interp(position, self._along, self._headings))

    def allowed_speed(self, position: float) -> float:
        """The highest speed (m/s) from which the car can still slow down for every curve within 60 m."""
        first, last = np.searchsorted(self._along, [position, position + 60.0])
        ahead = self._along[first:last] - position
        return float(np.sqrt(self._limits[first:last] ** 2 + 2 * CURVE_BRAKING * ahead).min(initial=60.0))


class Bicycle:
    """A car on a path, moved in steps of 0.1 s.

    Attributes:
        pose: x, y (m) and heading (rad, counter-clockwise from +x, never wrapped) of the rear axle, exact.
        speed: m/s.
        acceleration: of the last step, m/s^2.
        position: meters along the path.
    """

    def __init__(self, path: Path, position: float, speed: float) -> None:
        self.pose, self.position, self.speed, self.acceleration = path.at(position), position, speed, 0.0
        self._offset = self._steer = 0.0

    def move(
        self, path: Path, acceleration: float, wanted_offset: float, aside: Callable[[float], float] | None = None
    ) -> None:
        """Move by 0.1 s along `path`.

        Args:
            path: the path, along which `position` is counted.
            acceleration: m/s^2.
            wanted_offset: meters to the left of the path, which the car slowly takes on.
            aside: gives further meters to the left at a position.
        """
        speed = max(0.0, self.speed + acceleration * STEP_SECONDS)
        if acceleration < 0 and speed < STANDSTILL_SPEED:
            speed = 0.0
        slew = 0.1 * min(1.0, self.speed / 5.0)
        self._offset += min(slew, max(-slew, wanted_offset - self._offset))
        steer = self._steer
        if self.speed > 0.1:
            steer += min(MAX_STEER_STEP, max(-MAX_STEER_STEP, self._pursue(path, aside) - steer))
        self.pose = roll(self.pose, (self.speed, speed), (self._steer, steer))
        self.acceleration = (speed - self.speed) / STEP_SECONDS
        ahead = self.position + (self.speed + speed) / 2 * STEP_SECONDS
        self.speed, self._steer = speed, steer
        x, y, heading = path.at(ahead)
        self.position = ahead + (self.pose[0] - x) * math.cos(heading) + (self.pose[1] - y) * math.sin(heading)

    def _pursue(self, path: Path, aside: Callable[[float], float] | None) -> float:
        """The steering angle (rad) of the arc to a point of the wanted path one look-ahead distance away."""
        ahead = self.position + min(12.0, max(4.5, 0.9 * self.speed))
        x, y, heading = path.at(ahead)
        own_x, own_y, own_heading = self.pose
        offset = self._offset + (aside(ahead) if aside else 0.0)
        dx, dy = x - offset * math.sin(heading) - own_x, y + offset * math.cos(heading) - own_y
        sideways = -dx * math.sin(own_heading) + dy * math.cos(own_heading)
        angle = math.atan(2 * WHEELBASE * sideways / (dx * dx + dy * dy))
        return min(MAX_STEER, max(-MAX_STEER, angle))
