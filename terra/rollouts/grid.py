"""Draws the futures of one line of the manifest side by side in one video."""

import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack, closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from decoder.video import VideoWriter, probe_video, stream_video
from terra.errors import OutputError, VideoError
from terra.rollout_files import find_damage
from terra.rollouts.folder import RECORD, RolloutFolder
from tokenizer.files import make_folder, read_json

logger = logging.getLogger(__name__)

GRIDS = "grids"
_GAP = 4  # pixels
_BACKGROUND, _TEXT = (16, 20, 27), (236, 240, 245)


def write_grids(folder: RolloutFolder, lines: Iterable[tuple[list[str], int]], *, verify: bool = False) -> None:
    """Write grids/ID.mp4 for each line whose several futures are all done, unless the grid is newer than they are.

    A damaged grid is written again; with `verify` all are.

    Raises:
        OutputError: a file can't be written.
        VideoError: a future's video can't be read.
    """
    for names, _ in lines:
        if len(names) < 2 or not all(map(folder.has, names)):
            continue
        path = folder.path / GRIDS / f"{names[0]}.mp4"
        videos = [folder.rollout(name) / "video.mp4" for name in names]
        newest = max(video.parent.stat().st_mtime for video in videos)
        if not verify and _is_whole(path) and path.stat().st_mtime > newest:
            continue
        make_folder(path.parent)
        records = [read_json(video.parent / RECORD, OutputError) for video in videos]
        write_grid(videos, [f"seed {record['seed']}" for record in records], path)


def _is_whole(path: Path) -> bool:
    """Whether there is a grid, with no damage that its headers show; damage is logged."""
    if not path.is_file():
        return False
    damage = find_damage(path.parent, {path.name: None})
    if damage:
        logger.warning("%s: is damaged and made again: %s", path, damage[path.name])
    return not damage


def write_grid(videos: list[Path], labels: list[str], path: Path) -> None:
    """Write MP4s of one size, rate and length as tiles of one MP4, row by row, each with its label; a frame at a time.

    Raises:
        OutputError: the grid can't be written.
        VideoError: a video can't be read.
    """
    info = probe_video(videos[0])
    cols = math.ceil(math.sqrt(len(videos)))
    rows = math.ceil(len(videos) / cols)
    width, height = (count * (side + _GAP) - _GAP for count, side in ((cols, info.width), (rows, info.height)))
    canvas = np.empty((height + height % 2, width + width % 2, 3), np.uint8)
    canvas[:] = _BACKGROUND
    plates = [_plate(label) for label in labels]
    with ExitStack() as stack:
        readers: list[Any] = [stream_video(video) for video in videos]
        streams = [stack.enter_context(closing(reader)) for reader in readers]
        writer = stack.enter_context(VideoWriter(path, info.fps, (canvas.shape[1], canvas.shape[0])))
        for frames in zip_longest(*streams):
            if any(frame is None for frame in frames):
                lost = videos[next(index for index, frame in enumerate(frames) if frame is None)]
                raise VideoError(f"{lost}: expected as many frames as the other futures have: try verify=true")
            for index, (frame, plate) in enumerate(zip(frames, plates, strict=True)):
                row, col = divmod(index, cols)
                top, left = row * (info.height + _GAP), col * (info.width + _GAP)
                tile = canvas[top : top + frame.shape[0], left : left + frame.shape[1]]
                tile[:] = frame
                corner = tile[: plate.shape[0], : plate.shape[1]]
                corner[:] = plate[: corner.shape[0], : corner.shape[1]]
            writer.append(canvas)


def _plate(label: str) -> UInt8[np.ndarray, "height width 3"]:
    font = ImageFont.load_default(12)
    box = font.getbbox(label)
    plate = Image.new("RGB", (round(box[2]) + 8, round(box[3]) + 6), _BACKGROUND)
    ImageDraw.Draw(plate).text((4, 2), label, fill=_TEXT, font=font)
    return np.asarray(plate)
