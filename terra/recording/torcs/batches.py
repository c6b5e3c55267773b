"""A track's triangles in batches, one for each size of texture in each square of ground, to leave out unseen ones."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8, UInt32

from terra.recording.culling import parts_in_view
from terra.recording.torcs.assets import Geometry, Looks

CELL_METRES = 192.0


@dataclass(frozen=True, eq=False)
class Batches:
    """Batch k is `counts[k]` entries of `indices` from `firsts[k]`, within `radii[k]` metres of `centers[k]`.

    Its textures are `arrays[sizes[k]]` (layers, height, width, RGBA). `vertices` have rows
    [position 3, normal 3, uv 4, layer, shaded].
    """

    vertices: Float32[np.ndarray, "vertices 12"]
    indices: UInt32[np.ndarray, " indices"]
    arrays: tuple[UInt8[np.ndarray, "_ _ _ 4"], ...]
    sizes: Int[np.ndarray, " batches"]
    firsts: Int[np.ndarray, " batches"]
    counts: Int[np.ndarray, " batches"]
    centers: Float[np.ndarray, "batches 2"]
    radii: Float[np.ndarray, " batches"]

    def visible(self, view: tuple[float, float, float, float], sight: float) -> Int[np.ndarray, " visible"]:
        """The batches that `view` (x, y, heading, horizontal field of view in rad) may see within `sight` metres.

        By size of texture, then the nearest first.
        """
        seen, distances = parts_in_view(self.centers, self.radii, view, sight)
        return seen[np.lexsort((distances, self.sizes[seen]))]


def sort_batches(geometry: Geometry, looks: Looks) -> Batches:
    """The whole track in batches."""
    shapes = sorted({picture.shape for picture in looks.textures})
    size_of = np.array([shapes.index(picture.shape) for picture in looks.textures])
    layer_of = np.array([int((size_of[:k] == size).sum()) for k, size in enumerate(size_of)])
    arrays = tuple(
        np.stack([picture for picture, of in zip(looks.textures, size_of, strict=True) if of == size])
        for size in range(len(shapes))
    )
    vertices = np.concatenate(
        [
            geometry.positions,
            geometry.normals.astype(np.float32) / 127,
            geometry.uvs,
            layer_of[geometry.textures][:, None],
            geometry.shaded[:, None],
        ],
        axis=1,
        dtype=np.float32,
    )
    corners = geometry.positions[geometry.triangles]
    cells = np.floor(corners[..., :2].mean(axis=1) / CELL_METRES).astype(np.int64)
    keys = np.column_stack([size_of[geometry.textures[geometry.triangles[:, 0]]], cells])
    unique, which = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    counts = np.bincount(which.reshape(-1), minlength=len(unique))
    ends = np.cumsum(counts)
    boxes = [corners[order[end - count : end]].reshape(-1, 3)[:, :2] for end, count in zip(ends, counts, strict=True)]
    centers = np.array([(box.min(axis=0) + box.max(axis=0)) / 2 for box in boxes])
    return Batches(
        vertices=vertices,
        indices=np.ascontiguousarray(geometry.triangles[order].reshape(-1)),
        arrays=arrays,
        sizes=unique[:, 0],
        firsts=3 * (ends - counts),
        counts=3 * counts,
        centers=centers,
        radii=np.array([np.hypot(*(box - center).T).max() for box, center in zip(boxes, centers, strict=True)]),
    )
