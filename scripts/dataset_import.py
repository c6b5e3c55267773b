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
    from terra.dataset.checks import check_image_size, check_names
    from terra.dataset.importing import ImportSettings, Mount, import_drives
    from terra.dataset.importing.kinds import open_source

    settings = ImportSettings(
        **{name: values[name] for name in ("name", "fps", "frames_per_episode")},
        source=open_source(values["kind"], Path(str(values["input"])), values["lerobot"]),
        output=Path(str(values["output"])),
        image_size=check_image_size(values["image_size"]),
        held_out=check_names("held_out", values["held_out"]),
        drives=None if values["drives"] is None else check_names("drives", values["drives"]),
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
