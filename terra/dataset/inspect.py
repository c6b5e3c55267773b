"""Inspection of a dataset, or of a source before its import: statistics, doubts about its axes, and two pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from terra.actions import ActionTrack
from terra.dataset.action_pictures import Curve, draw_curves
from terra.dataset.card import draw_actions, save_pictures
from terra.dataset.checks import Seconds, Workers
from terra.dataset.format import DATASET_FILE, dataset_views, read_dataset
from terra.dataset.importing.cameras import alone
from terra.dataset.importing.fitting import fit_picture
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.outlook import foresee
from terra.dataset.importing.proposal import propose_fps
from terra.dataset.importing.recognize import Found, recognize, recognize_as
from terra.dataset.importing.report import aligned, describe, import_command
from terra.dataset.importing.settings import UNSET, SourceSettings
from terra.dataset.importing.source import DriveSource, SourceDrive
from terra.dataset.importing.survey import Notes, Survey, Timing, once_each, survey
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
from terra.dataset.reading import read_splits
from terra.dataset.statistics import split_statistics, tabulate
from terra.dataset.verify import verify_dataset
from terra.errors import ConfigError, DatasetError, TerraError
from tokenizer.settings import FilePath

_SHEET_AREA = 90 * 160  # pixels of a picture in the contact sheet
_LONGEST_LOOK = 60.0  # s
_MOST_CURVES = 4  # whose frames must be decoded


class InspectSettings(SourceSettings):
    """The whole of conf/inspect.yaml; see `SourceSettings` for what is not said here.

    Attributes:
        data: folder of recordings.
        kind: Terra's own format ("dataset"), or a source before its import; None finds it out.
        output: folder of the pictures.
        verify: whether every video of a dataset is decoded, and all checked that can be.
        workers: processes of `verify`; 0 works in this one.
        max_seconds: of a source, no drive is opened after so long; the others are not looked at.
    """

    data: FilePath
    kind: (
        Literal["dataset", "video_poses", "video_actions", "gpx", "lerobot", "kitti", "nuscenes", "donkeycar", "mcap"]
        | None
    )
    output: FilePath
    verify: bool
    workers: Workers
    max_seconds: Seconds


def run(settings: InspectSettings) -> int:
    """Inspect recordings as conf/inspect.yaml says, verify if asked to, and print what was found.

    Returns:
        The exit code: 0 nothing is wrong, 2 something is damaged or implausible.

    Raises:
        ConfigError: a setting that is not possible.
        DatasetError: there are no recordings in the folder that can be imported.
        OutputError: the pictures can't be written.
    """
    data, output = settings.data, settings.output
    notes = Notes()
    with notes.taken():
        found = _find(settings.kind, data)
        if found.kind != "dataset" and settings.verify:
            got = f"kind={found.kind}: a source is checked by its import"
            raise ConfigError(f"verify: expected kind=dataset, got {got}")
        if found.kind == "dataset":
            inspection = inspect_dataset(found.folder)
        else:
            inspection = inspect_found(found, settings, max_seconds=settings.max_seconds)
    inspection.save(output)
    print("\n".join([*inspection.lines, *aligned([("note", line) for line in notes.lines()])]))
    doubts = list(inspection.doubts)
    if settings.verify:
        doubts = list(dict.fromkeys([*doubts, *verify_dataset(found.folder, workers=settings.workers)]))
    for doubt in doubts:
        print(f"doubt: {doubt}")
    print(f"{len(doubts)} doubts; pictures in {output}")
    if inspection.command:
        print(f"\n{inspection.command}")
    return 2 if doubts else 0


def _find(kind: str | None, folder: Path) -> Found:
    """What is in a folder, or what the user says there is. Raises DatasetError."""
    if kind is None:
        return recognize(folder)
    own = Found("dataset", "Terra's own dataset", folder)
    return own if kind == "dataset" else recognize_as(kind, folder) or Found(kind, kind, folder)


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found.

    Attributes:
        lines: are to be printed.
        doubts: name what is damaged or implausible.
        pictures: by file name.
        command: of a source, the command that imports it, after lines of comments; else empty.
    """

    lines: tuple[str, ...]
    doubts: tuple[str, ...]
    pictures: dict[str, UInt8[np.ndarray, "height width 3"]]
    command: str = ""

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


def inspect_found(found: Found, given: SourceSettings = UNSET, *, max_seconds: float = _LONGEST_LOOK) -> Inspection:
    """Inspect what was recognized, opened with what was found, or with what the user gave instead.

    Raises:
        ConfigError: a setting that the kind needs or doesn't have.
        DatasetError: no drive can be read.
    """
    own = {name: getattr(given, name) for name in SourceSettings.model_fields}
    own = {name: value for name, value in own.items() if value != getattr(UNSET, name)}
    # A user's own columns of LeRobot are of another feature than the action space that was found.
    proposed = {} if "lerobot" in own else found.settings
    settings = SourceSettings(**{**proposed, **own})
    if (video := given.bags.video or (given.lerobot or {}).get("video")) is not None:
        taken = [video] if isinstance(video, str) else video
        cameras = tuple(replace(camera, is_taken=camera.name in taken) for camera in found.cameras)
        found = replace(found, cameras=cameras)
    return inspect_source(
        open_source(found.kind, found.folder, settings), found=found, settings=settings, max_seconds=max_seconds
    )


def inspect_source(
    source: DriveSource,
    *,
    found: Found | None = None,
    settings: SourceSettings = UNSET,
    max_seconds: float = _LONGEST_LOOK,
) -> Inspection:
    """Inspect a source before its import, without resampling or cutting it.

    Args:
        source: the source.
        found: what it was recognized as, for the command that imports it; None makes none.
        settings: what the source was opened with.
        max_seconds: no drive is opened after so long.

    Raises:
        DatasetError: the source is invalid, or none of its drives can be read.
    """
    seen = survey(source, max_seconds)
    if not seen.drives:
        problem = once_each(seen.problems)[0] if seen.problems else "there is none"
        raise DatasetError(f"expected a drive that can be read, got {len(seen.problems)} damaged: {problem}")
    problems = list(seen.problems)
    reports = [check_motion(drive.poses, drive.name) for drive in seen.driven]
    problems += [
        (report_drive.name, line)
        for report_drive, report in zip(seen.driven, reports, strict=True)
        for line in report.warnings
    ]
    labeled = []
    for drive in spread(seen.drives, SHEET_PICTURES):
        picture, reason = _first_frame(drive)
        labeled.append((drive.name, picture))
        problems += [] if reason is None else [(drive.name, reason)]
    sizes = [(picture.shape[0], picture.shape[1]) for _, picture in labeled if picture is not None]
    fps = propose_fps(_rates(seen), driving=bool(seen.driven))
    outlook = foresee(seen.drives, fps)
    problems += outlook.failed
    pictures = {SHEET_NAME: _sheet(labeled)}
    if seen.driven:
        pictures[PATHS_NAME] = draw_paths([drive.poses for drive in seen.driven if len(drive.poses.time)])
    if seen.played:
        pictures[ACTIONS_NAME] = draw_curves(_curves(seen.drives))
    lines = describe(seen, outlook, sizes, found)
    lines += aligned([("path", line) for line in (summarize(reports) if reports else [])])
    command = "" if found is None else import_command(found, settings, seen, fps, sizes)
    return Inspection(tuple(lines), tuple(once_each(problems)), pictures, command)


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


def _curves(drives: Sequence[SourceDrive]) -> list[Curve]:
    """The actions of a few drives, with their frames."""
    return [
        Curve.of_track(drive.name, drive.track, drive.frames, drive.frame_times)
        for drive in spread(drives, _MOST_CURVES)
        if isinstance(drive.track, ActionTrack)
    ]


def _sheet(labeled: Sequence[tuple[str, UInt8[np.ndarray, "height width 3"] | None]]) -> UInt8[np.ndarray, "_ _ 3"]:
    """The contact sheet, with pictures of the aspect of the first one."""
    first = next((picture for _, picture in labeled if picture is not None), None)
    if first is None:
        return tile(labeled)
    aspect = first.shape[1] / first.shape[0]
    size = max(round(math.sqrt(_SHEET_AREA / aspect)), 1), max(round(math.sqrt(_SHEET_AREA * aspect)), 1)
    fitted = [(name, None if picture is None else fit_picture(picture, size, None)) for name, picture in labeled]
    return tile(fitted)


def _first_frame(drive: SourceDrive) -> tuple[UInt8[np.ndarray, "height width 3"] | None, str | None]:
    """Return the first frame of a drive or, if it can't be read, None and the reason."""
    frames = drive.frames()
    try:
        picture = next(iter(frames), None)
    except TerraError as error:
        return None, str(error)
    return (None, f"{drive.name}: expected frames, got none") if picture is None else (picture, None)


def _rates(seen: Survey) -> list[float]:
    """The frames a second of all drives, and of the further cameras of each."""
    timings = [*seen.timings]
    for drive in seen.drives:
        timings += [Timing.of(alone(drive, name)) for name in drive.others]
    return [timing.fps for timing in timings if timing.fps > 0]
