"""Turn recorded driving into token files: `python scripts/dataset_tokenise.py data=... checkpoint=... output=...`.

Settings: conf/dataset_tokenise.yaml.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

CONF = Path(__file__).resolve().parent.parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="dataset_tokenise")
def main(config: DictConfig) -> None:
    """Tokenise; a user's error is one line and exit status 2."""
    from terra.errors import TerraError

    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        tokenise_splits(values)
    except (TerraError, MissingMandatoryValue) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)


def tokenise_splits(values: dict[str, Any]) -> None:
    """Encode each split and write its two files."""
    import torch

    from terra.training.data import load_driving
    from terra.training.settings import training_device
    from terra.training.tokens import save_tokens, tokenise
    from tokenizer import LFQTokenizer
    from tokenizer.checkpoint import checkpoint_sha256, resolve_checkpoint

    device = training_device(values["device"])
    folder = resolve_checkpoint(Path(values["checkpoint"]))
    tokenizer, sha256 = LFQTokenizer.from_pretrained(folder), checkpoint_sha256(folder)
    tokenizer = tokenizer.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    for split in values["splits"]:
        driving = load_driving(Path(values["data"]), split, device=device, workers=values["workers"])
        tokenised = tokenise(driving, tokenizer, sha256, batch_size=values["batch_size"])
        save_tokens(tokenised, Path(values["output"]) / split)


if __name__ == "__main__":
    main()
