"""The import: each drive becomes a shard; drives run in parallel processes, and complete shards are skipped."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from jaxtyping import UInt8
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SkipValidation, model_validator

from decoder.camera import Camera, FieldOfView, Height, Pitch
from decoder.frames import FrameChangeError
from terra.actions import Waypoints
from terra.dataset.card import write_card
from terra.dataset.checks import ImageSize, check_workload
from terra.dataset.format import DATASET_FILE, FramesASecond, check_name, dataset_views, read_dataset
from terra.dataset.importing.alignment import MIN_FRAMES, Alignment, align, cut, shorten
from terra.dataset.importing.cameras import align_cameras, alone, chosen_of, lay_out
from terra.dataset.importing.fitting import check_crop, crop_box, fit_picture, fitted_camera, kept_box
from terra.dataset.importing.source import DriveSource, Intrinsics, SourceDrive, VideoFrames, views_of
from terra.dataset.losses import Losses
from terra.dataset.workers import Outcome, run_jobs
from terra.dataset.writing import ShardWriter, create_dataset
from terra.errors import ConfigError, DatasetError
from terra.progress import ProgressLine
from terra.views import Views
from tokenizer.settings import Count, FilePath, NonNegative, Positive, Settings, expected_names

logger = logging.getLogger(__name__)

_REST = 64  # frames behind the last chosen one that are still read, to see that there are as many as times
_NOTICE = "imported; the terms of the source's makers go for its frames and {}"

_Frame = TypeVar("_Frame")
_Rgb = UInt8[np.ndarray, "height width 3"]

Crop = Annotated[tuple[int, int, int, int] | str | None, BeforeValidator(check_crop)]
"""The part of the source's pictures to keep, see `kept_box`; None keeps all."""


class Mount(Settings):
    """The camera's field of view and mounting position; without `height_meters` the dataset describes no camera.

    `fov_degrees` is the horizontal field of view of the source's uncropped pictures; None takes the source's own
    calibration. Raises ConfigError for values that no camera has.
    """

    fov_degrees: FieldOfView | None = None
    height_meters: Height | None = None
    pitch_radians: Pitch = 0.0
    x_forward_meters: float = 0.0


class ImportSettings(Settings):
    """Settings of an import.

    Attributes:
        source: the source of the drives.
        name: name of the source in the names of the shards.
        output: folder of the dataset; complete shards in it are kept.
        fps: frames per second of the dataset.
        image_size: (height, width), both even; pictures are cropped to this aspect ratio and resized.
        frames_per_episode: most frames of an episode; longer drives are cut.
        held_out: drives, or recordings with all their drives, of the split held_out; all others are of the split train.
            A name may be a pattern, such as "*_05-0[12]*".
        drives: the drives or recordings to import, likewise; None imports all.
        mount: the camera's field of view and mounting position.
        crop: what of the source's pictures is kept, before they are cropped to the aspect ratio of `image_size`.
        start, end: the part of each drive to import, in seconds after its first frame; None: to its end.
        gap_seconds, min_frames: where a drive is cut, see `terra.dataset.importing.alignment.align`.
        views: the part of each of several cameras in a picture; None: as `import_drives` lays them out.

    Raises:
        ConfigError: a value out of range.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    source: SkipValidation[DriveSource]
    name: Annotated[str, AfterValidator(lambda name: check_name(name, "name"))]
    output: FilePath
    fps: FramesASecond
    image_size: ImageSize
    frames_per_episode: Annotated[int, Field(ge=1, le=100_000)]
    held_out: tuple[str, ...]
    drives: tuple[str, ...] | None
    mount: Mount
    crop: Crop = None
    start: NonNegative = 0.0
    end: Positive | None = None
    gap_seconds: Positive | None = None
    min_frames: Count = MIN_FRAMES
    views: Views | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end: expected more than start={self.start:g}, got {self.end:g}")
        return self


def import_drives(settings: ImportSettings, *, workers: int, max_seconds: float | None = None) -> Outcome:
    """Import the drives that are missing, then describe the dataset (README.md and its pictures).

    A drive that can't be imported is reported in the outcome, and the other drives are still imported.

    Args:
        settings: the source, the dataset and the conversion.
        workers: number of worker processes; 0 imports in this process.
        max_seconds: seconds after which no further drive is begun; None for no limit.

    Raises:
        DatasetError: the source is invalid, or the output has frames of another rate or size.
        ConfigError: drives that the source doesn't have, or `workers` or `max_seconds` out of range.
        OutputError: the output can't be written.
    """
    check_workload(workers, max_seconds)
    known = settings.source.list_drives()
    recordings = settings.source.recordings
    settings = settings.replace(held_out=_expand(settings.held_out, recordings, known))
    wanted = known if settings.drives is None else _expand(settings.drives, recordings, known)
    unknown = sorted({*wanted, *settings.held_out} - set(known))
    if not wanted:
        raise ConfigError("drives: expected one or more, or null for all, got none")
    if unknown:
        setting = "held_out" if unknown[0] in settings.held_out else "drives"
        raise ConfigError(f"{setting}: {expected_names([*recordings, *known], unknown[0], 'drives of')}")
    for name, drives in recordings.items():
        if 0 < len(set(drives) & set(settings.held_out)) < len(drives):
            logger.warning(
                "%s: some of its drives are held out, others are not: what both show is in both splits", name
            )
    settings = settings.replace(views=_views(settings))
    if settings.held_out and not set(wanted) - set(settings.held_out):
        logger.warning("held_out: all drives are held out, none is left to train on")
    space = settings.source.space
    notice = _NOTICE.format("poses" if isinstance(space, Waypoints) else "actions")
    create_dataset(settings.output, settings.fps, settings.image_size, settings.name, notice, space, settings.views)
    jobs = [_Drive(settings, name) for name in wanted if not _writer(settings, name).is_complete()]
    logger.info("%s: %d drives to import, %d complete already", settings.output, len(jobs), len(wanted) - len(jobs))
    with ProgressLine("importing", len(jobs)) as line:
        outcome = run_jobs(
            jobs,
            import_drive,
            workers=workers,
            max_seconds=max_seconds,
            show=lambda frames, done: line.show(done, f"{done} of {len(jobs)} drives, {frames} frames"),
            describe=lambda job: job.name,
        )
    if outcome.num_done:
        logger.info("%s: at %g frames a second: %s", settings.name, settings.fps, Losses.of_all(outcome.results))
        write_card(settings.output)
    logger.info(
        "%s: %d drives imported, %d failed, %d left for another time",
        *(settings.output, outcome.num_done, len(outcome.failed), outcome.num_left),
    )
    return outcome


@dataclass(frozen=True)
class _Drive:
    settings: ImportSettings
    name: str


def import_drive(job: _Drive, worker: int, advance: Callable[[int], None]) -> Losses:
    """Import one drive; call `advance` with the number of frames of each episode written.

    Returns:
        What was kept of it, and what wasn't.
    """
    settings = job.settings
    drive = settings.source.open_drive(job.name)
    if settings.start or settings.end is not None:
        drive = shorten(drive, settings.start, settings.end)
    limits = {"gap_seconds": settings.gap_seconds, "min_frames": settings.min_frames}
    alignment = align_cameras(drive, align(drive, settings.fps, **limits), settings.fps, **limits)
    losses = alignment.losses
    name = drive.origin if drive.name in drive.origin else f"{drive.origin}: {drive.name}"
    logger.log(logging.INFO if losses.is_clean else logging.WARNING, "%s: %s", name, losses)
    try:
        _write(drive, alignment, job, advance)
    except FrameChangeError:
        # A video of changing frames goes frame by frame, each by its own size and color.
        _write(replace(drive, frames=drive.frames.__call__), alignment, job, advance)
    return losses


def _write(drive: SourceDrive, alignment: Alignment, job: _Drive, advance: Callable[[int], None]) -> None:
    """Write the shard of an aligned drive."""
    settings = job.settings
    if settings.views is None:
        fitted, camera, planes = _fitted(drive, alignment, settings, settings.image_size)
    else:
        fitted, camera, planes = _tiled(drive, alignment, settings, settings.views)
    episodes = [
        episode
        for part in alignment.parts
        for episode in cut(part.track, len(part.frame_index), settings.fps, settings.frames_per_episode)
    ]
    with _writer(settings, job.name, camera, alignment.losses, planes) as writer:
        for number, (num_frames, track) in enumerate(episodes):
            advance(writer.add(f"{writer.name_prefix}_{number:03d}", islice(fitted, num_frames), track))
        for _ in fitted:  # to the end, so that frames which the source didn't tell of are seen
            raise DatasetError(f"{drive.origin}: expected {len(alignment.frame_index)} chosen frames, got more")


def _views(settings: ImportSettings) -> Views | None:
    """The views of the source's cameras: as the dataset has them already, else as they are laid out.

    Raises:
        ConfigError: a crop of several cameras, or a picture that can't be divided.
    """
    names = views_of(settings.source)
    if len(names) < 2:
        return None
    if settings.crop is not None:
        got = list(settings.crop) if isinstance(settings.crop, tuple) else settings.crop
        raise ConfigError(f"crop: expected none with several cameras ({', '.join(names)}), got {got}")
    path = settings.output / DATASET_FILE
    present = dataset_views(read_dataset(settings.output), path) if path.is_file() else None
    if present is not None and (present.names, present.image_size) == (names, settings.image_size):
        return present
    views = lay_out(settings.source, settings.image_size)
    if views is not None:
        logger.info("%s: views: %s", settings.name, views.sizes)
        views.say_cut_patches("image_size")
    return views


def _tiled(
    drive: SourceDrive, alignment: Alignment, settings: ImportSettings, views: Views
) -> tuple[Iterator[UInt8[np.ndarray, "height width 3"]], Camera | None, bool]:
    """`_fitted` of the pictures of several cameras together; the camera is the first.

    Raises:
        DatasetError: other cameras than the source says; see also `chosen_frames`.
    """
    first, *others = views.names
    if tuple(drive.others) != tuple(others):
        got = ", ".join(drive.others) or "none"
        raise DatasetError(f"{drive.origin}: expected the cameras {', '.join(others)} beside {first}, got {got}")
    in_rgb = replace(drive, frames=lambda: drive.frames())
    pictures, camera, _ = _fitted(in_rgb, alignment, settings, views.tile_size(first))
    cameras = {first: pictures}
    for name in others:
        other = alone(drive, name)
        chosen = chosen_frames(other, chosen_of(alignment, name), other.frames())
        cameras[name] = map(partial(fit_picture, image_size=views.tile_size(name), intrinsics=None), chosen)
    together = (dict(zip(cameras, each, strict=True)) for each in zip(*cameras.values(), strict=True))
    return map(views.tile, together), camera, False


def _fitted(
    drive: SourceDrive, alignment: Alignment, settings: ImportSettings, image_size: tuple[int, int]
) -> tuple[Iterator[UInt8[np.ndarray, "..."]], Camera | None, bool]:
    """The chosen frames at a size (height, width), the camera, and whether frames are planes instead of RGB."""
    frames = drive.frames
    if isinstance(frames, VideoFrames) and frames.display.is_plain:
        size = frames.display.height, frames.display.width
        (left, top, right, bottom), intrinsics = _kept(drive, settings, size)
        inner = crop_box((bottom - top, right - left), image_size, intrinsics)
        box = left + inner[0], top + inner[1], left + inner[2], top + inner[3]
        planes = chosen_frames(drive, alignment, frames.planes(box, image_size))
        return planes, _camera(settings, image_size, intrinsics, (bottom - top, right - left)), True
    chosen = chosen_frames(drive, alignment, frames())
    first = next(chosen)
    (left, top, right, bottom), intrinsics = _kept(drive, settings, (first.shape[0], first.shape[1]))
    whole = (_checked_size(frame, first, drive, settings) for frame in chain([first], chosen))
    cropped = (frame[top:bottom, left:right] for frame in whole)
    fitted = (fit_picture(frame, image_size, intrinsics) for frame in cropped)
    return fitted, _camera(settings, image_size, intrinsics, (bottom - top, right - left)), False


def _checked_size(frame: _Rgb, first: _Rgb, drive: SourceDrive, settings: ImportSettings) -> _Rgb:
    """The frame; DatasetError if `crop` in pixels would keep something else of it than of the first one."""
    if settings.crop is not None and frame.shape != first.shape:
        sizes = [f"{width}x{height}" for height, width, _ in (first.shape, frame.shape)]
        raise DatasetError(f"{drive.origin}: crop: expected frames of {sizes[0]} pixels, as the first, got {sizes[1]}")
    return frame


def _kept(
    drive: SourceDrive, settings: ImportSettings, size: tuple[int, int]
) -> tuple[tuple[int, int, int, int], Intrinsics | None]:
    """What `crop` keeps of pictures of (height, width), and the intrinsics of that."""
    intrinsics = _intrinsics(drive, settings.mount, size)
    if settings.crop is None:
        return (0, 0, size[1], size[0]), intrinsics
    box = kept_box(size, settings.crop, drive.origin)
    logger.info("%s: pictures cropped to %s", drive.origin, list(box))
    return box, None if intrinsics is None else intrinsics.moved(box[0], box[1])


def chosen_frames(drive: SourceDrive, alignment: Alignment, frames: Iterator[_Frame]) -> Iterator[_Frame]:
    """Yield those of a drive's frames that the alignment takes, in order.

    Raises:
        DatasetError: the drive has fewer frames than times, or, where it is read to its end, more.
    """
    wanted = iter(alignment.frame_index.tolist())
    index, count = next(wanted, None), len(drive.frame_times)
    for number, frame in enumerate(frames):
        if number >= count:
            raise DatasetError(f"{drive.origin}: expected {count} frames, as many as times, got more")
        while index == number:
            yield frame
            index = next(wanted, None)
        if index is None and number < count - _REST:
            return
    if index is not None:
        raise DatasetError(f"{drive.origin}: expected {count} frames, as many as times, got fewer")


def _expand(
    names: tuple[str, ...], recordings: Mapping[str, tuple[str, ...]], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Replace the names of recordings, and patterns, by the drives that they mean, each drive once."""
    drives: dict[str, None] = {}
    for name in names:
        if name in recordings or name in known:
            matches = [name]
        else:
            matches = [each for each in (*recordings, *known) if fnmatchcase(each, name)] or [name]
        for match in matches:
            drives |= dict.fromkeys(recordings.get(match, (match,)))
    return tuple(drives)


def _intrinsics(drive: SourceDrive, mount: Mount, size: tuple[int, int]) -> Intrinsics | None:
    """The source's own calibration, or one from the user's field of view."""
    if mount.fov_degrees is None:
        return drive.intrinsics
    if drive.intrinsics is not None:
        raise ConfigError(f"{drive.origin}: expected no camera.fov_degrees beside the source's own calibration")
    height, width = size
    return Intrinsics(width / 2 / math.tan(math.radians(mount.fov_degrees) / 2), width / 2, height / 2)


def _camera(
    settings: ImportSettings, image_size: tuple[int, int], intrinsics: Intrinsics | None, size: tuple[int, int]
) -> Camera | None:
    mount = settings.mount
    if intrinsics is None or mount.height_meters is None:
        return None
    return fitted_camera(
        size,
        image_size,
        intrinsics,
        height_meters=mount.height_meters,
        pitch_radians=mount.pitch_radians,
        x_forward_meters=mount.x_forward_meters,
    )


def _writer(
    settings: ImportSettings,
    drive: str,
    camera: Camera | None = None,
    losses: Losses | None = None,
    planes: bool = False,
) -> ShardWriter:
    # Only what is given, so that shards of earlier versions are known again.
    parts: dict[str, Any] = {"crop": settings.crop, "start": settings.start or None, "end": settings.end}
    parts["gap_seconds"] = settings.gap_seconds
    parts["min_frames"] = None if settings.min_frames == MIN_FRAMES else settings.min_frames
    if isinstance(settings.crop, tuple):
        parts["crop"] = list(settings.crop)
    return ShardWriter(
        settings.output,
        split="held_out" if drive in settings.held_out else "train",
        source=settings.name,
        place=drive,
        fps=settings.fps,
        image_size=settings.image_size,
        camera=camera,
        recipe={
            "frames_per_episode": settings.frames_per_episode,
            "camera": settings.mount.model_dump(),
            "declared": dict(settings.source.declared),
            **{name: value for name, value in parts.items() if value is not None},
        },
        space=settings.source.space,
        losses=None if losses is None else losses.to_json(),
        views=settings.views,
        planes=planes,
    )
