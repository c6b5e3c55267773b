"""Train a world model on token files: `python scripts/world_model_train.py data=data/tokens output=outputs/model`.

Settings: conf/train_world_model.yaml. The same command resumes an interrupted run.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def train(config: DictConfig) -> None:
    """Check the settings, load the tokens, train and evaluate."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.device import torch_device
    from terra.training.settings import LoopConfig
    from terra.training.tokens import load_tokens
    from terra.training.world_model import WorldModelSize, train_world_model
    from tokenizer.checkpoint import write_json

    loop, device = LoopConfig.from_values(values), torch_device(values["device"])
    data = Path(values["data"])
    tokenised = load_tokens(data / values["train_split"], device)
    held_out = load_tokens(data / values["held_out_split"], device)
    write_json(loop.output / "settings.json", values)
    train_world_model(
        tokenised,
        held_out,
        loop,
        WorldModelSize(**values["world_model"]),
        window=values["window"],
        max_corruption=values["max_corruption"],
        evaluation_windows=values["evaluation_windows"],
    )


if __name__ == "__main__":
    command("train_world_model", train)
