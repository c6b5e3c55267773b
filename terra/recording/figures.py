"""Low-poly people on foot, built around the origin with their front towards +x: one mesh for each phase of a stride."""

import numpy as np

from terra.recording.mesh import Color, Material, Mesh, Vertices, polygon, rectangle

SKIN = (0.66, 0.50, 0.41)
HAIR = (0.22, 0.18, 0.16)
TROUSERS = (0.24, 0.26, 0.31)
SHOES = (0.14, 0.13, 0.13)
WHITE = (1.0, 1.0, 1.0)
HIP, SHOULDER, CHIN, CROWN = 0.86, 1.42, 1.48, 1.74  # heights in meters
# How far a foot is ahead of the hip (m) in each phase of a stride, the left one; the right one is opposite.
SWINGS = (0.34, 0.0, -0.34, 0.0)


def build_figure(phase: int, ground: float) -> Vertices:
    """A person in phase 0 to 3 of a stride at height `ground` (m); PAINT triangles take the clothes' color."""
    mesh, swing = Mesh(), SWINGS[phase]
    for side, ahead in ((1, swing), (-1, -swing)):
        y = side * 0.1
        _limb(mesh, (0.0, y, HIP), (ahead, y, 0.06), (0.17, 0.12), TROUSERS)
        mesh.prism(rectangle((ahead + 0.06, y), 0.27, 0.11, 0.0), 0.0, 0.09, SHOES)
        arm = (-0.7 * ahead, side * 0.29, 0.88)
        _limb(mesh, (0.0, side * 0.25, SHOULDER - 0.04), arm, (0.11, 0.09), WHITE, Material.PAINT)
    torso = Mesh()
    torso.prism(rectangle((0.0, 0.0), 0.25, 0.36, 0.0), HIP - 0.1, SHOULDER, WHITE, top_scale=1.15)
    vertices = torso.vertices
    vertices[:, 13] = Material.PAINT
    mesh.add(vertices)
    mesh.prism(polygon((0.01, 0.0), 0.06, 6), SHOULDER, CHIN, SKIN, cap=False)
    mesh.prism(polygon((0.02, 0.0), 0.105, 8), CHIN, CROWN - 0.08, SKIN)
    mesh.prism(polygon((-0.01, 0.0), 0.115, 8), CROWN - 0.12, CROWN, HAIR, top_scale=0.7)
    out = mesh.vertices
    out[:, 2] += ground
    return out


def _limb(
    mesh: Mesh,
    top: tuple[float, float, float],
    bottom: tuple[float, float, float],
    size: tuple[float, float],
    color: Color,
    material: Material = Material.PLAIN,
) -> None:
    """A box from `top` to `bottom`, slanted, `size` long and wide; narrower below."""
    upper = np.column_stack([rectangle(top[:2], *size, 0.0), np.full(4, top[2])])
    lower = np.column_stack([rectangle(bottom[:2], 0.75 * size[0], 0.75 * size[1], 0.0), np.full(4, bottom[2])])
    following = [1, 2, 3, 0]
    mesh.quads(np.stack([lower, lower[following], upper[following], upper], axis=1), color, material)
