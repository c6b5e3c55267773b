"""Look at driving, ours or a source's before its import: `python scripts/dataset_inspect.py data=data/town`.

Prints counts, rates and whether axes, signs and units agree; writes contact_sheet.png and paths.png. Settings:
conf/dataset_inspect.yaml. Exit code: 0 nothing is wrong, 2 a setting is wrong, or something is damaged or implausible.
"""

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def inspect(config: DictConfig) -> None:
    """Inspect, then verify if asked to."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.dataset.checks import check_workload
    from terra.dataset.importing.kinds import KINDS, open_source
    from terra.dataset.inspect import inspect_dataset, inspect_source
    from terra.dataset.verify import verify_dataset
    from terra.errors import ConfigError

    data, output, kind = Path(str(values["data"])), Path(str(values["output"])), values["kind"]
    if kind not in ("dataset", *KINDS):
        raise ConfigError(f"kind: expected one of dataset, {', '.join(KINDS)}, got {kind!r}")
    if not isinstance(values["verify"], bool):
        raise ConfigError(f"verify: expected true or false, got {values['verify']!r}")
    check_workload(values["workers"])
    if kind != "dataset" and values["verify"]:
        raise ConfigError(f"verify: expected kind=dataset, got kind={kind}: a source is checked by its import")
    if kind == "dataset":
        inspection = inspect_dataset(data)
    else:
        inspection = inspect_source(open_source(kind, data, values["lerobot"]))
    inspection.save(output)
    print("\n".join(inspection.lines))
    doubts = list(inspection.doubts)
    if values["verify"]:
        doubts = list(dict.fromkeys([*doubts, *verify_dataset(data, workers=values["workers"])]))
    for doubt in doubts:
        print(f"doubt: {doubt}")
    print(f"{len(doubts)} doubts; pictures in {output}")
    if doubts:
        sys.exit(2)


if __name__ == "__main__":
    command("dataset_inspect", inspect)
