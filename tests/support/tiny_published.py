"""Writes a small copy of the published repository's layout: the same files, keys and seven shards."""

from pathlib import Path

from terra.check.synthetic import write_repository

SMALL = {"hidden_size": 64, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 1025}

SMALL_TOKENIZER = {
    "encoder_decoder_config": {"ch": 32, "z_channels": 10, "num_res_blocks": 1},
    "quantizer_config": {"dim": 10, "codebook_size": 1024},
}


def write_small(folder: Path, name: str, **changes: object) -> None:
    write_repository(folder, name, world_model=SMALL | changes, tokenizer=SMALL_TOKENIZER, max_shard_bytes=110_000)
