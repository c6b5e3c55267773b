"""What `terra convert` does: weights that others trained, from their pickles to folders that Terra's settings take.

Nothing in a pickle is executed, and every tensor in it is accounted for.
"""

from typing import Any

from terra.check.settings import ConvertSettings
from terra.errors import CheckpointError, ConfigError
from terra.output import check_output, output_folder
from tokenizer.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from tokenizer.conversion import convert_state_dict, read_state_dict


def run(settings: ConvertSettings) -> None:
    """Convert as conf/convert.yaml says, and print one line of what was found.

    Raises:
        ConfigError: a setting that is not possible.
        CheckpointError: the file is not readable as tensors, or they are not those of the kind.
        OutputError: the output folder can't be written.
    """
    model, found = {"tokenizer": _tokenizer, "refiner": _refiner}[settings.kind](settings)
    tensors, output = model.state_dict(), settings.output
    needed = sum(tensor.nbytes for tensor in tensors.values())
    replaced = (CONFIG_NAME, WEIGHTS_NAME) if settings.overwrite else ()
    check_output(output, needed_bytes=needed, replaced=replaced, inputs=[settings.input])
    with output_folder(output) as folder:
        model.save_pretrained(folder)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{output}: {len(tensors)} tensors, {parameters:,} parameters; {found}")


def _tokenizer(settings: ConvertSettings) -> tuple[Any, str]:
    """A tokenizer of Open-MAGVIT2 or 1X, from its Lightning checkpoint."""
    source, size, order = settings.input, settings.image_size, settings.bit_order
    if size is None:
        raise ConfigError("image_size: expected [height, width], got nothing")
    if order is None:
        raise ConfigError("bit_order: expected msb_first or lsb_first, got nothing")
    state = read_state_dict(source)
    try:
        tokenizer = convert_state_dict(state, weights=settings.weights, image_size=size, bit_order=order)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    quantizer = tokenizer.config.quantizer_config
    grid = f"{tokenizer.rows} x {tokenizer.cols} tokens of {quantizer.dim} bits"
    return tokenizer, f"{settings.weights} weights, {grid}, {quantizer.bit_order}"


def _refiner(settings: ConvertSettings) -> tuple[Any, str]:
    """The published video refiner, from its DeepSpeed checkpoint."""
    from decoder.refiner import published  # needs an extra

    source = settings.input
    state, others = published.strip_prefix(read_state_dict(source, "module"))
    try:
        refiner, left_out = published.convert_state_dict(state, published.PUBLISHED)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    return refiner, f"{len(left_out)} tensors of the model and {len(others)} beside it are not needed"
