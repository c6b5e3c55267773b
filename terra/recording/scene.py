"""A town plan as triangles: ground, buildings, trees and lamps, sorted into cells that can be culled."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from terra.recording.cars import CAR_SHAPES, build_car
from terra.recording.culling import parts_in_view
from terra.recording.ground import add_block, add_junctions, add_meadow, add_outskirts, add_road, lift
from terra.recording.mesh import Material, Mesh, Vertices, blob, place, polygon, rectangle
from terra.recording.town import (
    KERB_HEIGHT,
    LAMP_DEPTH,
    STOREY_HEIGHT,
    Building,
    Lamp,
    Town,
    Tree,
)

CELL_METERS = 64.0
TRUNK = (0.40, 0.31, 0.24)
POLE = (0.30, 0.33, 0.34)
LAMP_GLOW = (1.0, 0.93, 0.78)
WINDOW_PITCH = 4.0
DECAL_HEIGHT = 0.02
LAMP_HEIGHT = 6.0
LAMP_ARM = 1.9
LAMP_POOL = 8.0  # m, radius of the pool of light below a lamp's head


@dataclass(frozen=True)
class CellMesh:
    """Vertices sorted by cell: cell k is `counts[k]` vertices from `firsts[k]`, within `radii[k]` of `centers[k]`."""

    vertices: Vertices
    firsts: Int[np.ndarray, " cells"]
    counts: Int[np.ndarray, " cells"]
    centers: Float[np.ndarray, "cells 2"]
    radii: Float[np.ndarray, " cells"]


@dataclass(frozen=True)
class Scene:
    """A town's meshes: large parts (`solid`), details too small to see from afar, and decals that shade the ground."""

    solid: CellMesh
    details: CellMesh
    decals: CellMesh


def build_scene(town: Town) -> Scene:
    """Turn a town plan into meshes."""
    solid, details, decals = Mesh(), Mesh(), Mesh()
    add_meadow(solid, town)
    for edge in town.edges:
        add_road(solid, edge)
    add_junctions(solid, town)
    for block, use in town.uses.items():
        add_block(solid, town, block, paved=use == "downtown")
    add_outskirts(solid, town)
    for building in town.buildings:
        _building(solid, decals, building)
    trees = _TreeShapes()
    for tree in town.trees:
        trees.add(solid, decals, tree)
    for lamp in town.lamps:
        _lamp(details, decals, lamp)
    cars = [build_car(shape) for shape in CAR_SHAPES]
    for car in town.parked_cars:
        details.add(place(cars[car.model], *car.center, 0.0, car.heading, color=car.color))
        shadow(decals, car.center, 4.9, 2.3, car.heading, DECAL_HEIGHT, strength=0.6)
    return Scene(*(sort_cells(mesh.vertices) for mesh in (solid, details, decals)))


def sort_cells(vertices: Vertices) -> CellMesh:
    """Group triangles by the square cell that contains their middle."""
    triangles = vertices.reshape(-1, 3, vertices.shape[1])
    cells = np.floor(triangles[:, :, :2].mean(axis=1) / CELL_METERS).astype(np.int64)
    _, which = np.unique(cells, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    counts = np.bincount(which.reshape(-1)) * 3
    firsts = np.cumsum(counts) - counts
    sorted_vertices = np.ascontiguousarray(triangles[order].reshape(-1, vertices.shape[1]))
    centers, radii = [], []
    for first, count in zip(firsts, counts, strict=True):
        xy = sorted_vertices[first : first + count, :2]
        middle = (xy.min(axis=0) + xy.max(axis=0)) / 2
        centers.append(middle)
        radii.append(float(np.hypot(*(xy - middle).T).max()))
    return CellMesh(sorted_vertices, firsts, counts, np.array(centers), np.array(radii))


def visible_cells(mesh: CellMesh, view: tuple[float, float, float, float], sight: float) -> Int[np.ndarray, " visible"]:
    """The cells that `view` (x, y, heading, horizontal field of view in rad) may see within `sight`, nearest first."""
    cells, distances = parts_in_view(mesh.centers, mesh.radii, view, sight)
    return cells[np.argsort(distances, kind="stable")]


def shadow(
    decals: Mesh,
    center: tuple[float, float],
    length: float,
    width: float,
    heading: float,
    z: float,
    *,
    roundness: float = 0.0,
    strength: float = 0.5,
) -> None:
    """Add a soft dark patch; `roundness` 1 makes it an ellipse."""
    values = [[-1, -1, roundness, strength], [1, -1, roundness, strength], [1, 1, roundness, strength]]
    values.append([-1, 1, roundness, strength])
    _decal(decals, rectangle(center, length, width, heading), z, Material.SHADOW, np.array(values))


def _decal(
    decals: Mesh, corners: Float[np.ndarray, "4 2"], z: float, material: Material, values: Float[np.ndarray, "4 4"]
) -> None:
    decals.quads(np.column_stack([corners, np.full(4, z)])[None], (1.0, 1.0, 1.0), material, values[None])


def _building(mesh: Mesh, decals: Mesh, building: Building) -> None:
    height = building.storeys * STOREY_HEIGHT + (0.6 if building.storeys < 3 else 0.0)
    outline = rectangle(building.center, building.width, building.depth, building.heading)
    for k in range(4):
        a, b = outline[k], outline[(k + 1) % 4]
        windows = max(1, round(math.dist(a, b) / WINDOW_PITCH))
        corners = np.array([[*a, 0.0], [*b, 0.0], [*b, height], [*a, height]])
        top = building.storeys
        seed = building.seed + k / 4
        style = building.style + (8 if building.gable else 0)
        values = [[0, 0, seed, style], [windows, 0, seed, style], [windows, top, seed, style], [0, top, seed, style]]
        mesh.quads(corners[None], building.color, Material.FACADE, np.array(values, float)[None])
    if building.gable:
        _gable(mesh, building, height)
    else:
        rim = rectangle(building.center, building.width + 0.3, building.depth + 0.3, building.heading)
        mesh.prism(rim, height - 0.05, height + 0.7, tuple(0.82 * c for c in building.color))
    shadow(
        decals, building.center, building.width + 2.4, building.depth + 2.4, building.heading,
        KERB_HEIGHT + DECAL_HEIGHT, strength=0.45,
    )  # fmt: skip


def _gable(mesh: Mesh, building: Building, height: float) -> None:
    eaves = rectangle(building.center, building.width + 0.8, building.depth + 0.9, building.heading)
    rise = 0.32 * building.depth
    low = lift(eaves, height - 0.15)
    ridge = lift(np.array([(eaves[0] + eaves[3]) / 2, (eaves[1] + eaves[2]) / 2]), height + rise)
    mesh.quads(
        np.stack([[low[0], low[1], ridge[1], ridge[0]], [low[2], low[3], ridge[0], ridge[1]]]), building.roof_color
    )
    ends = np.stack([[low[3], low[0], ridge[0], ridge[0]], [low[1], low[2], ridge[1], ridge[1]]])
    mesh.quads(ends, building.color)


class _TreeShapes:
    """Sixteen tree shapes, made once and placed often."""

    def __init__(self) -> None:
        self._crowns = [_crown(np.random.default_rng([77, seed])) for seed in range(8)]
        self._firs = [_fir(seed) for seed in range(8)]

    def add(self, mesh: Mesh, decals: Mesh, tree: Tree) -> None:
        shape = (self._firs if tree.conifer else self._crowns)[tree.seed]
        vertices = place(shape, *tree.center, 0.0, tree.seed * 0.8, scale=tree.height)
        leaves = vertices[:, 13] == Material.LEAVES
        vertices[leaves, 10:13] *= np.asarray(tree.color, np.float32)
        mesh.add(vertices)
        size = 0.62 * tree.height
        shadow(decals, tree.center, size, size, 0.0, KERB_HEIGHT + DECAL_HEIGHT, roundness=1.0, strength=0.5)


def _crown(rng: np.random.Generator) -> Vertices:
    """A broad-leaved tree of height 1, with white leaves."""
    mesh = Mesh()
    mesh.prism(polygon((0, 0), 0.03, 6), 0.0, 0.5, TRUNK, top_scale=0.7, cap=False)
    for k in range(3):
        angle = rng.uniform(0, 6.28) + 2.1 * k
        out, size = (0.0, 0.27) if k == 0 else (0.13, 0.2)
        z = 0.72 if k == 0 else rng.uniform(0.55, 0.7)
        ball = blob(rng, (1.0, 1.0, 1.0))
        mesh.add(place(ball, out * math.cos(angle), out * math.sin(angle), z, 0.0, scale=size))
    return mesh.vertices


def _fir(seed: int) -> Vertices:
    """A conifer of height 1, with white leaves."""
    mesh = Mesh()
    mesh.prism(polygon((0, 0), 0.025, 5), 0.0, 0.2, TRUNK, cap=False)
    for k, (bottom, top, radius) in enumerate(((0.12, 0.55, 0.24), (0.36, 0.78, 0.19), (0.6, 1.0, 0.13))):
        cone = Mesh()
        cone.prism(polygon((0, 0), radius, 7, turn=seed + k), bottom, top, (0.8, 0.85, 0.85), top_scale=0.02, cap=False)
        vertices = cone.vertices
        vertices[:, 13] = Material.LEAVES
        mesh.add(vertices)
    return mesh.vertices


def _lamp(mesh: Mesh, decals: Mesh, lamp: Lamp) -> None:
    ahead = np.array([math.cos(lamp.heading), math.sin(lamp.heading)])
    mesh.prism(polygon(lamp.center, 0.09, 5), 0.0, LAMP_HEIGHT, POLE)
    middle = np.asarray(lamp.center) + ahead * LAMP_ARM / 2
    mesh.prism(rectangle(middle, LAMP_ARM, 0.1, lamp.heading), LAMP_HEIGHT - 0.05, LAMP_HEIGHT + 0.05, POLE)
    head = np.asarray(lamp.center) + ahead * LAMP_ARM
    part = Mesh()
    part.prism(rectangle(head, 0.8, 0.3, lamp.heading), LAMP_HEIGHT - 0.14, LAMP_HEIGHT - 0.02, LAMP_GLOW)
    below = rectangle(head, 0.8, 0.3, lamp.heading)[::-1]
    part.quads(lift(below, LAMP_HEIGHT - 0.14)[None], LAMP_GLOW)
    vertices = part.vertices
    vertices[:, 13] = Material.LAMP
    mesh.add(vertices)
    # The pool of light lies on the road and, behind the kerb line, on the sidewalk.
    kerb = (LAMP_DEPTH - LAMP_ARM) / LAMP_POOL
    for x0, x1, z in ((-1.0, kerb, KERB_HEIGHT), (kerb, 1.0, 0.0)):
        values = np.array([[x0, -1, 0, 0], [x1, -1, 0, 0], [x1, 1, 0, 0], [x0, 1, 0, 0]], float)
        left = np.array([-ahead[1], ahead[0]])
        corners = head + LAMP_POOL * (values[:, :1] * ahead + values[:, 1:2] * left)
        _decal(decals, corners, z + DECAL_HEIGHT, Material.LIGHT_POOL, values)
