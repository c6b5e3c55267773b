"""Plots of a training run's log.jsonl."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from terra.errors import OutputError
from tokenizer.files import replacing

_COLOR, _OLD_COLOR = "#0072B2", "#D55E00"


def read_log(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Read from a run's log.jsonl the steps that logged a number called `name`, and those numbers.

    Raises:
        OutputError: no log, or nothing of that name in it.
    """
    path = run / "log.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
        # A killed run may have left a part of its last line.
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: expected the log of a training run: {error}") from None
    found = [(line["step"], line[name]) for line in lines if name in line]
    if not found:
        known = sorted({key for line in lines for key in line})
        raise OutputError(f"{path}: expected {name}, got {', '.join(known) or 'nothing'}")
    return [step for step, _ in found], [value for _, value in found]


def draw_log(run: Path, curves: Mapping[str, str]) -> Figure:
    """Plot logged numbers against the step, one plot for each item of `curves` (name in the log: label of the y axis).

    Raises:
        OutputError: see `read_log`.
    """
    figure = Figure(figsize=(3.2 * len(curves), 2.6), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(*read_log(run, name), ".-", color=_COLOR, markersize=4)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    return figure


def plot_learning(run: Path, metrics: Mapping[str, Any]) -> None:
    """Write `learning.png`: held-out cross-entropy of the new domain, and of the old one, against the step.

    Args:
        run: a run that started from a model's weights.
        metrics: what its metrics.json holds; the curves begin at "start" and end at the stored weights.

    Raises:
        OutputError: the picture can't be written.
    """
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, label, color, start, end in (
        ("held_out_cross_entropy", "new domain", _COLOR, metrics["start"], metrics),
        ("old_held_out_cross_entropy", "old domain", _OLD_COLOR, metrics["start"].get("old"), metrics.get("old")),
    ):
        if start is None or end is None:
            continue
        try:
            steps, values = read_log(run, name)
        except OutputError:
            steps, values = [], []  # a run that ended before its first save
        between = [(step, value) for step, value in zip(steps, values, strict=True) if 0 < step < metrics["step"]]
        points = [(0, start["cross_entropy"]), *between, (metrics["step"], end["cross_entropy"])]
        axes.plot(*zip(*points, strict=True), ".-", color=color, label=label)
        axes.axhline(start["cross_entropy"], color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="held-out cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(run / "learning.png") as temporary:
        figure.savefig(temporary, dpi=120, format="png")
