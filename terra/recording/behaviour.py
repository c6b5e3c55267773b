"""What the recorded car wants: varied town driving drawn from a seed, or one scripted manoeuvre."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

# Metres that a swerve leaves the lane's centre by; the car stays inside its lane.
SWERVE_OFFSET = 0.8


@dataclass(frozen=True)
class RoadAhead:
    """What a behaviour knows: the road lane, the speed (m/s), the metres from the front bumper to the stop line ahead
    (negative inside the junction), and the maneuvers that the junction ahead offers from any lane of the road."""

    lane: int
    speed: float
    to_line: float
    options: tuple[str, ...]


@dataclass(frozen=True)
class Wish:
    """What the car should do where road and traffic allow it.

    `speed` m/s, `offset` metres left of the lane's centre, `braking` m/s^2 of deliberate braking (0: none),
    `maneuver` at the next junction, `stop_at_line` whether to stop before it.
    """

    speed: float
    offset: float
    braking: float
    maneuver: str
    stop_at_line: bool


class Behaviour(Protocol):
    """Says what the car wants, once a step."""

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """The wish for step `step`; called for 0, 1, 2, ... in order."""
        ...


class ScriptedBehaviour:
    """Holds lane and `speed` for `hold_steps`, then goes "left", "straight" or "right", or comes to a "stop"."""

    def __init__(self, maneuver: str, hold_steps: int, speed: float) -> None:
        self._maneuver, self._hold_steps, self._speed = maneuver, hold_steps, speed

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """Straight on while holding, then the scripted maneuver."""
        now = self._maneuver if step >= self._hold_steps else "straight"
        if now not in road.options and now != "stop":
            now = road.options[0]
        return Wish(self._speed, 0.0, 0.0, "straight" if now == "stop" else now, now == "stop")


class RandomBehaviour:
    """Varied driving: cruising at 4 to 14 m/s, wandering in the lane, swerves, hard braking, stops at crosswalks.

    `events` collects (step, what) of what was done on purpose: swerve_left, swerve_right, hard_brake.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.events: list[tuple[int, str]] = []
        self._speed, self._speed_until = 0.0, 0
        self._offset, self._offset_until = 0.0, 0
        self._swerve, self._swerve_until = 0.0, 0
        self._braking, self._braking_until = 0.0, 0
        self._lane, self._maneuver = -1, ""
        self._stop_steps = 0

    def wish(self, step: int, road: RoadAhead) -> Wish:
        """Drawn from the seed; intentions last for seconds."""
        rng = self._rng
        if road.lane != self._lane and road.to_line > 0:
            self._lane = road.lane
            if self._maneuver not in road.options or rng.random() < 0.8:
                self._maneuver = road.options[int(rng.integers(len(road.options)))]
            self._stop_steps = int(rng.integers(8, 30)) if rng.random() < 0.2 else 0
        if step >= self._speed_until:
            self._speed, self._speed_until = float(rng.uniform(4.0, 14.0)), step + int(rng.integers(50, 130))
        if step >= self._offset_until:
            self._offset = float(np.clip(rng.normal(0.0, 0.2), -0.5, 0.5))
            self._offset_until = step + int(rng.integers(20, 70))
        self._surprise(step, road)
        if self._stop_steps and road.speed < 0.1 and road.to_line < 4.0:
            self._stop_steps -= 1
        swerving, braking = step < self._swerve_until, step < self._braking_until
        offset = self._swerve if swerving else self._offset
        return Wish(
            self._speed, offset, self._braking if braking else 0.0, self._maneuver, stop_at_line=self._stop_steps > 0
        )

    def _surprise(self, step: int, road: RoadAhead) -> None:
        rng, calm = self._rng, step >= max(self._swerve_until, self._braking_until)
        draw = rng.random()
        if not calm or road.speed < 5.0 or road.to_line < 15.0:
            return
        if draw < 0.008:
            side = 1 if rng.random() < 0.5 else -1
            self._swerve, self._swerve_until = side * SWERVE_OFFSET, step + int(rng.integers(8, 18))
            self.events.append((step, "swerve_left" if side > 0 else "swerve_right"))
        elif draw < 0.014:
            self._braking, self._braking_until = float(rng.uniform(3.0, 5.0)), step + int(rng.integers(5, 13))
            self.events.append((step, "hard_brake"))
