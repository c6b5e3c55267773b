"""Reads the pictures of TORCS: PNG, and Silicon Graphics images (.rgb) with one to four channels."""

import io
import struct
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from terra.errors import DatasetError

SGI_MAGIC = 0x01DA
SGI_HEADER = ">hBBHHHH"
SGI_HEADER_BYTES = 512


def read_picture(path: Path) -> Image.Image:
    """The picture as RGBA.

    Raises:
        DatasetError: it can't be read.
    """
    try:
        data = path.read_bytes()
        if data[:2] == SGI_MAGIC.to_bytes(2, "big"):
            return Image.fromarray(_to_rgba(read_sgi(data)))
        return Image.open(io.BytesIO(data)).convert("RGBA")
    except (OSError, UnidentifiedImageError, ValueError, IndexError, struct.error) as error:
        raise DatasetError(f"{path}: expected a PNG or SGI picture: {error}") from error


def read_sgi(data: bytes) -> UInt8[np.ndarray, "height width channels"]:
    """Decode a Silicon Graphics image, plain or run-length coded. Pillow refuses those of two channels.

    Raises:
        ValueError: not one byte a value, or the data end too early.
    """
    _, coded, depth, _, width, height, channels = struct.unpack(SGI_HEADER, data[:12])
    if depth != 1:
        raise ValueError(f"expected 1 byte a value, got {depth}")
    if coded:
        rows = height * channels
        starts = np.frombuffer(data, ">u4", rows, SGI_HEADER_BYTES)
        lengths = np.frombuffer(data, ">u4", rows, SGI_HEADER_BYTES + 4 * rows)
        planes = np.concatenate([_expand(data[a : a + n], width) for a, n in zip(starts, lengths, strict=True)])
    else:
        planes = np.frombuffer(data, np.uint8, channels * height * width, SGI_HEADER_BYTES)
    # Plane by plane, the lowest row first.
    return np.ascontiguousarray(np.moveaxis(planes.reshape(channels, height, width)[:, ::-1], 0, -1))


def _expand(row: bytes, width: int) -> UInt8[np.ndarray, " width"]:
    out = bytearray()
    at = 0
    while at < len(row) and row[at] & 127:
        count, literal = row[at] & 127, row[at] & 128
        out += row[at + 1 : at + 1 + count] if literal else row[at + 1 : at + 2] * count
        at += 1 + (count if literal else 1)
    if len(out) != width:
        raise ValueError(f"expected a row of {width} values, got {len(out)}")
    return np.frombuffer(bytes(out), np.uint8)


def _to_rgba(pixels: UInt8[np.ndarray, "height width channels"]) -> UInt8[np.ndarray, "height width 4"]:
    """One channel is grey, two are grey and alpha, three are a color."""
    channels = pixels.shape[2]
    color = pixels[..., :3] if channels >= 3 else np.repeat(pixels[..., :1], 3, axis=2)
    alpha = pixels[..., -1:] if channels in (2, 4) else np.full_like(pixels[..., :1], 255)
    return np.concatenate([color, alpha], axis=2)
