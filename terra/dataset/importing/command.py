"""What `terra import` does: check the settings, then bring recordings from elsewhere into our format."""

import logging
from typing import Annotated, Any, Literal

from pydantic import Field

from terra.dataset.checks import ImageSize, Names, Seconds, Workers
from terra.dataset.format import FramesASecond
from terra.dataset.importing.bags import Bags
from terra.dataset.importing.kinds import Gps, open_source
from terra.dataset.importing.run import Crop, ImportSettings, Mount, import_drives
from terra.views import ViewNames
from tokenizer.settings import Count, FilePath, NonNegative, Positive, Settings, Text

logger = logging.getLogger(__name__)


class ImportCommand(Settings):
    """The whole of conf/import.yaml; see `ImportSettings` for what is not said here.

    Attributes:
        kind: kind of source.
        input: folder of the source.
        lerobot: the columns of a LeRobot dataset, see `terra.dataset.importing.lerobot.LeRobotColumns`.
        action_space, picture_fps, sections, gps, bags, views: see `open_source`.
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
    lerobot: dict[str, Any] | None
    action_space: dict[str, Any] | None
    picture_fps: Positive | None
    sections: Annotated[int, Field(ge=1, le=1000)]
    gps: Gps
    bags: Bags
    views: ViewNames | None
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
        source=open_source(
            settings.kind,
            settings.input,
            lerobot=settings.lerobot,
            action_space=settings.action_space,
            picture_fps=settings.picture_fps,
            sections=settings.sections,
            gps=settings.gps,
            bags=settings.bags,
            views=settings.views,
        ),
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
