"""The evaluation's numbers as files (metrics.json, metrics.csv) and as tables in a terminal."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from terra.evaluation.comparison import ModelColumn, higher_is_better, is_clear, unit_of
from terra.evaluation.criteria import Criterion
from terra.evaluation.measures import HALVES, Measure
from terra.evaluation.scores import TRUE, VARIANTS
from terra.metrics.bootstrap import Estimate
from terra.tables import print_table
from tokenizer.files import make_folder, replacing

_T = TypeVar("_T")

_LEGEND = (
    "Brackets: 95 % intervals over places. A difference is of the same clips with the same seeds, paired clip "
    "by clip; bold: its whole interval lies on one side of 0."
)
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


def write_comparison(
    folder: Path, columns: Sequence[ModelColumn], facts: Mapping[str, Mapping[str, Any]], *, complete: bool
) -> None:
    """Write the table of several models as compare.json and compare.md. Raises OutputError.

    Args:
        folder: is made if it is not there.
        columns: the models, the base first.
        facts: those of each model's metrics.json, by its name.
        complete: whether all models are there.
    """
    make_folder(folder)
    base = facts[columns[0].name]
    content = {
        "format": "terra-comparison",
        "complete": complete,
        "intervals": base["intervals"],
        "clips": base["clips"],
        "rows": {row: {"unit": unit_of(row), "higher_is_better": higher_is_better(row)} for row in columns[0].values},
        "models": {
            each.name: {
                **{name: facts[each.name][name] for name in ("tokenizer", "world_model", "checkpoints")},
                "adapter": facts[each.name]["settings"]["adapter"],
                "values": {row: asdict(value) for row, value in each.values.items()},
                "differences": {row: asdict(value) for row, value in each.differences.items()},
            }
            for each in columns
        },
    }
    with replacing(folder / "compare.json") as temporary:
        temporary.write_text(json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    header, rows = _cells(columns, lambda text, clear: f"**{text}**" if clear else text)
    lines = [header, ["---"] * len(header), *rows]
    settings = base["settings"]
    text = [
        f"# {', '.join(each.name for each in columns)} on {base['clips']} clips of {settings['data']} "
        f"({settings['split']})",
        *(f"| {' | '.join(line)} |" for line in lines),
        _LEGEND,
    ]
    with replacing(folder / "compare.md") as temporary:
        temporary.write_text("\n\n".join([text[0], "\n".join(text[1:-1]), text[-1]]) + "\n", encoding="utf-8")


def print_comparison(console: Console, columns: Sequence[ModelColumn]) -> None:
    """Print the table of several models, the base first."""
    header, rows = _cells(columns, lambda text, clear: Text(text, style="bold" if clear else ""))
    table = Table(*(name.plain for name in header))
    for row in rows:
        table.add_row(*row)
    print_table(console, table)
    console.print(_LEGEND, markup=False, highlight=False, soft_wrap=True)


def _cells(columns: Sequence[ModelColumn], mark: Callable[[str, bool], _T]) -> tuple[list[_T], list[list[_T]]]:
    """The header and the rows of the table; `mark` gets each cell, and whether it is a clear difference."""
    base, *others = columns
    names = [each.name for each in columns]
    header = [mark(name, False) for name in ("", "better", *names, *(f"{each} - {base.name}" for each in names[1:]))]
    rows = []
    for row in base.values:
        unit = unit_of(row)
        texts = [f"{row} ({unit})" if unit else row, "higher" if higher_is_better(row) else "lower"]
        cells = [mark(text, False) for text in (*texts, *(_plain_cell(each.values.get(row)) for each in columns))]
        for difference in (each.differences.get(row) for each in others):
            is_marked = difference is not None and is_clear(difference)
            cells.append(mark(_plain_cell(difference, sign="+"), is_marked))
        rows.append(cells)
    return header, rows


def print_report(console: Console, measures: Sequence[Measure], criteria: Sequence[Criterion]) -> None:
    """Print the measures over whole clips, a row per metric, and the criteria, if there are any."""
    print_measures(console, measures)
    if not criteria:
        return
    table = Table("requirement", "value", "limit", "", title="requirements")
    for criterion in criteria:
        mark = {True: "[green]passed", False: "[red]failed", None: "unknown"}[criterion.passed]
        if criterion.too_few is not None:
            mark = f"[yellow]too few: {criterion.too_few}"
        value = "-" if criterion.value is None else f"{criterion.value:.3g}"
        table.add_row(criterion.name, value, criterion.limit, mark)
    print_table(console, table)


def print_measures(console: Console, measures: Sequence[Measure]) -> None:
    """Print the measures over whole clips: a table for each run, a row per metric, a column per variant with values."""
    usual = (*VARIANTS, TRUE, HALVES)
    whole = [each for each in measures if each.first_frame is None]
    for run in dict.fromkeys(each.run for each in whole):
        known = [each for each in whole if each.run == run and not math.isnan(each.estimate.value)]
        variants = tuple(dict.fromkeys(each.variant for each in known))
        if set(variants) <= set(usual):
            variants = tuple(each for each in usual if each in variants)
        table = Table("metric", *variants, "samples", title=f"{run}: mean [95 % interval]")
        for metric in dict.fromkeys(each.metric for each in whole if each.run == run):
            of = {each.variant: each.estimate for each in whole if (each.run, each.metric) == (run, metric)}
            counts = max(estimate.count for estimate in of.values())
            table.add_row(metric, *(_cell(of.get(variant)) for variant in variants), str(counts))
        print_table(console, table)


def _cell(estimate: Estimate | None) -> str:
    return _plain_cell(estimate).replace(" [", " \\[")  # rich reads [ as markup


def _plain_cell(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None or math.isnan(estimate.value):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:{sign}.3g}"
    return f"{estimate.value:{sign}.3g} [{estimate.low:{sign}.3g}, {estimate.high:{sign}.3g}]"


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
