"""The evaluation's numbers as files and as a table: metrics.json, metrics.csv, and what a terminal shows."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from terra.evaluation.bars import Bar
from terra.evaluation.bootstrap import Estimate
from terra.evaluation.measures import HALVES, Measure
from terra.evaluation.scores import TRUE, VARIANTS
from tokenizer.files import make_folder, replacing

_COLUMNS = ("run", "metric", "variant", "first_frame", "last_frame", "value", "low", "high", "count", "units")


def write_metrics(folder: Path, measures: Sequence[Measure], bars: Sequence[Bar], facts: dict[str, Any]) -> None:
    """Write metrics.json (facts, measures by run, metric and variant, bars) and metrics.csv (a row a measure).

    NaN, which JSON lacks, is null. Raises OutputError.
    """
    make_folder(folder)
    tree: dict[str, Any] = {}
    for measure in measures:
        node = tree.setdefault(measure.run, {}).setdefault(measure.metric, {}).setdefault(measure.variant, {})
        numbers = asdict(measure.estimate)
        if measure.first_frame is None:
            node.update(numbers)
        else:
            frames = {"first_frame": measure.first_frame, "last_frame": measure.last_frame}
            node.setdefault("by_frame", []).append(frames | numbers)
    content = {**facts, "bars": [asdict(bar) for bar in bars], "measures": tree}
    with replacing(folder / "metrics.json") as temporary:
        temporary.write_text(json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with replacing(folder / "metrics.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for each in measures:
            numbers = each.estimate
            span = (each.first_frame, each.last_frame)
            writer.writerow((each.run, each.metric, each.variant, *span, *astuple(numbers)))


def print_report(console: Console, measures: Sequence[Measure], bars: Sequence[Bar]) -> None:
    """The measures over whole clips, a row a metric, and the bars."""
    print_measures(console, measures)
    table = Table("requirement", "value", "limit", "", title="requirements")
    for bar in bars:
        mark = {True: "[green]passed", False: "[red]failed", None: "unknown"}[bar.passed]
        table.add_row(bar.name, "-" if bar.value is None else f"{bar.value:.3g}", bar.limit, mark)
    console.print(table)


def print_measures(console: Console, measures: Sequence[Measure]) -> None:
    """The measures over whole clips: a table for each run, a row a metric."""
    variants = (*VARIANTS, TRUE, HALVES)
    whole = [each for each in measures if each.first_frame is None]
    for run in dict.fromkeys(each.run for each in whole):
        table = Table(Column("metric", no_wrap=True), *variants, "samples", title=f"{run}: mean [95 % interval]")
        for metric in dict.fromkeys(each.metric for each in whole if each.run == run):
            of = {each.variant: each.estimate for each in whole if (each.run, each.metric) == (run, metric)}
            counts = max(estimate.count for estimate in of.values())
            table.add_row(metric, *(_cell(of.get(variant)) for variant in variants), str(counts))
        console.print(table)


def _cell(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} \\[{estimate.low:.3g}, {estimate.high:.3g}]"


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
