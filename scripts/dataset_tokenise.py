"""Turn recorded driving into token files: `python scripts/dataset_tokenise.py data=... checkpoint=... output=...`.

Settings: conf/dataset_tokenise.yaml.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def tokenise_splits(config: DictConfig) -> None:
    """Encode each split and write its two files."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.device import torch_device
    from terra.training.data import load_driving
    from terra.training.tokens import save_tokens, tokenise
    from tokenizer import LFQTokenizer
    from tokenizer.checkpoint import checkpoint_sha256, resolve_checkpoint

    device = torch_device(values["device"])
    folder = resolve_checkpoint(Path(values["checkpoint"]))
    tokenizer, sha256 = LFQTokenizer.from_pretrained(folder).to(device), checkpoint_sha256(folder)
    for split in values["splits"]:
        driving = load_driving(Path(values["data"]), split, device=device, workers=values["workers"])
        tokenised = tokenise(driving, tokenizer, sha256, batch_size=values["batch_size"])
        save_tokens(tokenised, Path(values["output"]) / split)


if __name__ == "__main__":
    command("dataset_tokenise", tokenise_splits)
