"""Writes a tokenizer and a world model of random weights in the exact layout of the published repository.

    python scripts/checkpoint_synthesize.py output=outputs/synthetic version=v2 [layers=2]

Settings: conf/checkpoint_synthesize.yaml.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command

_BYTES = 5_000_000_000  # of the full size, with room to spare


def synthesize(config: DictConfig) -> None:
    """Write tokenizer and world model as a repository folder."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.check.synthetic import write_repository
    from terra.errors import ConfigError
    from terra.output import check_output, output_folder
    from terra.world_model.published import WORLD_MODELS
    from tokenizer.checkpoint import CHECKPOINT_FILES

    names = {"v1": "world_model", "v2": "world_model_v2"}
    if values["version"] not in names:
        raise ConfigError(f"version: expected v1 or v2, got {values['version']!r}")
    for name in ("layers", "max_shard_mb"):
        if type(values[name]) is not int or values[name] < 1:
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {values[name]!r}")
    output = Path(values["output"])
    made = names[values["version"]], WORLD_MODELS[names[values["version"]]].tokenizer
    replaced = [f"{name}/{file}" for name in made for file in CHECKPOINT_FILES]
    check_output(output, needed_bytes=_BYTES, replaced=replaced if values["overwrite"] else ())
    with output_folder(output) as folder:
        write_repository(
            folder,
            names[values["version"]],
            world_model={"num_hidden_layers": values["layers"], **values["world_model"]},
            tokenizer=values["tokenizer"],
            max_shard_bytes=values["max_shard_mb"] * 1_000_000,
            seed=values["seed"],
        )


if __name__ == "__main__":
    command("checkpoint_synthesize", synthesize)
