"""Triangles as arrays: quads, boxes and extrusions with a surface material each, ready for a vertex buffer."""

import itertools
import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from jaxtyping import Float

# position 3, normal 3, surface 4 (meaning depends on the material), color 3 (sRGB, 0 to 1), material 1
VERTEX_FLOATS = 14

Vertices = Float[np.ndarray, "vertices 14"]
Color = Sequence[float]


class Material(IntEnum):
    """Materials of the fragment shader; each comment names the four surface values."""

    PLAIN = 0
    ROAD = 1  # meters left of the center line, meters along, length, lanes each way + 0.5 if cars park (0: no markings)
    PAVEMENT = 2  # meters from the kerb, meters along
    FACADE = 3  # windows across, storeys up, a seed in [0, 1), style
    GRASS = 4
    LAMP = 5  # glows with the street lamps
    PAINT = 6  # a car's own color
    TAIL_LIGHT = 7
    HEADLIGHT = 8
    LEAVES = 9
    SHADOW = 16  # decals: x and y in [-1, 1], roundness, strength
    LIGHT_POOL = 17  # decals: x and y in [-1, 1]


class Mesh:
    """Collects triangles; `vertices` joins them."""

    def __init__(self) -> None:
        self._parts: list[Vertices] = []

    @property
    def vertices(self) -> Vertices:
        """All vertices, three per triangle, float32."""
        if not self._parts:
            return np.zeros((0, VERTEX_FLOATS), np.float32)
        return np.concatenate(self._parts)

    def add(self, vertices: Vertices) -> None:
        """Add finished vertices."""
        self._parts.append(vertices)

    def quads(
        self,
        corners: Float[np.ndarray, "quads 4 3"],
        color: Color,
        material: Material = Material.PLAIN,
        surface: Float[np.ndarray, "quads 4 4"] | None = None,
    ) -> None:
        """Flat quads with corners counter-clockwise seen from outside; a quad may have two equal corners."""
        corners = np.asarray(corners, np.float32)
        normal = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])
        normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-9)
        out = np.zeros((len(corners), 4, VERTEX_FLOATS), np.float32)
        out[..., 0:3], out[..., 3:6] = corners, normal[:, None]
        if surface is not None:
            out[..., 6:10] = surface
        out[..., 10:13], out[..., 13] = np.asarray(color, np.float32), material
        self._parts.append(out[:, [0, 1, 2, 0, 2, 3]].reshape(-1, VERTEX_FLOATS))

    def strip(
        self,
        right: Float[np.ndarray, "points 3"],
        left: Float[np.ndarray, "points 3"],
        color: Color,
        material: Material,
        surface: tuple[Float[np.ndarray, "points 4"], Float[np.ndarray, "points 4"]],
    ) -> None:
        """A band between two lines of points, facing up where `left` is left of `right`; `surface` along each line."""
        corners = np.stack([right[:-1], right[1:], left[1:], left[:-1]], axis=1)
        values = np.stack([surface[0][:-1], surface[0][1:], surface[1][1:], surface[1][:-1]], axis=1)
        self.quads(corners, color, material, values)

    def prism(
        self,
        outline: Float[np.ndarray, "corners 2"],
        bottom: float,
        top: float,
        color: Color,
        *,
        top_scale: float = 1.0,
        cap: bool = True,
    ) -> None:
        """An upright prism over a counter-clockwise convex outline, narrowed to `top_scale` at the top."""
        center = outline.mean(axis=0)
        upper = np.column_stack([center + (outline - center) * top_scale, np.full(len(outline), top)])
        lower = np.column_stack([outline, np.full(len(outline), bottom)])
        following = np.roll(np.arange(len(outline)), -1)
        self.quads(np.stack([lower, lower[following], upper[following], upper], axis=1), color)
        if cap:
            middle = np.broadcast_to([*center, top], upper.shape)
            self.quads(np.stack([upper, upper[following], middle, middle], axis=1), color)


def rectangle(
    center: Sequence[float] | Float[np.ndarray, " 2"], length: float, width: float, heading: float
) -> Float[np.ndarray, "4 2"]:
    """Corners of a rectangle, counter-clockwise from its rear right one; `length` is along `heading`."""
    corners = np.array([[-length, -width], [length, -width], [length, width], [-length, width]]) / 2
    cosine, sine = math.cos(heading), math.sin(heading)
    return np.asarray(center, float) + corners @ np.array([[cosine, sine], [-sine, cosine]])


def polygon(center: Sequence[float], radius: float, sides: int, turn: float = 0.0) -> Float[np.ndarray, "sides 2"]:
    """A regular polygon, counter-clockwise."""
    angles = turn + 2 * np.pi * np.arange(sides) / sides
    return np.asarray(center, float) + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def place(
    vertices: Vertices, x: float, y: float, z: float, heading: float, *, scale: float = 1.0, color: Color | None = None
) -> Vertices:
    """Copy vertices, scaled, turned by `heading` and moved; with `color`, PAINT becomes PLAIN of that color."""
    out = vertices.copy()
    cosine, sine = math.cos(heading), math.sin(heading)
    turn = np.array([[cosine, sine], [-sine, cosine]], np.float32)
    out[:, 0:3] *= scale
    out[:, 0:2] = out[:, 0:2] @ turn
    out[:, 0:3] += np.array([x, y, z], np.float32)
    out[:, 3:5] = out[:, 3:5] @ turn
    if color is not None:
        paint = out[:, 13] == Material.PAINT
        out[paint, 10:13], out[paint, 13] = np.asarray(color, np.float32), Material.PLAIN
    return out


def blob(rng: np.random.Generator, color: Color) -> Vertices:
    """A rough ball of 20 triangles, radius about 1, lighter at the top; the crown of a tree."""
    phi = (1 + 5**0.5) / 2
    signs = [(a, b) for a in (-1.0, 1.0) for b in (-phi, phi)]
    points = np.array([np.roll((0.0, a, b), k) for k in range(3) for a, b in signs])
    # An icosahedron's edges have length 2 here: a face is any three corners that far from each other.
    edges = np.isclose(np.linalg.norm(points[:, None] - points, axis=-1), 2.0)
    triples = itertools.combinations(range(12), 3)
    faces = np.array([t for t in triples if edges[t[0], t[1]] and edges[t[1], t[2]] and edges[t[0], t[2]]])
    inward = np.linalg.det(points[faces]) < 0
    faces[inward] = faces[inward][:, ::-1]
    points /= np.sqrt(1 + phi**2)
    rough = points * rng.uniform(0.85, 1.12, (12, 1))
    a, b, c = (rough[faces[:, k]] for k in range(3))
    corners = np.stack([a, b, c], axis=1)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    out = np.zeros((len(faces), 3, VERTEX_FLOATS), np.float32)
    out[..., 0:3] = corners
    # Normals nearly round: soft light, with a hint of facets.
    out[..., 3:6] = 0.15 * normals[:, None] + 0.85 * corners / np.linalg.norm(corners, axis=-1, keepdims=True)
    out[..., 10:13] = np.asarray(color, np.float32) * (0.92 + 0.14 * corners[..., 2:3])
    out[..., 13] = Material.LEAVES
    return out.reshape(-1, VERTEX_FLOATS)
