"""Record driving in procedural towns: `python scripts/driving_record.py output=data/town towns=8 workers=2`.

Settings: conf/record.yaml. The same command goes on with an interrupted recording.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parent.parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="record")
def main(config: DictConfig) -> None:
    """Record; a user's error is one line and exit status 2."""
    from terra.errors import TerraError

    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    try:
        record(values)
    except TerraError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def record(values: dict[str, Any]) -> None:
    """Check the settings, then record what `kind` names."""
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
    main()
