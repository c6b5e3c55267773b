"""The console scripts. What a user can cause ends as one line on stderr and exit code 2."""

import os
import sys
from collections.abc import Callable

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from terra.errors import TerraError


def generate() -> None:
    """`terra-generate`: see `terra.generate`."""
    _main("generate", _generate)


def _generate(config: DictConfig) -> None:
    # Only now: `--help` and a mistyped key should not wait for torch.
    from rich.console import Console

    from terra.generate import run

    run(config, Console(stderr=True))


def _main(config_name: str, job: Callable[[DictConfig], None]) -> None:
    from terra.config_files import config_dir, register_resolvers

    register_resolvers()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing several lines
    entry = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(job)
    try:
        entry()
    except TerraError as error:
        _exit(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        _exit(_one_line(error))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


def _one_line(error: Exception) -> str:
    """Hydra's message without its layout: what was wrong, and the choices there are."""
    cause = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if cause is not None and str(cause).strip():
        lines.append(str(cause).strip().splitlines()[0])
    return "; ".join(dict.fromkeys(lines))


def _exit(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
