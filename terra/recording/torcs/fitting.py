"""Finds where the road of a track's description runs in the track's model, and how high the ground is along it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from terra.errors import DatasetError
from terra.recording.torcs.ac3d import Part
from terra.recording.torcs.road import Road, height_offsets

# TORCS names the objects of the road so; "main" is the road without its sides.
MAIN_ROAD, ANY_ROAD = "TKMN", "TK"
# Metres: how far the model's edges may be from the road that was fitted to them (the median vertex), and the gap that
# may be between the ends of the road.
MAX_MISFIT, MAX_GAP = 0.5, 1.0
NUM_ROUNDS = 30
CELL_METRES = 8.0
# Metres over which the car's springs even out the joints of the ground's flat pieces.
SMOOTHING = 2.0

Triangles = Float[np.ndarray, "triangles 3 3"]


def fit_road(trace: Float[np.ndarray, "points 3"], width: float, parts: Sequence[Part], where: str) -> Road:
    """The road of `trace` (from `layout.trace`), moved to where the model has it, with the model's heights.

    Raises:
        DatasetError: the road is no loop, or the model has no such road.
    """
    gap = float(np.hypot(*trace[-1, :2]))
    if gap > MAX_GAP:
        raise DatasetError(f"{where}: expected a road whose ends meet, got {gap:.1f} m between them")
    share = np.linspace(0.0, 1.0, len(trace))[:, None]
    line = trace.copy()
    line[:, :2] -= share * trace[-1, :2]
    line = line[:-1]
    edges = _edges(line, width)
    main = [part.positions.reshape(-1, 3)[:, :2] for part in parts if part.name.startswith(MAIN_ROAD)]
    if not main:
        raise DatasetError(f"{where}: expected objects named {MAIN_ROAD}..., got {len(parts)} others")
    vertices = np.unique(np.concatenate(main), axis=0)
    move, misfit = _align(edges, vertices)
    if misfit > MAX_MISFIT:
        raise DatasetError(
            f"{where}: expected the model's road within {MAX_MISFIT} m of the description's, {misfit = }"
        )
    line[:, :2] += move
    ground = np.concatenate([part.positions for part in parts if part.name.startswith(ANY_ROAD)])
    return Road(line, _heights(line, width, ground, where), width)


def _edges(line: Float[np.ndarray, "points 3"], width: float) -> Float[np.ndarray, "edges 2"]:
    left = np.stack([-np.sin(line[:, 2]), np.cos(line[:, 2])], axis=1)
    return np.concatenate([line[:, :2] + left * width / 2, line[:, :2] - left * width / 2])


def _align(
    edges: Float[np.ndarray, "edges 2"], vertices: Float[np.ndarray, "vertices 2"]
) -> tuple[Float[np.ndarray, " 2"], float]:
    """The move of `edges` onto `vertices`, and the median distance (m) that is left."""
    move = (vertices.min(axis=0) + vertices.max(axis=0) - edges.min(axis=0) - edges.max(axis=0)) / 2
    for _ in range(NUM_ROUNDS):
        misses = vertices - edges[_nearest(vertices, edges + move)] - move
        distances = np.hypot(*misses.T)
        # The start and the pits may be built otherwise than described.
        move = move + np.median(misses[distances <= np.percentile(distances, 70)], axis=0)
    misses = vertices - edges[_nearest(vertices, edges + move)] - move
    return move, float(np.median(np.hypot(*misses.T)))


def _nearest(points: Float[np.ndarray, "points 2"], others: Float[np.ndarray, "others 2"]) -> np.ndarray:
    """For each point the index of the nearest of `others`."""
    # |a - b|^2 without |a|^2, which changes no order; small blocks keep the memory low.
    squares = (others**2).sum(axis=1)
    blocks = np.array_split(points, max(1, len(points) * len(others) // 4_000_000))
    return np.concatenate([np.argmin(squares - 2 * block @ others.T, axis=1) for block in blocks])


def _heights(
    line: Float[np.ndarray, "points 3"], width: float, ground: Triangles, where: str
) -> Float[np.ndarray, "points offsets"]:
    offsets = height_offsets(width)
    left = np.stack([-np.sin(line[:, 2]), np.cos(line[:, 2])], axis=1)
    points = line[:, None, :2] + offsets[:, None] * left[:, None]
    heights = height_of(points.reshape(-1, 2), ground).reshape(len(line), len(offsets))
    middle = heights[:, len(offsets) // 2]
    known = np.flatnonzero(~np.isnan(middle))
    if len(known) < len(line) / 2:
        raise DatasetError(f"{where}: expected ground below the road, got it for {len(known)} m of {len(line)}")
    middle[:] = np.interp(np.arange(len(line)), known, middle[known], period=len(line))
    # What is not known at the sides is as high as beside it.
    for column in range(len(offsets) // 2 - 1, -1, -1):
        for side, inner in ((column, column + 1), (-1 - column, -2 - column)):
            heights[:, side] = np.where(np.isnan(heights[:, side]), heights[:, inner], heights[:, side])
    return _smoothed(heights, SMOOTHING)


def _smoothed(values: Float[np.ndarray, "points offsets"], sigma: float) -> Float[np.ndarray, "points offsets"]:
    """Averages along a closed line, weighted by a bell of `sigma` points."""
    reach = int(4 * sigma)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    shifted = [weight * np.roll(values, shift, axis=0) for shift, weight in enumerate(weights, start=-reach)]
    return np.sum(shifted, axis=0) / weights.sum()


def height_of(points: Float[np.ndarray, "points 2"], ground: Triangles) -> Float[np.ndarray, " points"]:
    """The height of the highest triangle over or under each point; NaN where there is none."""
    heights = np.full(len(points), np.nan)
    cells = defaultdict(list)
    for index, (low, high) in enumerate(zip(*_cell_ranges(ground), strict=True)):
        for cell in _cells_between(low, high):
            cells[cell].append(index)
    by_cell = defaultdict(list)
    for index, cell in enumerate(map(tuple, np.floor(points / CELL_METRES).astype(int))):
        by_cell[cell].append(index)
    for cell, members in by_cell.items():
        if cell in cells:
            found, inside = _intersect(points[members], ground[cells[cell]])
            highest = np.where(inside, found, -np.inf).max(axis=1)
            heights[members] = np.where(np.isfinite(highest), highest, np.nan)
    return heights


def _cell_ranges(ground: Triangles) -> tuple[np.ndarray, np.ndarray]:
    flat = np.floor(ground[:, :, :2] / CELL_METRES).astype(int)
    return flat.min(axis=1), flat.max(axis=1)


def _cells_between(low: np.ndarray, high: np.ndarray) -> Iterable[tuple[int, int]]:
    return ((i, j) for i in range(low[0], high[0] + 1) for j in range(low[1], high[1] + 1))


def _intersect(
    points: Float[np.ndarray, "points 2"], triangles: Triangles
) -> tuple[Float[np.ndarray, "points triangles"], Bool[np.ndarray, "points triangles"]]:
    """Heights of the triangles' planes at the points, and whether the points are inside the triangles."""
    a, b, c = (triangles[:, k] for k in range(3))
    u, v, p = (b - a)[:, :2], (c - a)[:, :2], points[:, None] - a[:, :2]
    area = u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
    upright = np.abs(area) < 1e-6
    area = np.where(upright, 1.0, area)
    s = (p[..., 0] * v[:, 1] - p[..., 1] * v[:, 0]) / area
    t = (u[:, 0] * p[..., 1] - u[:, 1] * p[..., 0]) / area
    slack = 1e-3
    inside = (s >= -slack) & (t >= -slack) & (s + t <= 1 + slack) & ~upright
    return a[:, 2] + s * (b - a)[:, 2] + t * (c - a)[:, 2], inside
