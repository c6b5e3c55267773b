"""Record driving in procedural towns: `python scripts/driving_record.py output=data/town towns=8 workers=2`.

Settings: conf/record.yaml. The same command goes on with an interrupted recording.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def record(config: DictConfig) -> None:
    """Check the settings, then record what `kind` names."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from decoder.camera import Camera
    from terra.errors import ConfigError
    from terra.recording.record import RecordSettings, record_counterfactuals, record_drives

    kind, num_context, maneuvers = (values.pop(name) for name in ("kind", "num_context", "maneuvers"))
    camera = Camera.from_dict(values.pop("camera"))
    output, (height, width) = Path(values.pop("output")), values.pop("image_size")
    settings = RecordSettings(output=output, image_size=(height, width), camera=camera, **values)
    if kind == "drives":
        record_drives(settings)
    elif kind == "counterfactuals":
        record_counterfactuals(settings, num_context=num_context, maneuvers=maneuvers)
    else:
        raise ConfigError(f"kind: expected drives or counterfactuals, got {kind!r}")


if __name__ == "__main__":
    command("record", record)
