"""A look at driving, ours or a source's before its import: numbers, doubts about its axes, and two pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from terra.dataset.card import SHEET_NAME, contact_sheet, tile
from terra.dataset.format import SPLITS, list_shards, read_dataset
from terra.dataset.importing.alignment import fit_picture
from terra.dataset.importing.source import DriveSource, SourceDrive
from terra.dataset.motion import MotionReport, check_motion, draw_paths
from terra.dataset.poses import Poses
from terra.dataset.reading import read_split
from terra.errors import DatasetError, TerraError
from tokenizer.files import make_folder, replacing

PATHS_NAME = "paths.png"
_MAX_PATHS = 60
_SHEET_DRIVES = 20
_SHEET_SIZE = (90, 160)


@dataclass(frozen=True, eq=False)
class Inspection:
    """`lines` are what to print; `doubts` what is damaged or implausible; the pictures are RGB in [0, 255]."""

    lines: tuple[str, ...]
    doubts: tuple[str, ...]
    sheet: UInt8[np.ndarray, "height width 3"]
    paths: UInt8[np.ndarray, "side side 3"]

    def save(self, folder: Path) -> None:
        """Write contact_sheet.png and paths.png. Raises OutputError."""
        make_folder(folder)
        for name, picture in ((SHEET_NAME, self.sheet), (PATHS_NAME, self.paths)):
            with replacing(folder / name) as temporary:
                Image.fromarray(picture).save(temporary, format="PNG")


def inspect_dataset(folder: Path) -> Inspection:
    """A dataset of ours, without decoding more than the contact sheet. Raises DatasetError if there is none."""
    facts = read_dataset(folder)
    episodes, doubts = [], []
    lines = [f"{folder}: {facts['fps']:g} frames a second of {facts['image_size'][1]}x{facts['image_size'][0]}"]
    for split in SPLITS:
        if not list_shards(folder, split):
            continue
        found = read_split(folder, split)
        episodes += found.episodes
        doubts += found.damaged
        frames, hours = sum(e.num_frames for e in found.episodes), sum(e.seconds for e in found.episodes) / 3600
        places = len({(e.source, e.place) for e in found.episodes})
        lines.append(f"{split}: {len(found.episodes)} episodes of {places} places, {frames} frames, {hours:.2f} h")
    if not episodes:
        raise DatasetError(f"{folder}: expected a dataset with episodes, got none")
    reports = [check_motion(episode.poses, episode.id) for episode in episodes]
    lines += summarise(reports)
    doubts += [line for report in reports for line in report.warnings]
    paths = draw_paths([episode.poses for episode in _spread(episodes, _MAX_PATHS)])
    return Inspection(tuple(lines), tuple(doubts), contact_sheet(episodes), paths)


def inspect_source(source: DriveSource) -> Inspection:
    """A foreign source, as it is: nothing is resampled or cut. Raises DatasetError if it isn't what it should be."""
    names = source.list_drives()
    drives: list[SourceDrive] = []
    doubts: list[str] = []
    for name in names:
        try:
            drives.append(source.open_drive(name))
        except TerraError as error:
            doubts.append(str(error))
    if not drives:
        raise DatasetError(f"expected a drive that can be read, got {len(names)} damaged: {doubts[0]}")
    frames = sum(len(drive.frame_times) for drive in drives)
    hours = sum(float(np.ptp(drive.frame_times)) for drive in drives if len(drive.frame_times)) / 3600
    rates = [_rate(drive.frame_times) for drive in drives if len(drive.frame_times) > 1]
    lines = [f"{len(drives)} of {len(names)} drives, {frames} frames, {hours:.2f} h"]
    if rates:
        lines.append(f"frames a second: {min(rates):.2f} to {max(rates):.2f}")
    reports = [check_motion(drive.poses, drive.name) for drive in drives]
    lines += summarise(reports)
    doubts += [line for report in reports for line in report.warnings]
    labelled = []
    for drive in _spread(drives, _SHEET_DRIVES):
        picture, reason = _first_frame(drive)
        labelled.append((drive.name, picture))
        doubts += [] if reason is None else [reason]
    moved: Sequence[Poses] = [drive.poses for drive in _spread(drives, _MAX_PATHS) if len(drive.poses.time)]
    return Inspection(tuple(lines), tuple(doubts), tile(labelled, columns=5), draw_paths(moved))


def summarise(reports: Sequence[MotionReport]) -> list[str]:
    """The numbers of all drives in a few lines."""
    lines = [f"driven: {sum(report.metres for report in reports) / 1000:.2f} km"]
    columns = {
        "poses a second": ("rate", 1.0, ".2f"),
        "top speed, m/s": ("top_speed", 1.0, ".1f"),
        "heading against motion, degrees (near 0)": ("misalignment", 180 / math.pi, ".1f"),
        "turning of heading and motion (near 1; -1: mirrored)": ("turn_agreement", 1.0, ".2f"),
        "stored speed against motion, share (near 0)": ("speed_error", 1.0, ".3f"),
    }
    for label, (name, scale, style) in columns.items():
        values = np.array([getattr(report, name) for report in reports]) * scale
        values = values[np.isfinite(values)]
        if len(values):
            low, middle, high = np.quantile(values, [0, 0.5, 1])
            lines.append(f"{label}: {low:{style}} / {middle:{style}} / {high:{style}} (least / median / most)")
    return lines


def _spread(items: Sequence, count: int) -> list:
    """Up to `count` of some items, evenly spread."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _rate(times: np.ndarray) -> float:
    return float(1 / np.median(np.diff(times)))


def _first_frame(drive: SourceDrive) -> tuple[UInt8[np.ndarray, "height width 3"] | None, str | None]:
    """The first frame of a drive, or why there is none."""
    frames = drive.frames()
    try:
        picture = next(iter(frames), None)
    except TerraError as error:
        return None, str(error)
    if picture is None:
        return None, f"{drive.name}: expected frames, got none"
    return fit_picture(picture, _SHEET_SIZE, drive.intrinsics), None
