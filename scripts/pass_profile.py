"""Profiles a decode step (pass) of `engine=graph`: the time that each kernel adds, from a trace of all kernels.

    python scripts/pass_profile.py --contexts 3 22 --report profile.json
    python scripts/pass_profile.py --rollouts 64 --contexts 5 --report profile.json

The weights are random. Results are added to the report, and the whole report is drawn beside it (`profile.png`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from terra.benchmark.case import write_json
from terra.benchmark.passes import Kernel, Passes, add_arguments, added, kernels_of, prepare
from terra.errors import ConfigError
from terra.tables import print_table

_PASSES = 10
_WARM_UPS = 30


def main() -> None:
    """Parse the command line, trace, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--report", type=Path, help="a JSON file that grows by what is found")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU, found none")
    try:
        earlier = read_report(arguments.report) if arguments.report else {}
        found = measure(arguments)
    except ConfigError as error:
        parser.error(str(error))
    for label, parts in found.items():
        table = Table("", "us", title=label)
        for name, microseconds in [*parts["layer"].items(), ("a layer", sum(parts["layer"].values()))]:
            table.add_row(name, f"{microseconds:.1f}")
        table.add_section()
        for name, microseconds in [*parts["pass"].items(), ("a pass", sum(parts["pass"].values()))]:
            table.add_row(name, f"{microseconds:.0f}")
        print_table(Console(), table)
    if arguments.report:
        write_json(arguments.report, earlier | found)
        draw(earlier | found, arguments.report.with_suffix(".png"))


def read_report(path: Path) -> dict[str, Any]:
    """Read the results of earlier runs.

    Raises:
        ConfigError: the file is no such report, or can't be written.
    """
    try:
        found = dict(json.loads(path.read_text())) if path.exists() else {}
        write_json(path, found)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--report: expected a JSON file that can be written, got {path}: {error}") from None
    return found


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of a layer's steps and of a pass's parts, by a label for each context."""
    kind = f"8 bits and {arguments.dtype}" if arguments.fp8 else arguments.dtype
    kind += "" if arguments.shape == "terra_v1" else f", {arguments.shape}"
    kind += f", {arguments.drafts} drafts" if arguments.drafts else ""
    found = {}
    for passes in prepare(arguments):
        layer, whole = added(trace(passes))
        label = f"{arguments.rollouts} at once, {passes.context} context frames, {kind}"
        found[label] = {"layer": layer, "pass": whole}
    return found


def trace(passes: Passes) -> list[Kernel]:
    """Trace some passes; returns all their kernels."""
    passes.begin()
    passes.run(_WARM_UPS)
    passes.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        passes.run(_PASSES)
        passes.wait()
    return kernels_of(profiler)


def draw(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw bars of a layer's steps, and of a pass's parts."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(11, 2 + 0.9 * len(found)), layout="constrained")
    for axes, part, title in zip(panels, ("layer", "pass"), ("a layer", "a pass"), strict=True):
        draw_bars(axes, {label: parts[part] for label, parts in found.items()})
        axes.set_xlabel(f"microseconds that each adds to {title}")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_bars(axes: Any, bars: dict[str, dict[str, float]]) -> None:
    """Draw a stacked bar for each label; a part has the same color in all bars."""
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    for height, label in enumerate(reversed(bars)):
        left = 0.0
        for name, width in bars[label].items():
            axes.barh(height, width, left=left, color=f"C{names.index(name)}", height=0.75)
            left += width
        axes.text(left, height, f" {left:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), list(reversed(bars)), fontsize=8)
    axes.margins(x=0.06)
    handles = [axes.barh(0, 0, color=f"C{number}") for number in range(len(names))]
    above = {"loc": "lower center", "bbox_to_anchor": (0.4, 1.0), "frameon": False}
    axes.legend(handles, names, fontsize=7, ncol=len(names), **above)


if __name__ == "__main__":
    main()
