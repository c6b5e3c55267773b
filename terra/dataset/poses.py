"""The motion of the camera: one pose for each frame of an episode and for three seconds more."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

# Rows that an episode has beyond its last frame, so that every frame knows its path: 3 s at 10 frames a second.
NUM_FUTURE_POSES = 30


@dataclass(frozen=True, eq=False)
class Poses:
    """float64 arrays of equal length, one row each 1 / fps s: one a frame and `NUM_FUTURE_POSES` more.

    `time` (s), `x`, `y`, `z` (m, in one fixed frame), `heading` (rad, counter-clockwise from +x, never wrapped),
    `pitch` (rad, up positive), `speed` (m/s).
    """

    time: Float[np.ndarray, " poses"]
    x: Float[np.ndarray, " poses"]
    y: Float[np.ndarray, " poses"]
    z: Float[np.ndarray, " poses"]
    heading: Float[np.ndarray, " poses"]
    pitch: Float[np.ndarray, " poses"]
    speed: Float[np.ndarray, " poses"]
