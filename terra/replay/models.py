"""Makes the settings of a rollout's models from its record: shipped ones by name, others where they are found."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terra.config.files import compose_groups, missing_world, model_names
from terra.config.groups import PipelineSettings
from terra.config.spec import PipelineSpec, targets
from terra.errors import ConfigError
from terra.locations import DEMO, places_of, worlds_folder
from terra.replay.files import missing
from terra.replay.settings import ReplaySettings
from terra.rollout_record import RECORD
from tokenizer.settings import checked


def recorded_spec(record: Mapping[str, Any], settings: ReplaySettings) -> PipelineSpec:
    """The spec of a rollout's record, checked as in `PipelineSpec.from_settings`, and with the recorded weights.

    Args:
        record: see `terra.rollout`; its names of engine and decoder are those of files of conf/.
        settings: the record's folder, and what replaces recorded values.

    Raises:
        TerraError: an engine or decoder that is none of Terra's own, or weights that are missing or others.
        KeyError, TypeError, ValueError: a record that is not whole.
    """
    device, dtype, folder = settings.device, settings.dtype, settings.folder
    given = {"tokenizer": settings.tokenizer, "world_model": settings.world_model}
    values: dict[str, Any] = {
        name: part or _checkpoint(name, record["checkpoints"][name], settings) for name, part in given.items()
    }
    values["tokenizer"] |= {"device": device or record["tokenizer_device"]}
    for group in ("engine", "decoder"):
        part = values[group] = _named_settings(group, record[group])
        for name, value in (("device", device), ("dtype", dtype if group == "engine" else None)):
            if value is not None and name in part:
                part[name] = value
    if settings.engine is not None:
        values["engine"] = settings.engine
    source = values["decoder"].pop("checkpoint", None)
    if source is not None:
        own = settings.decoder.pretrained
        values["decoder"]["pretrained"] = own or source.get("hub") or str(_find_refiner(source, folder))
    elif settings.decoder.pretrained is not None:
        raise ConfigError("decoder.pretrained: expected none, as the rollout's decoder has no weights of its own")
    values["overlap"] = record["overlap"]
    values["memory"] = record["memory"]["frames"] if record.get("memory") else 0
    adapter = record["adapter"]
    if adapter is not None:
        values["adapter"] = str(settings.adapter or _find_adapter(adapter, folder))
    elif settings.adapter is not None:
        raise ConfigError(f"adapter={settings.adapter}: expected none, as the rollout was made without")
    spec = PipelineSpec.from_settings(checked(PipelineSettings, values, RECORD))
    _check_weights(spec, record)
    return spec


def _checkpoint(part: str, source: Mapping[str, Any], settings: ReplaySettings) -> dict[str, Any]:
    """The settings of a checkpoint, as `terra.config.groups.CheckpointSettings` takes them."""
    named = source.get("model")
    if named is not None and named not in model_names():
        raise ConfigError(f"model: expected one of {', '.join(model_names())}, got {named!r}: give model.path=DIR")
    composed = {} if named is None else compose_groups({"model": named}, {"device": None})[part]
    subfolder = composed.get("subfolder", source.get("subfolder"))
    if settings.model.path is not None:
        return {"pretrained": settings.model.path, "subfolder": subfolder or part, "revision": settings.model.revision}
    if named is not None:
        if (problem := missing_world(composed["pretrained"])) is not None:
            raise ConfigError(f"{problem}, or give model.path=DIR")
        found = composed["pretrained"]
    elif "hub" in source:
        found = source["hub"]
    else:
        places = [*places_of(source["folder"], settings.folder), worlds_folder() / Path(source["folder"]).name]
        found = str(_first(part, [each / (subfolder or "") for each in places], places, "model.path=DIR"))
    return {"pretrained": found, "subfolder": subfolder, "revision": source.get("revision")}


def _find_adapter(source: Mapping[str, Any], folder: Path) -> Path:
    if "shipped" in source:
        places = [DEMO / "adapters" / Path(source["shipped"]).name]
    else:
        places = places_of(source["folder"], folder)
    return _first("adapter", places, places, "adapter=DIR")


def _find_refiner(source: Mapping[str, Any], folder: Path) -> Path:
    places = places_of(source["folder"], folder)
    return _first("decoder", places, places, "decoder.pretrained=DIR")


def _first(part: str, needed: list[Path], places: list[Path], remedy: str) -> Path:
    """The first of `places` where the folder in `needed` exists. Raises ConfigError."""
    for folder, place in zip(needed, places, strict=True):
        if folder.is_dir():
            return place
    raise missing(part, needed, remedy)


def _named_settings(group: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the `_target_` of a choice. A record may come from a stranger: its own targets are not imported."""
    known, name = targets(group), record["name"]
    if name not in known or "_target_" in json.dumps(record):
        raise ConfigError(f"{group}: expected one of {', '.join(known)}, got {name!r}")
    return {"_target_": known[name], **{key: value for key, value in record.items() if key != "name"}}


def _check_weights(spec: PipelineSpec, record: Mapping[str, Any]) -> None:
    refiner = spec.refiner
    parts = {
        **{name: (getattr(spec, name), record["checkpoints"][name]) for name in ("tokenizer", "world_model")},
        "adapter": (spec.adapter, record["adapter"]),
        "decoder": (refiner and refiner.pretrained, record["decoder"].get("checkpoint")),
    }
    hashes = spec.hashes()
    for name, (place, source) in parts.items():
        if source is not None and (got := hashes[f"{name}_sha256"]) != source["sha256"]:
            expected = f"expected the weights {source['sha256'][:12]} of the rollout"
            raise ConfigError(f"{name} {place}: {expected}, got {got[:12]}")
