"""Pictures in messages: compressed ones and pixels, of ROS (sensor_msgs) and of Foxglove's schemas."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from decoder.pictures import picture_size, read_picture
from terra.dataset.importing.bag_files import UndecodableError, binary, field
from terra.errors import DatasetError, VideoError
from tokenizer.limits import LIMITS

Pixels = UInt8[np.ndarray, "height width 3"]

_COMPRESSED = ("sensor_msgs/CompressedImage", "foxglove.CompressedImage", "foxglove_msgs/CompressedImage")
_RAW = ("sensor_msgs/Image", "foxglove.RawImage", "foxglove_msgs/RawImage")
VIDEO_TYPES = ("foxglove.CompressedVideo", "foxglove_msgs/CompressedVideo")
PICTURE_TYPES = (*_COMPRESSED, *_RAW, *VIDEO_TYPES)
"""The types of messages that hold pictures."""

# Bytes of a pixel, and where its red, green and blue are (sensor_msgs/image_encodings.hpp; OpenCV's types in CvBridge).
_ORDERS = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "8UC3": (3, (2, 1, 0)),
    "8UC4": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
    "8UC1": (1, (0, 0, 0)),
}
# Where a pair of pixels of 4:2:2 has its Y, Y, U and V. "yuv422" has always meant UYVY.
_PAIRS = {
    "yuv422": (1, 3, 0, 2),
    "uyvy": (1, 3, 0, 2),
    "yuv422_yuy2": (0, 2, 1, 3),
    "yuyv": (0, 2, 1, 3),
}
_DEPTHS = ("16UC1", "16SC1", "32SC1", "32FC1", "64FC1", "mono16")
_NO_PICTURE = ("compresseddepth", *(name.lower() for name in _DEPTHS))


@dataclass(frozen=True)
class Still:
    """Reads the pictures of a topic that holds no video.

    Attributes:
        type: the messages' type.
        where: bag and topic, with which messages begin.
    """

    type: str
    where: str

    def read(self, message: Any) -> Pixels:
        """The picture of a decoded message, RGB in [0, 255].

        Raises:
            UndecodableError: this picture is damaged.
            DatasetError: the topic's pictures are of a kind that can't be shown rightly.
        """
        try:
            if self.type in _COMPRESSED:
                return self._unpacked(message)
            return self._from_pixels(message)
        except AttributeError as error:
            raise DatasetError(f"{self.where}: expected a field {error} in {self.type}, got none") from None

    def _unpacked(self, message: Any) -> Pixels:
        words = str(field(message, "format")).lower()
        if any(name in words for name in _NO_PICTURE):
            raise DatasetError(f"{self.where}: expected pictures, got depth: format {words!r}")
        try:
            return read_picture(binary(message), "picture")
        except VideoError as error:
            raise UndecodableError(str(error)) from None

    def _from_pixels(self, message: Any) -> Pixels:
        encoding = str(field(message, "encoding"))
        width, height, step = (int(field(message, name)) for name in ("width", "height", "step"))
        size = {**{name: each[0] for name, each in _ORDERS.items()}, **dict.fromkeys(_PAIRS, 2)}.get(encoding)
        if size is None:
            kind = "depth or 16-bit gray" if encoding in _DEPTHS else "pixels"
            hint = "; record a topic of debayered pictures" if encoding.startswith("bayer") else ""
            known = ", ".join((*_ORDERS, *_PAIRS))
            raise DatasetError(f"{self.where}: expected pixels of {known}, got {kind} of {encoding[:40]!r}{hint}")
        data = np.frombuffer(binary(message), np.uint8)
        if not (0 < width * height <= LIMITS.picture_pixels and step >= width * size and len(data) >= step * height):
            raise UndecodableError(f"{width}x{height} pixels, {step} bytes a row, and {len(data)} bytes in all")
        if encoding in _PAIRS and width % 2:
            raise UndecodableError(f"an odd width of {width} pixels, and {encoding} has pairs")
        rows = data[: step * height].reshape(height, step)[:, : width * size]
        if encoding in _PAIRS:
            return _from_pairs(rows.reshape(height, width // 2, 4), _PAIRS[encoding])
        return np.ascontiguousarray(rows.reshape(height, width, size)[:, :, list(_ORDERS[encoding][1])])


def message_size(kind: str, message: Any) -> str | None:
    """What can be told of a picture's size without unpacking it: "640x480"; None of video, or if it can't be read."""
    try:
        if kind in _COMPRESSED:
            size = picture_size(binary(message))
        elif kind in _RAW:
            size = int(field(message, "width")), int(field(message, "height"))
        else:
            return None
    except (AttributeError, UndecodableError, TypeError, ValueError):
        return None
    return None if size is None else f"{size[0]}x{size[1]}"


def _from_pairs(pairs: UInt8[np.ndarray, "height pairs 4"], places: tuple[int, int, int, int]) -> Pixels:
    """RGB of 4:2:2 by BT.601 in limited range (16 to 235), as cv_bridge and V4L2 have it; a pair shares its color."""
    first, second, u_at, v_at = places
    bright = (pairs[:, :, [first, second]].astype(np.float32) - 16) * (255 / 219)
    u, v = ((pairs[:, :, [at]].astype(np.float32) - 128) * (255 / 224) for at in (u_at, v_at))
    channels = (bright + 1.402 * v, bright - 0.344136 * u - 0.714136 * v, bright + 1.772 * u)
    planes = [plane.reshape(len(pairs), -1) for plane in channels]
    return np.clip(np.stack(planes, axis=2) + 0.5, 0, 255).astype(np.uint8)
