"""What `terra record` does: check the settings, then record what `kind` names."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from decoder.camera import Camera
from terra.config_files import plain
from terra.dataset.checks import check_image_size
from terra.recording.record import RecordSettings, parse_maneuvers, record, town_places

logger = logging.getLogger(__name__)


def run(config: DictConfig) -> int:
    """Record as conf/record.yaml says; the same command goes on with an interrupted recording.

    Returns:
        The exit code: 0 all that there was time for is recorded, 2 a place failed, 130 interrupted.

    Raises:
        ConfigError, DatasetError, OutputError: see `terra.recording.record`.
    """
    values = plain(config)
    maneuvers, num_context = parse_maneuvers(values["kind"], values["maneuvers"], values["num_context"])
    settings = RecordSettings(
        **{name: values[name] for name in ("split", "source", "episodes_per_place", "frames_per_episode")},
        output=Path(str(values["output"])),
        places=town_places(values["split"], values["seed"], values["towns"]),
        image_size=check_image_size(values["image_size"]),
        camera=Camera.from_dict(values["camera"]),
        maneuvers=maneuvers,
        num_context=num_context,
    )
    try:
        outcome = record(settings, workers=values["workers"], max_seconds=values["max_seconds"])
    except KeyboardInterrupt:
        logger.warning("interrupted: what is complete is kept; the same command goes on")
        return 130
    return 2 if outcome.failed else 0
