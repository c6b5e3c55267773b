"""The camera that took the frames, and the projection of ground points into its picture."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import Field

from tokenizer.settings import Positive, Settings, checked

FieldOfView = Annotated[float, Field(gt=0, lt=180)]
Height = Positive
Pitch = Annotated[float, Field(gt=-math.pi / 2, lt=math.pi / 2)]


class Camera(Settings):
    """A pinhole camera with square pixels over flat ground, looking along the car's heading.

    `fov_degrees` is the horizontal field of view; a negative `pitch_radians` looks down; the camera sits
    `x_forward_meters` ahead of the car's origin. Raises `ConfigError` for values that no such camera has.
    """

    fov_degrees: FieldOfView
    height_meters: Height
    pitch_radians: Pitch
    x_forward_meters: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """The fields as JSON has them."""
        return self.model_dump()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "camera") -> "Camera":
        """Undo `to_dict`; only `x_forward_meters` may be left out. Raises `ConfigError`, which begins with `where`.

        Keys that end in `_metres`, as they did in datasets before version 0.1, are read too.
        """
        return checked(cls, {re.sub("_metres$", "_meters", name): value for name, value in values.items()}, where)


def project(
    points_xy: Float[np.ndarray, "points 2"], camera: Camera, image_size: tuple[int, int]
) -> Float[np.ndarray, "points 2"]:
    """Project ground points (m) to (column, row) in pixels of a picture of `image_size` (width, height).

    (0, 0) is the picture's top left corner, (0.5, 0.5) the center of its first pixel; points may land outside.
    With x' = x - x_forward, height h, pitch p and f = width / (2 tan(fov / 2)):
    depth = x' cos p - h sin p, column = width / 2 - f y / depth, row = height / 2 + f (x' sin p + h cos p) / depth.
    Points that are not in front of the camera (depth of a micrometer or less) become NaN.
    """
    width, height = image_size
    focal = width / (2 * math.tan(math.radians(camera.fov_degrees) / 2))
    cosine, sine = math.cos(camera.pitch_radians), math.sin(camera.pitch_radians)
    ahead, left = points_xy[:, 0] - camera.x_forward_meters, points_xy[:, 1]
    depth = ahead * cosine - camera.height_meters * sine
    depth = np.where(depth > 1e-6, depth, np.nan)
    below = ahead * sine + camera.height_meters * cosine
    return np.stack([width / 2 - focal * left / depth, height / 2 + focal * below / depth], axis=-1)
