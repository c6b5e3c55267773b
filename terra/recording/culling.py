"""View culling: the parts of a scene whose bounding circles reach into the view."""

import math

import numpy as np
from jaxtyping import Float, Int


def parts_in_view(
    centers: Float[np.ndarray, "parts 2"],
    radii: Float[np.ndarray, " parts"],
    view: tuple[float, float, float, float],
    sight: float,
) -> tuple[Int[np.ndarray, " seen"], Float[np.ndarray, " seen"]]:
    """Find the circles that `view` (x, y, heading, horizontal field of view in rad) may see within `sight` meters.

    Returns the circles' indices in rising order, and the distances (m) of their centers. A circle is left out only if
    it lies outside one of three half-planes: those of the view's two sides and of its back.
    """
    x, y, heading, fov = view
    offsets = centers - np.array([x, y])
    ahead = offsets @ np.array([math.cos(heading), math.sin(heading)])
    aside = np.abs(offsets @ np.array([-math.sin(heading), math.cos(heading)]))
    distances = np.hypot(ahead, aside)
    in_view = (aside * math.cos(fov / 2) - ahead * math.sin(fov / 2) < radii) & (ahead > -radii)
    seen = np.flatnonzero(in_view & (distances - radii < sight))
    return seen, distances[seen]
