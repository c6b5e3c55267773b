"""The report of a benchmark: its results as a JSON file, a table and a plot."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from terra.benchmark.case import BANDWIDTH, result_path, write_json
from terra.benchmark.measure import spread
from terra.benchmark.model import Traffic
from terra.benchmark.plan import NUM_WARMUP_FRAMES, Case, Workload
from terra.tables import print_table

_BINS = {"0": 0, "1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-32": 32, "33-64": 64, "more": None}
"""Bins of the tokens that a pass gives, each with the most that fall into it."""

_BASELINES = {"hf_generate": "vs Hugging Face generate", "vllm_eager_per_frame": "vs vLLM per frame"}


def write_report(folder: Path, plan: dict[str, Any], cases: list[Case], failures: dict[str, str]) -> str:
    """Write benchmark.json, .txt and .png from the results in `folder`, and return the table as text."""
    path = result_path(folder, BANDWIDTH, BANDWIDTH)
    rates = json.loads(path.read_text()) if path.exists() else None
    bandwidth = {kind: spread(values) for kind, values in rates.items()} if rates else None
    rows = [
        _row(folder, plan, case, workload, bandwidth)
        for case in cases
        for workload in case.workloads
        if result_path(folder, case.name, workload.name).exists()
    ]
    add_speedups(rows)
    about = {key: plan[key] for key in ("device_name", "dtype", "world_model", "traffic")}
    report = about | {"bandwidth": bandwidth, "rows": rows, "failures": failures}
    write_json(folder / "benchmark.json", report)
    console = Console(record=True, file=io.StringIO(), force_terminal=False)
    print_report(console, report)
    text = console.export_text()
    (folder / "benchmark.txt").write_text(text)
    if rows:
        _plot(folder / "benchmark.png", about, rows)
    return text


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Add to each row how many times faster it is than each baseline in the same part of the window.

    Rollouts at once are compared with as many of the baseline's, or with nothing; where a baseline has a cold and a
    warm pass, the warm one counts, which is the last.
    """
    for row in rows:
        for baseline in _BASELINES:
            same = (baseline, row["window_part"], row["rollouts"])
            other = [r for r in rows if (r["case"], r["window_part"], r["rollouts"]) == same]
            row["speedup"][baseline] = row["frames_per_second"] / other[-1]["frames_per_second"] if other else None


def _row(
    folder: Path, plan: dict[str, Any], case: Case, workload: Workload, bandwidth: dict[str, Any] | None
) -> dict[str, Any]:
    repeats = json.loads(result_path(folder, case.name, workload.name).read_text())["repeats"]
    passes = itertools.zip_longest(*(repeat.get("passes", ()) for repeat in repeats), fillvalue=0)
    seconds = spread([value for repeat in repeats for value in repeat["seconds"]])
    before = workload.num_context + NUM_WARMUP_FRAMES + (workload.num_frames - 1) / 2
    moved = Traffic(**plan["traffic"]).frame_bytes(
        workload.rollouts,
        before,
        element=plan["element"],
        weight_bytes=case.weight_bytes,
        head_bytes=case.head_bytes,
        kv_bytes=case.kv_bytes,
    )
    roofline = moved / max(each["median"] for each in bandwidth.values()) if bandwidth else None
    return {
        "case": case.name,
        "label": case.label,
        "way": workload.way,
        "rollouts": workload.rollouts,
        "window_part": workload.window_part,
        "frames_before": before,
        "seconds_per_frame": seconds,
        "first_frame_seconds": spread([repeat["first"] for repeat in repeats]),
        "frames_per_second": workload.rollouts / seconds["median"],
        "frame_bytes": moved,
        "roofline_seconds": roofline,
        "roofline_share": roofline / seconds["median"] if roofline else None,
        "timed_tokens": repeats[0].get("timed_tokens"),
        "drafts": case.arguments.get("drafts", 0),
        "passes": [sum(counts) for counts in passes],
        "speedup": {},
    }


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the tables of a report, the content of benchmark.json, and what is to be known of them."""
    bandwidth, rows = report["bandwidth"], report["rows"]
    title = f"{report['device_name']}, {report['dtype']}, {Path(report['world_model']).name}"
    if bandwidth:
        read, copy = bandwidth["read"], bandwidth["copy"]
        title += f"; memory reads {read['median'] / 1e9:.1f} GB/s ({read['low'] / 1e9:.1f} to {read['high'] / 1e9:.1f})"
        title += f", copies {copy['median'] / 1e9:.1f} GB/s"
    table = Table(title=title)
    for name in ("case", "way", "window part"):
        table.add_column(name)
    for name in (
        "rollouts",
        "s/frame",
        "quartiles",
        "n",
        "frames/s",
        *_BASELINES.values(),
        "of roofline",
        "first frame s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        seconds = row["seconds_per_frame"]
        share = row["roofline_share"]
        table.add_row(
            row["label"],
            row["way"],
            row["window_part"],
            str(row["rollouts"]),
            f"{seconds['median']:.4g}",
            f"{seconds['low']:.4g} to {seconds['high']:.4g}",
            str(seconds["count"]),
            f"{row['frames_per_second']:.4g}",
            *(f"{times:.2f}x" if (times := row["speedup"][baseline]) else "" for baseline in _BASELINES),
            f"{share:.0%}" if share else "",
            f"{row['first_frame_seconds']['median']:.4g}",
        )
    print_table(console, table)
    drafted = [row for row in rows if row["drafts"] and row["passes"]]
    if drafted:
        print_table(console, _passes_table(drafted, report["traffic"]["image_tokens"]))
    notes = [f"not measured: {name}: {reason}" for name, reason in report["failures"].items()]
    extrapolated = {row["timed_tokens"] for row in rows if row["timed_tokens"]}
    if extrapolated:
        total = report["traffic"]["image_tokens"]
        notes.append(f"Hugging Face generate: timed for {min(extrapolated)} of {total} tokens of each frame")
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _passes_table(rows: list[dict[str, Any]], image_tokens: int) -> Table:
    """How many tokens the passes of a rollout gave: those of the accepted drafts and the one behind them."""
    table = Table(title="Share of a rollout's passes by the tokens that they gave")
    for name in ("case", "way", "window part"):
        table.add_column(name)
    for name in ("rollouts", "drafts", *_BINS, "tokens a pass", "passes a frame"):
        table.add_column(name, justify="right")
    for row in rows:
        passes, counts, shares = row["passes"], sum(row["passes"]), []
        first = 0
        for most in _BINS.values():
            end = len(passes) if most is None else most + 1
            shares.append(sum(passes[first:end]) / counts)
            first = end
        mean = sum(tokens * count for tokens, count in enumerate(passes)) / counts
        table.add_row(
            row["label"],
            row["way"],
            row["window_part"],
            str(row["rollouts"]),
            str(row["drafts"]),
            *(f"{share:.0%}" if share else "" for share in shares),
            f"{mean:.1f}",
            f"{image_tokens / mean:.1f}",
        )
    return table


def _plot(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.32 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['label']}, {row['way']}, {row['rollouts']} at the {row['window_part']}" for row in rows]
    rates = [row["frames_per_second"] for row in rows]
    # Equal measurements give quartiles that differ by a rounding, to either side.
    spreads = [(row["rollouts"], row["seconds_per_frame"]) for row in rows]
    bounds = [(rollouts / seconds["high"], rollouts / seconds["low"]) for rollouts, seconds in spreads]
    errors = [
        [max(rate - lowest, 0.0) for rate, (lowest, _) in zip(rates, bounds, strict=True)],
        [max(highest - rate, 0.0) for rate, (_, highest) in zip(rates, bounds, strict=True)],
    ]
    axes.barh(names, rates, xerr=errors, color="#4477aa", ecolor="#222222", label="measured, with quartiles")
    roofs = [row["rollouts"] / row["roofline_seconds"] if row["roofline_seconds"] else None for row in rows]
    known = [(roof, name) for roof, name in zip(roofs, names, strict=True) if roof]
    if known:
        axes.scatter(*zip(*known, strict=True), marker="|", s=160, color="#cc3311", label="memory bandwidth allows")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("frames a second, all rollouts together")
    axes.set_title(f"{about['device_name']}, {about['dtype']}")
    axes.legend(loc="lower right")
    partial = path.with_name("partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
