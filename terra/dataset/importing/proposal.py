"""What `terra inspect` proposes for an import: frame rate, picture size, held-out drives, and the command to copy."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terra.dataset.format import MAX_FPS, MIN_FPS
from terra.dataset.importing.alignment import RATE_TOLERANCE

DRIVING_FPS = 10.0  # frames a second of the worlds that are driven by poses
_MOST_FPS = 30.0
_PIXELS = 144 * 256  # of the shipped models' pictures
_SIDE = 16  # pixels that a token's side is a multiple of
_SIDES = range(_SIDE, 513, _SIDE)
_LISTED, _MOST_PATTERNS = 5, 12  # names, and patterns, of drives to hold out
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.@*?-]*|0|[1-9][0-9]*|0[0-9]+")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "inf", "nan"}  # that YAML or Hydra takes for values
_LINE = 100  # characters


def propose_fps(rates: Sequence[float], *, driving: bool) -> float:
    """Frames a second that all drives have: the slowest drive's own rate, rounded; of driving 10 at most.

    Args:
        rates: the drives' frames a second.
        driving: whether the drives have poses.
    """
    slowest = min(rates, default=DRIVING_FPS)
    if driving and slowest * RATE_TOLERANCE >= DRIVING_FPS:
        return DRIVING_FPS
    fps = float(round(slowest)) if round(slowest) <= slowest * RATE_TOLERANCE else math.floor(slowest)
    while fps > _MOST_FPS:
        fps /= 2
    return min(max(fps or round(slowest, 2), MIN_FPS), MAX_FPS)


def propose_size(picture_size: tuple[int, int], num_cameras: int = 1) -> tuple[int, int]:
    """A (height, width) for pictures of this size: multiples of 16 of nearly its aspect, no larger, not many pixels.

    Two cameras stand side by side, three and four in two rows; then the size is that of the whole picture.
    """
    if num_cameras > 1:
        rows = 1 if num_cameras == 2 else 2
        up, across = _tile_size(picture_size, _PIXELS / (2 * rows))
        return rows * up, 2 * across
    return _tile_size(picture_size, _PIXELS)


def _tile_size(picture_size: tuple[int, int], pixels: float) -> tuple[int, int]:
    height, width = picture_size

    def cost(size: tuple[int, int]) -> float:
        ratio = size[1] / size[0] / (width / height)
        cropped = 1 - min(ratio, 1 / ratio)
        return cropped + 0.1 * abs(math.log(size[0] * size[1] / min(pixels, height * width)))

    sizes = [
        (up, across) for up in _SIDES for across in _SIDES if up <= max(height, _SIDE) and across <= max(width, _SIDE)
    ]
    return min(sizes, key=cost)


def propose_held_out(
    drives: Sequence[str], recordings: Mapping[str, Sequence[str]], declared: Sequence[str] = ()
) -> list[str]:
    """Names or patterns of the drives to hold out: recordings that the source declares, else the last tenth.

    Drives of one recording stay together. Nothing is held out of a single drive.
    """
    wanted = [name for name in declared if name in recordings]
    if wanted:
        return wanted
    if len(recordings) > 1:
        count = 0
        for name in reversed(list(recordings)):
            wanted.insert(0, name)
            count += len(recordings[name])
            if count >= len(drives) / 10:
                return wanted
    if len(drives) > 1:
        wanted = list(drives[-max(1, round(len(drives) / 10)) :])
    return wanted if len(wanted) <= _LISTED else _patterns(drives, len(wanted)) or wanted


def _patterns(drives: Sequence[str], wanted: int) -> list[str] | None:
    """The fewest patterns such as episode_009* for so many of the last drives, or up to twice as many; None: there are
    none, because the names don't count on."""
    fewest: list[str] | None = None
    for dropped in range(1, max(map(len, drives))):
        groups = Counter(name[:-dropped] for name in drives if len(name) > dropped)
        patterns: list[str] = []
        count = 0
        for begin in dict.fromkeys(name[:-dropped] for name in reversed(drives) if len(name) > dropped):
            patterns.insert(0, f"{begin}*")
            count += groups[begin]
            if count >= wanted or len(patterns) == _MOST_PATTERNS:
                break
        if wanted <= count <= 2 * wanted and (fewest is None or len(patterns) < len(fewest)):
            fewest = patterns
    return fewest


def command_line(arguments: Mapping[str, Any]) -> str:
    """`terra import` with settings by name, quoted for Hydra and for a POSIX shell; long ones take several lines."""
    words = ["terra import", *(shell_quoted(f"{name}={_value(value)}") for name, value in arguments.items())]
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > _LINE:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def shell_quoted(word: str) -> str:
    """A word for a POSIX shell, in double quotes where these do, else in single ones."""
    if shlex.quote(word) == word:
        return word
    is_literal = not set(word) & set('"$`!\n') and "\\\\" not in word and not word.endswith("\\")
    return f'"{word}"' if is_literal else shlex.quote(word)


def _value(value: object) -> str:
    """A value as Hydra's command line has it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value:.12g}"
        case Mapping():
            return "{" + ",".join(f"{name}:{_value(each)}" for name, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_value, value)) + "]"
        case Path():
            return _value(str(value))
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    if not text:
        return '""'
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\*)\$\{", r"\1\1\\${", text))
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
