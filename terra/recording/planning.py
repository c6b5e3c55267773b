"""Plans a procedural town from one seed: a bowed grid of roads with buildings, lamps, trees and parked cars."""

import math
from collections.abc import Iterator

import numpy as np

from terra.recording.town import (
    BOW_RADIUS,
    CAR_COLORS,
    KERB_RADIUS,
    LAMP_DEPTH,
    NUM_CAR_MODELS,
    ROAD_KINDS,
    SIDEWALK_WIDTH,
    STRAIGHT_APPROACH,
    STREET,
    Building,
    Color,
    Edge,
    Frontage,
    Lamp,
    Node,
    ParkedCar,
    RoadKind,
    Town,
    Tree,
)

FACADE_COLORS: tuple[Color, ...] = (
    (0.74, 0.68, 0.59),
    (0.64, 0.49, 0.42),
    (0.79, 0.76, 0.70),
    (0.60, 0.63, 0.66),
    (0.65, 0.66, 0.61),
    (0.70, 0.60, 0.49),
)
HOUSE_COLORS: tuple[Color, ...] = ((0.84, 0.81, 0.74), (0.79, 0.73, 0.63), (0.70, 0.74, 0.76), (0.77, 0.68, 0.62))
ROOF_COLORS: tuple[Color, ...] = ((0.50, 0.33, 0.28), (0.42, 0.35, 0.32), (0.36, 0.38, 0.42))
LEAF_COLORS: tuple[Color, ...] = ((0.36, 0.47, 0.28), (0.42, 0.52, 0.31), (0.30, 0.42, 0.29), (0.52, 0.51, 0.32))


def plan_town(seed: int, num_lines: int = 6) -> Town:
    """The town of `seed`: a bowed grid of `num_lines` x `num_lines` roads. Equal seeds give equal towns.

    Raises:
        ValueError: fewer than 4 lines, which leaves no inner crossing to turn at.
    """
    if num_lines < 4:
        raise ValueError(f"a town needs at least 4 roads each way, got {num_lines = }")
    rng = np.random.default_rng([seed, 0])
    xs = tuple(np.cumsum(rng.uniform(66.0, 98.0, num_lines)).tolist())
    ys = tuple(np.cumsum(rng.uniform(66.0, 98.0, num_lines)).tolist())
    column_kinds, row_kinds = _draw_kinds(rng, num_lines), _draw_kinds(rng, num_lines)
    edges = tuple(_lay_edges(rng, xs, ys, column_kinds, row_kinds))
    town = Town(seed, xs, ys, column_kinds, row_kinds, edges, _draw_uses(rng, num_lines))
    for edge in edges:
        for side in (-1, 1):
            _furnish(town, Frontage(edge, side, _use_beside(town, edge, side)), rng)
    for block, use in town.uses.items():
        if use == "park":
            town.trees.extend(_park_trees(town, block, rng))
    town.trees.extend(_wood(town, rng))
    return town


def _draw_kinds(rng: np.random.Generator, num_lines: int) -> tuple[RoadKind, ...]:
    kinds = [ROAD_KINDS[k] for k in rng.choice(3, num_lines, p=[0.4, 0.35, 0.25])]
    # At least one inner road with a single lane, from which a car may go left, straight or right.
    kinds[int(rng.integers(1, num_lines - 1))] = STREET
    return tuple(kinds)


def _lay_edges(
    rng: np.random.Generator,
    xs: tuple[float, ...],
    ys: tuple[float, ...],
    column_kinds: tuple[RoadKind, ...],
    row_kinds: tuple[RoadKind, ...],
) -> Iterator[Edge]:
    for i, x in enumerate(xs):
        for j, y in enumerate(ys):
            for axis, (lines, k, kind, crossing) in enumerate(
                ((xs, i, row_kinds[j], column_kinds), (ys, j, column_kinds[i], row_kinds))
            ):
                if k + 1 == len(lines):
                    continue
                length = lines[k + 1] - lines[k]
                widest = (length - 2 * STRAIGHT_APPROACH) ** 2 / (2 * np.pi**2 * BOW_RADIUS)
                bow = float(rng.uniform(-1, 1) * widest * (rng.random() < 0.7))
                end = (i + 1, j) if axis == 0 else (i, j + 1)
                reaches = [crossing[m].half_width + KERB_RADIUS for m in (k, k + 1)]
                yield Edge((i, j), end, (x, y), axis, length, bow, kind, *reaches)


def _draw_uses(rng: np.random.Generator, num_lines: int) -> dict[Node, str]:
    """Draw the use of each block between the roads: downtown around one spot, houses and parks away from it."""
    heart = rng.uniform(1.0, num_lines - 2.0, 2)
    uses = {}
    for i in range(num_lines - 1):
        for j in range(num_lines - 1):
            dense = math.hypot(i - heart[0], j - heart[1]) < rng.uniform(0.8, 2.4)
            weights = [0.85, 0.0, 0.15] if dense else [0.2, 0.6, 0.2]
            uses[i, j] = str(rng.choice(["downtown", "houses", "park"], p=weights))
    return uses


def _use_beside(town: Town, edge: Edge, side: int) -> str:
    i, j = edge.start
    block = (i, j if side > 0 else j - 1) if edge.axis == 0 else (i - 1 if side > 0 else i, j)
    return town.uses.get(block, "outskirts")


def _furnish(town: Town, frontage: Frontage, rng: np.random.Generator) -> None:
    if frontage.use in ("downtown", "houses"):
        town.buildings.extend(_line_buildings(frontage, rng))
    town.lamps.extend(_line_lamps(frontage, rng))
    town.trees.extend(_line_trees(frontage, rng))
    if frontage.edge.kind.parking:
        town.parked_cars.extend(_line_parked_cars(frontage, rng))


def _line_buildings(frontage: Frontage, rng: np.random.Generator) -> Iterator[Building]:
    edge, dense = frontage.edge, frontage.use == "downtown"
    # Buildings of streets along x take the corners; those of streets along y leave the corners free.
    inset = SIDEWALK_WIDTH + 1.0 + (0.0 if edge.axis == 0 else 19.0)
    along, end = edge.start_reach + inset - KERB_RADIUS, edge.length - edge.end_reach - inset + KERB_RADIUS
    while True:
        width = float(rng.uniform(12, 24) if dense else rng.uniform(9, 13))
        depth = float(rng.uniform(11, 16) if dense else rng.uniform(8, 10))
        setback = SIDEWALK_WIDTH + (rng.uniform(1.0, 1.6) if dense else rng.uniform(4.0, 6.0))
        storeys = int(rng.integers(3, 9) if dense else rng.integers(1, 3))
        palette = FACADE_COLORS if dense else HOUSE_COLORS
        color, roof = palette[rng.integers(len(palette))], ROOF_COLORS[rng.integers(len(ROOF_COLORS))]
        style, seed = int(rng.integers(4)), float(rng.random())
        gap = float(rng.uniform(0.0, 1.5) * (rng.random() < 0.4) if dense else rng.uniform(4, 9))
        if along + width > end:
            return
        center, heading = frontage.at(along + width / 2, setback + depth / 2)
        # Widths along x and depth behind the kerb: every building turns its front to the road.
        facing = heading if frontage.side < 0 else heading + math.pi
        yield Building(center, width, depth, storeys, facing, color, roof, style, seed, gable=not dense)
        along += width + max(gap, 0.3)


def _line_lamps(frontage: Frontage, rng: np.random.Generator) -> Iterator[Lamp]:
    edge = frontage.edge
    along = edge.start_reach + float(rng.uniform(2, 6)) + (14.0 if frontage.side > 0 else 0.0)
    while along < edge.length - edge.end_reach - 2:
        center, heading = frontage.at(along, LAMP_DEPTH)
        yield Lamp(center, heading - frontage.side * math.pi / 2)
        along += 28.0


def _line_trees(frontage: Frontage, rng: np.random.Generator) -> Iterator[Tree]:
    edge = frontage.edge
    wooded = frontage.use == "outskirts"
    if not wooded and rng.random() < 0.35:
        return
    color = LEAF_COLORS[rng.integers(len(LEAF_COLORS))]
    spacing = float(rng.uniform(7, 9) if wooded else rng.uniform(10, 14))
    along = edge.start_reach + 7.0
    while along < edge.length - edge.end_reach - 6:
        if wooded:
            depth, color = float(rng.uniform(5, 16)), LEAF_COLORS[rng.integers(len(LEAF_COLORS))]
        else:
            depth = 1.3
        center, _ = frontage.at(along + float(rng.uniform(-1, 1)), depth)
        yield Tree(center, float(rng.uniform(5.5, 7.5)), color, wooded and rng.random() < 0.4, int(rng.integers(8)))
        along += spacing


def _line_parked_cars(frontage: Frontage, rng: np.random.Generator) -> Iterator[ParkedCar]:
    edge = frontage.edge
    along = edge.start_reach + 11.0
    while along < edge.length - edge.end_reach - 11.0:
        if rng.random() < 0.55:
            center, heading = frontage.at(along, -1.25)
            facing = heading if frontage.side < 0 else heading + math.pi
            yield ParkedCar(
                center, facing, int(rng.integers(NUM_CAR_MODELS)), CAR_COLORS[rng.integers(len(CAR_COLORS))]
            )
        along += 6.4


def _park_trees(town: Town, block: Node, rng: np.random.Generator) -> Iterator[Tree]:
    i, j = block
    for _ in range(26):
        x = rng.uniform(town.xs[i] + 22, town.xs[i + 1] - 22)
        y = rng.uniform(town.ys[j] + 22, town.ys[j + 1] - 22)
        color = LEAF_COLORS[rng.integers(len(LEAF_COLORS))]
        yield Tree((float(x), float(y)), float(rng.uniform(6, 9)), color, rng.random() < 0.3, int(rng.integers(8)))


def _wood(town: Town, rng: np.random.Generator) -> Iterator[Tree]:
    """Trees in a belt around the town, so that roads that end at its edge do not face an empty meadow."""
    corners = [
        (town.xs[0], town.ys[0]),
        (town.xs[-1], town.ys[0]),
        (town.xs[-1], town.ys[-1]),
        (town.xs[0], town.ys[-1]),
    ]
    for k, start in enumerate(corners):
        end, out = corners[(k + 1) % 4], k * math.pi / 2 - math.pi / 2
        for share in np.arange(-0.05, 1.05, 10.0 / math.dist(start, end)):
            away, share = float(rng.uniform(24, 55)), float(share) + float(rng.uniform(-0.01, 0.01))
            x = start[0] + share * (end[0] - start[0]) + away * math.cos(out)
            y = start[1] + share * (end[1] - start[1]) + away * math.sin(out)
            color = LEAF_COLORS[rng.integers(len(LEAF_COLORS))]
            yield Tree((x, y), float(rng.uniform(6.5, 10)), color, rng.random() < 0.5, int(rng.integers(8)))
