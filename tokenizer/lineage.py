"""Tokenizers that make the same tokens, or nearly the same ones.

Tokenizers that share an encoder and differ in decoders make the same tokens: a world model of one takes them all.
A tokenizer that was trained from another one with a penalty on tokens that change makes nearly the same tokens, and its
config.json names the other one as `tokens_like`: a world model of the other one is a good start for a training on the
new tokens, but is not valid for them.
"""

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
