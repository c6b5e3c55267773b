"""Prepare race tracks to record in: `python scripts/torcs_prepare.py output=data/torcs`.

Fetches Debian's package torcs-data (or takes `deb=FILE`) and packs its good tracks small. Their art is under the GNU
GPL and the Free Art License: see the LICENCE that is written beside them. Settings: conf/torcs_prepare.yaml.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def prepare(config: DictConfig) -> None:
    """Prepare the tracks that the settings name."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.dataset.checks import check_names
    from terra.recording.torcs.preparing import prepare_tracks

    tracks = None if values["tracks"] is None else check_names("tracks", values["tracks"])
    prepare_tracks(Path(str(values["output"])), None if values["deb"] is None else Path(str(values["deb"])), tracks)


if __name__ == "__main__":
    command("torcs_prepare", prepare)
