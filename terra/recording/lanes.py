"""The lanes of a town as a graph: road lanes between junctions, and the turns that join them inside junctions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from terra.recording.town import LANE_WIDTH, STOP_LINE_SETBACK, Edge, Node, Town

SAMPLE_STEP = 0.5
MAX_RIGHT_RADIUS = 9.0
MAX_LEFT_RADIUS = 13.0
# Two turns conflict if their center lines come closer (m) than a turning car is wide.
CONFLICT_DISTANCE = 3.0

MANEUVERS = ("left", "straight", "right")


@dataclass(frozen=True)
class Lane:
    """A stretch of lane that one car drives on: a road lane up to its stop line, or one turn inside a junction.

    `direction` is +1 along the edge and -1 against it (road lanes only), `index` counts lanes from the center line,
    `maneuver` is "" for road lanes. `node` is the junction ahead of a road lane, or the one that a turn crosses.
    """

    node: Node
    edge: int
    direction: int
    index: int
    maneuver: str
    entry: int
    exit: int


class LaneGraph:
    """All lanes of a town, with their center lines sampled about every 0.5 m.

    `lanes[k]` describes lane k and `lengths[k]` is its length in meters; the first `num_road_lanes` are road lanes, the
    rest turns. `turns[k]` are the turns that leave road lane k, `exits[k]` the road lane that turn k ends in (else -1),
    `bends[k]` tells whether lane k is a turn to the left or right, `conflicts[j, k]` whether two turns come closer
    than `CONFLICT_DISTANCE`.
    """

    def __init__(self, town: Town) -> None:
        self.town = town
        self.lanes: list[Lane] = []
        self.turns: dict[int, list[int]] = {}
        self._paths: list[Float[np.ndarray, "points 2"]] = []
        self._by_place: dict[tuple[int, int, int], int] = {}
        for edge_index, edge in enumerate(town.edges):
            self._add_road_lanes(edge_index, edge)
        self.num_road_lanes = len(self.lanes)
        for lane in range(self.num_road_lanes):
            self._add_turns(lane)
        self.exits = np.array([lane.exit for lane in self.lanes])
        self.bends = np.array([lane.maneuver in ("left", "right") for lane in self.lanes])
        self._sample()
        self.conflicts = self._find_conflicts()

    def beside(self, lane: int, index: int) -> int:
        """The lane of the same road and direction with another `index`; KeyError if the road has no such lane."""
        this = self.lanes[lane]
        return self._by_place[this.edge, this.direction, index]

    def turn(self, lane: int, maneuver: str) -> int | None:
        """The turn that leaves road lane `lane` by `maneuver`, if there is one."""
        return next((turn for turn in self.turns[lane] if self.lanes[turn].maneuver == maneuver), None)

    def path(self, lane: int) -> Float[np.ndarray, "points 2"]:
        """The center line of a lane, `round(length / 0.5) + 1` points evenly spaced."""
        return self._points[self._offsets[lane] : self._offsets[lane] + self._counts[lane]]

    def poses(
        self, lanes: Int[np.ndarray, " cars"], positions: Float[np.ndarray, " cars"]
    ) -> Float[np.ndarray, "cars 3"]:
        """x, y (m) and heading (rad) at `positions` meters along `lanes`."""
        place = np.clip(positions / self._steps[lanes], 0.0, self._counts[lanes] - 1.000001)
        below = place.astype(np.int64)
        share = (place - below)[:, None]
        first = self._offsets[lanes] + below
        xy = (1 - share) * self._points[first] + share * self._points[first + 1]
        turn = self._headings[first + 1] - self._headings[first]
        return np.concatenate([xy, self._headings[first][:, None] + share * turn[:, None]], axis=1)

    def _add_road_lanes(self, edge_index: int, edge: Edge) -> None:
        along = np.linspace(edge.start_reach + STOP_LINE_SETBACK, edge.length - edge.end_reach - STOP_LINE_SETBACK, 200)
        for direction in (1, -1):
            for index in range(edge.kind.lanes):
                points, _ = edge.at(along, -direction * (index + 0.5) * LANE_WIDTH)
                self._by_place[edge_index, direction, index] = len(self.lanes)
                node = edge.end if direction > 0 else edge.start
                self.lanes.append(Lane(node, edge_index, direction, index, "", -1, -1))
                self._paths.append(points if direction > 0 else points[::-1])

    def _add_turns(self, lane: int) -> None:
        found = list(self._turns_from(lane))
        # From the right lane a car turns right or goes straight, from the left lane it turns left or goes straight; if
        # the junction offers neither, it may take any turn.
        this, lanes = self.lanes[lane], self.town.edges[self.lanes[lane].edge].kind.lanes
        kept = [(m, e) for m, e in found if m == "straight" or lanes == 1 or (m == "left") == (this.index == 0)]
        self.turns[lane] = []
        for maneuver, exit_lane in kept or found:
            self.turns[lane].append(len(self.lanes))
            self.lanes.append(Lane(this.node, -1, 0, -1, maneuver, lane, exit_lane))
            self._paths.append(_turn_path(self._paths[lane], self._paths[exit_lane], maneuver))

    def _turns_from(self, lane: int) -> Iterator[tuple[str, int]]:
        this = self.lanes[lane]
        inward = _compass(self.town.edges[this.edge], this.direction)
        for edge_index, edge in enumerate(self.town.edges):
            if edge_index == this.edge or this.node not in (edge.start, edge.end):
                continue
            direction = 1 if edge.start == this.node else -1
            maneuver = ("straight", "left", "back", "right")[(_compass(edge, direction) - inward) % 4]
            # A left turn ends in the lane at the center line, a right turn in the lane at the kerb.
            index = {"straight": this.index, "left": 0, "right": edge.kind.lanes - 1}[maneuver]
            yield maneuver, self._by_place[edge_index, direction, index]

    def _sample(self) -> None:
        paths, lengths = [], []
        for path in self._paths:
            along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
            wanted = np.linspace(0.0, along[-1], round(along[-1] / SAMPLE_STEP) + 1)
            paths.append(np.stack([np.interp(wanted, along, path[:, k]) for k in (0, 1)], axis=1))
            lengths.append(along[-1])
        self.lengths = np.array(lengths)
        self._counts = np.array([len(path) for path in paths])
        self._offsets = np.cumsum(self._counts) - self._counts
        self._steps = self.lengths / (self._counts - 1)
        self._points = np.concatenate(paths)
        self._headings = np.concatenate([np.unwrap(np.arctan2(*np.gradient(path, axis=0).T[::-1])) for path in paths])

    def _find_conflicts(self) -> Bool[np.ndarray, "lanes lanes"]:
        conflicts = np.zeros((len(self.lanes), len(self.lanes)), bool)
        by_node: dict[Node, list[int]] = {}
        for turn in range(self.num_road_lanes, len(self.lanes)):
            by_node.setdefault(self.lanes[turn].node, []).append(turn)
        for turns in by_node.values():
            for k, first in enumerate(turns):
                path = self.path(first)[::2]
                for second in turns[:k]:
                    gaps = path[:, None] - self.path(second)[None, ::2]
                    if (gaps**2).sum(-1).min() < CONFLICT_DISTANCE**2:
                        conflicts[first, second] = conflicts[second, first] = True
        return conflicts


def _compass(edge: Edge, direction: int) -> int:
    """The quarter turns from +x of travel along an edge."""
    return edge.axis + (0 if direction > 0 else 2)


def _turn_path(
    entry: Float[np.ndarray, "points 2"], leaving: Float[np.ndarray, "exit_points 2"], maneuver: str
) -> Float[np.ndarray, "turn_points 2"]:
    """A line, an arc and a line from the end of `entry` to the start of `leaving`."""
    start, end = entry[-1], leaving[0]
    if maneuver == "straight":
        return np.stack([start, end])
    ahead = (entry[-1] - entry[-2]) / math.dist(entry[-1], entry[-2])
    out = (leaving[1] - leaving[0]) / math.dist(leaving[0], leaving[1])
    run_in, run_out = float(np.dot(end - start, ahead)), float(np.dot(end - start, out))
    radius = min(run_in, run_out, MAX_LEFT_RADIUS if maneuver == "left" else MAX_RIGHT_RADIUS)
    begin = start + ahead * (run_in - radius)
    angles = np.linspace(0.0, np.pi / 2, 40)[:, None]
    arc = begin + radius * (np.sin(angles) * ahead + (1 - np.cos(angles)) * out)
    return np.concatenate([start[None], arc, end[None]])
