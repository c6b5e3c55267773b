"""Three low-poly cars, built around the origin with their front towards +x."""

from dataclasses import dataclass

import numpy as np

from terra.recording.mesh import Material, Mesh, Vertices, polygon

GLASS = (0.16, 0.20, 0.25)
TYRE = (0.09, 0.09, 0.10)
RIM = (0.45, 0.46, 0.48)
TRIM = (0.13, 0.13, 0.14)
PLATE = (0.88, 0.88, 0.84)
WHITE = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class CarShape:
    """Profile of a car in meters: `hood` and `deck` are body heights in front and rear, `cabin` the x of its glass
    (rear bottom, rear top, front top, front bottom) and `roof` its height."""

    length: float
    width: float
    hood: float
    deck: float
    cabin: tuple[float, float, float, float]
    roof: float


# sedan, hatchback, van: the order of the models' numbers
CAR_SHAPES = (
    CarShape(4.4, 1.78, 0.86, 0.94, (-1.75, -1.10, 0.35, 1.15), 1.42),
    CarShape(4.0, 1.76, 0.90, 0.98, (-1.95, -1.65, 0.35, 1.10), 1.52),
    CarShape(4.5, 1.84, 1.05, 1.10, (-2.20, -2.10, 0.95, 1.65), 1.95),
)


def build_car(shape: CarShape) -> Vertices:
    """Body, glass, wheels and lights of one car."""
    mesh = Mesh()
    _body(mesh, shape)
    _cabin(mesh, shape)
    for x in (-shape.length * 0.31, shape.length * 0.31):
        for side in (-1, 1):
            _wheel(mesh, x, side, shape.width / 2)
    _lights(mesh, shape)
    return mesh.vertices


def _extrude(mesh: Mesh, profile: list[tuple[float, float]], half_width: float, color: tuple[float, ...]) -> None:
    """A profile in x and z, clockwise seen from the car's right, as wide as the car; both sides are closed."""
    points = np.array(profile)
    following = np.roll(points, -1, axis=0)
    y = np.full((len(points), 1), half_width)

    def at(xz: np.ndarray, side: int) -> np.ndarray:
        return np.concatenate([xz[:, :1], side * y, xz[:, 1:]], axis=1)

    mesh.quads(
        np.stack([at(points, -1), at(following, -1), at(following, 1), at(points, 1)], axis=1), color, Material.PAINT
    )
    middle = np.broadcast_to(points.mean(axis=0), points.shape)
    for side in (-1, 1):
        a, b = (points, following) if side < 0 else (following, points)
        center = at(middle, side)
        mesh.quads(np.stack([at(b, side), at(a, side), center, center], axis=1), color, Material.PAINT)


def _body(mesh: Mesh, shape: CarShape) -> None:
    half = shape.length / 2
    profile = [
        (-half, 0.34),
        (-half - 0.02, shape.deck - 0.16),
        (-half + 0.12, shape.deck),
        (shape.cabin[3], shape.hood + 0.04),
        (half - 0.22, shape.hood - 0.14),
        (half, shape.hood - 0.34),
        (half - 0.03, 0.34),
    ]
    _extrude(mesh, profile, shape.width / 2, WHITE)
    sill = np.array([[-half + 0.05, -0.8], [half - 0.08, -0.8], [half - 0.08, 0.8], [-half + 0.05, 0.8]])
    mesh.prism(sill, 0.2, 0.36, TRIM)


def _cabin(mesh: Mesh, shape: CarShape) -> None:
    rear_low, rear_top, front_top, front_low = shape.cabin
    low, top = shape.width / 2 - 0.05, shape.width / 2 - 0.2
    base = min(shape.hood, shape.deck) - 0.02
    lower = np.array([[rear_low, -low], [front_low, -low], [front_low, low], [rear_low, low]])
    upper = np.array([[rear_top, -top], [front_top, -top], [front_top, top], [rear_top, top]])
    bottom, roof = np.column_stack([lower, np.full(4, base)]), np.column_stack([upper, np.full(4, shape.roof - 0.06)])
    nxt = [1, 2, 3, 0]
    mesh.quads(np.stack([bottom, bottom[nxt], roof[nxt], roof], axis=1), GLASS)
    lid = Mesh()
    lid.prism(upper * [1.03, 1.03], shape.roof - 0.06, shape.roof, WHITE, top_scale=0.96)
    vertices = lid.vertices
    vertices[:, 13] = Material.PAINT
    mesh.add(vertices)
    # Two pillars a side stand a little out of the glass.
    for share in (0.12, 0.52):
        for side in (-1, 1):
            x_low, x_top = rear_low + share * (front_low - rear_low), rear_top + share * (front_top - rear_top)
            out = side * 0.012
            corners = np.array(
                [
                    [x_low, side * low + out, base],
                    [x_low + 0.12, side * low + out, base],
                    [x_top + 0.12, side * top + out, shape.roof - 0.06],
                    [x_top, side * top + out, shape.roof - 0.06],
                ]
            )
            mesh.quads(corners[None, :: 1 if side < 0 else -1], WHITE, Material.PAINT)


def _wheel(mesh: Mesh, x: float, side: int, half_width: float) -> None:
    for radius, out, color in ((0.33, 0.02, TYRE), (0.19, 0.03, RIM)):
        rim = polygon((x, 0.33), radius, 10)
        y = side * (half_width + out)
        points = np.column_stack([rim[:, 0], np.full(10, y), rim[:, 1]])
        following = np.roll(points, -1, axis=0)
        center = np.broadcast_to([x, y, 0.33], points.shape)
        a, b = (points, following) if side < 0 else (following, points)
        mesh.quads(np.stack([a, b, center, center], axis=1), color)


def _lights(mesh: Mesh, shape: CarShape) -> None:
    half = shape.length / 2

    def plate(
        x: float, y: float, z: float, size: tuple[float, float], color: tuple[float, ...], what: Material
    ) -> None:
        width, height = size
        corners = np.array(
            [[x, y - width, z], [x, y + width, z], [x, y + width, z + height], [x, y - width, z + height]]
        )
        mesh.quads(corners[None, :: 1 if x > 0 else -1], color, what)

    for side in (-1, 1):
        y = side * (shape.width / 2 - 0.24)
        plate(-half - 0.04, y, shape.deck - 0.34, (0.2, 0.18), (0.75, 0.08, 0.07), Material.TAIL_LIGHT)
        plate(half + 0.015, y, shape.hood - 0.46, (0.2, 0.14), (0.95, 0.94, 0.85), Material.HEADLIGHT)
    plate(-half - 0.04, 0.0, 0.5, (0.26, 0.13), PLATE, Material.PLAIN)
    plate(-half - 0.035, 0.0, 0.34, (shape.width / 2 - 0.06, 0.13), TRIM, Material.PLAIN)
    plate(half + 0.01, 0.0, 0.36, (0.55, 0.14), TRIM, Material.PLAIN)
