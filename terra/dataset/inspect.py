"""Inspection of a dataset, or of a source before its import: statistics, doubts about its axes, and two pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import UInt8
from pydantic import model_validator

from terra.actions import ActionTrack
from terra.dataset.action_pictures import Curve, draw_curves
from terra.dataset.card import draw_actions, save_pictures
from terra.dataset.checks import Workers
from terra.dataset.format import DATASET_FILE, dataset_views, read_dataset
from terra.dataset.importing.fitting import fit_picture
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.source import DriveSource, SourceDrive
from terra.dataset.motion import MotionReport, check_motion
from terra.dataset.pictures import (
    ACTIONS_NAME,
    PATHS_NAME,
    SHEET_NAME,
    SHEET_PICTURES,
    contact_sheet,
    draw_paths,
    spread,
    tile,
)
from terra.dataset.poses import Poses
from terra.dataset.reading import read_splits
from terra.dataset.statistics import split_statistics, tabulate
from terra.dataset.verify import verify_dataset
from terra.errors import DatasetError, TerraError
from tokenizer.settings import FilePath, Settings

_SHEET_SIZE = (90, 160)


class InspectSettings(Settings):
    """The whole of conf/inspect.yaml.

    Attributes:
        data: folder of driving.
        kind: Terra's own format ("dataset"), or a source before its import.
        output: folder of the pictures.
        verify: whether every video of a dataset is decoded, and all checked that can be.
        workers: processes of `verify`; 0 works in this one.
        lerobot: the columns of a LeRobot dataset, see `terra.dataset.importing.lerobot.LeRobotColumns`.
    """

    data: FilePath
    kind: Literal["dataset", "video_poses", "gpx", "lerobot", "kitti", "nuscenes", "donkeycar"]
    output: FilePath
    verify: bool
    workers: Workers
    lerobot: dict[str, Any] | None

    @model_validator(mode="after")
    def _only_datasets(self) -> Self:
        if self.kind != "dataset" and self.verify:
            raise ValueError(f"verify: expected kind=dataset, got kind={self.kind}: a source is checked by its import")
        return self


def run(settings: InspectSettings) -> int:
    """Inspect recordings as conf/inspect.yaml says, verify if asked to, and print what was found.

    Returns:
        The exit code: 0 nothing is wrong, 2 something is damaged or implausible.

    Raises:
        ConfigError: a setting that is not possible.
        DatasetError: there is no driving in the folder.
        OutputError: the pictures can't be written.
    """
    data, output, kind = settings.data, settings.output, settings.kind
    if kind == "dataset":
        inspection = inspect_dataset(data)
    else:
        inspection = inspect_source(open_source(kind, data, lerobot=settings.lerobot))
    inspection.save(output)
    print("\n".join(inspection.lines))
    doubts = list(inspection.doubts)
    if settings.verify:
        doubts = list(dict.fromkeys([*doubts, *verify_dataset(data, workers=settings.workers)]))
    for doubt in doubts:
        print(f"doubt: {doubt}")
    print(f"{len(doubts)} doubts; pictures in {output}")
    return 2 if doubts else 0


@dataclass(frozen=True, eq=False)
class Inspection:
    """`lines` are to be printed; `doubts` name what is damaged or implausible; `pictures` are by file name."""

    lines: tuple[str, ...]
    doubts: tuple[str, ...]
    pictures: dict[str, UInt8[np.ndarray, "height width 3"]]

    def save(self, folder: Path) -> None:
        """Write the pictures. Raises OutputError."""
        save_pictures(folder, self.pictures)


def inspect_dataset(folder: Path) -> Inspection:
    """Inspect a dataset in Terra's format; only the contact sheet's frames are decoded. Raises DatasetError if none."""
    facts, splits = read_dataset(folder), read_splits(folder)
    height, width = facts["image_size"]
    lines = [f"{folder}: {facts['fps']:g} frames a second of {width}x{height} from {', '.join(facts['sources'])}"]
    if (views := dataset_views(facts, folder / DATASET_FILE)) is not None:
        lines.append(f"views: {views.sizes}")
    rows = tabulate({name: split_statistics(split.episodes) for name, split in splits.items()})
    for label, cells in {"": list(splits), **rows}.items():
        lines.append("  ".join([f"{label:{max(map(len, rows))}}", *(f"{cell:>24}" for cell in cells)]))
    episodes = [episode for split in splits.values() for episode in split.episodes]
    doubts = [line for split in splits.values() for line in split.damaged]
    reports = [check_motion(episode.poses, episode.id) for episode in episodes if episode.motion is not None]
    lines += summarize(reports) if reports else []
    doubts += [line for report in reports for line in report.warnings]
    sheet, unshown = contact_sheet(episodes)
    return Inspection(tuple(lines), (*doubts, *unshown), {SHEET_NAME: sheet} | draw_actions(episodes))


def inspect_source(source: DriveSource) -> Inspection:
    """Inspect a source before its import, without resampling or cutting it. Raises DatasetError if it is invalid."""
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
    driven = [drive for drive in drives if isinstance(drive.track, Poses)]
    reports = [check_motion(drive.poses, drive.name) for drive in driven]
    lines += summarize(reports) if reports else []
    doubts += [line for report in reports for line in report.warnings]
    labeled = []
    for drive in spread(drives, SHEET_PICTURES):
        picture, reason = _first_frame(drive)
        labeled.append((drive.name, picture))
        doubts += [] if reason is None else [reason]
    pictures = {SHEET_NAME: tile(labeled)}
    if driven:
        pictures[PATHS_NAME] = draw_paths([drive.poses for drive in driven if len(drive.poses.time)])
    played = [(drive.name, drive.track) for drive in drives if isinstance(drive.track, ActionTrack)]
    if played:
        pictures[ACTIONS_NAME] = draw_curves([Curve.of_track(name, track) for name, track in played])
    return Inspection(tuple(lines), tuple(doubts), pictures)


def summarize(reports: Sequence[MotionReport]) -> list[str]:
    """Summarize the motion of all drives in a few lines."""
    lines = [f"driven: {sum(report.meters for report in reports) / 1000:.2f} km"]
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


def _rate(times: np.ndarray) -> float:
    return float(1 / np.median(np.diff(times)))


def _first_frame(drive: SourceDrive) -> tuple[UInt8[np.ndarray, "height width 3"] | None, str | None]:
    """Return the first frame of a drive or, if it can't be read, None and the reason."""
    frames = drive.frames()
    try:
        picture = next(iter(frames), None)
    except TerraError as error:
        return None, str(error)
    if picture is None:
        return None, f"{drive.name}: expected frames, got none"
    return fit_picture(picture, _SHEET_SIZE, drive.intrinsics), None
