"""The `Trajectory`: one future path for each frame in that frame's own ego frame, and the actions made from it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Float64

from terra.errors import ConfigError, TrajectoryError
from terra.trajectory.checks import check_count, check_fps, check_path_times, check_paths, check_poses, stack_poses
from tokenizer.limits import LIMITS, Limits

# Seconds after the frame. The published prepare_action keeps indices 9::10 of a path sampled every 0.05 s from 0.
WAYPOINT_TIMES = (0.45, 0.95, 1.45, 1.95, 2.45, 2.95)
# Length and spacing of a path, in seconds, as in ACT-Bench: 60 points, the last one at 2.95 s.
PATH_HORIZON = 3.0
PATH_STEP = 0.05

TIME_TOLERANCE = 1e-5  # s; times since 1970 in float64 are exact to about 2e-7 s


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The future path of each frame of a drive, checked when made; its arrays are read-only.

    Attributes:
        paths: [x forward, y left] in meters in the ego frame of that frame's own pose.
        times: seconds after the frame, strictly increasing, the same for all frames.
        fps: frames a second, 0.01 to 100.
        source: name of the origin ("drive.csv"), with which every error message begins.

    Raises:
        TrajectoryError: wrong shapes, NaN or infinity, times not increasing, a path that does not start at its own
            ego, more than 80 m/s between two points, fps out of range.
    """

    paths: Float64[np.ndarray, "frames points 2"]
    times: Float64[np.ndarray, " points"]
    fps: float
    source: str

    def __post_init__(self) -> None:
        try:
            paths = np.array(self.paths, dtype=np.float64)
            times = np.array(self.times, dtype=np.float64)
        except (ValueError, TypeError) as error:
            raise TrajectoryError(f"{self.source}: paths and times: expected arrays of numbers, got {error}") from error
        fps = check_fps(self.fps, self.source)
        check_path_times(times, self.source)
        check_paths(paths, times, self.source)
        paths.setflags(write=False)
        times.setflags(write=False)
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "fps", fps)

    @property
    def num_frames(self) -> int:
        """Frames that have a path."""
        return len(self.paths)

    @classmethod
    def from_poses(
        cls,
        times: Float[np.ndarray, " poses"],
        positions: Float[np.ndarray, "poses 2"],
        headings: Float[np.ndarray, " poses"],
        *,
        fps: float,
        source: str = "poses",
        horizon: float = PATH_HORIZON,
        step: float = PATH_STEP,
    ) -> "Trajectory":
        """Cut the future path of each frame out of a drive.

        Frames are taken every 1 / fps seconds from the first pose on, as long as the drive covers the whole path
        (with the defaults 60 points, the last one 2.95 s later). Between poses, positions and unwrapped headings are
        interpolated linearly.

        Args:
            times: seconds, strictly increasing, at most 3 s apart, from any origin.
            positions: x, y in meters in one fixed frame.
            headings: radians, counter-clockwise from +x; they may wrap.
            fps: frames a second to take.
            source: where the poses came from.
            horizon: seconds; a path's points lie at 0, step, 2 step, ... below it.
            step: seconds between two points of a path.

        Raises:
            TrajectoryError: poses that fail `check_poses`, or a drive shorter than one path.
            ConfigError: horizon and step that do not give two or more points.
        """
        poses = stack_poses(times, positions, headings, source)
        return trajectory_from_poses(
            poses, fps=fps, source=source, locate=lambda row: f"{source}: pose {row}", horizon=horizon, step=step
        )

    def resample(self, fps: float, max_frames: int | None = None, limits: Limits = LIMITS) -> "Trajectory":
        """Return the same drive at another frame rate, from its first frame to its last or to `max_frames` frames.

        A frame between two others gets the linear blend of their paths, point by point, because in the moving ego frame
        the point t seconds ahead changes smoothly with time. Nothing is extrapolated. The same rate returns `self`.
        Only the frames that are returned are made.

        Raises:
            TrajectoryError: fps not from 0.01 to 100, or frames of more numbers than `limits` allow.
        """
        fps = check_fps(fps, self.source)
        if fps == self.fps:
            return self if max_frames is None else replace(self, paths=self.paths[:max_frames])
        last = (self.num_frames - 1) / self.fps
        count = math.floor((last + TIME_TOLERANCE) * fps) + 1
        count = count if max_frames is None else min(count, max_frames)
        check_count(count * self.paths[0].size, f"{self.source}: {count} frames at {fps:g} fps", limits)
        wanted = np.arange(count) / fps
        frame_times = np.arange(self.num_frames) / self.fps
        return Trajectory(interpolate(frame_times, self.paths, wanted), self.times, fps, self.source)

    def require(self, num_frames: int) -> None:
        """Raise TrajectoryError unless a rollout of `num_frames` frames has its num_frames - 1 actions.

        The last frame of a rollout needs no action: nothing follows it.
        """
        if num_frames < 1:
            raise ConfigError(f"expected num_frames of 1 or more, got {num_frames = }")
        if self.num_frames < num_frames - 1:
            raise TrajectoryError(self._too_short(f"num_frames={num_frames} needs", num_frames - 1))

    def actions(
        self, num_frames: int, waypoint_times: Sequence[float] = WAYPOINT_TIMES
    ) -> Float32[np.ndarray, "steps waypoints 3"]:
        """Return the actions of the first `num_frames` frames, as the world model takes them.

        A rollout of n frames uses n - 1 of them. Each row is [lateral y (left positive), forward x, time t] in meters
        and seconds, linearly interpolated in time along the frame's path. For ACT-Bench's paths and the default times
        these are the numbers of the published prepare_action.

        Raises:
            TrajectoryError: fewer frames than `num_frames`, or a waypoint outside the times of the paths.
            ConfigError: num_frames below 0, or waypoint times that are missing or not increasing.
        """
        at = np.asarray(waypoint_times, dtype=np.float64)
        if at.ndim != 1 or len(at) == 0 or not np.isfinite(at).all() or (np.diff(at) <= 0).any():
            raise ConfigError(f"expected waypoint times in increasing seconds, got {waypoint_times = }")
        if num_frames < 0:
            raise ConfigError(f"expected actions for 0 or more frames, got {num_frames = }")
        if self.num_frames < num_frames:
            raise TrajectoryError(self._too_short(f"actions for {num_frames} frames need", num_frames))
        for time in at:
            if not self.times[0] - TIME_TOLERANCE <= time <= self.times[-1] + TIME_TOLERANCE:
                raise TrajectoryError(
                    f"{self.source}: expected paths that cover the waypoint at {time:g} s,"
                    f" got paths from {self.times[0]:g} s to {self.times[-1]:g} s"
                )
        points = interpolate(self.times, np.moveaxis(self.paths[:num_frames], 1, 0), at)
        forward, left = np.moveaxis(points, 0, 1)[..., 0], np.moveaxis(points, 0, 1)[..., 1]
        return np.stack([left, forward, np.broadcast_to(at, forward.shape)], axis=-1).astype(np.float32)

    def _too_short(self, needs: str, num_frames: int) -> str:
        """What to say where actions of `num_frames` frames are needed: each is the path that follows on its frame."""
        path = self.times[-1]
        covered, needed = ((frames - 1) / self.fps + path for frames in (self.num_frames, num_frames))
        return (
            f"{self.source}: covers {covered:.4g} s = {self.num_frames} frames at {self.fps:g} fps and {path:g} s of"
            f" path after the last of them; {needs} {num_frames} frames, {needed:.4g} s"
        )


@dataclass(frozen=True, eq=False)
class PoseTable:
    """A drive's poses from a file, converted to SI units but not checked against one another yet.

    Attributes:
        poses: rows of [time s, x m, y m, heading rad, counter-clockwise from +x].
        fps: frames per second of the drive.
        source: name of the file.
        locate: turns a row's index into the beginning of an error message.
        start: the time (s) of the file's first row, also where this lacks a value and is no pose; None: of the first.
    """

    poses: Float64[np.ndarray, "poses 4"]
    fps: float
    source: str
    locate: Callable[[int], str]
    start: float | None = None

    def trajectory(self, seconds: float | None = None, limits: Limits = LIMITS) -> Trajectory:
        """The future path of each frame, or of the frames up to `seconds` and one more, if there are more.

        Raises:
            TrajectoryError: poses that are not a vehicle's motion, or paths of more numbers than `limits` allow.
        """
        named = {"fps": self.fps, "source": self.source, "locate": self.locate}
        return trajectory_from_poses(self.poses, **named, seconds=seconds, limits=limits)


def trajectory_from_poses(
    poses: Float64[np.ndarray, "poses 4"],
    *,
    fps: float,
    source: str,
    locate: Callable[[int], str],
    horizon: float = PATH_HORIZON,
    step: float = PATH_STEP,
    seconds: float | None = None,
    limits: Limits = LIMITS,
) -> Trajectory:
    """`Trajectory.from_poses` for rows of [time s, x m, y m, heading rad]; `locate` names a row in error messages.

    `seconds` leaves out what comes later than the frame after that time.
    """
    fps = check_fps(fps, source)
    if not 0 < step < horizon < math.inf:
        raise ConfigError(f"expected 0 < step < horizon in seconds, got {step = }, {horizon = }")
    check_poses(poses, source, locate)
    num_points = horizon / step
    if not num_points < limits.trajectory_numbers:
        raise ConfigError(f"expected a path of at most {limits.trajectory_numbers} points, got {step = }, {horizon = }")
    path_times = np.arange(math.ceil(num_points - 1e-9)) * step
    clock = poses[:, 0] - poses[0, 0]
    spare = clock[-1] - path_times[-1] + TIME_TOLERANCE
    if spare < 0:
        raise TrajectoryError(
            f"{source}: covers {clock[-1]:.4g} s, expected at least the {path_times[-1]:g} s of one future path"
        )
    count = math.floor(spare * fps) + 1
    if seconds is not None:
        count = min(count, math.ceil(seconds * fps) + 2)
    check_count(count * 2 * len(path_times), f"{source}: {count} frames at {fps:g} fps", limits)
    frame_times = np.arange(count) / fps
    places = np.column_stack([poses[:, 1:3] - poses[0, 1:3], np.unwrap(poses[:, 3])])
    start = interpolate(clock, places, frame_times)
    ahead = interpolate(clock, places[:, :2], frame_times[:, None] + path_times) - start[:, None, :2]
    cos, sin = np.cos(start[:, 2, None]), np.sin(start[:, 2, None])
    forward = ahead[..., 0] * cos + ahead[..., 1] * sin
    left = ahead[..., 1] * cos - ahead[..., 0] * sin
    return Trajectory(np.stack([forward, left], axis=-1), path_times, fps, source)


def interpolate(times: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Interpolate `values` (times, ...) linearly at the times `at` (any shape), held constant outside.

    A time of `at` that differs from one of `times` by rounding alone gives exactly that row, so that sampling at
    k * 0.05 s returns the points of a path, bit by bit.
    """
    low = np.clip(np.searchsorted(times, at, side="right") - 1, 0, len(times) - 1)
    high = np.minimum(low + 1, len(times) - 1)
    span = times[high] - times[low]
    weight = np.divide(at - times[low], span, out=np.zeros(np.shape(at)), where=span > 0)
    weight = np.where(weight < 1e-9, 0.0, np.where(weight > 1 - 1e-9, 1.0, weight))
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - 1))
    return values[low] * (1 - weight) + values[high] * weight
