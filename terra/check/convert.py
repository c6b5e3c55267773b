"""What `terra convert` does: weights that others trained, from their pickles to folders that Terra's settings take.

Nothing in a pickle is executed, and every tensor in it is accounted for.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from terra.config_files import plain
from terra.errors import CheckpointError, ConfigError
from terra.output import check_output, output_folder
from tokenizer.conversion import convert_state_dict, read_state_dict


def run(config: DictConfig) -> None:
    """Convert as conf/convert.yaml says, and print one line of what was found.

    Raises:
        ConfigError: a setting that is not possible.
        CheckpointError: the file is not readable as tensors, or they are not those of the kind.
        OutputError: the output folder can't be written.
    """
    values = plain(config)
    convert = {"tokenizer": _tokenizer, "refiner": _refiner}.get(values["kind"])
    if convert is None:
        raise ConfigError(f"kind: expected tokenizer or refiner, got {values['kind']!r}")
    model, found = convert(values, Path(values["input"]))
    tensors, output = model.state_dict(), Path(values["output"])
    check_output(output, overwrite=values["overwrite"], needed_bytes=sum(t.nbytes for t in tensors.values()))
    with output_folder(output) as folder:
        model.save_pretrained(folder)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{output}: {len(tensors)} tensors, {parameters:,} parameters; {found}")


def _tokenizer(values: dict[str, Any], source: Path) -> tuple[Any, str]:
    """A tokenizer of Open-MAGVIT2 or 1X, from its Lightning checkpoint."""
    if values["weights"] not in ("live", "ema"):
        raise ConfigError(f"weights: expected live or ema, got {values['weights']!r}")
    size = values["image_size"]
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int for side in size):
        raise ConfigError(f"image_size: expected [height, width], got {size!r}")
    if values["bit_order"] is None:
        raise ConfigError("bit_order: expected msb_first or lsb_first, got nothing")
    state = read_state_dict(source)
    try:
        tokenizer = convert_state_dict(
            state, weights=values["weights"], image_size=(size[0], size[1]), bit_order=values["bit_order"]
        )
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    quantizer = tokenizer.config.quantizer_config
    grid = f"{tokenizer.rows} x {tokenizer.cols} tokens of {quantizer.dim} bits"
    return tokenizer, f"{values['weights']} weights, {grid}, {quantizer.bit_order}"


def _refiner(_values: dict[str, Any], source: Path) -> tuple[Any, str]:
    """The published video refiner, from its DeepSpeed checkpoint."""
    from decoder.refiner import published  # needs an extra

    state, others = published.strip_prefix(read_state_dict(source, "module"))
    try:
        refiner, left_out = published.convert_state_dict(state, published.PUBLISHED)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    return refiner, f"{len(left_out)} tensors of the model and {len(others)} beside it are not needed"
