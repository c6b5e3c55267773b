"""The vehicle's motion in an episode: a pose at each frame and for three seconds after the last frame."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

# Poses after an episode's last frame, so that the future path of every frame is known: 3 s at 10 frames per second.
NUM_FUTURE_POSES = 30


@dataclass(frozen=True, eq=False)
class Poses:
    """float64 arrays of equal length with one element each 1 / fps s: one per frame and `NUM_FUTURE_POSES` more.

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
