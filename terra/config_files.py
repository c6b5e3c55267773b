"""Where the YAML files are, and what they may refer to. Imports nothing heavy: `--help` goes through here."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf


def config_dir() -> Path:
    """The folder of YAML files: `terra/conf` in an installed package, `conf` in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def register_resolvers() -> None:
    """Make `${terra_demo:NAME}` in YAML the path of a file or folder that ships with Terra."""
    OmegaConf.register_new_resolver("terra_demo", lambda name: str(Path(__file__).parent / "demo" / name), replace=True)


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The settings of conf/CONFIG_NAME.yaml with `key=value` overrides, as a command line would have them.

    Raises:
        HydraException: no such configuration, choice or key.
    """
    import hydra

    register_resolvers()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return hydra.compose(config_name, list(overrides))
