"""Pictures that carry their own number, which is read again from any part that shows a whole one."""

import numpy as np

_COLUMNS, _ROWS = 5, 2


def coded(number: int, height: int = 80, width: int = 160) -> np.ndarray:
    """A picture of 5 x 2 blocks, dark or bright: the bits of a number below 1024."""
    bits = np.array([number >> bit & 1 for bit in range(_COLUMNS * _ROWS)]).reshape(_ROWS, _COLUMNS)
    blocks = np.where(bits, 235, 20).astype(np.uint8)
    rows, columns = np.arange(height) * _ROWS // height, np.arange(width) * _COLUMNS // width
    return np.repeat(blocks[rows][:, columns, None], 3, axis=2)


def number_in(picture: np.ndarray) -> int:
    """The number of a picture that `coded` made, whatever its size."""
    height, width = picture.shape[:2]
    total = 0
    for bit in range(_COLUMNS * _ROWS):
        row, column = divmod(bit, _COLUMNS)
        y, x = int((row + 0.5) * height / _ROWS), int((column + 0.5) * width / _COLUMNS)
        total |= int(picture[y - 1 : y + 2, x - 1 : x + 2].mean() > 127) << bit
    return total
