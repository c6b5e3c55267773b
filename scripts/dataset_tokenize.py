"""Turn recorded driving into token files: `python scripts/dataset_tokenize.py data=... checkpoint=... output=...`.

Settings: conf/dataset_tokenize.yaml. The same command goes on where it was stopped; with `accelerate launch` each
process takes its share of the shards.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def tokenize_splits(config: DictConfig) -> None:
    """Encode each split shard by shard, then write its index."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.dataset import read_split
    from terra.device import torch_dtype
    from terra.training.processes import start_processes
    from terra.training.tokenize import FrameEncoder, finish_split, tokenize_split
    from tokenizer import LFQTokenizer
    from tokenizer.checkpoint import resolve_checkpoint
    from tokenizer.lineage import tokens_sha256

    dtype, data, output = torch_dtype(values["dtype"]), Path(values["data"]), Path(values["output"])
    processes = start_processes(values["device"])
    splits = {split: read_split(data, split) for split in values["splits"]}
    checkpoint = resolve_checkpoint(Path(values["checkpoint"]))
    tokenizer, sha256 = LFQTokenizer.from_pretrained(checkpoint), tokens_sha256(checkpoint)
    encoder = FrameEncoder(tokenizer, processes.device, dtype, values["batch_size"], compiled=values["compile_model"])
    for split, found in splits.items():
        tokenize_split(
            found,
            output / split,
            encoder,
            sha256,
            workers=values["workers"],
            rank=processes.process_index,
            num_processes=processes.num_processes,
        )
    # Once for all splits: a process that is done early would otherwise wait at every one.
    processes.wait_for_everyone()
    if processes.is_main_process:
        for split, found in splits.items():
            finish_split(found, output / split)


if __name__ == "__main__":
    command("dataset_tokenize", tokenize_splits)
