"""The other cars: each follows its lane, keeps its distance, and enters a junction only when its turn is free."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from terra.recording.lanes import LaneGraph
from terra.recording.town import NUM_CAR_MODELS, Node

CAR_LENGTH = 4.5
CAR_WIDTH = 1.84
STEP_SECONDS = 0.1

# The intelligent driver model (Treiber, Hennecke, Helbing, Phys. Rev. E 62, 2000), with calm urban values.
MAX_ACCELERATION = 1.5
COMFORTABLE_BRAKING = 2.0
HARDEST_BRAKING = 8.0
STANDSTILL_GAP = 2.5
TIME_HEADWAY = 1.2

TURN_SPEED = 4.5
STRAIGHT_SPEED = 11.0
BRAKE_LIGHT_FROM = 0.8


@dataclass(frozen=True)
class Occupant:
    """A car that `Traffic` sees but does not drive: its lane, the position (m) of its middle there, its speed (m/s)."""

    lane: int
    position: float
    speed: float


class Crossings(Protocol):
    """Tells which turns pedestrians block; `Pedestrians` implements it."""

    def blocks(self, turn: int) -> bool:
        """Whether someone crosses, or is about to, where `turn` passes."""
        ...


def follow(
    speed: Float[np.ndarray, " cars"],
    wanted: Float[np.ndarray, " cars"],
    gap: Float[np.ndarray, " cars"],
    lead_speed: Float[np.ndarray, " cars"],
) -> Float[np.ndarray, " cars"]:
    """Acceleration (m/s^2) at `speed`, bumper to bumper `gap` meters behind a car that goes `lead_speed`."""
    closing = speed * (speed - lead_speed) / (2 * np.sqrt(MAX_ACCELERATION * COMFORTABLE_BRAKING))
    spacing = STANDSTILL_GAP + np.maximum(0.0, speed * TIME_HEADWAY + closing)
    free = (speed / np.maximum(wanted, 0.1)) ** 4
    acceleration = MAX_ACCELERATION * (1 - free - (spacing / np.maximum(gap, 0.1)) ** 2)
    return np.clip(acceleration, -HARDEST_BRAKING, MAX_ACCELERATION)


class Traffic:
    """`num_cars` cars spread over a town's road lanes, stepped at 10 Hz.

    `closed` junctions admit no car. `clear` lists occupants near whom no car starts. Cars wait before turns that
    `crossings` block, and react to the occupants passed to `step`. The arrays `lane`, `position`, `speed` and `braking`
    have one element per car.
    """

    def __init__(
        self,
        graph: LaneGraph,
        num_cars: int,
        rng: np.random.Generator,
        *,
        closed: Collection[Node] = (),
        clear: Sequence[Occupant] = (),
        crossings: Crossings | None = None,
    ) -> None:
        self.graph, self._rng, self._closed = graph, rng, frozenset(closed)
        self._crossings = crossings
        places = self._place(num_cars, clear)
        self.lane = np.array([lane for lane, _ in places], np.int64)
        self.position = np.array([position for _, position in places])
        count = len(places)
        self.wanted = rng.uniform(8.0, 13.0, count)
        self.speed = self.wanted * 0.7
        self.braking = np.zeros(count, bool)
        self.models = rng.integers(NUM_CAR_MODELS, size=count)
        self.colors = rng.integers(6, size=count)
        self._next = np.array([self._choose(int(lane)) for lane in self.lane], np.int64)
        self._held = np.full(count, -1)
        self._visitor = -1

    def poses(self) -> Float[np.ndarray, "cars 3"]:
        """x, y (m) and heading (rad) of each car's middle."""
        return self.graph.poses(self.lane, self.position)

    def admit(self, turn: int, waits_behind: bool) -> bool:
        """Request `turn` for the recorded car; True once the turn is reserved for it, until `leave`."""
        if self._visitor == turn:
            return True
        if waits_behind or self._crossed(turn) or self.graph.conflicts[turn, self._held[self._held >= 0]].any():
            return False
        self._visitor = turn
        return True

    def leave(self) -> None:
        """Release the turn that `admit` reserved."""
        self._visitor = -1

    def taken(self) -> list[int]:
        """The turns that cars have been admitted to and not yet left."""
        held = self._held[self._held >= 0].tolist()
        return held if self._visitor < 0 else [*held, self._visitor]

    def step(self, occupants: Sequence[Occupant] = ()) -> None:
        """Advance all cars by 0.1 s."""
        graph = self.graph
        lanes = np.concatenate([self.lane, np.array([o.lane for o in occupants], np.int64)])
        positions = np.concatenate([self.position, [o.position for o in occupants]])
        speeds = np.concatenate([self.speed, [o.speed for o in occupants]])
        gap, lead_speed, leads_lane, first = self._leaders(lanes, positions, speeds)
        self._reserve(leads_lane, first, positions, speeds)

        on_road = self.lane < graph.num_road_lanes
        to_line = graph.lengths[self.lane] - self.position - CAR_LENGTH / 2
        limit = np.where(graph.bends[self._next], TURN_SPEED, STRAIGHT_SPEED)
        approach = np.sqrt(limit**2 + 2 * COMFORTABLE_BRAKING * np.maximum(to_line, 0.0))
        wanted = np.minimum(self.wanted, np.where(on_road, approach, limit))
        acceleration = follow(self.speed, wanted, gap, lead_speed)
        waiting = on_road & (self._held < 0)
        at_line = follow(self.speed, wanted, to_line + STANDSTILL_GAP - 0.5, np.zeros_like(self.speed))
        acceleration = np.where(waiting, np.minimum(acceleration, at_line), acceleration)

        before = self.speed
        self.speed = np.maximum(0.0, before + acceleration * STEP_SECONDS)
        self.braking = (acceleration < -BRAKE_LIGHT_FROM) | (self.speed < 0.3)
        self.position = self.position + (before + self.speed) / 2 * STEP_SECONDS
        self._pass_on()

    def _place(self, num_cars: int, clear: Sequence[Occupant]) -> list[tuple[int, float]]:
        graph, taken = self.graph, [(o.lane, o.position) for o in clear]
        weights = graph.lengths[: graph.num_road_lanes]
        places: list[tuple[int, float]] = []
        for _ in range(4 * num_cars):
            if len(places) == num_cars:
                break
            lane = int(self._rng.choice(graph.num_road_lanes, p=weights / weights.sum()))
            position = float(self._rng.uniform(3.0, graph.lengths[lane] - 14.0))
            if all(other != lane or abs(position - at) > 16.0 for other, at in taken):
                places.append((lane, position))
                taken.append((lane, position))
        return places

    def _choose(self, lane: int) -> int:
        turns = self.graph.turns[lane]
        return turns[int(self._rng.integers(len(turns)))]

    def _leaders(
        self, lanes: Int[np.ndarray, " all"], positions: Float[np.ndarray, " all"], speeds: Float[np.ndarray, " all"]
    ) -> tuple[
        Float[np.ndarray, " cars"], Float[np.ndarray, " cars"], Bool[np.ndarray, " cars"], Int[np.ndarray, " lanes"]
    ]:
        """Gap and speed of each car's leader within two lanes; whether a car leads its lane; each lane's last car."""
        graph, count = self.graph, len(self.lane)
        order = np.lexsort((positions, lanes))
        first = np.full(len(graph.lanes), -1)
        first[lanes[order][::-1]] = order[::-1]
        leader = np.full(len(lanes), -1)
        same = lanes[order][1:] == lanes[order][:-1]
        leader[order[:-1][same]] = order[1:][same]
        leader = leader[:count]
        leads_lane = leader < 0

        on_road = self.lane < graph.num_road_lanes
        exits = graph.exits[self._next]
        then = np.where(on_road, self._next, exits)
        distance = np.where(leads_lane, graph.lengths[self.lane], 0.0)
        leader = np.where(leads_lane, first[then], leader)
        beyond = leads_lane & (leader < 0) & on_road
        distance = np.where(beyond, distance + graph.lengths[self._next], distance)
        leader = np.where(beyond, first[exits], leader)

        alone = leader < 0
        gap = np.where(alone, 1e3, distance + positions[leader] - self.position - CAR_LENGTH)
        return gap, np.where(alone, 30.0, speeds[leader]), leads_lane, first

    def _reserve(
        self,
        leads_lane: Bool[np.ndarray, " cars"],
        first: Int[np.ndarray, " lanes"],
        positions: Float[np.ndarray, " all"],
        speeds: Float[np.ndarray, " all"],
    ) -> None:
        graph = self.graph
        to_line = graph.lengths[self.lane] - self.position - CAR_LENGTH / 2
        near = to_line < np.maximum(9.0, self.speed**2 / (2 * COMFORTABLE_BRAKING) + 6.0)
        asks = np.flatnonzero(near & leads_lane & (self._held < 0) & (self.lane < graph.num_road_lanes))
        for car in asks[np.argsort(to_line[asks], kind="stable")]:
            if self._crossed(int(self._next[car])):
                continue
            turn = graph.lanes[self._next[car]]
            taken = self._held[self._held >= 0]
            last = first[turn.exit]
            full = last >= 0 and positions[last] < 1.8 * CAR_LENGTH and speeds[last] < 3.0
            blocked = self._visitor >= 0 and graph.conflicts[self._next[car], self._visitor]
            if not (turn.node in self._closed or full or blocked or graph.conflicts[self._next[car], taken].any()):
                self._held[car] = self._next[car]

    def _crossed(self, turn: int) -> bool:
        return self._crossings is not None and self._crossings.blocks(turn)

    def _pass_on(self) -> None:
        graph = self.graph
        for car in np.flatnonzero(self.position > graph.lengths[self.lane]):
            self.position[car] -= graph.lengths[self.lane[car]]
            if self.lane[car] < graph.num_road_lanes:
                self.lane[car] = self._next[car]
            else:
                self.lane[car] = graph.lanes[self._next[car]].exit
                self._next[car] = self._choose(int(self.lane[car]))
        # A turn stays taken until the car's tail has left the junction.
        out = (self.lane < graph.num_road_lanes) & (self._held >= 0)
        entered = self._held != self._next
        self._held[out & entered & (self.position > CAR_LENGTH / 2 + 0.5)] = -1
