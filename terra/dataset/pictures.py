"""Two pictures of a dataset: a contact sheet with a frame of some episodes, and the driven paths."""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from decoder.video import read_video
from terra.dataset.episode import Episode
from terra.dataset.poses import Poses
from terra.errors import TerraError

SHEET_NAME, PATHS_NAME, ACTIONS_NAME = "contact_sheet.png", "paths.png", "actions.png"
SHEET_COLUMNS, SHEET_PICTURES = 5, 20
_MAX_PATHS = 60
# The contact sheet shows the frame at this time in an episode, or this time after several futures part: late enough
# that something happens, early enough that little must be decoded.
_SECONDS_IN, _SECONDS_APART = 2.0, 4.0
_LEAST_WIDTH = 192  # pixels that a label needs
_LABEL_HEIGHT = 26
_MISSING_SIZE = (90, 160)

Item = TypeVar("Item")
Picture = UInt8[np.ndarray, "_ _ 3"]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Choose at most `count` evenly spread items."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def contact_sheet(episodes: Sequence[Episode]) -> tuple[Picture, list[str]]:
    """Tile one frame of up to 20 episodes over their names, splits, weathers and maneuvers.

    Also returns one line for each frame that can't be read, which stays gray in the picture.
    """
    labeled: list[tuple[str, Picture | None]] = []
    damaged: list[str] = []
    for episode in spread(episodes, SHEET_PICTURES):
        words = (episode.split, episode.weather, episode.maneuver)
        label = f"{episode.id}\n{', '.join(word for word in words if word)}"
        try:
            labeled.append((label, _one_frame(episode)))
        except TerraError as error:
            labeled.append((label, None))
            damaged.append(str(error))
    return tile(labeled), damaged


def tile(labeled: Sequence[tuple[str, Picture | None]]) -> Picture:
    """Tile pictures of one size in rows of 5, each over its label of up to two lines; None becomes a gray picture."""
    height, width = next((picture.shape[:2] for _, picture in labeled if picture is not None), _MISSING_SIZE)
    scale = math.ceil(_LEAST_WIDTH / width)
    width, height = scale * width, scale * height
    rows = math.ceil(len(labeled) / SHEET_COLUMNS)
    sheet = Image.new("RGB", (min(SHEET_COLUMNS, len(labeled)) * width, rows * (height + _LABEL_HEIGHT)), "white")
    for index, (label, picture) in enumerate(labeled):
        # Each cell is drawn as a picture of its own, so that a long label is cut off at the cell's edge.
        cell = Image.new("RGB", (width, height + _LABEL_HEIGHT), "white")
        image = Image.new("RGB", (1, 1), "gray") if picture is None else Image.fromarray(picture)
        cell.paste(image.resize((width, height)), (0, 0))
        ImageDraw.Draw(cell).multiline_text((2, height + 1), label, fill="black", spacing=1)
        sheet.paste(cell, (index % SHEET_COLUMNS * width, index // SHEET_COLUMNS * (height + _LABEL_HEIGHT)))
    return np.asarray(sheet)


def _one_frame(episode: Episode) -> Picture:
    seconds = _SECONDS_IN if episode.group is None else _SECONDS_APART
    index = min(episode.num_context + round(seconds * episode.fps), episode.num_frames - 1)
    return read_video(episode.video, max_frames=index + 1)[-1]


def draw_paths(drives: Sequence[Poses], side: int = 640) -> UInt8[np.ndarray, "side side 3"]:
    """Draw the paths of up to 60 drives from a common start, turned so that each begins upwards, not mirrored.

    Each drive has its own color; all drives have one scale.
    """
    paths = [_from_start(poses) for poses in spread(drives, _MAX_PATHS)]
    corners = np.concatenate([*paths, np.zeros((1, 2))])
    lowest, highest = corners.min(axis=0), corners.max(axis=0)
    middle, reach = (lowest + highest) / 2, max(float((highest - lowest).max()) / 2, 1.0) * 1.05
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)

    def place(points: Float[np.ndarray, "points 2"]) -> list[tuple[float, float]]:
        shown = side / 2 - (points - middle) / reach * side / 2
        return [(left, forward) for forward, left in shown.tolist()]

    step = 10.0 ** math.floor(math.log10(reach))
    for axis in (0, 1):
        for at in np.arange(math.ceil((middle - reach)[axis] / step), (middle + reach)[axis] / step) * step:
            ends = np.stack([middle - reach, middle + reach])
            ends[:, axis] = at
            draw.line(place(ends), fill=(150, 150, 150) if at == 0 else (225, 225, 225))
            # Meters stand where a line meets the left edge (forward) or the lower one (left).
            edge = place(ends)[1] if axis == 0 else place(ends)[0]
            draw.text(edge, f"{at:g}", fill=(100, 100, 100), anchor="ls")
    for number, path in enumerate(paths):
        color = tuple(int(127 + 100 * math.cos(2.4 * number + shift)) for shift in (0.0, 2.1, 4.2))
        draw.line(place(path), fill=color, width=2)
    draw.text((4, 4), "m forward (up) and m left (to the left); all start, heading up, at 0", fill="black")
    return np.asarray(image)


def _from_start(poses: Poses) -> Float[np.ndarray, "poses 2"]:
    """Positions [forward, left] in meters, relative to the first pose and its heading."""
    x, y = poses.x - poses.x[0], poses.y - poses.y[0]
    cos, sin = math.cos(poses.heading[0]), math.sin(poses.heading[0])
    return np.stack([x * cos + y * sin, y * cos - x * sin], axis=1)
