"""Collects the sections of `terra info` and prints them; a broken package is told in its own line."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from terra.info import machine, models
from terra.info.settings import InfoSettings

SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "terra": machine.terra,
    "packages": machine.packages,
    "machine": machine.machine,
    "gpus": machine.gpus,
    "engines": models.engines,
    "extras": models.extras,
    "worlds": models.worlds,
    "folders": models.folders,
}
"""Each section by name, in the order of printing; each is a dictionary of JSON values."""


def run(settings: InfoSettings) -> None:
    """Print what a bug report needs to say of this installation; no weights are loaded."""
    found = {name: _collected(collect) for name, collect in SECTIONS.items()}
    print(json.dumps(found, indent=2) if settings.format == "json" else as_text(found))


def as_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as text, a line for each entry."""
    lines = []
    for section, entries in found.items():
        lines.append(f"{section}:")
        width = max((len(name) for name in entries), default=0) + 2
        lines += [f"  {name:<{width}}{_line(value)}" for name, value in entries.items()] or ["  none"]
    return "\n".join(lines)


def _collected(collect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return collect()
    except Exception as error:
        return {"error": machine.one_line(error)}


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{each}" if name in ("state", "name") else f"{name} {each}" for name, each in value.items())
    return str(value)
