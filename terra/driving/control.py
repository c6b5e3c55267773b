"""From what a driver says to actions: a car that turns its wheels, or one that follows a path.

Axes are the car's own, x forward and y left, or those that it had in the first frame of a rollout ("world").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Float64

from terra.errors import TrajectoryError
from terra.trajectory import Trajectory

WHEELBASE = 2.7  # m, a middle-sized car's
MAX_STEERING = 1.0  # rad at the wheels; cars reach about 0.6
MAX_SPEED = 80.0  # m/s, as in terra.trajectory.checks
MAX_PATH_POINTS = 512
_START_METERS = 0.5  # a path's first point, if it is one of "now", lies as near to the car as this
_TANGENT_SECONDS = 0.1  # over which a path's direction is measured, before and behind
_STANDING_METERS = 0.01  # a car that moves less keeps its heading

Points = Float64[np.ndarray, "points 2"]
Times = Float64[np.ndarray, " points"]


@dataclass(frozen=True)
class Pose:
    """Where the car is, in meters, and its heading in radians (counter-clockwise), in the world's axes."""

    x: float = 0.0
    y: float = 0.0
    heading: float = 0.0

    def to_world(self, points: Points) -> Points:
        """Points given in the car's axes."""
        cosine, sine = math.cos(self.heading), math.sin(self.heading)
        forward, left = points[..., 0], points[..., 1]
        turned = np.stack([forward * cosine - left * sine, forward * sine + left * cosine], axis=-1)
        return turned + np.array([self.x, self.y])

    def to_ego(self, points: Points) -> Points:
        """Points given in the world's axes."""
        cosine, sine = math.cos(self.heading), math.sin(self.heading)
        ahead, left = points[..., 0] - self.x, points[..., 1] - self.y
        return np.stack([ahead * cosine + left * sine, left * cosine - ahead * sine], axis=-1)


@dataclass(frozen=True)
class Steering:
    """Wheels held at `angle` (rad, left positive) at `speed` (m/s): an arc.

    The kinematic bicycle model, seen from the middle of the rear axle: yaw rate = speed tan(angle) / wheelbase
    (P. Polack et al., The kinematic bicycle model, IV 2017).
    """

    angle: float
    speed: float

    def ahead(self, pose: Pose, elapsed: float, times: Times) -> Points:
        """Where the car will be after `times` seconds, in its own axes."""
        distance = self.speed * times
        turn = distance * math.tan(self.angle) / WHEELBASE
        # sin(turn) / turn and (1 - cos(turn)) / turn, which are whole at 0 too.
        return np.stack([distance * np.sinc(turn / np.pi), distance * np.sin(turn / 2) * np.sinc(turn / math.tau)], -1)

    def move(self, pose: Pose, elapsed: float, seconds: float) -> Pose:
        """Where it is after some seconds."""
        (point,) = pose.to_world(self.ahead(pose, elapsed, np.array([seconds])))
        turn = self.speed * seconds * math.tan(self.angle) / WHEELBASE
        return Pose(float(point[0]), float(point[1]), pose.heading + turn)


@dataclass(frozen=True, eq=False)
class Path:
    """A path that stays where it is in the world while the car follows it; straight on after its last point.

    `times` are seconds after the moment it was given; the car was at (0, 0) of `points` then, in the world's axes.
    """

    points: Points
    times: Times

    @classmethod
    def given(cls, points: Sequence[Sequence[float]], times: Sequence[float], pose: Pose, fps: float) -> "Path":
        """Check a path in the car's axes and place it in the world.

        Raises:
            TrajectoryError: not as many times as points, times that do not increase, a first point that is not the
                car, more than 80 m/s.
        """
        if len(points) != len(times) or not len(times):
            raise TrajectoryError(f"path: expected a time for each point, got {len(points)} points, {len(times)} times")
        rows, clock = np.array(points, np.float64).reshape(-1, 2), np.array(times, np.float64)
        if clock[0] == 0 and math.hypot(*rows[0]) > _START_METERS:
            raise TrajectoryError(f"path: expected it to start at the car, (0, 0), got {rows[0].tolist()} at 0 s")
        if clock[0] == 0:
            rows, clock = rows[1:], clock[1:]
        rows, clock = np.concatenate([np.zeros((1, 2)), rows]), np.concatenate([[0.0], clock])
        Trajectory(rows[None], clock, fps, "path")
        return cls(pose.to_world(rows), clock)

    def ahead(self, pose: Pose, elapsed: float, times: Times) -> Points:
        """Where the car will be after `times` seconds, in its own axes."""
        return pose.to_ego(self._at(elapsed + times))

    def move(self, pose: Pose, elapsed: float, seconds: float) -> Pose:
        """Where it is after some seconds; it looks along the path."""
        now = elapsed + seconds
        # The clock's origin: no path lies before it.
        before, here, after = self._at(np.array([max(now - _TANGENT_SECONDS, 0), now, now + _TANGENT_SECONDS]))
        step = after - before
        heading = pose.heading if np.hypot(*step) < _STANDING_METERS else math.atan2(step[1], step[0])
        # Headings go on counting where a turn passes half a circle.
        turn = math.remainder(heading - pose.heading, math.tau)
        return Pose(float(here[0]), float(here[1]), pose.heading + turn)

    def _at(self, times: Times) -> Points:
        inside = np.stack([np.interp(times, self.times, column) for column in self.points.T], axis=-1)
        last = (self.points[-1] - self.points[-2]) / (self.times[-1] - self.times[-2])
        return inside + np.maximum(times - self.times[-1], 0)[:, None] * last


@dataclass(frozen=True)
class Driver:
    """The car at one frame, and what it was told: unchanging, so that a rewound rollout has it again.

    Attributes:
        pose: in the world's axes.
        order: what it does until told otherwise.
        num_since: frames since the order was given.
        fps: frames a second.
    """

    order: Steering | Path
    fps: float
    pose: Pose = Pose()
    num_since: int = 0

    def told(self, order: Steering | Path) -> "Driver":
        """The same car with another order, from now on."""
        return replace(self, order=order, num_since=0)

    def ahead(self, times: Times) -> Points:
        """Where the car will be after `times` seconds, in its own axes, if the order stands."""
        return self.order.ahead(self.pose, self.num_since / self.fps, times)

    def action(self, waypoint_times: Sequence[float]) -> Float32[np.ndarray, "waypoints 3"]:
        """The action of this frame: rows of [lateral y, forward x, time t]."""
        times = np.array(waypoint_times, np.float64)
        points = self.ahead(times)
        return np.column_stack([points[:, 1], points[:, 0], times]).astype(np.float32)

    def moved(self) -> "Driver":
        """The car at the next frame."""
        pose = self.order.move(self.pose, self.num_since / self.fps, 1 / self.fps)
        return replace(self, pose=pose, num_since=self.num_since + 1)

    def moved_by(self, action: Float32[np.ndarray, "waypoints 3"]) -> "Driver":
        """The car at the next frame after one action of another's making; the order then counts from there."""
        path = Path(self.pose.to_world(_with_start(action[:, 1::-1])), np.concatenate([[0.0], action[:, 2]]))
        driver = replace(self, pose=path.move(self.pose, 0.0, 1 / self.fps))
        return driver if isinstance(self.order, Steering) else driver.told(Steering(0.0, self.told(path).speed))

    @property
    def speed(self) -> float:
        """Meters a second, over the next frame."""
        (point,) = self.ahead(np.array([1 / self.fps]))
        return float(np.hypot(*point) * self.fps)


def _with_start(points: np.ndarray) -> Points:
    return np.concatenate([np.zeros((1, 2)), points.astype(np.float64)])
