"""Loads a map: pictures of a place and the pose of the camera in each, which a rollout remembers from its beginning.

A map is the MP4 of an episode of a dataset, or a CSV beside the pictures that it names:

    file,x_m,y_m,heading_deg
    corner_1.jpg,0.0,0.0,90
    corner_2.jpg,0.5,4.0,85

Positions are meters in any fixed coordinate system; headings (heading_rad or heading_deg) are counter-clockwise from
+x.
"""

import asyncio
import csv
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decoder.video import Pixels, to_uint8
from terra.context import load_context
from terra.dataset import read_episode, read_frames
from terra.errors import ContextError
from terra.memory import Poses, relative
from terra.recall import PlaceMap
from terra.trajectory.document import ANGLE_UNITS
from tokenizer import TokenGrid
from tokenizer.files import file_sha256, read_text
from tokenizer.limits import LIMITS, MAP_METERS, Limits

_COLUMNS = "file, x_m, y_m and heading_rad or heading_deg"
_CHUNK = 16  # pictures that are read at a time: as floats they take four times the memory


@dataclass(frozen=True, eq=False)
class MapPictures:
    """The frames of a map.

    Attributes:
        pixels: 8-bit RGB, in the model's size.
        poses: rows of [x, y, heading], in the map's own axes.
        source: the map's file.
        sha256: hash of the file's content, and of the pictures'.
    """

    pixels: Pixels
    poses: Poses
    source: Path
    sha256: str

    def seen_from(self, pose: Sequence[float]) -> Poses:
        """The poses in the axes of a rollout that begins at `pose` of the map, [x, y, heading] in m and rad."""
        return relative(self.poses, np.array(pose, np.float64))

    def describe(self, pose: Sequence[float]) -> dict[str, Any]:
        """What a rollout's record says of its map."""
        return {"path": str(self.source.absolute()), "sha256": self.sha256, "pose": list(pose)}


class Place:
    """A map that many rollouts remember; the first of them has it tokenized, and only the tokens are kept.

    Args:
        pictures: the map's frames, in the model's size, and their poses.
        encode: makes a map of pixels and poses, as `terra.pipeline.Pipeline.encode_map`.
    """

    def __init__(self, pictures: MapPictures, encode: Callable[[Pixels, Poses], Awaitable[PlaceMap]]) -> None:
        self.pictures, self._encode = pictures, encode
        self._tokens: TokenGrid | None = None
        self._encoding = asyncio.Lock()

    async def seen_from(self, pose: Sequence[float]) -> PlaceMap:
        """The map in the axes of a rollout that begins at `pose` of the map, [x, y, heading] in m and rad."""
        async with self._encoding:
            if self._tokens is None:
                self._tokens = (await self._encode(self.pictures.pixels, self.pictures.poses)).tokens
                self.pictures = replace(self.pictures, pixels=self.pictures.pixels[:0].copy())
        return PlaceMap(self._tokens, self.pictures.seen_from(pose))


def load_map(
    path: Path, image_size: tuple[int, int], fps: float, limits: Limits = LIMITS, *, at_least: int = 1
) -> MapPictures:
    """Load the frames of a map and their poses.

    Args:
        path: the MP4 of an episode of a dataset, or a CSV.
        image_size: (height, width) in pixels that the tokenizer takes.
        fps: the model's frames a second.
        limits: bounds on files, pictures and the number of frames.
        at_least: the fewest frames, as many as a window remembers.

    Raises:
        ContextError: no such file, a column missing or unknown, no number, a picture that can't be read, too many
            frames or too few.
        DatasetError, VideoError: an MP4 that is no episode of a dataset, or damaged.
    """
    if not path.is_file():
        raise ContextError(f"map={path}: expected a CSV, or the MP4 of an episode of a dataset, got no such file")
    if path.suffix.lower() == ".mp4":
        return _from_episode(path, image_size, at_least, limits)
    if path.suffix.lower() != ".csv":
        raise ContextError(f"map={path}: expected a file that ends in .csv or .mp4, got {path.suffix!r}")
    files, poses = _read_table(path, limits)
    _check_count(len(files), path, at_least, limits)
    pieces = [
        to_uint8(load_context(files[at : at + _CHUNK], num_frames=num, image_size=image_size, fps=fps, limits=limits))
        for at in range(0, len(files), _CHUNK)
        if (num := len(files[at : at + _CHUNK]))
    ]
    return MapPictures(np.concatenate(pieces), poses, path, _table_sha256(path, files))


def map_sha256(path: Path, limits: Limits = LIMITS) -> str:
    """The hash that `load_map` tells of a map, without decoding the pictures. Raises TerraError."""
    if path.suffix.lower() == ".mp4":
        return read_episode(path).video_sha256
    return _table_sha256(path, _read_table(path, limits)[0])


def _table_sha256(path: Path, files: Sequence[Path]) -> str:
    hashes = [file_sha256(each, ContextError) for each in (path, *files)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _from_episode(path: Path, image_size: tuple[int, int], at_least: int, limits: Limits) -> MapPictures:
    episode = read_episode(path)
    _check_count(episode.num_frames, path, at_least, limits)
    if episode.image_size != image_size:
        wanted, got = ("x".join(map(str, reversed(size))) for size in (image_size, episode.image_size))
        raise ContextError(f"map={path}: expected pictures of {wanted} pixels, the model's, got {got}")
    poses = np.stack([episode.poses.x, episode.poses.y, episode.poses.heading], 1)[: episode.num_frames]
    return MapPictures(read_frames(episode), poses, path, episode.video_sha256)


def _read_table(path: Path, limits: Limits) -> tuple[list[Path], Poses]:
    lines = read_text(path, ContextError, max_bytes=limits.table_bytes).splitlines()
    _check_count(len(lines) - 1, path, 1, limits)
    if (longest := max(map(len, lines), default=0)) > limits.line_chars:
        raise ContextError(f"{path}: expected lines of at most {limits.line_chars} characters, got {longest}")
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise ContextError(f"{path}: expected a CSV, got: {error}") from None
    header = [cell.strip() for cell in rows[0]] if rows else []
    heading = next((name for name in header if name in ("heading_rad", "heading_deg")), "heading_rad")
    if sorted(header) != sorted(["file", "x_m", "y_m", heading]):
        raise ContextError(f"{path}: line 1: expected the columns {_COLUMNS}, got {', '.join(header)[:200] or 'none'}")
    files, poses = [], []
    for number, row in enumerate(rows[1:], 2):
        where = f"{path}: line {number}"
        if len(row) != len(header):
            raise ContextError(f"{where}: expected {len(header)} columns, got {len(row)}")
        cells = dict(zip(header, map(str.strip, row), strict=True))
        files.append(path.parent / cells["file"])
        x, y, angle = (_number(cells[name], f"{where}: {name}") for name in ("x_m", "y_m", heading))
        poses.append([x, y, angle / ANGLE_UNITS[heading.removeprefix("heading_")]])
    return files, np.array(poses)


def _check_count(count: int, path: Path, at_least: int, limits: Limits) -> None:
    if not at_least <= count <= limits.map_frames:
        raise ContextError(f"map={path}: expected {at_least} to {limits.map_frames} frames, got {max(count, 0)}")


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < MAP_METERS:
        raise ContextError(f"{where}: expected a number below 1e7, got {text[:40]!r}")
    return value
