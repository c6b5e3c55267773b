"""The evaluation's numbers as files (metrics.json, metrics.csv) and as tables in a terminal."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from terra.evaluation.criteria import Criterion
from terra.evaluation.measures import HALVES, Measure
from terra.evaluation.scores import TRUE, VARIANTS
from terra.metrics.bootstrap import Estimate
from tokenizer.files import make_folder, replacing

_COLUMNS = ("run", "metric", "variant", "first_frame", "last_frame", "value", "low", "high", "count", "units")


def write_metrics(
    folder: Path, measures: Sequence[Measure], criteria: Sequence[Criterion], facts: dict[str, Any]
) -> None:
    """Write metrics.json (facts, criteria, measures by run, metric and variant) and metrics.csv (a row per measure).

    NaN, which JSON lacks, is written as null. Raises OutputError.
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
    content = {**facts, "criteria": [asdict(criterion) for criterion in criteria], "measures": tree}
    with replacing(folder / "metrics.json") as temporary:
        temporary.write_text(json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with replacing(folder / "metrics.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for each in measures:
            numbers = each.estimate
            span = (each.first_frame, each.last_frame)
            writer.writerow((each.run, each.metric, each.variant, *span, *astuple(numbers)))


def print_report(console: Console, measures: Sequence[Measure], criteria: Sequence[Criterion]) -> None:
    """Print the measures over whole clips, a row per metric, and the criteria, if there are any."""
    print_measures(console, measures)
    if not criteria:
        return
    table = Table("requirement", "value", "limit", "", title="requirements")
    for criterion in criteria:
        mark = {True: "[green]passed", False: "[red]failed", None: "unknown"}[criterion.passed]
        value = "-" if criterion.value is None else f"{criterion.value:.3g}"
        table.add_row(criterion.name, value, criterion.limit, mark)
    console.print(table)


def print_measures(console: Console, measures: Sequence[Measure]) -> None:
    """Print the measures over whole clips: a table for each run, a row per metric."""
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
