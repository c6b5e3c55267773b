"""What `terra import` does: check the settings, then bring driving from elsewhere into our format."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from terra.config_files import plain
from terra.dataset.checks import check_image_size, check_names
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.run import ImportSettings, Mount, import_drives

logger = logging.getLogger(__name__)


def run(config: DictConfig) -> int:
    """Import as conf/import.yaml says; the same command goes on with an interrupted import.

    Returns:
        The exit code: 0 all that there was time for is imported, 2 a drive could not be imported, 130 interrupted.

    Raises:
        ConfigError, DatasetError, OutputError: see `open_source` and `import_drives`.
    """
    values = plain(config)
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
        logger.warning("interrupted: what is complete is kept; the same command goes on")
        return 130
    return 2 if outcome.failed else 0
