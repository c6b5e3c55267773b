"""What `terra record` does: check the settings, then record what `kind` names."""

import importlib
import logging
from typing import Literal

from decoder.camera import Camera
from terra.dataset.checks import ImageSize, Names, Seconds, Workers
from terra.recording.record import RecordSettings, parse_maneuvers, record, town_places
from tokenizer.settings import Count, FilePath, Natural, Settings

logger = logging.getLogger(__name__)


class RecordCommand(Settings):
    """The whole of conf/record.yaml; see `RecordSettings` for what is not said here.

    Attributes:
        kind: plain drives, or counterfactuals (several futures of each start).
        seed: number of the first town, counted from the split's first.
        towns: how many towns, each a shard.
        workers: processes; 0 records in this one.
        max_seconds: no town is begun after so long; None for no limit.
    """

    output: FilePath
    kind: Literal["drives", "counterfactuals"]
    split: Literal["train", "held_out"]
    source: Literal["town"]
    seed: Natural
    towns: Count
    episodes_per_place: Count
    frames_per_episode: Count
    image_size: ImageSize
    camera: Camera
    num_context: Count
    maneuvers: Names
    workers: Workers
    max_seconds: Seconds | None


def run(settings: RecordCommand) -> int:
    """Record as conf/record.yaml says; the same command goes on with an interrupted recording.

    Returns:
        The exit code: 0 all that there was time for is recorded, 2 a place failed, 130 interrupted.

    Raises:
        ConfigError: also where moderngl is not installed.
        DatasetError, OutputError: see `terra.recording.record`.
    """
    maneuvers, num_context = parse_maneuvers(settings.kind, settings.maneuvers, settings.num_context)
    recording = RecordSettings(
        output=settings.output,
        split=settings.split,
        source=settings.source,
        places=town_places(settings.split, settings.seed, settings.towns),
        episodes_per_place=settings.episodes_per_place,
        frames_per_episode=settings.frames_per_episode,
        image_size=settings.image_size,
        camera=settings.camera,
        maneuvers=maneuvers,
        num_context=num_context,
    )
    importlib.import_module("terra.recording.canvas")  # a missing moderngl is said now, not by every worker
    try:
        outcome = record(recording, workers=settings.workers, max_seconds=settings.max_seconds)
    except KeyboardInterrupt:
        logger.warning("interrupted: what is complete is kept; the same command goes on")
        return 130
    return 2 if outcome.failed else 0
