"""A quick look at picture files: do header and end belong to a whole picture? Nothing is decoded."""

import os
from pathlib import Path

from PIL import Image

from terra.context import DAMAGED_IMAGE
from terra.errors import DatasetError
from tokenizer.files import open_regular

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL = 4096  # bytes; some cameras write a little after the end


def picture_size(path: Path) -> tuple[int, int]:
    """The (height, width) that the header of a PNG or JPEG picture gives.

    A picture that was cut off while it was written has no end marker. Damage in its middle is not seen here.

    Raises:
        DatasetError: a file that is missing, empty, cut off, or no such picture.
    """
    with open_regular(path, DatasetError, "a PNG or JPEG picture") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise DatasetError(f"{path}: expected a PNG or JPEG picture, got 0 bytes")
        try:
            with Image.open(file, formats=tuple(_ENDS)) as picture:
                width, height, end = *picture.size, _ENDS[str(picture.format)]
                file.seek(max(size - _TAIL, 0))
                if end not in file.read(_TAIL):
                    raise DatasetError(f"{path}: expected a whole picture, got {size} bytes without its end")
        except DAMAGED_IMAGE as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise DatasetError(f"{path}: expected a PNG or JPEG picture, got: {reason}") from None
    return height, width
