"""What the recorded car wants on a track: speeds, lanes, swerves, stops and hard braking, drawn from a seed."""

from dataclasses import dataclass

import numpy as np

LANES = (-1, 1)  # right, left
SLOWEST, FASTEST = 4.0, 24.0
SWERVE_OFFSET = 1.1
# Chances in each 0.1 s of driving that is not slow.
SWERVE_CHANCE, BRAKE_CHANCE, STOP_CHANCE = 0.007, 0.006, 0.0025


@dataclass(frozen=True)
class TrackWish:
    """What the car should do where road and traffic allow it.

    `speed` m/s, `lane` -1 right or 1 left, `offset` metres left of the lane's middle, `braking` m/s^2 of deliberate
    braking (0: none).
    """

    speed: float
    lane: int
    offset: float
    braking: float


class TrackBehaviour:
    """Varied driving: cruising at 4 to 24 m/s, wandering in the lane, changing it, and surprises.

    `events` collects (step, what) of what was done on purpose: swerve_left, swerve_right, hard_brake.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.events: list[tuple[int, str]] = []
        self._speed, self._speed_until = 0.0, 0
        self._lane, self._lane_until = LANES[int(rng.random() < 0.35)], int(rng.integers(60, 200))
        self._offset, self._offset_until = 0.0, 0
        self._swerve, self._swerve_until = 0.0, 0
        self._braking, self._braking_until = 0.0, 0
        self._standing = 0

    def wish(self, step: int, speed: float, lane: int) -> TrackWish:
        """The wish for step `step` (called for 0, 1, 2, ... in order) at `speed` m/s in `lane`."""
        rng = self._rng
        if step >= self._speed_until:
            self._speed, self._speed_until = float(rng.uniform(SLOWEST, FASTEST)), step + int(rng.integers(50, 130))
        if step >= self._lane_until:
            # Where traffic refused the last change this is the lane that the car is in.
            self._lane, self._lane_until = -lane, step + int(rng.integers(60, 200))
        if step >= self._offset_until:
            self._offset = float(np.clip(rng.normal(0.0, 0.3), -0.7, 0.7))
            self._offset_until = step + int(rng.integers(20, 70))
        self._surprise(step, speed)
        if self._standing and speed == 0.0:
            self._standing -= 1
            self._braking = 0.0 if self._standing == 0 else self._braking
        braking = self._braking if self._standing or step < self._braking_until else 0.0
        offset = self._offset + (self._swerve if step < self._swerve_until else 0.0)
        return TrackWish(self._speed, self._lane, offset, braking)

    def _surprise(self, step: int, speed: float) -> None:
        rng, calm = self._rng, step >= max(self._swerve_until, self._braking_until) and not self._standing
        draw = rng.random()
        if not calm or speed < 5.0:
            return
        if draw < SWERVE_CHANCE:
            side = 1 if rng.random() < 0.5 else -1
            self._swerve, self._swerve_until = side * SWERVE_OFFSET, step + int(rng.integers(8, 18))
            self.events.append((step, "swerve_left" if side > 0 else "swerve_right"))
        elif draw < SWERVE_CHANCE + BRAKE_CHANCE:
            self._braking, self._braking_until = float(rng.uniform(3.5, 6.0)), step + int(rng.integers(5, 16))
            self.events.append((step, "hard_brake"))
        elif draw < SWERVE_CHANCE + BRAKE_CHANCE + STOP_CHANCE:
            self._braking, self._standing = float(rng.uniform(1.5, 3.0)), int(rng.integers(8, 35))
