"""The recorded car and the others on a track: a kinematic bicycle that steers by pure pursuit, and cars on rails."""

import math

import numpy as np
from jaxtyping import Float

from terra.recording.driving import MAX_STEER, MAX_STEER_STEP, MIDDLE_AHEAD, STANDSTILL_SPEED, WHEELBASE, roll
from terra.recording.torcs.behaviour import LANES, TrackBehaviour, TrackWish
from terra.recording.torcs.road import Road
from terra.recording.traffic import CAR_LENGTH, STEP_SECONDS, follow

# Cars nearer than this to each other's side, measured across the road, are in each other's way.
SIDE_BY_SIDE = 2.6
# The middle of a lane from the middle of the road, as a share of the road's width.
LANE_SHARE = 0.24
# Metres of road to a moving car, and from the recorded car to the next when a drive begins.
FREE_START = 30.0
SLOWEST_CAR, FASTEST_CAR = 5.0, 15.0
# m/s sideways, at most, that a change of lane or a swerve is planned with.
SIDEWAYS_SPEED = 1.6


class TrackTraffic:
    """`num_cars` cars that keep to their lanes and to their distance, 10 steps a second.

    Arrays run over cars: `place` (m along the road), `offset` (m left of its middle), `speed` (m/s) and `braking`.
    """

    def __init__(self, road: Road, num_cars: int, rng: np.random.Generator, start: float) -> None:
        self._road = road
        gap = (road.length - 2 * FREE_START) / max(1, num_cars)
        jitter = rng.uniform(0.0, max(0.0, gap - 3 * CAR_LENGTH), num_cars)
        self.place = (start + FREE_START + gap * np.arange(num_cars) + jitter) % road.length
        self.offset = rng.choice(LANES, num_cars) * LANE_SHARE * road.width + rng.normal(0.0, 0.15, num_cars)
        self._wanted = rng.uniform(SLOWEST_CAR, FASTEST_CAR, num_cars)
        self.speed = np.minimum(self._wanted, road.allowed_speeds(self.place))
        self.braking = np.zeros(num_cars, bool)

    def ahead_of(self, place: float) -> Float[np.ndarray, " cars"]:
        """Metres along the road from `place` to each car, from - half to half of the road's length."""
        half = self._road.length / 2
        return (self.place - place + half) % self._road.length - half

    def gap(self, place: float, offset: float) -> tuple[float, float]:
        """Bumper to bumper metres from a car in `place` at `offset` to the next before it, and that one's speed."""
        ahead = self.ahead_of(place)
        ahead[(ahead <= 0) | (np.abs(self.offset - offset) >= SIDE_BY_SIDE)] = np.inf
        if not np.isfinite(ahead).any():
            return 1e3, 30.0
        nearest = int(np.argmin(ahead))
        return float(ahead[nearest]) - CAR_LENGTH, float(self.speed[nearest])

    def step(self, place: float, offsets: tuple[float, ...], speed: float) -> None:
        """Advance by 0.1 s; the recorded car is in `place` at all of `offsets`."""
        places = np.append(self.place, [place] * len(offsets))
        across, speeds = np.append(self.offset, offsets), np.append(self.speed, [speed] * len(offsets))
        ahead = (places - self.place[:, None]) % self._road.length
        ahead[(ahead == 0) | (np.abs(across - self.offset[:, None]) >= SIDE_BY_SIDE)] = np.inf
        leader = np.argmin(ahead, axis=1)
        rows = np.arange(len(self.place))
        gap = np.minimum(ahead[rows, leader], 1e3) - CAR_LENGTH
        acceleration = follow(
            self.speed, np.minimum(self._wanted, self._road.allowed_speeds(self.place)), gap, speeds[leader]
        )
        following = np.maximum(0.0, self.speed + acceleration * STEP_SECONDS)
        self.place = (self.place + (self.speed + following) / 2 * STEP_SECONDS) % self._road.length
        self.speed, self.braking = following, acceleration < -0.6


class TrackDriver:
    """The recorded car. `x`, `y` (m), `heading` (rad, ccw from +x, never wrapped), `speed` (m/s) are its rear axle's.

    `events` collects (step, what) as they happen: stop, start, lane_change_left, lane_change_right.
    """

    def __init__(self, road: Road, behaviour: TrackBehaviour, place: float, lane: int, speed: float) -> None:
        self._road, self._behaviour = road, behaviour
        self.place, self.lane = place, lane
        self._middle = self._target = lane * LANE_SHARE * road.width
        self._steer, self._acceleration = 0.0, 0.0
        self.x, self.y, self.heading = road.at(place, self._middle)
        self.speed = min(speed, self._allowed_speed(0.0))
        self.events: list[tuple[int, str]] = []

    @property
    def offset(self) -> float:
        """Metres left of the road's middle."""
        x, y, heading = self._road.at(self.place)
        return -(self.x - x) * math.sin(heading) + (self.y - y) * math.cos(heading)

    @property
    def occupied(self) -> tuple[float, ...]:
        """The offsets that others have to expect the car at: where it is, and the lane that it changes to."""
        return (self.offset, self.lane * LANE_SHARE * self._road.width)

    def step(self, index: int, traffic: TrackTraffic) -> None:
        """Advance by 0.1 s: ask the behaviour, then steer and brake along the road."""
        wish = self._behaviour.wish(index, self.speed, self.lane)
        if wish.lane != self.lane and self.speed > 3.0 and self._is_free(wish.lane, traffic):
            self.events.append((index, "lane_change_left" if wish.lane > self.lane else "lane_change_right"))
            self.lane = wish.lane
        stood = self.speed == 0.0
        self._move(self._accelerate(wish, traffic), wish.offset)
        if stood != (self.speed == 0.0):
            self.events.append((index, "start" if stood else "stop"))

    def _is_free(self, lane: int, traffic: TrackTraffic) -> bool:
        ahead = traffic.ahead_of(self.place + MIDDLE_AHEAD)
        ahead = ahead[np.abs(traffic.offset - lane * LANE_SHARE * self._road.width) < SIDE_BY_SIDE]
        return bool((np.abs(ahead) > CAR_LENGTH + 8.0 + 1.5 * self.speed).all())

    def _accelerate(self, wish: TrackWish, traffic: TrackTraffic) -> float:
        gap, lead_speed = min(traffic.gap(self.place + MIDDLE_AHEAD, offset) for offset in self.occupied)
        cruise = min(2.2, max(-2.5, 0.7 * (wish.speed - self.speed)))
        curves = max(-6.0, 2.0 * (self._allowed_speed(0.3 * self.speed) - self.speed))
        following = float(follow(*(np.array(value) for value in (self.speed, 60.0, gap, lead_speed))))
        wanted = min(cruise, curves, following, -wish.braking if wish.braking > 0 else math.inf)
        if wanted < -5.0:
            return max(wanted, -8.0)
        # No more jerk than a passenger would stand.
        return min(self._acceleration + 0.5, max(self._acceleration - 1.0, wanted))

    def _allowed_speed(self, ahead: float) -> float:
        return float(self._road.allowed_speeds(np.array([self.place + ahead]))[0])

    def _move(self, acceleration: float, wanted_offset: float) -> None:
        speed = max(0.0, self.speed + acceleration * STEP_SECONDS)
        if acceleration < 0 and speed < STANDSTILL_SPEED:
            speed = 0.0
        self._middle = _approach(self._middle, self.lane * LANE_SHARE * self._road.width, self._slew())
        self._target = _approach(self._target, self._middle + wanted_offset, self._slew())
        steer = self._steer
        if self.speed > 0.1:
            steer = _approach(steer, self._pursue(), MAX_STEER_STEP)
        self.x, self.y, self.heading = roll((self.x, self.y, self.heading), (self.speed, speed), (self._steer, steer))
        ahead = self.place + (self.speed + speed) / 2 * STEP_SECONDS
        self._acceleration = (speed - self.speed) / STEP_SECONDS
        self.speed, self._steer = speed, steer
        x, y, heading = self._road.at(ahead)
        self.place = ahead + (self.x - x) * math.cos(heading) + (self.y - y) * math.sin(heading)

    def _slew(self) -> float:
        """Metres that the planned path may move sideways in a step; a slow car can't move sideways fast."""
        return SIDEWAYS_SPEED * STEP_SECONDS * min(1.0, self.speed / 8.0)

    def _pursue(self) -> float:
        """The steering angle (rad) of the arc to a point of the planned path one look-ahead distance away."""
        x, y, _ = self._road.at(self.place + min(16.0, max(4.5, 0.9 * self.speed)), self._target)
        dx, dy = x - self.x, y - self.y
        sideways = -dx * math.sin(self.heading) + dy * math.cos(self.heading)
        return min(MAX_STEER, max(-MAX_STEER, math.atan(2 * WHEELBASE * sideways / (dx * dx + dy * dy))))


def _approach(value: float, target: float, most: float) -> float:
    return value + min(most, max(-most, target - value))
