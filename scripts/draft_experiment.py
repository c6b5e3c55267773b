"""What drafts and diagonal decoding would bring, if they were built: `python scripts/draft_experiment.py data=DIR`.

Settings: conf/draft_experiment.yaml. The same command goes on where it was stopped.
"""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def experiment(config: DictConfig) -> None:
    """Measure, and print the tables."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from terra.benchmark.draft_experiment import run
    from terra.config import checkpoint_folder

    folders = checkpoint_folder(config.tokenizer), checkpoint_folder(config.world_model)
    print(run(values, *folders))


if __name__ == "__main__":
    command("draft_experiment", experiment)
