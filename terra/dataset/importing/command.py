"""What `terra import` does: check the settings, then bring recordings from elsewhere into our format."""

import logging
from typing import Literal

from terra.dataset.checks import ImageSize, Names, Seconds, Workers
from terra.dataset.format import FramesASecond
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.run import Crop, ImportSettings, Mount, import_drives
from terra.dataset.importing.settings import SourceSettings
from tokenizer.settings import Count, FilePath, NonNegative, Positive, Text

logger = logging.getLogger(__name__)


class ImportCommand(SourceSettings):
    """The whole of conf/import.yaml; see `SourceSettings` and `ImportSettings` for what is not said here.

    Attributes:
        kind: kind of source.
        input: folder of the source.
        camera: `ImportSettings.mount`.
        workers: processes; 0 imports in this one.
        max_seconds: no drive is begun after so long; None for no limit.
    """

    kind: Literal["video_poses", "video_actions", "lerobot", "kitti", "nuscenes", "donkeycar", "gpx", "mcap"]
    input: FilePath
    output: FilePath
    name: Text
    fps: FramesASecond
    image_size: ImageSize
    frames_per_episode: Count
    held_out: Names
    drives: Names | None
    camera: Mount
    crop: Crop
    start: NonNegative
    end: Positive | None
    gap_seconds: Positive | None
    min_frames: Count
    workers: Workers
    max_seconds: Seconds | None


def run(settings: ImportCommand) -> int:
    """Import as conf/import.yaml says; the same command goes on with an interrupted import.

    Returns:
        The exit code: 0 all that there was time for is imported, 2 a drive could not be imported, 130 interrupted.

    Raises:
        ConfigError, DatasetError, OutputError: see `open_source` and `import_drives`.
    """
    what = ImportSettings(
        source=open_source(settings.kind, settings.input, settings),
        name=settings.name,
        output=settings.output,
        fps=settings.fps,
        image_size=settings.image_size,
        frames_per_episode=settings.frames_per_episode,
        held_out=settings.held_out,
        drives=settings.drives,
        mount=settings.camera,
        crop=settings.crop,
        start=settings.start,
        end=settings.end,
        gap_seconds=settings.gap_seconds,
        min_frames=settings.min_frames,
    )
    try:
        outcome = import_drives(what, workers=settings.workers, max_seconds=settings.max_seconds)
    except KeyboardInterrupt:
        logger.warning("interrupted: what is complete is kept; the same command goes on")
        return 130
    return 2 if outcome.failed else 0
