"""The tables, the JSON file and the picture of the experiment on drafts and diagonal decoding."""

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from terra.benchmark.case import write_json
from terra.benchmark.measure import spread
from terra.evaluation.bootstrap import mean_estimate

NAME = "draft_experiment"
MEASURES = {"nats": ("cross-entropy, nats", 3), "psnr": ("PSNR, dB", 2), "ADE": ("ADE, m", 3)}
ASSUMPTION = (
    "speed-up: on a device where a pass costs the same with and without drafts (weights read once), tokens a pass"
)


def write_report(
    folder: Path, drafted: Sequence[dict[str, Any]], diagonal: Sequence[dict[str, Any]], resamples: int
) -> str:
    """Write draft_experiment.json, .txt and .png and return the tables as text.

    Args:
        drafted: a row for each clip and temperature with its frames, see `draft_measure.drafted_frames`.
        diagonal: a row for each way of decoding with its clips, the sequential one first.
        resamples: of the bootstrap over clips, for the mean differences to sequential decoding.
    """
    draft_rows = summarise_drafts(drafted)
    diagonal_rows = summarise_diagonal(diagonal, resamples)
    write_json(folder / f"{NAME}.json", {"drafts": draft_rows, "diagonal": diagonal_rows})
    text = _draft_table(drafted, draft_rows) + "\n" + _diagonal_table(diagonal, diagonal_rows)
    (folder / f"{NAME}.txt").write_text(text)
    _plot(folder / f"{NAME}.png", draft_rows, diagonal_rows)
    return text


def summarise_drafts(drafted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By temperature, kind and number of drafts the tokens a pass, over frames.

    `tokens_per_pass` is their spread, `overall` all tokens by all passes, and `changing` that of the quarter of frames
    (at least one) that copy the fewest tokens of the frame before; `left_out` counts near ties.
    """
    rows = []
    for temperature in dict.fromkeys(row["temperature"] for row in drafted):
        frames = [frame for row in drafted if row["temperature"] == temperature for frame in row["frames"]]
        frames.sort(key=lambda frame: frame["copied"])
        for kind, numbers in frames[0]["passes"].items():
            for number in numbers:
                counted = [frame for frame in frames if frame["passes"][kind][number] is not None]
                if not counted:
                    continue
                rates = [frame["tokens"] / frame["passes"][kind][number] for frame in counted]
                rows.append(
                    {
                        "temperature": temperature,
                        "drafts": kind,
                        "num_drafts": int(number),
                        "tokens_per_pass": spread(rates),
                        "overall": overall(counted, kind, number),
                        "changing": overall(counted[: max(1, len(counted) // 4)], kind, number),
                        "left_out": len(frames) - len(counted),
                    }
                )
    return rows


def overall(frames: Sequence[dict[str, Any]], kind: str, number: str) -> float:
    """Tokens of all frames by passes of all frames."""
    return sum(frame["tokens"] for frame in frames) / sum(frame["passes"][kind][number] for frame in frames)


def summarise_diagonal(diagonal: Sequence[dict[str, Any]], resamples: int) -> list[dict[str, Any]]:
    """By way of decoding each measure's spread over clips, and the mean difference to sequential decoding of a clip."""
    sequential = next(row["clips"] for row in diagonal if row["sequential"])
    rows = []
    for row in diagonal:
        about = {name: row[name] for name in ("lag", "sight", "sequential", "passes")}
        for measure in MEASURES:
            ours = np.array([clip[measure] for clip in row["clips"].values()])
            theirs = np.array([sequential[name][measure] for name in row["clips"]])
            about[measure] = spread(ours.tolist())
            about[f"{measure}_difference"] = asdict(mean_estimate(ours - theirs, num_resamples=resamples))
        rows.append(about)
    return rows


def _draft_table(drafted: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    table = Table(title="tokens a pass with drafts: the tokens of sequential decoding, each frame compared")
    table.add_column("drafts from")
    table.add_column("drafts", justify="right")
    for temperature in temperatures:
        name = f"T = {temperature:g}" if temperature else "greedy"
        for column in (f"{name}: median", "quartiles", "all (= speed-up)", "least copied quarter"):
            table.add_column(column, justify="right")
    keys = list(dict.fromkeys((row["drafts"], row["num_drafts"]) for row in rows))
    for kind, number in keys:
        cells = []
        for temperature in temperatures:
            found = [r for r in rows if (r["temperature"], r["drafts"], r["num_drafts"]) == (temperature, kind, number)]
            cells += _draft_cells(found[0]) if found else [""] * 4
        table.add_row(kind, str(number), *cells)
    notes = [ASSUMPTION]
    for temperature in temperatures:
        clips = [row for row in drafted if row["temperature"] == temperature]
        frames = [frame for row in clips for frame in row["frames"]]
        copied, entropy = spread([f["copied"] for f in frames]), spread([f["entropy"] for f in frames])
        left_out = sum(row["left_out"] for row in rows if row["temperature"] == temperature)
        notes.append(
            f"T = {temperature:g}: {len(frames)} frames of {len(clips)} clips; as in the frame before: "
            f"{copied['median']:.0%} of tokens ({copied['low']:.0%} to {copied['high']:.0%}); entropy "
            f"{entropy['median']:.2f} nats a token ({entropy['low']:.2f} to {entropy['high']:.2f}); left out for near "
            f"ties: {left_out}"
        )
    return _text(table, notes)


def _draft_cells(row: dict[str, Any]) -> list[str]:
    rate = row["tokens_per_pass"]
    return [
        f"{rate['median']:.2f}",
        f"{rate['low']:.2f} to {rate['high']:.2f}",
        f"{row['overall']:.2f}",
        f"{row['changing']:.2f}",
    ]


def _diagonal_table(diagonal: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    table = Table(title="diagonal decoding: not exact; medians and quartiles over clips, mean differences with 95 %")
    for name in ("lag", "a token sees"):
        table.add_column(name, no_wrap=True)
    for name in ("passes", "speed-up"):
        table.add_column(name, justify="right")
    for name, _ in MEASURES.values():
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("to sequential", justify="right", no_wrap=True)
    most = max(row["passes"] for row in rows)
    for row in rows:
        cells = []
        for measure, (_, digits) in MEASURES.items():
            value, difference = row[measure], row[f"{measure}_difference"]
            cells.append(f"{value['median']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})")
            low, high = (f"{difference[end]:+.{digits}f}" for end in ("low", "high"))
            cells.append("" if row["sequential"] else f"{difference['value']:+.{digits}f} ({low} to {high})")
        name = "sequential" if row["sequential"] else str(row["lag"])
        sight = "" if row["sequential"] else row["sight"]
        table.add_row(name, sight, str(row["passes"]), f"{most / row['passes']:.1f}x", *cells)
    clips = diagonal[0]["clips"]
    return _text(table, [f"{len(clips)} clips; cross-entropy of the true frames, PSNR and ADE of generated ones"])


def _text(table: Table, notes: Sequence[str]) -> str:
    console = Console(width=210, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text() + "".join(f"{note}\n" for note in notes)


def _plot(path: Path, drafts: Sequence[dict[str, Any]], diagonal: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(dict.fromkeys(row["drafts"] for row in drafts), ("#4477aa", "#ccbb44", "#cc3311"), strict=False))
    for (kind, temperature), style in {(r["drafts"], r["temperature"]): r["temperature"] > 0 for r in drafts}.items():
        rows = [row for row in drafts if (row["drafts"], row["temperature"]) == (kind, temperature)]
        numbers = [row["num_drafts"] for row in rows]
        medians = [row["tokens_per_pass"]["median"] for row in rows]
        name = f"{kind}, " + (f"T = {temperature:g}" if temperature else "greedy")
        left.plot(numbers, medians, "o-" if style else "o--", color=colours[kind], label=name)
        if temperature:
            bounds = [[row["tokens_per_pass"][end] for row in rows] for end in ("low", "high")]
            left.fill_between(numbers, *bounds, color=colours[kind], alpha=0.15)
    left.set_xscale("log", base=2)
    left.set_xticks(numbers := sorted({row["num_drafts"] for row in drafts}), [str(number) for number in numbers])
    left.minorticks_off()
    left.set_xlabel("drafts a pass")
    left.set_ylabel("tokens a pass, median and quartiles")
    left.set_ylim(bottom=1.0)
    left.legend()
    for sight in dict.fromkeys(row["sight"] for row in diagonal if not row["sequential"]):
        rows = [row for row in diagonal if row["sight"] == sight and not row["sequential"]]
        speed = [max(r["passes"] for r in diagonal) / row["passes"] for row in rows]
        differences = [row["nats_difference"] for row in rows]
        values = [each["value"] for each in differences]
        errors = [
            [max(each["value"] - each["low"], 0.0) for each in differences],
            [max(each["high"] - each["value"], 0.0) for each in differences],
        ]
        right.errorbar(speed, values, yerr=errors, marker="o", capsize=3, label=f"diagonal, a token sees {sight}")
    right.axhline(0.0, color="#222222", linewidth=0.8, label="exact: sequential, drafts")
    right.set_xlabel("fewer passes than sequential decoding, times")
    right.set_ylabel("cross-entropy above sequential, nats a token")
    right.legend()
    partial = path.with_name("partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
