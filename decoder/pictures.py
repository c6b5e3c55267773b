"""The one reader of pictures: PNG, JPEG and WebP become RGB as a viewer shows them, or are refused by name.

    EXIF orientation         the picture is turned
    gray, palette            become RGB
    an opaque alpha channel  is dropped; a picture with transparent pixels is refused: what lies behind it is unknown
    16 bits a channel        color is reduced to 8 bits; gray is refused, because most of it is depth, not brightness
    another color profile    is converted to sRGB; CMYK, whose colors depend on ink, is refused

A picture's size is known, and checked, before it is unpacked.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image, ImageCms, ImageOps

from tokenizer.errors import VideoError
from tokenizer.files import open_regular
from tokenizer.limits import LIMITS, Limits

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")

_EXPECTED = "a whole PNG, JPEG or WebP picture"
_FORMATS = ("PNG", "JPEG", "WEBP")
_SCAN, _CHUNK = b"\xff\xda", 1 << 20  # the marker before each scan of a JPEG, which nothing else in it contains
_ENDS = {"PNG": b"IEND\xaeB\x60\x82", "JPEG": b"\xff\xd9"}
_COUNTING = 0.5  # of the steps between numbered names
_TAIL_BYTES = 1 << 16  # behind a JPEG's end some cameras append a second picture, or zeros
_EIGHT_BITS = ("1", "L", "P", "RGB", "LA", "PA", "RGBA", "RGBX", "La", "RGBa")

# What Pillow raises for damaged files, by decoder.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

# The limit of Terra's own refuses a large picture in one line; Pillow's warning would be two more.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def read_picture(
    source: Path | bytes,
    name: str | None = None,
    *,
    limits: Limits = LIMITS,
    check_size: Callable[[tuple[int, int]], None] | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """Read a picture as RGB in [0, 255], upright.

    Args:
        source: a file, or its bytes.
        name: how messages call it; None: by its path.
        limits: bounds on its pixels, and on the scans of a JPEG.
        check_size: is called with (width, height) before the picture is unpacked, and raises an error if it isn't
            wanted.

    Raises:
        VideoError: a damaged file, one of another kind, a larger one, or one that can't be shown rightly.
    """
    name = name or (str(source) if isinstance(source, Path) else "picture")
    with _open(source) as file:
        try:
            with Image.open(file, formats=_FORMATS) as picture:
                width, height = picture.size
                if width * height > limits.picture_pixels:
                    got = f"{width}x{height} = {width * height / 1e6:.0f} megapixels"
                    raise VideoError(f"{name}: expected at most {limits.picture_pixels / 1e6:g} megapixels, got {got}")
                if check_size is not None:
                    check_size(_upright_size(picture))
                _check_scans(picture, limits)
                return np.asarray(_as_shown(picture, name))
        except _DAMAGED as error:
            raise VideoError(f"{name}: expected {_EXPECTED}, got: {_reason(error)}") from None


def picture_size(data: bytes) -> tuple[int, int] | None:
    """The (width, height) that a picture's header tells; None if it can't be read."""
    with suppress(*_DAMAGED), Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
        return picture.size
    return None


def picture_problem(path: Path, limits: Limits = LIMITS) -> str | None:
    """What is wrong with a picture, told without unpacking it: missing, empty, cut off, larger than the bounds.

    None if nothing is; what only unpacking shows stays unknown.
    """
    try:
        with open_regular(path, VideoError, _EXPECTED) as file:
            size = file.seek(0, io.SEEK_END)
            if not size:
                return "an empty file"
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
            file.seek(0)
            return _header_problem(file, tail, limits)
    except VideoError as error:
        return str(error).partition("got ")[2] or str(error).partition("got: ")[2]


def _header_problem(file: IO[bytes], tail: bytes, limits: Limits) -> str | None:
    try:
        with Image.open(file, formats=_FORMATS) as picture:
            if picture.width * picture.height > limits.picture_pixels:
                return f"{picture.width}x{picture.height} pixels"
            if picture.format in _ENDS and _ENDS[picture.format] not in tail:
                # Some cameras append a film to a picture; only unpacking tells.
                picture.load()
    except _DAMAGED as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """What Pillow says, without an object's address."""
    return (str(error).splitlines() or [""])[0].partition(" <")[0] or type(error).__name__


def list_pictures(entries: Iterable[Path], where: str) -> list[Path]:
    """The pictures among some files, in the order of their names, in which digits count as numbers.

    Raises:
        VideoError: two pictures of one name (0001.png beside 0001.jpg), or of two cameras (left_1.png, right_1.png),
            which are not the frames of one video.
    """
    found = sorted(filter(is_picture, entries), key=natural_key)
    stems: dict[str, Path] = {}
    for path in found:
        other = stems.setdefault(str(path.with_suffix("")).casefold(), path)
        if other is not path:
            raise VideoError(f"{where}: expected one picture of a name, got {other.name} and {path.name}")
    prefixes: dict[str, set[int]] = {}
    for path in found:
        prefix, digits = split_number(str(path.with_suffix("")))
        if digits:
            prefixes.setdefault(prefix.casefold(), set()).add(int(digits))
    shared = sorted(prefixes, key=lambda prefix: -len(prefixes[prefix]))[:2]
    if len(shared) == 2 and len(prefixes[shared[0]] & prefixes[shared[1]]) > 1:
        got = " and ".join(f"{prefix.rpartition('/')[2]}..." for prefix in sorted(shared))
        raise VideoError(f"{where}: expected the pictures of one camera, got those of two, {got}: give each a folder")
    return found


def split_number(stem: str) -> tuple[str, str]:
    """A name as what stands before the digits at its end, and these digits."""
    prefix = stem.rstrip("0123456789")
    return prefix, stem[len(prefix) :]


def missing_pictures(paths: Sequence[Path]) -> Int[np.ndarray, " pictures"] | None:
    """The place of each picture in its sequence, by the numbers that end their names; None if these don't count.

    Names count where nearly all numbers lie one stride apart, and the others some strides: of 0, 5, 10, 20 the places
    are 0, 1, 2, 4. Where names are times or words, they don't.
    """
    parts = [split_number(str(path.with_suffix(""))) for path in paths]
    if len(parts) < 3 or not all(digits for _, digits in parts) or len({prefix for prefix, _ in parts}) > 1:
        return None
    numbers = [int(digits) for _, digits in parts]
    steps = [b - a for a, b in pairwise(numbers)]
    stride = min(steps)
    if stride < 1 or any(step % stride for step in steps) or steps.count(stride) < _COUNTING * len(steps):
        return None
    return np.array([(number - numbers[0]) // stride for number in numbers])


def natural_key(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key under which runs of digits compare as numbers, and letters in any case."""
    parts = re.findall(r"[0-9]+|[^0-9]+", str(path).casefold())
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], str(path)


def is_picture(path: Path) -> bool:
    """Whether a file has a picture's suffix, in any case, and is not hidden."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def _open(source: Path | bytes) -> AbstractContextManager[IO[bytes]]:
    return io.BytesIO(source) if isinstance(source, bytes) else open_regular(source, VideoError, _EXPECTED)


def _upright_size(picture: Image.Image) -> tuple[int, int]:
    turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
    return (picture.height, picture.width) if turned else picture.size


def _as_shown(picture: Image.Image, name: str) -> Image.Image:
    if picture.mode not in _EIGHT_BITS:
        hint = ": depth is no picture" if picture.mode.startswith(("I", "F")) else ": convert it to RGB first"
        raise VideoError(f"{name}: expected RGB or gray of 8 bits, got mode {picture.mode!r}{hint}")
    profile = picture.info.get("icc_profile")
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if np.asarray(picture.getchannel("A")).min() < 255:
            raise VideoError(f"{name}: expected an opaque picture, got one with transparent pixels: flatten it first")
    picture = picture.convert("RGB")
    return picture if profile is None else _in_srgb(picture, profile, name)


def _in_srgb(picture: Image.Image, profile: bytes, name: str) -> Image.Image:
    try:
        source = ImageCms.getOpenProfile(io.BytesIO(profile))
        if profile[16:20] != b"RGB " or "srgb" in ImageCms.getProfileDescription(source).lower():
            return picture
        shown = ImageCms.profileToProfile(picture, source, ImageCms.createProfile("sRGB"))
    except (ImageCms.PyCMSError, OSError) as error:
        raise VideoError(f"{name}: expected a color profile that can be read, got: {error}") from None
    assert shown is not None
    return shown


def _check_scans(picture: Image.Image, limits: Limits) -> None:
    """Raise ValueError for a JPEG of more scans than the bounds allow: some kilobytes of them take minutes."""
    file = getattr(picture, "fp", None)
    if picture.format not in ("JPEG", "MPO") or file is None:
        return
    at, count, tail = file.tell(), 0, b""
    file.seek(0)
    while chunk := file.read(_CHUNK):
        count += (tail + chunk).count(_SCAN)
        tail = chunk[-1:] if not chunk.endswith(_SCAN) else b""
    file.seek(at)
    if count > limits.jpeg_scans:
        raise ValueError(f"a JPEG of {count} scans, above the {limits.jpeg_scans} that are read")
