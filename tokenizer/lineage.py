"""Tokenizers that make the same tokens: one, and those whose decoders were trained further while the encoder stayed."""

from pathlib import Path

from tokenizer.checkpoint import CONFIG_NAME, checkpoint_sha256
from tokenizer.config import LFQTokenizerConfig


def tokens_sha256(folder: Path) -> str:
    """`checkpoint_sha256` of the first tokenizer with this one's encoder, which may be itself: what names its tokens.

    Raises CheckpointError if the folder holds no tokenizer.
    """
    return LFQTokenizerConfig.load(folder / CONFIG_NAME).same_tokens_as or checkpoint_sha256(folder)


def makes_tokens_of(folder: Path, sha256: str) -> bool:
    """Whether a tokenizer is the one of that `checkpoint_sha256`, or has its encoder.

    Raises CheckpointError if the folder holds no tokenizer.
    """
    return sha256 in (tokens_sha256(folder), checkpoint_sha256(folder))
