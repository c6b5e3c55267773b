"""Drives that come back to what they have seen: circles in a junction, out and back, and around a block.

These drives show whether a world model remembers places. A circle takes about 10 s, out and back 20 s, a block 40 s.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from terra.recording.bicycle import Bicycle, Path
from terra.recording.lanes import SAMPLE_STEP, LaneGraph
from terra.recording.town import LANE_WIDTH, Node

CIRCLE, OUT_AND_BACK, BLOCK = REVISITS = ("circle", "out_and_back", "block")

# Meters; the largest circle about a junction's center stays on the asphalt of the narrowest junction, and the smallest
# is one that the car can steer.
RADII = (4.5, 6.0)
LATERAL = LANE_WIDTH / 2  # m from the center line to the lane beside it
MAX_OFFSET = 0.25  # m from the path, at most
CRUISE_SPEEDS = {CIRCLE: (5.0, 9.0), OUT_AND_BACK: (8.0, 12.0), BLOCK: (9.0, 12.5)}  # m/s
RUN_UPS = {CIRCLE: (8.0, 25.0), OUT_AND_BACK: (20.0, 40.0), BLOCK: (20.0, 40.0)}  # m before the first stop line
# Cars in curves are so much slower (factor) than the comfortable limit.
CURVE_SPEEDS = (0.75, 0.95)
REST_SHARE = 0.2


@dataclass(frozen=True)
class Course:
    """The way of one drive.

    Attributes:
        path: the line that the car follows.
        start: position of the start along the path, m.
        marks: (position, event) of each junction: circle, turn_back, left or right.
        lanes: the road lanes that are driven.
        nodes: the junctions that are crossed.
    """

    path: Path
    start: float
    marks: tuple[tuple[float, str], ...]
    lanes: frozenset[int]
    nodes: frozenset[Node]


def plan_course(graph: LaneGraph, kind: str, node: Node, rng: np.random.Generator, meters: float) -> Course:
    """Plan a drive of one of `REVISITS` about a junction that is not at the town's edge, repeated over `meters`."""
    radius = float(rng.uniform(*RADII))
    pieces: list[Float[np.ndarray, "points 2"]] = []
    marks: list[tuple[float, str]] = []
    lanes, nodes, driven, start = set[int](), set[Node](), 0.0, 0.0
    for lane, event, crossing in _steps(graph, kind, node, rng, radius):
        road = graph.path(lane)
        if not pieces:
            start = max(0.0, float(graph.lengths[lane]) - float(rng.uniform(*RUN_UPS[kind])))
        pieces += [road[:-1], crossing]
        lanes.add(lane)
        nodes.add(graph.lanes[lane].node)
        driven += float(graph.lengths[lane])
        marks.append((driven, event))
        driven += _length(crossing)
        if driven > start + meters:
            break
    points = np.concatenate(pieces)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    return Course(Path(points, along), start, tuple(marks), frozenset(lanes), frozenset(nodes))


class RevisitDriver:
    """Drives one car along a course in steps of 0.1 s; there is nobody to yield to.

    `events` has the kind of the drive at step 0 and the course's marks.
    """

    def __init__(self, course: Course, kind: str, rng: np.random.Generator) -> None:
        self._path, self._marks, self._rng = course.path, list(course.marks), rng
        self._cruise, self._calm = float(rng.uniform(*CRUISE_SPEEDS[kind])), float(rng.uniform(*CURVE_SPEEDS))
        speed = 0.0 if rng.random() < REST_SHARE else min(self._cruise, self._calm * self._allowed(course.start))
        self._car = Bicycle(course.path, course.start, speed)
        self._offset, self._offset_until = 0.0, 0
        self.events = [(0, kind)]

    @property
    def pose(self) -> tuple[float, float, float]:
        """x, y (m) and heading (rad, counter-clockwise from +x, never wrapped)."""
        return self._car.pose

    @property
    def speed(self) -> float:
        """The car's, m/s."""
        return self._car.speed

    def step(self, index: int) -> None:
        """Advance by 0.1 s."""
        if index >= self._offset_until:
            self._offset = float(np.clip(self._rng.normal(0.0, 0.15), -MAX_OFFSET, MAX_OFFSET))
            self._offset_until = index + int(self._rng.integers(20, 70))
        car = self._car
        cruise = min(2.2, max(-2.0, 0.9 * (self._cruise - car.speed)))
        curves = max(-5.0, 2.0 * (self._calm * self._allowed(car.position) - car.speed))
        # The change of acceleration per step bounds the jerk, as for `Driver`.
        car.move(
            self._path, min(car.acceleration + 0.5, max(car.acceleration - 1.0, min(cruise, curves))), self._offset
        )
        while self._marks and car.position >= self._marks[0][0]:
            self.events.append((index, self._marks.pop(0)[1]))

    def _allowed(self, position: float) -> float:
        return self._path.allowed_speed(position)


def _steps(
    graph: LaneGraph, kind: str, node: Node, rng: np.random.Generator, radius: float
) -> Iterator[tuple[int, str, Float[np.ndarray, "points 2"]]]:
    """Without end, a road lane, what happens at the junction after it, and the path through that junction."""
    side = "left" if rng.random() < 0.5 else "right"
    lane = int(rng.choice([k for k in range(graph.num_road_lanes) if graph.lanes[k].node == node]))
    # A left turn begins and ends at the center line, as do circles; a right turn at the kerb.
    lane = graph.beside(lane, _lanes(graph, lane) - 1 if kind == BLOCK and side == "right" else 0)
    while True:
        if kind == BLOCK:
            turn = graph.turn(lane, side)
            assert turn is not None, "every junction of a grid has a turn to each side of some road of a block"
            yield lane, side, graph.path(turn)[:-1]
            lane = graph.lanes[turn].exit
        else:
            ways = _ways_on(graph, lane)
            angle = 180 if kind == OUT_AND_BACK else int(rng.choice(sorted(ways)))
            event = "circle" if kind == CIRCLE else "turn_back"
            yield lane, event, _around(graph, lane, radius, math.radians(angle), laps=int(kind == CIRCLE))
            lane = ways[angle]


def _lanes(graph: LaneGraph, lane: int) -> int:
    return graph.town.edges[graph.lanes[lane].edge].kind.lanes


def _ways_on(graph: LaneGraph, lane: int) -> dict[int, int]:
    """For each turn in degrees to the left that the junction ahead allows (180: back), the lane at the center line."""
    this = graph.lanes[lane]
    inward = graph.path(lane)[-1] - graph.path(lane)[-2]
    ways = {}
    for other in range(graph.num_road_lanes):
        that = graph.lanes[other]
        edge = graph.town.edges[that.edge]
        if that.index == 0 and this.node == (edge.start if that.direction > 0 else edge.end):
            outward = graph.path(other)[1] - graph.path(other)[0]
            cross = inward[0] * outward[1] - inward[1] * outward[0]
            angle = math.degrees(math.atan2(cross, float(np.dot(inward, outward))))
            ways[90 * round(angle / 90) % 360] = other
    return ways


def _around(graph: LaneGraph, lane: int, radius: float, angle: float, *, laps: int) -> Float[np.ndarray, "points 2"]:
    """The path through the junction ahead, counter-clockwise about its center as in a roundabout.

    Args:
        graph: the town's lanes.
        lane: the lane, beside the center line, on which the car comes.
        radius: of all arcs, m.
        angle: of the road that is left by, to the left of straight on, rad.
        laps: full circles before that.
    """
    i, j = graph.lanes[lane].node
    center = np.array([graph.town.xs[i], graph.town.ys[j]])
    step = graph.path(lane)[-1] - graph.path(lane)[-2]
    heading = math.pi / 2 * round(math.atan2(step[1], step[0]) / (math.pi / 2))
    # The arcs that lead in and out turn right and touch the circle. `ahead` is how far their centers are from the
    # junction's, along the road, and `edge` is where they touch it: so far from straight ahead or straight behind.
    ahead = math.sqrt(4 * radius**2 - (LATERAL + radius) ** 2)
    edge = math.atan2(LATERAL + radius, ahead)
    bend = math.pi / 2 - edge
    around = angle % (2 * math.pi) + math.pi - 2 * edge
    around = around % (2 * math.pi) + 2 * math.pi * laps
    parts = [
        _arc(np.array([-ahead, -LATERAL - radius]), radius, math.pi / 2, -bend),
        _arc(np.zeros(2), radius, edge - math.pi, around),
        _rotated(_arc(np.array([ahead, -LATERAL - radius]), radius, math.pi / 2 + bend, -bend), angle),
    ]
    return center + _rotated(np.concatenate(parts), heading)


def _arc(center: Float[np.ndarray, " 2"], radius: float, begin: float, turn: float) -> Float[np.ndarray, "points 2"]:
    """Points about every 0.5 m of an arc, without the last one; angles in rad, counter-clockwise from +x."""
    angles = begin + turn * np.arange(0.0, 1.0, min(0.5, SAMPLE_STEP / (radius * abs(turn))))
    return center + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _rotated(points: Float[np.ndarray, "points 2"], angle: float) -> Float[np.ndarray, "points 2"]:
    cosine, sine = math.cos(angle), math.sin(angle)
    return points @ np.array([[cosine, sine], [-sine, cosine]])


def _length(points: Float[np.ndarray, "points 2"]) -> float:
    return float(np.hypot(*np.diff(points, axis=0).T).sum())
