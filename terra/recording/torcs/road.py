"""The road of a track as a closed line with a width and heights: where a car is, and how fast it may take the bends."""

import math
from functools import cached_property

import numpy as np
from jaxtyping import Float

# Of the recorded car and all others, m/s^2.
LATERAL_ACCELERATION = 3.0
CURVE_BRAKING = 2.0
FASTEST = 40.0
NUM_OFFSETS = 5


def height_offsets(width: float) -> Float[np.ndarray, " offsets"]:
    """Where across a road its heights are known, in metres left of its middle."""
    # Not quite to its edges: in bends the flat pieces of a model cut the outer one.
    return np.linspace(-0.45 * width, 0.45 * width, NUM_OFFSETS)


class Road:
    """A closed road, `width` metres wide.

    `line` has rows [x, y, heading]: the middle of the road, some metre apart, with headings (rad) that are never
    wrapped. `heights` are those of the ground in metres, for each row at the offsets of `height_offsets`.
    """

    def __init__(
        self, line: Float[np.ndarray, "points 3"], heights: Float[np.ndarray, "points offsets"], width: float
    ) -> None:
        self.line, self.heights, self.width = line, heights, width
        gaps = np.hypot(*(np.roll(line[:, :2], -1, axis=0) - line[:, :2]).T)
        self._along = np.concatenate([[0.0], np.cumsum(gaps)])
        self.length = float(self._along[-1])
        self._turns = 2 * math.pi * round(float(line[-1, 2] - line[0, 2]) / (2 * math.pi))
        self._x, self._y = (np.append(line[:, k], line[0, k]) for k in (0, 1))
        self._heading = np.append(line[:, 2], line[0, 2] + self._turns)
        self._heights = np.concatenate([heights, heights[:1]])

    def at(self, place: float, offset: float = 0.0) -> tuple[float, float, float]:
        """x, y and heading `place` metres along the line (any number of laps) and `offset` metres left of it."""
        x, y, heading = self.poses_at(np.array([place]), np.array([offset]))[0]
        return float(x), float(y), float(heading)

    def poses_at(
        self, places: Float[np.ndarray, " cars"], offsets: Float[np.ndarray, " cars"]
    ) -> Float[np.ndarray, "cars 3"]:
        """`at` for many."""
        laps, rest = np.divmod(places, self.length)
        heading = np.interp(rest, self._along, self._heading) + laps * self._turns
        x, y = (np.interp(rest, self._along, values) for values in (self._x, self._y))
        return np.stack([x - offsets * np.sin(heading), y + offsets * np.cos(heading), heading], axis=1)

    def ground_at(
        self, places: Float[np.ndarray, " cars"], offsets: Float[np.ndarray, " cars"]
    ) -> Float[np.ndarray, " cars"]:
        """The ground's heights there; beyond the outermost `height_offsets` those at it."""
        rows = np.interp(places % self.length, self._along, np.arange(len(self._along)))
        columns = np.interp(offsets, height_offsets(self.width), np.arange(NUM_OFFSETS))
        i = np.minimum(rows.astype(int), len(self._heights) - 2)
        j = np.minimum(columns.astype(int), NUM_OFFSETS - 2)
        near, far = (
            self._heights[k, j] + (columns - j) * (self._heights[k, j + 1] - self._heights[k, j]) for k in (i, i + 1)
        )
        return near + (rows - i) * (far - near)

    def allowed_speeds(self, places: Float[np.ndarray, " cars"]) -> Float[np.ndarray, " cars"]:
        """The speeds (m/s) from which the bends ahead can be taken with `LATERAL_ACCELERATION`."""
        return np.interp(places % self.length, self._along, self._limits)

    @cached_property
    def _limits(self) -> Float[np.ndarray, " points"]:
        gaps = np.diff(self._along)
        # Over some metres: a single joint of the line is no bend.
        reach = 4
        rows = np.arange(len(gaps))
        headings = np.concatenate(
            [self._heading[:-1] - self._turns, self._heading[:-1], self._heading[:-1] + self._turns]
        )
        middle = rows + len(gaps)
        turned = np.abs(headings[middle + reach] - headings[middle - reach])
        travelled = np.convolve(np.tile(gaps, 3), np.ones(2 * reach), "full")[middle + reach - 1]
        limits = np.sqrt(LATERAL_ACCELERATION / np.maximum(turned / travelled, LATERAL_ACCELERATION / FASTEST**2))
        # Twice around backwards, so that braking for the first bend starts before the line's end.
        for _ in range(2):
            for k in range(len(gaps) - 1, -1, -1):
                following = limits[(k + 1) % len(gaps)]
                limits[k] = min(limits[k], math.sqrt(following**2 + 2 * CURVE_BRAKING * gaps[k]))
        return np.append(limits, limits[0])
