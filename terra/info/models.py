"""Which engines work here and which one engine=auto takes, extras, worlds and adapters."""

import importlib.util
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from terra.config.files import choices, compose_groups, model_names
from terra.errors import TerraError
from terra.extras import EXTRAS, install_hint
from terra.info.machine import one_line
from terra.locations import DEMO, worlds_folder
from terra.model_facts import ModelFacts, count_weights
from terra.worlds.places import archives_at_hand, unpacked_worlds


def engines() -> dict[str, Any]:
    """Whether each engine works here, and if not why; then what engine=auto takes."""
    from terra.config.spec import AUTO, choose_engine, engine_problem
    from terra.device import torch_device

    device = torch_device(None)
    found = {}
    for name in choices("engine"):
        if name == AUTO:
            continue
        try:
            problem = engine_problem(name, device)
        except Exception as error:
            problem = one_line(error)
        slow = " (its PyTorch reference, slowly)" if name == "graph" and device.type == "cpu" else ""
        found[name] = f"works on {device.type}{slow}" if problem is None else f"does not work: {problem}"
    name, reason = choose_engine(device)
    return found | {AUTO: f"{name} ({reason})"}


def extras() -> dict[str, Any]:
    """The extras of the distribution: installed, or what is missing."""
    missing: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        missing.setdefault(extra, []).extend([] if _is_there(package) else [package])
    return {
        extra: f"missing {', '.join(names)}: {install_hint(names[0])}" if names else "installed"
        for extra, names in sorted(missing.items())
    }


def worlds() -> dict[str, Any]:
    """The models by name, and the worlds that are unpacked: where each is, and what its files tell."""
    archives, unpacked = archives_at_hand(), unpacked_worlds()
    found: dict[str, Any] = {}
    for name in dict.fromkeys([*model_names(), *archives, *unpacked]):
        try:
            if name == "demo":
                found[name] = _facts("shipped", DEMO)
            elif name in unpacked:
                found[name] = _facts("unpacked", unpacked[name])
            elif name in archives:
                found[name] = _archived(archives[name])
            else:
                found[name] = {"state": "not here", "from": _source(name)}
        except (TerraError, OSError, zipfile.BadZipFile) as error:
            found[name] = f"broken: {error}"
    return found


def folders() -> dict[str, Any]:
    """Where worlds and adapters are looked for, and which adapters ship."""
    shipped = sorted(path.name for path in (DEMO / "adapters").glob("*") if path.is_dir())
    return {
        "worlds": f"{worlds_folder()} (TERRA_WORLDS, else ~/.cache/terra/worlds)",
        "adapters": f"{DEMO / 'adapters'} ({', '.join(shipped) or 'none'}); others: adapter=FOLDER",
    }


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _facts(state: str, folder: Path) -> dict[str, Any]:
    counted = [count_weights(folder / part) for part in ("tokenizer", "world_model")]
    parameters, size = (sum(each) for each in zip(*counted, strict=True))
    return {
        "state": state,
        **_described(folder / "tokenizer", folder / "world_model"),
        "parameters": f"{parameters / 1e6:.1f} M",
        "weights": f"{size / 1e6:.0f} MB on disk and {4 * parameters / 1e6:.0f} MB in float32",
        "in": str(folder),
    }


def _archived(archive: Path) -> dict[str, Any]:
    """What the config.json files of a packed world tell; one without a tokenizer has the shipped one."""
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(archive) as packed:
        folder = Path(temporary)
        for part in ("tokenizer", "world_model"):
            (folder / part).mkdir()
            if f"{part}/config.json" in packed.namelist():
                with packed.open(f"{part}/config.json") as source, (folder / part / "config.json").open("wb") as file:
                    shutil.copyfileobj(source, file)
        own = (folder / "tokenizer" / "config.json").is_file()
        described = _described(folder / "tokenizer" if own else DEMO / "tokenizer", folder / "world_model")
    size = archive.stat().st_size
    return {"state": "archive at hand", **described, "archive": f"{size / 1e6:.0f} MB", "in": str(archive)}


def _described(tokenizer: Path, world_model: Path) -> dict[str, Any]:
    facts = ModelFacts.read(tokenizer, world_model)
    return {
        "pixels": " x ".join(map(str, facts.image_size)),
        "fps": f"{facts.fps:g}",
        "actions": facts.space.title,
        **({} if facts.views is None else {"views": facts.views.sizes}),
        "memory frames": 0 if facts.memory is None else facts.memory.frames,
    }


def _source(name: str) -> str:
    """Where a model that is not here is to be had."""
    path = compose_groups({"model": name}, {"device": None})["model"]["path"]
    return "an archive in terra/worlds of Terra's repository" if Path(path).is_absolute() else f"the Hub, {path}"
