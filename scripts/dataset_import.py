"""Bring driving from elsewhere into our format: `python scripts/dataset_import.py kind=kitti input=DIR output=DIR`.

Settings: conf/dataset_import.yaml. The same command goes on with an interrupted import. Exit code: 0 all that there was
time for is imported, 2 a setting is wrong or a drive could not be imported, 130 interrupted.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def import_driving(config: DictConfig) -> None:
    """Check the settings, then import."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.dataset.importing import ImportSettings, Mount, import_drives
    from terra.dataset.importing.kinds import drive_names, open_source

    settings = ImportSettings(
        **{name: values[name] for name in ("name", "fps", "frames_per_episode")},
        source=open_source(values["kind"], Path(values["input"]), values["lerobot"]),
        output=Path(values["output"]),
        image_size=(values["image_size"][0], values["image_size"][1]),
        held_out=drive_names(values["held_out"]),
        drives=None if values["drives"] is None else drive_names(values["drives"]),
        mount=Mount(**values["camera"]),
    )
    try:
        outcome = import_drives(settings, workers=values["workers"], max_seconds=values["max_seconds"])
    except KeyboardInterrupt:
        logging.getLogger(__name__).warning("interrupted: what is complete is kept; the same command goes on")
        sys.exit(130)
    if outcome.failed:
        sys.exit(2)


if __name__ == "__main__":
    command("dataset_import", import_driving)
