"""From a driver's orders to actions: the car holds a steering angle and a speed, or follows a path.

Axes are the car's own (x forward, y left), or the "world" axes: the car's axes in the first frame of a rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Float64

from terra.errors import TrajectoryError
from terra.trajectory import Trajectory

WHEELBASE = 2.7  # m, of a middle-sized car
MAX_STEERING = 1.0  # rad at the wheels; cars reach about 0.6
MAX_SPEED = 80.0  # m/s, as in terra.trajectory.checks
MAX_PATH_POINTS = 512
_START_METERS = 0.5  # largest distance between the car and a path's first point, if its time is 0
_TANGENT_SECONDS = 0.1  # a path's direction is measured over this time before and after a point
_STANDING_METERS = 0.01  # a car that moves less keeps its heading

Points = Float64[np.ndarray, "points 2"]
Times = Float64[np.ndarray, " points"]


@dataclass(frozen=True)
class Pose:
    """The car's position (m) and heading (rad, counter-clockwise) in the world's axes."""

    x: float = 0.0
    y: float = 0.0
    heading: float = 0.0

    def to_world(self, points: Points) -> Points:
        """Convert points from the car's axes to the world's."""
        cosine, sine = math.cos(self.heading), math.sin(self.heading)
        forward, left = points[..., 0], points[..., 1]
        turned = np.stack([forward * cosine - left * sine, forward * sine + left * cosine], axis=-1)
        return turned + np.array([self.x, self.y])

    def to_ego(self, points: Points) -> Points:
        """Convert points from the world's axes to the car's."""
        cosine, sine = math.cos(self.heading), math.sin(self.heading)
        ahead, left = points[..., 0] - self.x, points[..., 1] - self.y
        return np.stack([ahead * cosine + left * sine, left * cosine - ahead * sine], axis=-1)


@dataclass(frozen=True)
class Steering:
    """An order to hold the wheels at `angle` (rad, left positive) and the speed at `speed` (m/s), which gives an arc.

    The car is a kinematic bicycle whose reference point is the middle of the rear axle: yaw rate = speed tan(angle) /
    wheelbase (P. Polack et al., The kinematic bicycle model, IV 2017).
    """

    angle: float
    speed: float

    def ahead(self, pose: Pose, elapsed: float, times: Times) -> Points:
        """The car's positions after `times` seconds, in its current axes."""
        distance = self.speed * times
        turn = distance * math.tan(self.angle) / WHEELBASE
        # sin(turn) / turn and (1 - cos(turn)) / turn, written so that they are finite at turn = 0.
        return np.stack([distance * np.sinc(turn / np.pi), distance * np.sin(turn / 2) * np.sinc(turn / math.tau)], -1)

    def move(self, pose: Pose, elapsed: float, seconds: float) -> Pose:
        """The car's pose after `seconds`."""
        (point,) = pose.to_world(self.ahead(pose, elapsed, np.array([seconds])))
        turn = self.speed * seconds * math.tan(self.angle) / WHEELBASE
        return Pose(float(point[0]), float(point[1]), pose.heading + turn)


@dataclass(frozen=True, eq=False)
class Path:
    """An order to follow a path that is fixed in the world, and to go straight on after its last point.

    `points` are in the world's axes and begin at the car's position when the order was given; `times` are seconds after
    that moment.
    """

    points: Points
    times: Times

    @classmethod
    def given(cls, points: Sequence[Sequence[float]], times: Sequence[float], pose: Pose, fps: float) -> "Path":
        """Check a path in the car's axes and convert it to the world's.

        Raises:
            TrajectoryError: different numbers of times and points, times that do not increase, a first point that is
                not at the car, or more than 80 m/s.
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
        """The car's positions after `times` seconds, in its current axes."""
        return pose.to_ego(self._at(elapsed + times))

    def move(self, pose: Pose, elapsed: float, seconds: float) -> Pose:
        """The car's pose after `seconds`; its heading is the path's direction."""
        now = elapsed + seconds
        # The path has no points before time 0.
        before, here, after = self._at(np.array([max(now - _TANGENT_SECONDS, 0), now, now + _TANGENT_SECONDS]))
        step = after - before
        heading = pose.heading if np.hypot(*step) < _STANDING_METERS else math.atan2(step[1], step[0])
        # Headings are not wrapped, so they continue past half a circle.
        turn = math.remainder(heading - pose.heading, math.tau)
        return Pose(float(here[0]), float(here[1]), pose.heading + turn)

    def _at(self, times: Times) -> Points:
        inside = np.stack([np.interp(times, self.times, column) for column in self.points.T], axis=-1)
        last = (self.points[-1] - self.points[-2]) / (self.times[-1] - self.times[-2])
        return inside + np.maximum(times - self.times[-1], 0)[:, None] * last


@dataclass(frozen=True)
class Driver:
    """The car at one frame and its current order; immutable, so that a rewound rollout can restore it.

    Attributes:
        pose: the car's pose in the world's axes.
        order: the order that the car follows until the next one.
        num_since: number of frames since the order was given.
        fps: frames per second.
    """

    order: Steering | Path
    fps: float
    pose: Pose = Pose()
    num_since: int = 0

    def told(self, order: Steering | Path) -> "Driver":
        """Return the car with another order, which begins at this frame."""
        return replace(self, order=order, num_since=0)

    def ahead(self, times: Times) -> Points:
        """The car's positions after `times` seconds, in its current axes, if the order stands."""
        return self.order.ahead(self.pose, self.num_since / self.fps, times)

    def action(self, waypoint_times: Sequence[float]) -> Float32[np.ndarray, "waypoints 3"]:
        """The action of this frame: rows of [lateral y (left positive), forward x, time t] in meters and seconds."""
        times = np.array(waypoint_times, np.float64)
        points = self.ahead(times)
        return np.column_stack([points[:, 1], points[:, 0], times]).astype(np.float32)

    def moved(self) -> "Driver":
        """Return the car at the next frame."""
        pose = self.order.move(self.pose, self.num_since / self.fps, 1 / self.fps)
        return replace(self, pose=pose, num_since=self.num_since + 1)

    def moved_by(self, action: Float32[np.ndarray, "waypoints 3"]) -> "Driver":
        """Return the car at the next frame after an action that did not come from its order, which restarts there."""
        path = Path(self.pose.to_world(_with_start(action[:, 1::-1])), np.concatenate([[0.0], action[:, 2]]))
        driver = replace(self, pose=path.move(self.pose, 0.0, 1 / self.fps))
        return driver if isinstance(self.order, Steering) else driver.told(Steering(0.0, self.told(path).speed))

    @property
    def speed(self) -> float:
        """Mean speed (m/s) until the next frame."""
        (point,) = self.ahead(np.array([1 / self.fps]))
        return float(np.hypot(*point) * self.fps)


def _with_start(points: np.ndarray) -> Points:
    return np.concatenate([np.zeros((1, 2)), points.astype(np.float64)])
