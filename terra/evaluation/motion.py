"""The ego motion between consecutive frames, the path that it adds up to, and the class of that path."""

import numpy as np
from jaxtyping import Float

from terra.dataset import Poses

Steps = Float[np.ndarray, "steps 2"]
Path2D = Float[np.ndarray, "points 3"]

CLASSES = ("stopped", "starting", "stopping", "left", "right", "accelerating", "decelerating", "straight")

STOPPED_SPEED = 1.0  # m/s; a car whose mean speed over half a second is lower counts as standing
TURN_DEGREES = 10.0
SPEED_CHANGE = 1.5  # m/s over the path
_ENDS_SECONDS = 0.5  # the first and last speeds are means over this long


def steps_of(poses: Poses, first: int, num_frames: int) -> Steps:
    """Forward movement (m) and heading change (rad, counter-clockwise) between `num_frames` poses from `first` on.

    Forward is along the heading halfway between the two poses, in which a car that rolls without slipping on a circle
    moves exactly.
    """
    part = slice(first, first + num_frames)
    heading = poses.heading[part]
    turn = np.diff(heading)
    middle = heading[:-1] + turn / 2
    forward = np.diff(poses.x[part]) * np.cos(middle) + np.diff(poses.y[part]) * np.sin(middle)
    return np.stack([forward, turn], axis=1)


def integrate(steps: Steps) -> Path2D:
    """x forward (m), y left (m), heading (rad) after 0, 1, 2, ... steps from (0, 0, 0): the inverse of `steps_of`."""
    steps = np.asarray(steps, dtype=np.float64)
    heading = np.concatenate([[0.0], np.cumsum(steps[:, 1])])
    middle = heading[:-1] + steps[:, 1] / 2
    moves = steps[:, :1] * np.stack([np.cos(middle), np.sin(middle)], axis=1)
    return np.column_stack([np.concatenate([np.zeros((1, 2)), np.cumsum(moves, axis=0)]), heading])


def classify(steps: Steps, fps: float) -> str:
    """Classify a motion by the first rule that holds; speeds are means over the first and the last half second.

    stopped: both speeds below 1 m/s. starting: the first below 1. stopping: the last below 1. left, right: the
    heading turns by more than 10 degrees. accelerating, decelerating: the speed changes by more than 1.5 m/s. straight:
    the rest. The classes are ACT-Bench's high-level ones (arXiv 2412.05337), with its two of constant speed merged.
    """
    speeds = steps[:, 0] * fps
    ends = max(1, min(round(_ENDS_SECONDS * fps), len(speeds)))
    first, last = speeds[:ends].mean(), speeds[-ends:].mean()
    turn = np.degrees(steps[:, 1].sum())
    rules = (
        ("stopped", first < STOPPED_SPEED and last < STOPPED_SPEED),
        ("starting", first < STOPPED_SPEED),
        ("stopping", last < STOPPED_SPEED),
        ("left", turn > TURN_DEGREES),
        ("right", turn < -TURN_DEGREES),
        ("accelerating", last - first > SPEED_CHANGE),
        ("decelerating", last - first < -SPEED_CHANGE),
        ("straight", True),
    )
    return next(name for name, holds in rules if holds)
