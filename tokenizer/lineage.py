"""Tokenizers that make the same tokens: they share an encoder and differ in decoders that were trained further."""

from pathlib import Path

from tokenizer.checkpoint import CONFIG_NAME, checkpoint_sha256
from tokenizer.config import LFQTokenizerConfig


def tokens_sha256(folder: Path) -> str:
    """The identity of a tokenizer's tokens: `checkpoint_sha256` of the first tokenizer that had the same encoder.

    Raises CheckpointError if the folder holds no tokenizer.
    """
    return LFQTokenizerConfig.load(folder / CONFIG_NAME).same_tokens_as or checkpoint_sha256(folder)


def makes_tokens_of(folder: Path, sha256: str) -> bool:
    """Whether the tokenizer in `folder` has the `checkpoint_sha256` `sha256`, or the encoder of the one that has it.

    Raises CheckpointError if the folder holds no tokenizer.
    """
    return sha256 in (tokens_sha256(folder), checkpoint_sha256(folder))
