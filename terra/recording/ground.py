"""The ground of a town as triangles: meadow, roads, junctions, blocks and their sidewalks."""

import itertools
import math

import numpy as np
from jaxtyping import Float

from terra.recording.mesh import Material, Mesh, rectangle
from terra.recording.town import KERB_HEIGHT, KERB_RADIUS, SIDEWALK_WIDTH, Edge, Node, Points, Town

ASPHALT = (0.34, 0.345, 0.36)
PAVEMENT = (0.66, 0.64, 0.60)
GRASS = (0.44, 0.51, 0.34)
MEADOW = (0.47, 0.52, 0.36)
# Far enough that fog and distance hide where the ground ends.
MEADOW_REACH = 2500.0


def lift(points: Points, z: float) -> Float[np.ndarray, "points 3"]:
    """Points of the plan at height z."""
    return np.column_stack([points, np.full(len(points), z)])


def _flat(mesh: Mesh, corners: Points, z: float, color: tuple[float, ...], material: Material) -> None:
    mesh.quads(lift(corners, z)[None], color, material)


def add_meadow(mesh: Mesh, town: Town) -> None:
    """Ground under and around everything, coarse far away, in squares small enough to shade evenly."""
    x0, x1, y0, y1 = town.xs[0], town.xs[-1], town.ys[0], town.ys[-1]
    xs = [x0 - MEADOW_REACH, x0 - 600, x0, x1, x1 + 600, x1 + MEADOW_REACH]
    ys = [y0 - MEADOW_REACH, y0 - 600, y0, y1, y1 + 600, y1 + MEADOW_REACH]
    for a, b in itertools.pairwise(xs):
        for c, d in itertools.pairwise(ys):
            _flat(mesh, np.array([[a, c], [b, c], [b, d], [a, d]]), -0.2, MEADOW, Material.GRASS)


def add_road(mesh: Mesh, edge: Edge) -> None:
    """The roadway between two junctions; its markings are the shader's."""
    along = edge.samples()
    half = edge.kind.half_width
    lines = [edge.at(along, side * half)[0] for side in (-1, 1)]
    layout = edge.kind.lanes + 0.5 * edge.kind.parking
    values = [
        np.column_stack(
            [
                np.full(len(along), side * half),
                along - along[0],
                np.full((len(along), 2), [along[-1] - along[0], layout]),
            ]
        )
        for side in (-1, 1)
    ]
    mesh.strip(lift(lines[0], 0.0), lift(lines[1], 0.0), ASPHALT, Material.ROAD, (values[0], values[1]))


def add_junctions(mesh: Mesh, town: Town) -> None:
    """Plain asphalt where roads cross; the blocks' rounded corners cover its own."""
    for i, x in enumerate(town.xs):
        for j, y in enumerate(town.ys):
            length = 2 * (town.column_kinds[i].half_width + KERB_RADIUS)
            width = 2 * (town.row_kinds[j].half_width + KERB_RADIUS)
            _flat(mesh, rectangle((x, y), length, width, 0.0), 0.0, ASPHALT, Material.ROAD)


def _edges_of(town: Town, block: Node) -> tuple[Edge, Edge, Edge, Edge]:
    """The edges about a block: bottom, right, top, left."""
    found = {(edge.start, edge.axis): edge for edge in town.edges}
    i, j = block
    return found[(i, j), 0], found[(i + 1, j), 1], found[(i, j + 1), 0], found[(i, j), 1]


def block_loops(town: Town, block: Node) -> tuple[Points, Points]:
    """The kerb's line and the sidewalk's inner line around a block, counter-clockwise, point by point."""
    outer, inner = [], []
    arcs = np.linspace(0, np.pi / 2, 6)[1:-1]
    for k, edge in enumerate(_edges_of(town, block)):
        along = edge.samples() if k < 2 else edge.samples()[::-1]
        side = 1 if k < 2 else -1
        kerb = edge.at(along, side * edge.kind.half_width)[0]
        back = edge.at(along, side * (edge.kind.half_width + SIDEWALK_WIDTH))[0]
        heading = k * np.pi / 2
        left = np.array([-math.sin(heading), math.cos(heading)])
        ahead = np.array([math.cos(heading), math.sin(heading)])
        pivot = kerb[-1] + KERB_RADIUS * left
        around = np.sin(arcs)[:, None] * ahead - np.cos(arcs)[:, None] * left
        outer += [kerb, pivot + KERB_RADIUS * around]
        inner += [back, pivot + (KERB_RADIUS - SIDEWALK_WIDTH) * around]
    return np.concatenate(outer), np.concatenate(inner)


def _sidewalk(mesh: Mesh, kerb: Points, back: Points) -> None:
    """A raised band between a kerb (with its face) and the line behind it, to the left of the points' order."""
    run = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(kerb, axis=0).T))])
    zeros = np.zeros((len(run), 2))
    front_values = np.column_stack([np.zeros(len(run)), run, zeros])
    back_values = np.column_stack([np.full(len(run), SIDEWALK_WIDTH), run, zeros])
    mesh.strip(
        lift(kerb, KERB_HEIGHT), lift(back, KERB_HEIGHT), PAVEMENT, Material.PAVEMENT, (front_values, back_values)
    )
    mesh.strip(lift(kerb, -0.05), lift(kerb, KERB_HEIGHT), PAVEMENT, Material.PAVEMENT, (front_values, front_values))


def add_block(mesh: Mesh, town: Town, block: Node, *, paved: bool) -> None:
    """A raised block of the town with a sidewalk around it and pavement or grass inside."""
    loops = block_loops(town, block)
    kerb, back = (np.concatenate([loop, loop[:1]]) for loop in loops)
    _sidewalk(mesh, kerb, back)
    center = np.broadcast_to([*loops[1].mean(axis=0), KERB_HEIGHT], (len(back) - 1, 3))
    ground = lift(back, KERB_HEIGHT)
    color, material = (PAVEMENT, Material.PLAIN) if paved else (GRASS, Material.GRASS)
    mesh.quads(np.stack([ground[:-1], ground[1:], center, center], axis=1), color, material)


def add_outskirts(mesh: Mesh, town: Town) -> None:
    """The sidewalk along the outer side of the roads around the town."""
    last_x, last_y = len(town.xs) - 1, len(town.ys) - 1
    for edge in town.edges:
        i, j = edge.start
        outside = {(0, 0): -1, (0, last_y): 1}.get((edge.axis, j)) if edge.axis == 0 else {0: 1, last_x: -1}.get(i)
        if outside is None:
            continue
        along = np.concatenate([[0.0], edge.samples(), [edge.length]])
        half = edge.kind.half_width
        kerb, back = (edge.at(along, outside * offset)[0] for offset in (half, half + SIDEWALK_WIDTH))
        if outside < 0:
            kerb, back = kerb[::-1], back[::-1]
        _sidewalk(mesh, kerb, back)
    for x, column in ((town.xs[0], -1), (town.xs[-1], 1)):
        for y, row in ((town.ys[0], -1), (town.ys[-1], 1)):
            kind_x, kind_y = town.column_kinds[0 if column < 0 else -1], town.row_kinds[0 if row < 0 else -1]
            _corner(mesh, (x, y), (column, row), (kind_x.half_width, kind_y.half_width))


def _corner(mesh: Mesh, node: tuple[float, float], out: tuple[int, int], halves: tuple[float, float]) -> None:
    """Pavement that joins the outer sidewalks at a corner of the town, an L around the junction."""
    (x, y), (sx, sy), (hx, hy) = node, out, halves
    far_x, far_y = hx + SIDEWALK_WIDTH, hy + SIDEWALK_WIDTH
    for x0, x1, y0, y1 in ((hx, far_x, 0.0, far_y), (0.0, hx, hy, far_y)):
        center = (x + sx * (x0 + x1) / 2, y + sy * (y0 + y1) / 2)
        mesh.prism(rectangle(center, x1 - x0, y1 - y0, 0.0), -0.05, KERB_HEIGHT, PAVEMENT)
