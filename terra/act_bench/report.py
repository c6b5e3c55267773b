"""The benchmark's scores as files and as a table beside the published scores."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from terra.act_bench.estimation import Estimated
from terra.act_bench.published import NUM_SAMPLES, NUM_SCORED, PUBLISHED
from terra.act_bench.samples import CLASSES
from terra.act_bench.scores import ALL, Row, VideoScores, confusion
from terra.metrics.bootstrap import Estimate
from terra.tables import print_table
from tokenizer.files import make_folder, replacing, write_json

# Metric -> its title and the number of decimals shown.
_METRICS = {"accuracy": ("accuracy (higher)", 3), "ade": ("ADE, m (lower)", 2), "fde": ("FDE, m (lower)", 2)}


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a run.

    Attributes:
        estimated: the estimator's outputs and their samples.
        scores: scores of these samples, in the same order.
        rows: means over all samples and by class.
        left_out: sample id -> why the sample is not scored.
        facts: further content of results.json.
    """

    estimated: Estimated
    scores: VideoScores
    rows: Sequence[Row]
    left_out: dict[int, str]
    facts: dict[str, Any]

    @property
    def coverage(self) -> str:
        """The share of the benchmark that was scored, such as "12 of 1,979 scored samples"."""
        return f"{len(self.estimated.samples):,} of {NUM_SCORED[ALL]:,} scored samples"


def write_results(folder: Path, results: Results) -> None:
    """Write results.json, results.csv (a row per class) and estimates.jsonl (a line per video).

    NaN, which JSON lacks, is written as null. Raises OutputError.
    """
    make_folder(folder)
    content = {
        "format": "terra-act-bench",
        "coverage": {
            "statement": results.coverage,
            "scored": len(results.estimated.samples),
            "benchmark_scored": NUM_SCORED[ALL],
            "benchmark_samples": NUM_SAMPLES,
        },
        "scores": {
            row.name: {"samples": row.count, "benchmark_samples": NUM_SCORED[row.name], "drives": row.accuracy.units}
            | {metric: _interval(getattr(row, metric)) for metric in _METRICS}
            for row in results.rows
        },
        "confusion": {"classes": CLASSES, "wanted_by_estimated": confusion(results.scores).tolist()},
        "published": {
            model: {name: asdict(score) for name, score in scores.items()} for model, scores in PUBLISHED.items()
        },
        "left_out": {str(sample_id): why for sample_id, why in sorted(results.left_out.items())},
    }
    write_json(folder / "results.json", content | results.facts)
    _write_csv(folder / "results.csv", results)
    _write_estimates(folder / "estimates.jsonl", results)


def print_report(console: Console, results: Results) -> None:
    """Print the means over all videos beside the published scores, and the means by class."""
    overall = results.rows[0]
    table = Table("", "this run [95 %]", *PUBLISHED, title=f"ACT-Bench: {results.coverage}")
    for metric, (title, digits) in _METRICS.items():
        estimate = getattr(overall, metric)
        known = not math.isnan(estimate.low)
        interval = f" \\[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]" if known else ""
        published = (f"{getattr(scores[ALL], metric):.{digits}f}" for scores in PUBLISHED.values())
        table.add_row(title, f"{estimate.value:.{digits}f}{interval}", *published)
    print_table(console, table)
    table = Table("class", "samples", "accuracy", "ADE, m", "FDE, m", title="by class")
    for row in results.rows[1:]:
        values = ((getattr(row, metric).value, digits) for metric, (_, digits) in _METRICS.items())
        cells = ("-" if math.isnan(value) else f"{value:.{digits}f}" for value, digits in values)
        table.add_row(row.name, f"{row.count} of {NUM_SCORED[row.name]}", *cells)
    print_table(console, table)
    if overall.count < NUM_SCORED[ALL]:
        note = "The published numbers are of all scored samples, and not of this part."
        console.print(note, highlight=False, soft_wrap=True)
    if results.left_out:
        note = f"left out: {len(results.left_out)} samples, see left_out in results.json"
        console.print(note, highlight=False, soft_wrap=True)


def _write_csv(path: Path, results: Results) -> None:
    ours = [f"{metric}{end}" for metric in _METRICS for end in ("", "_low", "_high")]
    theirs = [f"{model.lower().replace(' ', '_')}_{metric}" for model in PUBLISHED for metric in _METRICS]
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "samples", "benchmark_samples", *ours, *theirs))
        for row in results.rows:
            numbers = [_interval(getattr(row, metric))[end] for metric in _METRICS for end in ("value", "low", "high")]
            published = [
                getattr(scores.get(row.name), metric, None) for scores in PUBLISHED.values() for metric in _METRICS
            ]
            writer.writerow((row.name, row.count, NUM_SCORED[row.name], *numbers, *published))


def _write_estimates(path: Path, results: Results) -> None:
    scores, estimated = results.scores, results.estimated
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for index, sample in enumerate(estimated.samples):
            record = {
                "sample_id": sample.sample_id,
                "label": sample.label,
                "class": CLASSES[scores.wanted[index]],
                "estimated": CLASSES[scores.estimated[index]],
                "ade": round(float(scores.ade[index]), 6),
                "fde": round(float(scores.fde[index]), 6),
                "logits": _rounded(estimated.logits[index]),
                "waypoints": _rounded(estimated.waypoints[index]),
            }
            file.write(json.dumps(record) + "\n")


def _rounded(values: np.ndarray) -> list[Any]:
    return values.astype(np.float64).round(6).tolist()


def _interval(estimate: Estimate) -> dict[str, float | None]:
    numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}
