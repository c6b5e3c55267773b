"""The camera that took the frames, and the projection of ground points into its picture."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tokenizer.errors import ConfigError


@dataclass(frozen=True)
class Camera:
    """A pinhole camera with square pixels over flat ground, looking along the car's heading.

    `fov_degrees` is the horizontal field of view; a negative `pitch_radians` looks down; the camera sits
    `x_forward_meters` ahead of the car's origin. Raises `ValueError` for values that no such camera has.
    """

    fov_degrees: float
    height_meters: float
    pitch_radians: float
    x_forward_meters: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field.name}: expected a finite number, got {value!r}")
        if not 0 < self.fov_degrees < 180:
            raise ValueError(f"fov_degrees: expected more than 0 and less than 180, got {self.fov_degrees}")
        if self.height_meters <= 0:
            raise ValueError(f"height_meters: expected more than 0, got {self.height_meters}")
        if abs(self.pitch_radians) >= math.pi / 2:
            raise ValueError(f"pitch_radians: expected less than a right angle (1.57), got {self.pitch_radians}")

    def to_dict(self) -> dict[str, float]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "camera") -> "Camera":
        """Undo `to_dict`; only `x_forward_meters` may be left out. Raises `ConfigError`, which begins with `where`.

        Keys that end in `_metres`, as in datasets made before version 0.1, are read too.
        """
        values = {re.sub("_metres$", "_meters", name): value for name, value in values.items()}
        known = {field.name for field in fields(cls)}
        missing, unknown = known - {"x_forward_meters"} - values.keys(), values.keys() - known
        if missing or unknown:
            raise ConfigError(
                f"{where}: expected {sorted(known)}, missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        try:
            return cls(**{name: float(value) if type(value) is int else value for name, value in values.items()})
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_json(cls, path: Path | str) -> "Camera":
        """Read a file that holds `to_dict`'s object. Raises `ConfigError`."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: expected a camera as a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a camera as a JSON object, got {type(values).__name__}")
        return cls.from_dict(values, where=str(path))


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
