"""Prepare race tracks to record in: `python scripts/torcs_prepare.py output=data/torcs`.

Fetches Debian's package torcs-data (or takes `deb=FILE`) and packs its good tracks small. Their art is under the GNU
GPL and the Free Art License: see the LICENCE that is written beside them. Settings: conf/torcs_prepare.yaml.
"""

from pathlib import Path

from omegaconf import DictConfig

from terra.cli import command


def prepare(config: DictConfig) -> None:
    """Prepare the tracks that the settings name."""
    from terra.recording.torcs.preparing import prepare_tracks

    deb = None if config.deb is None else Path(config.deb)
    prepare_tracks(Path(config.output), deb, None if config.tracks is None else list(config.tracks))


if __name__ == "__main__":
    command("torcs_prepare", prepare)
