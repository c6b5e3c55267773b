"""Train a tokenizer on recorded driving: `python scripts/tokenizer_train.py data=data/town output=outputs/tokenizer`.

Settings: conf/train_tokenizer.yaml. The same command resumes an interrupted run.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def train(config: DictConfig) -> None:
    """Check the settings, load the frames, train and evaluate."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.device import torch_device
    from terra.training.data import load_driving
    from terra.training.settings import LoopConfig
    from terra.training.tokenizer import EntropyAnneal, loss_weights, small_config, stored_dtype, train_tokenizer
    from tokenizer.checkpoint import write_json

    loop = LoopConfig.from_values(values)
    weights, anneal = loss_weights(values["loss"]), EntropyAnneal(**values["entropy_anneal"])
    dtype, device = stored_dtype(values["dtype"]), torch_device(values["device"])
    folder, workers = Path(values["data"]), values["workers"]
    driving = load_driving(folder, values["train_split"], device=device, workers=workers)
    held_out = load_driving(folder, values["held_out_split"], device=device, workers=workers)
    height, width = driving.frames.shape[2:]
    model = small_config(image_size=(height, width), **values["tokenizer"])
    write_json(loop.output / "settings.json", values)
    train_tokenizer(
        driving,
        held_out,
        loop,
        model,
        weights=weights,
        anneal=anneal,
        dtype=dtype,
        evaluation_frames=values["evaluation_frames"],
    )


if __name__ == "__main__":
    command("train_tokenizer", train)
