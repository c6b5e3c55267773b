"""The plan of a town: roads and the objects beside them, in meters and without any graphics."""

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

LANE_WIDTH = 3.5
GUTTER_WIDTH = 0.4
PARKING_WIDTH = 2.3
KERB_RADIUS = 4.5
KERB_HEIGHT = 0.14
SIDEWALK_WIDTH = 3.0
# From the end of the kerb's rounding to the stop line: the crosswalk and the gap before it.
STOP_LINE_SETBACK = 4.3
STOREY_HEIGHT = 3.2
# Meters from the kerb to a lamp post.
LAMP_DEPTH = 0.6

BOW_RADIUS = 60.0  # m, smallest radius of a road's bow, so that cruising through it stays comfortable
# Roads stay straight this far from a junction's center; past every stop line.
STRAIGHT_APPROACH = 24.0

Color = tuple[float, float, float]
Node = tuple[int, int]
Points = Float[np.ndarray, "points 2"]
Scalars = Float[np.ndarray, " points"]

CAR_COLORS: tuple[Color, ...] = (
    (0.55, 0.20, 0.18),
    (0.22, 0.32, 0.48),
    (0.84, 0.84, 0.82),
    (0.20, 0.21, 0.23),
    (0.56, 0.58, 0.60),
    (0.40, 0.44, 0.38),
)
NUM_CAR_MODELS = 3


@dataclass(frozen=True)
class RoadKind:
    """The layout of a road: the number of lanes each way, and whether cars park along both kerbs."""

    name: str
    lanes: int
    parking: bool

    @property
    def half_width(self) -> float:
        """Meters from the center line to the kerb."""
        return self.lanes * LANE_WIDTH + GUTTER_WIDTH + self.parking * PARKING_WIDTH


STREET = RoadKind("street", lanes=1, parking=False)
PARKING_STREET = RoadKind("parking_street", lanes=1, parking=True)
AVENUE = RoadKind("avenue", lanes=2, parking=False)
ROAD_KINDS = (STREET, PARKING_STREET, AVENUE)


@dataclass(frozen=True)
class Edge:
    """A road between two neighboring junctions, drawn along +x (`axis` 0) or +y (`axis` 1).

    Positions along the road are meters of straight distance from the first junction's center. `bow` is how far (m) the
    middle of the road swings to the left. The road proper lies between `start_reach` and `end_reach`, at which the
    junctions end.
    """

    start: Node
    end: Node
    origin: tuple[float, float]
    axis: int
    length: float
    bow: float
    kind: RoadKind
    start_reach: float
    end_reach: float

    def at(self, along: Scalars, lateral: float | Scalars = 0.0) -> tuple[Points, Scalars]:
        """Points `lateral` meters left of the center line, and the road's heading (rad, from +x) there."""
        inner = self.length - 2 * STRAIGHT_APPROACH
        phase = np.pi * np.clip((np.asarray(along, float) - STRAIGHT_APPROACH) / inner, 0.0, 1.0)
        swing = self.bow * np.sin(phase) ** 2
        slope = self.bow * np.pi / inner * np.sin(2 * phase)
        turn = np.arctan(slope)
        forward = along - lateral * np.sin(turn)
        left = swing + lateral * np.cos(turn)
        x, y = (forward, left) if self.axis == 0 else (-left, forward)
        return np.stack([self.origin[0] + x, self.origin[1] + y], axis=-1), turn + self.axis * np.pi / 2

    def samples(self) -> Scalars:
        """Positions about every 4 m from one junction's end to the other's; all geometry beside the road uses them."""
        span = self.length - self.start_reach - self.end_reach
        return np.linspace(self.start_reach, self.length - self.end_reach, max(2, math.ceil(span / 4.0)))


@dataclass(frozen=True)
class Frontage:
    """One side of one edge: `side` +1 is left of the edge's direction; `use` is the use of the block there."""

    edge: Edge
    side: int
    use: str

    def at(self, along: float, depth: float) -> tuple[tuple[float, float], float]:
        """The point `depth` meters behind the kerb and the road's heading there."""
        points, headings = self.edge.at(np.array([along]), self.side * (self.edge.kind.half_width + depth))
        return (float(points[0, 0]), float(points[0, 1])), float(headings[0])


@dataclass(frozen=True)
class Building:
    """A block of `storeys`, `width` along its street (`heading`) and `depth` behind it; `gable` gives it a roof."""

    center: tuple[float, float]
    width: float
    depth: float
    storeys: int
    heading: float
    color: Color
    roof_color: Color
    style: int
    seed: float
    gable: bool


@dataclass(frozen=True)
class Tree:
    """A tree or, with `conifer`, a fir; `seed` picks its shape."""

    center: tuple[float, float]
    height: float
    color: Color
    conifer: bool
    seed: int


@dataclass(frozen=True)
class Lamp:
    """A street lamp whose arm points along `heading`, over the road."""

    center: tuple[float, float]
    heading: float


@dataclass(frozen=True)
class ParkedCar:
    """A car that never moves."""

    center: tuple[float, float]
    heading: float
    model: int
    color: Color


@dataclass(frozen=True)
class Town:
    """The plan: junction (i, j) is at `xs[i]`, `ys[j]`, where the roads `column_kinds[i]` and `row_kinds[j]` cross.

    `uses[i, j]` is the use of the block between junctions (i, j) and (i + 1, j + 1): downtown, houses or park.
    """

    seed: int
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    column_kinds: tuple[RoadKind, ...]
    row_kinds: tuple[RoadKind, ...]
    edges: tuple[Edge, ...]
    uses: dict[Node, str]
    buildings: list[Building] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    lamps: list[Lamp] = field(default_factory=list)
    parked_cars: list[ParkedCar] = field(default_factory=list)
