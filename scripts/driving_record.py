"""Record driving in towns: `python scripts/driving_record.py output=data/town towns=8 workers=2`.

Settings: conf/record.yaml. The same command goes on with an interrupted recording. Exit code: 0 all that there was
time for is recorded, 2 a setting is wrong or a place failed, 130 interrupted.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def record(config: DictConfig) -> None:
    """Check the settings, then record what `kind` names."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from decoder.camera import Camera
    from terra.dataset.checks import check_image_size
    from terra.recording import record as recording

    maneuvers, num_context = recording.parse_maneuvers(values["kind"], values["maneuvers"], values["num_context"])
    settings = recording.RecordSettings(
        **{name: values[name] for name in ("split", "source", "episodes_per_place", "frames_per_episode")},
        output=Path(str(values["output"])),
        places=recording.town_places(values["split"], values["seed"], values["towns"]),
        image_size=check_image_size(values["image_size"]),
        camera=Camera.from_dict(values["camera"]),
        maneuvers=maneuvers,
        num_context=num_context,
    )
    try:
        outcome = recording.record(settings, workers=values["workers"], max_seconds=values["max_seconds"])
    except KeyboardInterrupt:
        logging.getLogger(__name__).warning("interrupted: what is complete is kept; the same command goes on")
        sys.exit(130)
    if outcome.failed:
        sys.exit(2)


if __name__ == "__main__":
    command("record", record)
