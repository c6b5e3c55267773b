"""Measures how much data a new domain needs: held-out cross-entropy against frames, for three ways of training.

    python scripts/adapter_curves.py --output outputs/curves --old-data data/town_tokens \\
        --domains camera=data/camera_tokens snow=data/snow_tokens

On the first 100, 1,000 and 10,000 frames of each domain the script trains with `terra train`: an adapter of rank 16 of
the shipped model, all of the shipped model's weights, and a model of the same size from nothing. It writes curves.json,
curves.md and curves.png. What is finished is kept, and the same command goes on. The exit code is 0 if all is done, 75
if `--seconds` are over first, 1 if a training failed.

Every training predicts the held-out windows now and then, and its lowest cross-entropy counts, for all three ways
alike: few frames are soon learned by heart.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from terra.dataset.tokens import TokenizedDriving, load_tokens
from terra.training.curves import read_log
from tokenizer.files import write_json

METHODS = {
    "adapter": ("adapter, rank 16", "#0072B2", ["recipe=world_model_adapter"]),
    "full": ("full fine-tuning", "#D55E00", ["init_from=demo", "learning_rate=2e-4", "warmup_steps=20"]),
    "nothing": ("from nothing", "#009E73", ["learning_rate=1e-3", "warmup_steps=50"]),
}
STEPS = {100: 60, 1_000: 150, 10_000: 300}
STEPS_FROM_NOTHING = 1.5  # times as many


@dataclass(frozen=True)
class Training:
    """One point of a curve: a way of training on the first frames of a domain's tokens."""

    domain: str
    data: Path
    frames: int
    method: str
    output: Path

    @property
    def done(self) -> bool:
        """Whether the training has written its figures."""
        return (self.output / "metrics.json").exists()

    def command(self, old_data: Path | None) -> list[str]:
        """The command line of the training; `old_data` are the tokens of the shipped model's own domain."""
        steps = int(STEPS[self.frames] * (STEPS_FROM_NOTHING if self.method == "nothing" else 1))
        values: dict[str, Any] = {
            "data": self.data,
            "output": self.output,
            "max_frames": self.frames,
            "max_steps": steps,
            "schedule": "steps",
            "max_seconds": "null",
            "ema_decay": 0.98,
            "ema_every_steps": 1,
            "save_every_seconds": 15,
            "evaluation_windows": 32,
            "keep": "best",
            "max_shard_size": "12MB",
        }
        if old_data is not None and self.method != "nothing":
            values["old_data"] = old_data
        arguments = [f"{name}={value}" for name, value in values.items()]
        return [sys.executable, "-m", "terra", "train", *METHODS[self.method][2], *arguments]

    def figures(self) -> dict[str, Any]:
        """A row of the table: cross-entropy (nats a token, the lowest), its start, and the old domain's."""
        metrics = json.loads((self.output / "metrics.json").read_text())
        start = metrics.get("start", {})
        return {
            "domain": self.domain,
            "frames": min(self.frames, frames_of(self.data)),
            "method": self.method,
            "cross_entropy": min([metrics["cross_entropy"], *read_log(self.output, "held_out_cross_entropy")[1]]),
            "last_cross_entropy": metrics["cross_entropy"],
            "accuracy": metrics["accuracy"],
            "start": start.get("cross_entropy"),
            "old": metrics.get("old", {}).get("cross_entropy"),
            "old_start": start.get("old", {}).get("cross_entropy"),
            "steps": metrics["step"],
            "seconds": metrics["seconds"],
        }


def plan(domains: dict[str, Path], output: Path) -> list[Training]:
    """All trainings, those on the most frames first. A domain's last point takes all frames that it has."""
    trainings = []
    for name, data in domains.items():
        there = frames_of(data)
        last = next((frames for frames in STEPS if frames >= there), max(STEPS))
        for frames in (frames for frames in STEPS if frames <= last):
            trainings += [Training(name, data, frames, way, output / name / f"{way}_{frames}") for way in METHODS]
    return sorted(trainings, key=lambda each: (each.method == "nothing", -each.frames))


def frames_of(data: Path) -> int:
    """Number of frames of the training split."""
    return len(load_tokens(data / "train").tokens)


def old_data_for(data: Path, old_data: Path | None) -> Path | None:
    """`old_data`, if its frames have the actions of `data`, so that one model can be asked for both."""
    if old_data is None:
        return None
    both: list[TokenizedDriving] = [load_tokens(folder / "held_out") for folder in (data, old_data)]
    same = (both[0].space, both[0].fps) == (both[1].space, both[1].fps)
    return old_data if same else None


def train_all(trainings: list[Training], old_data: Path | None, gpus: list[str], jobs: int, seconds: float) -> bool:
    """Run what is not done, `jobs` trainings at a time on each GPU; after `seconds` the running ones save their state.

    Returns whether none failed.
    """
    started = time.monotonic()
    waiting = [training for training in trainings if not training.done]
    free = gpus * jobs
    running: list[tuple[Training, subprocess.Popen[bytes], str]] = []
    failed: list[Training] = []
    stopped = False
    while running or (waiting and not stopped):
        stopped = stopped or time.monotonic() - started > seconds
        if stopped:
            for _, process, _ in running:
                process.terminate()
        while waiting and free and not stopped:
            training, gpu = waiting.pop(0), free.pop(0)
            training.output.mkdir(parents=True, exist_ok=True)
            with (training.output / "output.txt").open("ab") as log:
                process = subprocess.Popen(
                    training.command(old_data_for(training.data, old_data)),
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else None,
                )
            running.append((training, process, gpu))
        for item in [item for item in running if item[1].poll() is not None]:
            running.remove(item)
            training, process, gpu = item
            free.append(gpu)
            failed += [training] if process.returncode else []
            took = f"{time.monotonic() - started:.0f} s, {len(waiting) + len(running)} left"
            print(f"{training.domain} {training.frames} {training.method}: exit code {process.returncode} ({took})")
            sys.stdout.flush()
        time.sleep(0.2)
    for training in failed:
        print((training.output / "output.txt").read_text()[-1500:], file=sys.stderr)
    return not failed


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Write and print the figures as a table of Markdown."""
    lines = [
        "| domain | frames | training | nats a token | before | of full's gain | old domain | before | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    full = {(row["domain"], row["frames"]): row for row in rows if row["method"] == "full"}
    for row in rows:
        share, other = None, full.get((row["domain"], row["frames"]))
        if row["method"] == "adapter" and other is not None:
            share = (row["start"] - row["cross_entropy"]) / (other["start"] - other["cross_entropy"])
        cells = [
            row["domain"],
            f"{row['frames']:,}",
            METHODS[row["method"]][0],
            f"{row['cross_entropy']:.3f}",
            *("" if row[name] is None else f"{row[name]:.3f}" for name in ("start",)),
            "" if share is None else f"{share:.0%}",
            *("" if row[name] is None else f"{row[name]:.3f}" for name in ("old", "old_start")),
            f"{row['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the curves, a plot for each domain."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure = Figure(figsize=(3.6 * len(domains), 3.4), layout="constrained")
    plots = figure.subplots(1, len(domains), squeeze=False)[0]
    for axes, domain in zip(plots, domains, strict=True):
        mine = [row for row in rows if row["domain"] == domain]
        for method, (label, color, _) in METHODS.items():
            points = sorted((row["frames"], row["cross_entropy"]) for row in mine if row["method"] == method)
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=color, label=label)
        starts = [row["start"] for row in mine if row["start"] is not None and row["method"] == "full"]
        if starts:
            axes.axhline(starts[0], color="0.5", linestyle=":", label="shipped model")
        axes.set(xscale="log", title=domain, xlabel="frames of the new domain")
        axes.grid(alpha=0.3)
    plots[0].set_ylabel("held-out cross-entropy (nats a token)")
    plots[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Parse the command line, train, write what was found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domains", nargs="+", required=True, metavar="NAME=TOKENS")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--old-data", type=Path, help="tokens of the shipped model's own domain: what is forgotten")
    parser.add_argument("--gpus", nargs="+", default=[""], help="CUDA_VISIBLE_DEVICES of the trainings")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time on each GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no training goes on for longer")
    arguments = parser.parse_args()
    domains = {name: Path(data) for name, _, data in (pair.partition("=") for pair in arguments.domains)}
    trainings = plan(domains, arguments.output)
    good = train_all(trainings, arguments.old_data, arguments.gpus, arguments.jobs, arguments.seconds)
    order = {name: index for index, name in enumerate(METHODS)}
    done = sorted((t for t in trainings if t.done), key=lambda t: (t.domain, t.frames, order[t.method]))
    rows = [training.figures() for training in done]
    write_json(arguments.output / "curves.json", {"trainings": rows})
    if rows:
        write_table(rows, arguments.output / "curves.md")
        draw(rows, arguments.output / "curves.png")
    if not good:
        return 1
    return 0 if len(rows) == len(trainings) else 75


if __name__ == "__main__":
    sys.exit(main())
