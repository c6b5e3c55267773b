"""A tokenizer of Open-MAGVIT2 or 1X, from its Lightning checkpoint to a folder that `tokenizer.pretrained=` takes.

    python scripts/tokenizer_convert.py input=b.ckpt output=outputs/b image_size=[288,512] bit_order=msb_first

Settings: conf/tokenizer_convert.yaml.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def convert(config: DictConfig) -> None:
    """Read, check, write."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.errors import CheckpointError, ConfigError
    from terra.output import check_output, output_folder
    from tokenizer.conversion import convert_state_dict, read_state_dict

    source, output = Path(values["input"]), Path(values["output"])
    if values["weights"] not in ("live", "ema"):
        raise ConfigError(f"weights: expected live or ema, got {values['weights']!r}")
    size = values["image_size"]
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int for side in size):
        raise ConfigError(f"image_size: expected [height, width], got {size!r}")
    state = read_state_dict(source)
    try:
        tokenizer = convert_state_dict(
            state, weights=values["weights"], image_size=(size[0], size[1]), bit_order=values["bit_order"]
        )
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    tensors = tokenizer.state_dict()
    check_output(output, overwrite=values["overwrite"], needed_bytes=sum(t.nbytes for t in tensors.values()))
    with output_folder(output) as folder:
        tokenizer.save_pretrained(folder)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    quantizer = tokenizer.config.quantizer_config
    print(
        f"{output}: {values['weights']} weights, {len(tensors)} tensors, {parameters:,} parameters, "
        f"{tokenizer.rows} x {tokenizer.cols} tokens of {quantizer.dim} bits, {quantizer.bit_order}"
    )


if __name__ == "__main__":
    command("tokenizer_convert", convert)
