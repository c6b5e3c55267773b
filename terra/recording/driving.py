"""The recorded car among traffic: it follows lane centers as its behavior decides, and yields."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from terra.recording.behavior import Behavior, RoadAhead, Wish
from terra.recording.bicycle import Bicycle, Path
from terra.recording.lanes import LaneGraph
from terra.recording.town import LANE_WIDTH
from terra.recording.traffic import CAR_LENGTH, Occupant, Traffic, follow

# The pose is that of the rear axle, which moves exactly along its heading; the body's middle is ahead of it.
MIDDLE_AHEAD = 1.3
FRONT_AHEAD = MIDDLE_AHEAD + CAR_LENGTH / 2
TAIL_BEHIND = CAR_LENGTH / 2 - MIDDLE_AHEAD

LINE_BRAKING = 2.2
# A car below the first speed (m/s) has stopped; above the second it has started again.
STOPPED_SPEED, STARTED_SPEED = 0.1, 0.5
FREE_GAP = 70.0  # m; cars farther ahead are ignored


class Admission(Protocol):
    """Decides whether the recorded car may enter a junction; `Traffic` implements it."""

    def admit(self, turn: int, waits_behind: bool) -> bool:
        """Whether the car may now take `turn`."""
        ...

    def leave(self) -> None:
        """Release the turn after the car has left the junction."""
        ...


class OpenJunctions:
    """Admits the car everywhere; for drives whose junctions are closed to traffic."""

    def admit(self, turn: int, waits_behind: bool) -> bool:
        """Return True."""
        return True

    def leave(self) -> None:
        """Do nothing, because `admit` reserves nothing."""


class Route:
    """The way ahead: the road lane that the car is in, the turn it will take, and the road lane after that."""

    def __init__(self, graph: LaneGraph, lane: int, turn: int) -> None:
        self.lanes = (lane, turn, int(graph.exits[turn]))
        lengths = graph.lengths[list(self.lanes)]
        self.starts = np.concatenate([[0.0], np.cumsum(lengths)])
        points, along = [], []
        for start, length, member in zip(self.starts, lengths, self.lanes, strict=False):
            path = graph.path(member)[:-1]
            points.append(path)
            along.append(start + length * np.arange(len(path)) / len(path))
        self.path = Path(np.concatenate(points), np.concatenate(along))


@dataclass(frozen=True)
class LaneChange:
    """A change from `begin` meters along the route over `length` meters into `lane`; `side` +1 is to the left."""

    lane: int
    begin: float
    length: float
    side: int

    def offset(self, position: float) -> float:
        """Meters to the left of the old lane's center."""
        share = min(1.0, max(0.0, (position - self.begin) / self.length))
        return self.side * LANE_WIDTH * share * share * (3 - 2 * share)


class Driver:
    """Drives one car through a lane graph in steps of 0.1 s, as its `behavior` decides.

    `events` collects (step, event): left, straight, right, stop, start, lane_change_left, lane_change_right.
    """

    def __init__(self, graph: LaneGraph, behavior: Behavior, lane: int, position: float, speed: float) -> None:
        self._graph, self._behavior = graph, behavior
        self._route = Route(graph, lane, graph.turns[lane][0])
        self._car = Bicycle(self._route.path, position, speed)
        self._change: LaneChange | None = None
        self._admitted = self._turning = self._leaving = False
        self._standing = speed < STOPPED_SPEED
        self.events: list[tuple[int, str]] = []

    @property
    def pose(self) -> tuple[float, float, float]:
        """x, y (m) and heading (rad, counter-clockwise from +x, never wrapped)."""
        return self._car.pose

    @property
    def speed(self) -> float:
        """The car's, m/s."""
        return self._car.speed

    def occupants(self) -> list[Occupant]:
        """This car as traffic sees it: in its lane and, during a lane change, in the other lane too."""
        middle = self._car.position + MIDDLE_AHEAD
        part = int(np.searchsorted(self._route.starts[1:3], middle, side="right"))
        found = [Occupant(self._route.lanes[part], middle - float(self._route.starts[part]), self.speed)]
        if self._change is not None:
            found.append(Occupant(self._change.lane, self._across(middle, self._change.lane), self.speed))
        return found

    def step(self, index: int, traffic: Traffic, junctions: Admission) -> None:
        """Advance by 0.1 s: ask the behavior, choose the way, then steer and brake along it."""
        wish = self._behavior.wish(index, self._look())
        if self._car.position + FRONT_AHEAD < self._route.starts[1] and self._change is None and not self._leaving:
            self._choose_turn(index, wish, traffic, junctions)
        gap, lead_speed, waits_behind = self._leader(traffic)
        acceleration = self._accelerate(wish, gap, lead_speed, self._may_enter(wish, junctions, waits_behind))
        self._car.move(self._route.path, acceleration, wish.offset, self._change.offset if self._change else None)
        if self.speed > STARTED_SPEED if self._standing else self.speed < STOPPED_SPEED:
            self.events.append((index, "start" if self._standing else "stop"))
            self._standing = not self._standing
        self._progress(index, junctions)

    def _look(self) -> RoadAhead:
        lane, graph = self._route.lanes[0], self._graph
        this = graph.lanes[lane]
        beside = [graph.beside(lane, k) for k in range(graph.town.edges[this.edge].kind.lanes)]
        options = {graph.lanes[turn].maneuver for other in beside for turn in graph.turns[other]}
        to_line = float(self._route.starts[1]) - self._car.position - FRONT_AHEAD
        return RoadAhead(lane, self.speed, to_line, tuple(sorted(options)))

    def _choose_turn(self, index: int, wish: Wish, traffic: Traffic, junctions: Admission) -> None:
        graph, lane = self._graph, self._route.lanes[0]
        other_turn = graph.lanes[self._route.lanes[1]].maneuver != wish.maneuver
        turn = graph.turn(lane, wish.maneuver) if other_turn else None
        if self._admitted and (turn is not None or wish.stop_at_line):
            junctions.leave()
            self._admitted = False
        if turn is not None:
            self._route = Route(graph, lane, turn)
        elif other_turn and not self._admitted:
            self._begin_lane_change(index, wish.maneuver, traffic)

    def _begin_lane_change(self, index: int, maneuver: str, traffic: Traffic) -> None:
        """Start towards the lane from which `maneuver` can be made, if there is room and time for it."""
        graph, lane = self._graph, self._route.lanes[0]
        this = graph.lanes[lane]
        length = max(22.0, 2.6 * self.speed)
        if float(self._route.starts[1]) - self._car.position - FRONT_AHEAD < length + 8.0:
            return
        for k in range(graph.town.edges[this.edge].kind.lanes):
            other = graph.beside(lane, k)
            if graph.turn(other, maneuver) is not None and self._is_free(other, traffic):
                side = 1 if k < this.index else -1
                self._change = LaneChange(other, self._car.position, length, side)
                self.events.append((index, f"lane_change_{'left' if side > 0 else 'right'}"))
                return

    def _is_free(self, lane: int, traffic: Traffic) -> bool:
        ahead = traffic.position[traffic.lane == lane] - self._across(self._car.position + MIDDLE_AHEAD, lane)
        closing = np.where(ahead > 0, -1, 1) * (traffic.speed[traffic.lane == lane] - self.speed)
        return bool((np.abs(ahead) > CAR_LENGTH + 5.0 + 2.5 * np.maximum(0.0, closing)).all())

    def _across(self, position: float, lane: int) -> float:
        return position * float(self._graph.lengths[lane] / self._graph.lengths[self._route.lanes[0]])

    def _leader(self, traffic: Traffic) -> tuple[float, float, bool]:
        """Gap and speed of the nearest car ahead, and whether one stands between this car and its stop line."""
        middle = self._car.position + MIDDLE_AHEAD
        ahead = np.full(len(traffic.lane), np.inf)
        for start, lane in zip(self._route.starts, self._route.lanes, strict=False):
            ahead = np.where(traffic.lane == lane, start + traffic.position - middle, ahead)
        if self._change is not None:
            beside = traffic.position - self._across(middle, self._change.lane)
            ahead = np.where(traffic.lane == self._change.lane, beside, ahead)
        ahead[ahead <= 0] = np.inf
        if not np.isfinite(ahead).any():
            return 1e3, 30.0, False
        nearest = int(np.argmin(ahead))
        before_line = bool(middle + ahead[nearest] < self._route.starts[1])
        return float(ahead[nearest]) - CAR_LENGTH, float(traffic.speed[nearest]), before_line

    def _may_enter(self, wish: Wish, junctions: Admission, waits_behind: bool) -> bool:
        to_line = float(self._route.starts[1]) - self._car.position - FRONT_AHEAD
        if self._admitted or to_line > max(18.0, self.speed**2 / 4 + 8.0) or self._change is not None:
            return self._admitted
        if not wish.stop_at_line:
            self._admitted = junctions.admit(self._route.lanes[1], waits_behind)
        return self._admitted

    def _accelerate(self, wish: Wish, gap: float, lead_speed: float, may_enter: bool) -> float:
        cruise = min(2.2, max(-2.0, 0.9 * (wish.speed - self.speed)))
        curves = max(-5.0, 2.0 * (self._route.path.allowed_speed(self._car.position) - self.speed))
        following = math.inf
        if gap < FREE_GAP:
            following = float(follow(*(np.array(value) for value in (self.speed, 60.0, gap, lead_speed))))
        wanted = min(cruise, curves, following, -wish.braking if wish.braking > 0 else math.inf)
        if not may_enter:
            to_line = float(self._route.starts[1]) - self._car.position - FRONT_AHEAD - 0.6
            wanted = min(wanted, 2.0 * (math.sqrt(2 * LINE_BRAKING * max(0.0, to_line)) - self.speed))
        if wanted < -5.0:
            return max(wanted, -8.0)
        # The change of acceleration per step bounds the jerk to what passengers accept.
        return min(self._car.acceleration + 0.5, max(self._car.acceleration - 1.0, wanted))

    def _progress(self, index: int, junctions: Admission) -> None:
        graph, route = self._graph, self._route
        lane = route.lanes[0]
        if self._change is not None and self._car.position > self._change.begin + self._change.length:
            lane, position = self._change.lane, self._across(self._car.position, self._change.lane)
            self._route, self._car.position, self._change = Route(graph, lane, graph.turns[lane][0]), position, None
        elif self._car.position >= route.starts[2]:
            lane = route.lanes[2]
            self._car.position -= float(route.starts[2])
            self._route, self._turning, self._leaving = Route(graph, lane, graph.turns[lane][0]), False, self._admitted
        elif self._car.position >= route.starts[1] and not self._turning:
            self._turning = True
            self.events.append((index, graph.lanes[route.lanes[1]].maneuver))
        if self._leaving and self._car.position > TAIL_BEHIND + 0.5:
            junctions.leave()
            self._admitted = self._leaving = False
