"""Loads scripts and settings as a command line does, for tests that run them in this process."""

import importlib.util
from pathlib import Path

from terra.cli import COMMANDS
from terra.config.files import compose as compose


def read_settings(config_name: str, overrides=()):
    """The checked settings of a command, from conf/CONFIG_NAME.yaml with `key=value` overrides."""
    command = next(each for each in COMMANDS.values() if each.config_name == config_name)
    return command.check(compose(config_name, overrides))


def load_script(name: str):
    path = Path(__file__).resolve().parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
