"""Pedestrians: they walk around the blocks of a town and cross roads at crosswalks, where cars yield to them."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from terra.recording.ground import block_loops
from terra.recording.lanes import LaneGraph
from terra.recording.town import SIDEWALK_WIDTH, Color, Node, Town
from terra.recording.traffic import STEP_SECONDS

# Muted, and dark and pale ones in equal parts.
CLOTHES: tuple[Color, ...] = (
    (0.33, 0.36, 0.42),
    (0.55, 0.38, 0.34),
    (0.70, 0.66, 0.58),
    (0.36, 0.42, 0.36),
    (0.62, 0.64, 0.66),
    (0.28, 0.27, 0.28),
    (0.50, 0.46, 0.56),
    (0.66, 0.54, 0.40),
)
# Meters from the kerb to the middle of the walking band, behind lamps and trees, and half the band's width.
WALK_DEPTH = 2.3
WALK_SPREAD = 0.35
WAIT_DEPTH = 0.7  # m behind the kerb, where pedestrians wait to cross
# From a junction's end to the middle of its crosswalk, and how far from that middle people cross.
CROSSWALK_MIDDLE = 1.8
CROSSWALK_SPREAD = 0.7
# Meters of sidewalk per pedestrian, by the use of the block.
METERS_PER_PERSON = {"downtown": 30.0, "park": 70.0, "houses": 90.0}
MAX_PEOPLE = 160
WALKING_SPEEDS = (1.0, 1.6)  # m/s
CROSSING_SHARE = 0.15
# Share of the initial pedestrians who take their next crosswalk if it is within this many meters.
EAGER_SHARE, EAGER_METERS = 0.12, 30.0
STRIDE = 1.4  # m; a stride is two steps
SAMPLE_STEP = 0.25

_WALKING, _APPROACHING, _WAITING, _CROSSING, _LEAVING = range(5)


@dataclass(frozen=True)
class Crosswalk:
    """One crosswalk.

    Attributes:
        middle: x + iy (m) of its middle.
        across: unit vector across the road, from the left of the edge to the right.
        half: half the width of the road (m).
        node: its junction.
        loops, positions: walking loops at its left and right end, and meters along each loop where the end lies.
    """

    middle: complex
    across: complex
    half: float
    node: Node
    loops: tuple[int, int]
    positions: tuple[float, float]


class Walkways:
    """The pedestrians' paths: a closed loop around each block, counter-clockwise, and the crosswalks between blocks.

    `turn_crossings[k]` are the crosswalks that lane k of the lane graph passes: up to two for turns, none for roads.
    """

    def __init__(self, graph: LaneGraph) -> None:
        town = graph.town
        self.lengths, self.uses = np.zeros(len(town.uses)), tuple(town.uses.values())
        points, headings, counts = [], [], []
        for k, block in enumerate(town.uses):
            line, turn, self.lengths[k] = _loop(town, block)
            points.append(line)
            headings.append(turn)
            counts.append(len(line))
        self._points, self._headings = np.concatenate(points), np.concatenate(headings)
        self._steps = self.lengths / (np.array(counts) - 1)
        self._firsts = np.cumsum(counts) - counts
        self.crosswalks: list[Crosswalk] = []
        ends = self._lay_crosswalks(town, points)
        self.turn_crossings: list[tuple[int, ...]] = [()] * graph.num_road_lanes
        for lane in graph.lanes[graph.num_road_lanes :]:
            roads = (graph.lanes[lane.entry].edge, graph.lanes[lane.exit].edge)
            self.turn_crossings.append(tuple(ends[edge, lane.node] for edge in roads if (edge, lane.node) in ends))
        # For each loop the ends of crosswalks on it: position (m), index of the crosswalk, side (+1: its left end).
        self.anchors: list[list[tuple[float, int, int]]] = [[] for _ in town.uses]
        for number, crosswalk in enumerate(self.crosswalks):
            for loop, position, side in zip(crosswalk.loops, crosswalk.positions, (1, -1), strict=True):
                self.anchors[loop].append((position, number, side))

    def _lay_crosswalks(self, town: Town, points: Sequence[np.ndarray]) -> dict[tuple[int, Node], int]:
        numbers = {block: k for k, block in enumerate(town.uses)}
        ends: dict[tuple[int, Node], int] = {}
        for index, edge in enumerate(town.edges):
            i, j = edge.start
            blocks = ((i, j), (i, j - 1)) if edge.axis == 0 else ((i - 1, j), (i, j))
            if blocks[0] not in numbers or blocks[1] not in numbers:
                continue
            loops = (numbers[blocks[0]], numbers[blocks[1]])
            inset = CROSSWALK_MIDDLE
            for node, along in (
                (edge.start, edge.start_reach + inset),
                (edge.end, edge.length - edge.end_reach - inset),
            ):
                (point,), (heading,) = edge.at(np.array([along]))
                middle, across = complex(*point), -1j * complex(math.cos(heading), math.sin(heading))
                reach = edge.kind.half_width + WALK_DEPTH
                positions = (
                    self._project(points[loops[0]], loops[0], middle - across * reach),
                    self._project(points[loops[1]], loops[1], middle + across * reach),
                )
                ends[index, node] = len(self.crosswalks)
                self.crosswalks.append(Crosswalk(middle, across, edge.kind.half_width, node, loops, positions))
        return ends

    def _project(self, points: np.ndarray, loop: int, target: complex) -> float:
        nearest = min(int(np.argmin(np.abs(points - target))), len(points) - 2)
        ahead = points[nearest + 1] - points[nearest]
        return float(nearest * self._steps[loop] + np.real((target - points[nearest]) * np.conj(ahead)) / abs(ahead))

    def on_loops(
        self, loops: Int[np.ndarray, "..."], positions: Float[np.ndarray, "..."], offsets: Float[np.ndarray, "..."]
    ) -> tuple[np.ndarray, Float[np.ndarray, "..."]]:
        """x + iy (m) of points `positions` meters along `loops` and `offsets` meters left, and the loops' headings."""
        along = np.mod(positions, self.lengths[loops]) / self._steps[loops]
        below = along.astype(np.int64)
        first = self._firsts[loops] + below
        share = along - below
        point, heading = self._points[first], self._headings[first]
        heading = heading + share * (self._headings[first + 1] - heading)
        left = -np.sin(heading) + 1j * np.cos(heading)
        return point + share * (self._points[first + 1] - point) + offsets * left, heading


def _loop(town: Town, block: Node) -> tuple[np.ndarray, Float[np.ndarray, " points"], float]:
    """The walking line around a block, closed and evenly sampled: x + iy, headings and its length (m)."""
    kerb, back = block_loops(town, block)
    line = (kerb + (back - kerb) * (WALK_DEPTH / SIDEWALK_WIDTH)) @ np.array([1, 1j])
    line = np.append(line, line[0])
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(line)))])
    length = float(along[-1])
    wanted = np.linspace(0.0, length, math.ceil(length / SAMPLE_STEP) + 1)
    points = np.interp(wanted, along, np.real(line)) + 1j * np.interp(wanted, along, np.imag(line))
    steps = np.roll(points[:-1], -1) - np.roll(points[:-1], 1)
    headings = np.unwrap(np.angle(steps))
    return np.append(points[:-1], points[0]), np.append(headings, headings[0] + 2 * math.pi), length


class Pedestrians:
    """The pedestrians of a town, stepped at 10 Hz.

    No pedestrian begins to cross at `closed` junctions. A pedestrian who wants to cross waits at the kerb until no car
    has reserved a turn over the crosswalk, and then blocks those turns until reaching the other kerb.
    """

    def __init__(
        self,
        walkways: Walkways,
        rng: np.random.Generator,
        *,
        closed: Collection[Node] = (),
        most: int = MAX_PEOPLE,
    ) -> None:
        self._ways, self._rng, self._closed = walkways, rng, frozenset(closed)
        counts = [round(n / METERS_PER_PERSON[use]) for n, use in zip(walkways.lengths, walkways.uses, strict=True)]
        path = np.repeat(np.arange(len(counts)), counts)
        # Above the most, a random selection keeps the density even.
        path = np.sort(rng.permutation(path)[:most])
        count = len(path)
        self._path, self._position = path, rng.uniform(0.0, 1.0, count) * walkways.lengths[path]
        self._direction = np.where(rng.random(count) < 0.5, 1.0, -1.0)
        self._depth = rng.uniform(-WALK_SPREAD, WALK_SPREAD, count)
        self._aside = rng.uniform(-CROSSWALK_SPREAD, CROSSWALK_SPREAD, count)
        self._stride = rng.uniform(*WALKING_SPEEDS, count) * STEP_SECONDS
        self._walked = rng.uniform(0.0, STRIDE, count)
        self.clothes = rng.integers(len(CLOTHES), size=count)
        self._stage = [_WALKING] * count
        self._target = [(0, 1)] * count  # the next crosswalk and its side
        self._to_go = np.zeros(count)
        self._moving = np.ones(count)
        self._waiting: list[int] = []
        self._claims: list[int] = []  # the crosswalk of each pedestrian who waits or crosses
        self._claimed: frozenset[int] = frozenset()
        self._notes: list[tuple[np.ndarray, ...]] = []
        self._crosses = [False] * count  # whether the next crosswalk will be taken
        for person in range(count):
            self._walk_on(person)
        # Some pedestrians are about to cross at the start, as at any later time.
        for person in np.flatnonzero(rng.random(count) < EAGER_SHARE).tolist():
            skipped = max(0.0, float(self._to_go[person]) - float(rng.uniform(0.5, EAGER_METERS)))
            self._position[person] += self._direction[person] * skipped
            self._to_go[person] -= skipped
            self._crosses[person] = True

    def blocks(self, turn: int) -> bool:
        """Whether someone crosses, or is about to, where `turn` passes."""
        return not self._claimed.isdisjoint(self._ways.turn_crossings[turn])

    def step(self, taken: Collection[int]) -> None:
        """Advance by 0.1 s; `taken` are the turns that cars have been admitted to."""
        move = self._stride * self._moving
        self._position += self._direction * move
        self._walked += move
        self._to_go -= move
        if self._waiting:
            busy = {crossing for turn in taken for crossing in self._ways.turn_crossings[turn]}
            for person in tuple(self._waiting):
                if self._target[person][0] not in busy:
                    self._cross(person)
        for person in np.flatnonzero(self._to_go <= 0.0).tolist():
            self._arrive(person)

    def note(self) -> None:
        """Record the pedestrians' current state for `poses`."""
        self._notes.append((self._path.copy(), self._position.copy(), self._direction.copy(), self._walked.copy()))

    def poses(self) -> tuple[Float[np.ndarray, "notes pedestrians 4"], Bool[np.ndarray, "notes pedestrians"]]:
        """The recorded states: x, y (m), heading (rad), walk phase in [0, 1); and whether each is on a sidewalk.

        A stride begins with phase 0; a standing pedestrian has phase 0.25, in which the legs are side by side.
        """
        path, position, direction, walked = (np.stack(values) for values in zip(*self._notes, strict=True))
        num_loops = len(self._ways.lengths)
        on_loop = path < num_loops
        depths = np.broadcast_to(self._depth, path.shape)
        point, heading = self._ways.on_loops(np.where(on_loop, path, 0), position, depths)
        raised = np.ones(path.shape, bool)
        note, person = np.nonzero(~on_loop)
        if len(note):
            crosswalks = self._ways.crosswalks
            crossing = path[note, person] - num_loops
            middle, across = (np.array([getattr(c, name) for c in crosswalks]) for name in ("middle", "across"))
            along = position[note, person]
            point[note, person] = middle[crossing] + across[crossing] * (along + 1j * self._aside[person])
            heading[note, person] = np.angle(across[crossing])
            raised[note, person] = np.abs(along) > np.array([c.half for c in crosswalks])[crossing]
        heading = heading + np.where(direction < 0, math.pi, 0.0)
        phase = np.mod(walked / STRIDE, 1.0)
        phase[1:][walked[1:] == walked[:-1]] = 0.25
        return np.stack([np.real(point), np.imag(point), heading, phase], axis=-1), raised

    def _walk_on(self, person: int) -> None:
        """Choose the next crosswalk ahead as the person's target."""
        loop, position, direction = (
            int(self._path[person]),
            float(self._position[person]),
            float(self._direction[person]),
        )
        length, aside = float(self._ways.lengths[loop]), float(self._aside[person])
        best = length
        for at, crosswalk, side in self._ways.anchors[loop]:
            distance = (at + side * aside - position) * direction % length
            if 0.05 < distance < best:
                best, self._target[person] = distance, (crosswalk, side)
        self._stage[person], self._to_go[person] = _WALKING, best
        self._crosses[person] = bool(self._rng.random() < CROSSING_SHARE)

    def _arrive(self, person: int) -> None:
        """Begin the person's next activity at the end of the current one."""
        stage, (number, side) = self._stage[person], self._target[person]
        crosswalk = self._ways.crosswalks[number]
        depth = float(self._depth[person])
        self._position[person] += self._direction[person] * self._to_go[person]
        if stage == _WALKING:
            if not self._crosses[person] or crosswalk.node in self._closed:
                self._walk_on(person)
                return
            self._path[person] = len(self._ways.lengths) + number
            self._position[person] = -side * (crosswalk.half + WALK_DEPTH + depth)
            self._direction[person] = side
            self._stage[person], self._to_go[person] = _APPROACHING, WALK_DEPTH + depth - WAIT_DEPTH
        elif stage == _APPROACHING:
            self._stage[person], self._moving[person], self._to_go[person] = _WAITING, 0.0, math.inf
            self._waiting.append(person)
            self._claims.append(number)
            self._claimed = frozenset(self._claims)
        elif stage == _CROSSING:
            self._claims.remove(number)
            self._claimed = frozenset(self._claims)
            self._stage[person], self._to_go[person] = _LEAVING, WALK_DEPTH + depth - WAIT_DEPTH
        else:
            end = 1 if side > 0 else 0
            self._path[person] = crosswalk.loops[end]
            self._position[person] = crosswalk.positions[end] - side * float(self._aside[person])
            self._direction[person] = 1.0 if self._rng.random() < 0.5 else -1.0
            self._walk_on(person)

    def _cross(self, person: int) -> None:
        self._waiting.remove(person)
        half = self._ways.crosswalks[self._target[person][0]].half
        self._stage[person], self._moving[person] = _CROSSING, 1.0
        self._to_go[person] = 2 * (half + WAIT_DEPTH)
