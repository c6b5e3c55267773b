"""The published video refiner, from its pickle to a folder that `decoder.pretrained=` takes.

    python scripts/refiner_convert.py input=refiner_model.pt output=outputs/refiner

Nothing in the pickle is executed, and every tensor in it is accounted for. Settings: conf/refiner_convert.yaml.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def convert(config: DictConfig) -> None:
    """Read, rename, check, write."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from decoder.refiner import published
    from terra.errors import CheckpointError
    from terra.output import check_output, output_folder
    from tokenizer.conversion import read_state_dict

    source, output = Path(values["input"]), Path(values["output"])
    state, others = published.strip_prefix(read_state_dict(source, "module"))
    try:
        refiner, left_out = published.convert_state_dict(state, published.PUBLISHED)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    tensors = refiner.state_dict()
    check_output(output, overwrite=values["overwrite"], needed_bytes=sum(t.nbytes for t in tensors.values()))
    with output_folder(output) as folder:
        refiner.save_pretrained(folder)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{output}: {len(tensors)} tensors, {parameters:,} parameters; "
        f"{len(left_out)} tensors of the model and {len(others)} beside it are not needed"
    )


if __name__ == "__main__":
    command("refiner_convert", convert)
