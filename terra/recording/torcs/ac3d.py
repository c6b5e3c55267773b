"""Reads AC3D models as TORCS writes them (.acc): triangle strips, normals, and a second texture for shadows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from terra.errors import DatasetError

NO_TEXTURE = "empty_texture_no_mapping"
POLYGON, STRIP = 0, 4


@dataclass(frozen=True, eq=False)
class Part:
    """One object of a model, in the world's axes: x and y flat, z up, metres.

    `texture` and `shading` name pictures ("" for none). For each corner of each triangle: `positions`, `normals`,
    `uvs` of `texture` and `shading_uvs` of `shading`. `color` is sRGB, 0 to 1.
    """

    name: str
    texture: str
    shading: str
    color: tuple[float, float, float]
    positions: Float[np.ndarray, "triangles 3 3"]
    normals: Float[np.ndarray, "triangles 3 3"]
    uvs: Float[np.ndarray, "triangles 3 2"]
    shading_uvs: Float[np.ndarray, "triangles 3 2"]


def read_model(path: Path) -> list[Part]:
    """The objects of a model that have surfaces.

    Raises:
        DatasetError: the file can't be read, or a line is not what AC3D has there.
    """
    try:
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise DatasetError(f"{path}: expected an AC3D model: {error}") from error
    if not text.startswith("AC3D"):
        raise DatasetError(f"{path}: expected an AC3D model, got a file that starts with {text[:4]!r}")
    reader = _Reader(text)
    try:
        return list(reader.parts())
    except (ValueError, IndexError) as error:
        raise DatasetError(f"{path}: line {reader.line}: expected AC3D ({error}), got {reader.text!r}") from error


def triangles_of(kind: int, count: int) -> list[tuple[int, int, int]]:
    """Corners of the triangles of a surface with `count` corners: a strip (all turned alike) or a convex polygon."""
    if kind == STRIP:
        return [(k, k + 1, k + 2) if k % 2 == 0 else (k + 1, k, k + 2) for k in range(count - 2)]
    if kind == POLYGON:
        return [(0, k, k + 1) for k in range(1, count - 1)]
    return []


class _Reader:
    """Walks through the lines of a model."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._colors: list[tuple[float, float, float]] = []
        self.line = 1

    @property
    def text(self) -> str:
        """The line that was read last; "" after the last one."""
        return self._lines[self.line - 1].strip() if self.line <= len(self._lines) else ""

    def _next(self) -> str:
        self.line += 1
        if self.line > len(self._lines):
            raise ValueError("the file ends too early")
        return self.text

    def parts(self) -> Iterator[Part]:
        """The parts in order; objects without surfaces only place their children, which TORCS never moves."""
        name, textures, vertices = "", [], np.zeros((0, 6))
        corners: list[tuple[float, ...]] = []
        material = 0
        while self.line < len(self._lines):
            words = self._next().split(maxsplit=1)
            if not words:
                continue
            key, rest = words[0], words[1] if len(words) > 1 else ""
            if key == "MATERIAL":
                values = rest[rest.index("rgb") + 3 :].split()
                self._colors.append((float(values[0]), float(values[1]), float(values[2])))
            elif key == "OBJECT":
                name, textures, vertices, corners, material = "", [], np.zeros((0, 6)), [], 0
            elif key == "name":
                name = rest.strip('"')
            elif key == "texture":
                textures.append(rest.rpartition(" ")[0].strip('"') if not rest.endswith('"') else rest.strip('"'))
            elif key == "loc":
                if any(float(value) for value in rest.split()):
                    raise ValueError("an object that is not moved")
            elif key == "numvert":
                vertices = self._vertices(int(rest))
            elif key == "SURF":
                material, added = self._surface(int(rest, 16))
                corners += added
            elif key == "kids" and corners:
                yield self._part(name, textures, vertices, np.array(corners), material)

    def _vertices(self, count: int) -> Float[np.ndarray, "vertices 6"]:
        rows = [[float(value) for value in self._next().split()[:6]] for _ in range(count)]
        # Without normals of their own the faces' are used.
        return np.array([row + [0.0] * (6 - len(row)) for row in rows]).reshape(-1, 6)

    def _surface(self, flags: int) -> tuple[int, list[tuple[float, ...]]]:
        """The material, and (vertex, u, v, shading u, shading v) of the corners of its triangles, in threes."""
        material = 0
        while (words := self._next().split())[0] != "refs":
            if words[0] == "mat":
                material = int(words[1])
        refs = []
        for _ in range(int(words[1])):
            values = self._next().split()
            uv = (float(values[1]), float(values[2]))
            shading_uv = (float(values[3]), float(values[4])) if len(values) >= 5 else uv
            refs.append((float(values[0]), *uv, *shading_uv))
        found = triangles_of(flags & 0xF, len(refs))
        # Strips are joined by triangles that have a corner twice.
        kept = [triangle for triangle in found if len({refs[k][0] for k in triangle}) == 3]
        return material, [refs[k] for triangle in kept for k in triangle]

    def _part(
        self,
        name: str,
        textures: list[str],
        vertices: Float[np.ndarray, "vertices 6"],
        corners: Float[np.ndarray, "corners 5"],
        material: int,
    ) -> Part:
        which: Int[np.ndarray, " corners"] = corners[:, 0].astype(int)
        positions, normals = (_to_world(vertices[which, k : k + 3]).reshape(-1, 3, 3) for k in (0, 3))
        flat = np.cross(positions[:, 1] - positions[:, 0], positions[:, 2] - positions[:, 0])[:, None]
        normals = np.where(np.abs(normals).sum(axis=-1, keepdims=True) > 0, normals, flat)
        normals = normals / np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-9)
        texture, shading, *_ = [*textures, "", ""]
        return Part(
            name=name,
            texture="" if texture == NO_TEXTURE else texture,
            shading="" if shading == NO_TEXTURE else shading,
            color=self._colors[material] if material < len(self._colors) else (1.0, 1.0, 1.0),
            positions=positions,
            normals=normals,
            uvs=corners[:, 1:3].reshape(-1, 3, 2),
            shading_uvs=corners[:, 3:5].reshape(-1, 3, 2),
        )


def _to_world(points: Float[np.ndarray, "points 3"]) -> Float[np.ndarray, "points 3"]:
    """AC3D has y up and z towards the viewer."""
    return np.stack([points[:, 0], -points[:, 2], points[:, 1]], axis=1)
