"""Intentions of the recorded car: varied town driving drawn from a seed, or one scripted maneuver."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

SWERVE_OFFSET = 0.8  # m from the lane's center in a swerve; the car stays inside its lane
JUNCTION_OFFSET = 0.4  # m from the lane's center in a junction, at most
STRAIGHT_WEIGHT = 0.5  # probability of going straight on, relative to that of each possible turn
SLOW_SHARE = 0.12  # share of slow drivers
REST_BRAKING = 2.0  # m/s^2, for a stop between junctions


@dataclass(frozen=True)
class RoadAhead:
    """The input of a behavior.

    Attributes:
        lane: the road lane that the car is in.
        speed: the car's speed, m/s.
        to_line: meters from the front bumper to the stop line ahead, negative inside the junction.
        options: maneuvers possible at the junction ahead, from any lane of the road.
    """

    lane: int
    speed: float
    to_line: float
    options: tuple[str, ...]


@dataclass(frozen=True)
class Wish:
    """The output of a behavior: what the car does if road and traffic allow it.

    Attributes:
        speed: desired speed, m/s.
        offset: desired meters to the left of the lane's center.
        braking: deliberate braking, m/s^2; 0 for none.
        maneuver: maneuver at the next junction.
        stop_at_line: whether to stop before the next junction.
    """

    speed: float
    offset: float
    braking: float
    maneuver: str
    stop_at_line: bool


class Behavior(Protocol):
    """Decides what the car does, once per step."""

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """The wish for step `step`; called for 0, 1, 2, ... in order."""
        ...


class ScriptedBehavior:
    """Holds lane and `speed` for `hold_steps`, then goes "left", "straight" or "right", or comes to a "stop"."""

    def __init__(self, maneuver: str, hold_steps: int, speed: float) -> None:
        self._maneuver, self._hold_steps, self._speed = maneuver, hold_steps, speed

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """Straight on while holding, then the scripted maneuver."""
        now = self._maneuver if step >= self._hold_steps else "straight"
        if now not in road.options and now != "stop":
            now = road.options[0]
        return Wish(self._speed, 0.0, 0.0, "straight" if now == "stop" else now, now == "stop")


class RandomBehavior:
    """Varied driving: 2 to 14 m/s, wandering in the lane, swerves, hard braking, stops at lines and on the way.

    `starts_at_rest` tells whether the car begins at standstill. `events` collects the deliberate (step, event):
    swerve_left, swerve_right, hard_brake.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.events: list[tuple[int, str]] = []
        self.starts_at_rest = bool(rng.random() < 0.2)
        self._wanders = bool(rng.random() < 0.3)
        self._speed, self._speed_until = 0.0, 0
        self._offset, self._offset_until = 0.0, 0
        self._swerve, self._swerve_until = 0.0, 0
        self._braking, self._braking_until = 0.0, 0
        self._lane, self._maneuver = -1, ""
        self._stop_steps = 0
        self._rest_steps = int(rng.integers(5, 30)) if self.starts_at_rest else 0

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """Draw intentions from the seed; an intention lasts for seconds."""
        rng = self._rng
        if road.lane != self._lane and road.to_line > 0:
            self._lane = road.lane
            weights = np.array([STRAIGHT_WEIGHT if option == "straight" else 1.0 for option in road.options])
            self._maneuver = str(rng.choice(road.options, p=weights / weights.sum()))
            self._stop_steps = int(rng.integers(10, 50)) if rng.random() < 0.12 else 0
        if step >= self._speed_until:
            slow = rng.random() < SLOW_SHARE
            self._speed = float(rng.uniform(2.0, 6.0) if slow else rng.uniform(9.0, 14.0))
            self._speed_until = step + int(rng.integers(20, 50) if slow else rng.integers(50, 130))
        if step >= self._offset_until:
            self._offset, self._offset_until = self._draw_offset(step)
        self._surprise(step, road)
        if self._stop_steps and road.speed < 0.1 and road.to_line < 4.0:
            self._stop_steps -= 1
        if self._rest_steps and road.speed < 0.1:
            self._rest_steps -= 1
        swerving = step < self._swerve_until
        offset = self._swerve if swerving else self._offset
        # Turns leave less room than lanes do.
        offset = offset if road.to_line > 10.0 else min(JUNCTION_OFFSET, max(-JUNCTION_OFFSET, offset))
        braking = self._braking if step < self._braking_until else REST_BRAKING if self._rest_steps else 0.0
        return Wish(self._speed, offset, braking, self._maneuver, stop_at_line=self._stop_steps > 0)

    def _draw_offset(self, step: int) -> tuple[float, int]:
        rng = self._rng
        if self._wanders:
            return float(np.clip(rng.normal(0.0, 0.45), -0.6, 0.6)), step + int(rng.integers(10, 35))
        return float(np.clip(rng.normal(0.0, 0.15), -0.4, 0.4)), step + int(rng.integers(20, 70))

    def _surprise(self, step: int, road: RoadAhead) -> None:
        rng, calm = self._rng, step >= max(self._swerve_until, self._braking_until) and not self._rest_steps
        draw = rng.random()
        if not calm or road.speed < 4.0 or road.to_line < 15.0:
            return
        if draw < 0.012:
            side = 1 if rng.random() < 0.5 else -1
            self._swerve, self._swerve_until = side * SWERVE_OFFSET, step + int(rng.integers(8, 18))
            self.events.append((step, "swerve_left" if side > 0 else "swerve_right"))
        elif draw < 0.016:
            self._braking, self._braking_until = float(rng.uniform(3.0, 5.0)), step + int(rng.integers(5, 13))
            self.events.append((step, "hard_brake"))
        elif draw < 0.0175:
            self._rest_steps = int(rng.integers(10, 50))
