"""How fast the engines are, side by side: `python scripts/engine_benchmark.py shape=small output=outputs/benchmark`.

Settings: conf/benchmark.yaml. The same command goes on where it was stopped.
"""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def benchmark(config: DictConfig) -> None:
    """Measure, and print the table."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from terra.benchmark.run import run
    from terra.config import checkpoint_folder

    given = config.get("world_model")
    print(run(values | {"world_model": None if given is None else str(checkpoint_folder(given))}))


if __name__ == "__main__":
    command("benchmark", benchmark)
