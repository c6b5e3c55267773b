"""Fitting of a source's pictures to the dataset: what of them is kept, the crop to its aspect ratio, and the size."""

import math
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from decoder.camera import Camera
from terra.dataset.importing.source import Intrinsics
from terra.errors import DatasetError

_ASPECT = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})")


def check_crop(value: object) -> object:
    """Return a crop as `kept_box` takes it. Raises ValueError."""
    if value is None or (isinstance(value, str) and _ASPECT.fullmatch(value)):
        return value
    if isinstance(value, Sequence) and len(value) == 4 and all(type(edge) is int and edge >= 0 for edge in value):
        left, top, right, bottom = value
        if left < right and top < bottom:
            return left, top, right, bottom
    raise ValueError(f"expected [left,top,right,bottom] in pixels, or an aspect such as 16:9, got {value!r}")


def kept_box(
    picture_size: tuple[int, int], crop: tuple[int, int, int, int] | str, where: str
) -> tuple[int, int, int, int]:
    """The part of a picture that a crop keeps, as (left, top, right, bottom) in pixels.

    Args:
        picture_size: (height, width).
        crop: such a box, or an aspect such as "16:9", of which the largest centered box is taken.
        where: the beginning of a message.

    Raises:
        DatasetError: a box that is not within the picture.
    """
    height, width = picture_size
    if isinstance(crop, str):
        across, up = map(int, crop.split(":"))
        box_width = min(width, max(1, round(height * across / up)))
        box_height = min(height, max(1, round(width * up / across)))
        left, top = (width - box_width) // 2, (height - box_height) // 2
        return left, top, left + box_width, top + box_height
    if crop[2] > width or crop[3] > height:
        raise DatasetError(f"{where}: expected a crop within {width} x {height} pixels, got {list(crop)}")
    return crop


def crop_box(
    picture_size: tuple[int, int], image_size: tuple[int, int], intrinsics: Intrinsics | None
) -> tuple[float, float, float, float]:
    """The largest crop of a picture with the dataset's aspect ratio, as (left, top, right, bottom) in pixels.

    The crop is centered on the picture or, if the intrinsics are known, as near as possible on the principal point.
    Sizes are (height, width).
    """
    (height, width), aspect = picture_size, image_size[1] / image_size[0]
    box_width, box_height = min(float(width), height * aspect), min(float(height), width / aspect)
    center = width / 2 if intrinsics is None else intrinsics.center_x
    left = min(max(center - box_width / 2, 0.0), width - box_width)
    top = (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def fit_picture(
    picture: UInt8[np.ndarray, "height width 3"], image_size: tuple[int, int], intrinsics: Intrinsics | None
) -> UInt8[np.ndarray, "rows cols 3"]:
    """Crop a picture to the aspect ratio of `image_size` and resize it (bicubic, antialiased)."""
    box = crop_box((picture.shape[0], picture.shape[1]), image_size, intrinsics)
    size = (image_size[1], image_size[0])
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0))


def fitted_camera(
    picture_size: tuple[int, int],
    image_size: tuple[int, int],
    intrinsics: Intrinsics,
    *,
    height_meters: float,
    pitch_radians: float,
    x_forward_meters: float,
) -> Camera:
    """The camera of the fitted pictures; a horizon that is not half way up becomes the pitch of the camera."""
    left, top, right, bottom = crop_box(picture_size, image_size, intrinsics)
    tilt = math.atan((intrinsics.center_y - (top + bottom) / 2) / intrinsics.focal)
    fov = 2 * math.atan((right - left) / 2 / intrinsics.focal)
    return Camera(
        fov_degrees=math.degrees(fov),
        height_meters=height_meters,
        pitch_radians=pitch_radians + tilt,
        x_forward_meters=x_forward_meters,
    )
