"""Several cameras in one picture: which part of the picture shows which camera.

    1 camera    the whole picture
    2 cameras   side by side or one above the other, whichever gives tiles nearer to the cameras' aspect ratio; a tie is
                side by side
    3 and 4     two rows of two tiles, in the order of the names; with 3 the lower right tile is black

All tiles of a picture have one size. A dataset, its tokens and a world model keep their views under the key `views`
({"image_size", "names", "boxes"}), which a world of one camera does not have.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Self

import numpy as np
from jaxtyping import UInt8
from pydantic import AfterValidator, Field, model_validator

from tokenizer.errors import ConfigError, TerraError
from tokenizer.settings import Settings, Text, checked, expecting

logger = logging.getLogger(__name__)

MOST_VIEWS = 4
ASPECT = 4 / 3  # width / height of a camera whose pictures nobody has seen
_EDGE, _PATCH = 8, 16  # pixels: what a tile's edges are multiples of, and should be, since tokens are of 8 or 16 pixels
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Pictures = UInt8[np.ndarray, "*frames height width 3"]
"""One picture or several of 8-bit RGB, channels last."""


def check_view_names(names: Sequence[str]) -> Sequence[str]:
    """Return 1 to 4 different names of cameras, which can be parts of file names. Raises ValueError."""
    if not 1 <= len(names) <= MOST_VIEWS or len(set(names)) < len(names):
        raise ValueError(f"expected 1 to {MOST_VIEWS} different names of cameras, got {', '.join(names) or 'none'}")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"expected a name of letters, digits, '_' and '-', got {name!r}")
    return names


ViewNames = Annotated[tuple[Text, ...], Field(strict=False), AfterValidator(check_view_names)]
"""1 to 4 names of cameras."""

_Pixel = Annotated[int, Field(ge=0, le=1 << 16, multiple_of=2)]
_Box = Annotated[
    tuple[_Pixel, _Pixel, _Pixel, _Pixel], Field(strict=False), expecting("[left, top, right, bottom], even pixels")
]
_Size = Annotated[tuple[_Pixel, _Pixel], Field(strict=False), expecting("[height, width], even pixels")]


class Views(Settings):
    """The cameras of a world, and the part of the picture that shows each.

    Attributes:
        image_size: (height, width) of the whole picture, in pixels.
        names: 1 to 4 names, such as "front" and "wrist"; the first is the main camera's.
        boxes: (left, top, right, bottom) of each, in pixels; they do not overlap.

    Raises:
        ConfigError: names that are no names, or boxes that overlap, are empty or leave the picture.
    """

    image_size: _Size
    names: ViewNames
    boxes: Annotated[tuple[_Box, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.boxes) != len(self.names):
            raise ValueError(f"boxes: expected one for each of {', '.join(self.names)}, got {len(self.boxes)}")
        height, width = self.image_size
        for name, (left, top, right, bottom) in zip(self.names, self.boxes, strict=True):
            if not (left < right <= width and top < bottom <= height):
                got = [left, top, right, bottom]
                raise ValueError(f"boxes: expected a part of {width} x {height} pixels for {name}, got {got}")
        for (one, a), (other, b) in combinations(zip(self.names, self.boxes, strict=True), 2):
            if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
                raise ValueError(
                    f"boxes: expected parts that do not overlap, got {one} {list(a)} and {other} {list(b)}"
                )
        return self

    @classmethod
    def tiled(cls, names: Sequence[str], image_size: tuple[int, int], aspect: float = ASPECT) -> Self:
        """Lay out cameras in a picture, as the module says.

        Args:
            names: 1 to 4 names.
            image_size: (height, width) of the picture in pixels; a side that is halved must be a multiple of 16.
            aspect: width / height of the cameras' own pictures.

        Raises:
            ConfigError: wrong names, or a picture that can't be divided.
        """
        try:
            check_view_names(names)
        except ValueError as error:
            raise ConfigError(f"views: {error}") from None
        height, width = image_size
        rows, columns = 1, 1
        if len(names) == 2:
            beside, above = (abs(math.log(shape / aspect)) for shape in (width / 2 / height, width / (height / 2)))
            rows, columns = (1, 2) if beside <= above + 1e-9 else (2, 1)
        elif len(names) > 2:
            rows, columns = 2, 2
        for side, parts in ((height, rows), (width, columns)):
            if side % (parts * _EDGE) and parts > 1:
                expected = f"a multiple of {parts * _EDGE} to be halved for views"
                raise ConfigError(f"image_size: expected {expected}, got {list(image_size)}")
        tile_height, tile_width = height // rows, width // columns
        boxes = [
            (left, top, left + tile_width, top + tile_height)
            for top in range(0, rows * tile_height, tile_height)
            for left in range(0, columns * tile_width, tile_width)
        ]
        return cls(image_size=(height, width), names=tuple(names), boxes=tuple(boxes[: len(names)]))

    def say_cut_patches(self, where: str) -> None:
        """Warn if tokens of 16 pixels a side would show parts of two cameras."""
        cut = sorted({edge for box in self.boxes for edge in box if edge % _PATCH and edge not in self.image_size})
        if cut:
            expected = f"views that meet at a multiple of {_PATCH} pixels"
            got = ", ".join(map(str, cut))
            logger.warning("%s: expected %s, got %s: tokens of that size show two cameras there", where, expected, got)

    @classmethod
    def read(cls, facts: Mapping[str, Any], where: str, error_class: type[TerraError] = ConfigError) -> Self | None:
        """The key `views` of a file's content; None without it, which is one camera. Raises `error_class`."""
        values = facts.get("views")
        return None if values is None else checked(cls, values, f"{where}: views", error_class)

    def describe(self) -> dict[str, Any]:
        """The key `views` as JSON values."""
        return self.model_dump(mode="json")

    @property
    def sizes(self) -> str:
        """Names, sizes and places in one line: "front 128x144 at 0,0"; sizes are width x height."""
        places = zip(self.names, self.boxes, strict=True)
        return ", ".join(f"{name} {box[2] - box[0]}x{box[3] - box[1]} at {box[0]},{box[1]}" for name, box in places)

    def tile_size(self, name: str) -> tuple[int, int]:
        """(height, width) in pixels of a camera's tile."""
        left, top, right, bottom = self.boxes[self.names.index(name)]
        return bottom - top, right - left

    def areas(self, size: tuple[int, int] | None = None) -> dict[str, tuple[slice, slice]]:
        """The rows and columns of each view in pictures of a size (height, width), by default `image_size`."""
        down, across = (got / own for got, own in zip(size or self.image_size, self.image_size, strict=True))
        return {
            name: (slice(round(top * down), round(bottom * down)), slice(round(left * across), round(right * across)))
            for name, (left, top, right, bottom) in zip(self.names, self.boxes, strict=True)
        }

    def split(self, frames: Pictures) -> dict[str, Pictures]:
        """The part of each view of pictures of any size, without copying."""
        areas = self.areas((frames.shape[-3], frames.shape[-2]))
        return {name: frames[..., rows, columns, :] for name, (rows, columns) in areas.items()}

    def tile(self, pictures: Mapping[str, Pictures]) -> Pictures:
        """The whole pictures of one picture, or as many, of each view, of its tile's size; the rest is black.

        Raises:
            ValueError: a view that is missing or unknown, or pictures of another size or number.
        """
        if set(pictures) != set(self.names):
            raise ValueError(f"expected pictures of {', '.join(self.names)}, got {', '.join(pictures) or 'none'}")
        some = pictures[self.names[0]].shape[:-3]
        whole = np.zeros((*some, *self.image_size, 3), np.uint8)
        for name, part in self.split(whole).items():
            if pictures[name].shape != part.shape:
                raise ValueError(f"{name}: expected pictures of shape {part.shape}, got {pictures[name].shape}")
            part[...] = pictures[name]
        return whole


def title_of(views: Views | None) -> str:
    """The views' names in one line, for messages; "one camera" for None."""
    return "one camera" if views is None else " and ".join(views.names)
