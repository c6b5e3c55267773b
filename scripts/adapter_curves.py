"""Measures how much data a new domain needs: held-out cross-entropy against frames, for three ways of training.

    python scripts/adapter_curves.py output=outputs/curves domains=camera=data/camera_tokens,snow=data/snow_tokens \\
        old_data=data/town_tokens

Trains with `terra train` an adapter of rank 16 of the shipped model, all of its weights, and a model of the same size
from nothing, on the first 100, 1,000 and 10,000 frames of each domain. Writes curves.json, curves.md and curves.png.
What is finished is kept; the same command goes on. Exit code: 0 all is done, 75 run it again (after `seconds`).
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from terra.dataset.tokens import load_tokens
from tokenizer.files import write_json

METHODS = {
    "adapter": ["init_from=demo", "adapter.rank=16", "learning_rate=2e-3", "weight_decay=0.0"],
    "full": ["init_from=demo", "learning_rate=2e-4"],
    "nothing": ["learning_rate=1e-3"],
}
NAMES = {"adapter": "adapter, rank 16", "full": "full fine-tuning", "nothing": "from nothing"}
COLORS = {"adapter": "#0072B2", "full": "#D55E00", "nothing": "#009E73"}
FRAMES = (100, 1_000, 10_000)
STEPS = {100: 100, 1_000: 300, 10_000: 1_200}
STEPS_FROM_NOTHING = 2  # times as many
DEFAULTS = {
    "output": "outputs/curves",
    "domains": "",
    "old_data": "",
    "device": "cuda",
    "parallel": "3",
    "seconds": "1e9",
}


def command(settings: dict[str, str], method: str, data: str, frames: int, output: Path) -> list[str]:
    """The arguments of one training."""
    steps = STEPS[frames] * (STEPS_FROM_NOTHING if method == "nothing" else 1)
    values = {
        "data": data, "output": output, "device": settings["device"], "max_frames": frames, "max_steps": steps,
        "schedule": "steps", "max_seconds": "null", "batch_size": 16, "warmup_steps": 20, "ema_decay": 0.98,
        "ema_every_steps": 1, "save_every_seconds": 1e6, "evaluation_windows": 64,
    }  # fmt: skip
    if settings["old_data"] and method != "nothing" and same_actions(data, settings["old_data"]):
        values["old_data"] = settings["old_data"]
    return [
        sys.executable,
        "-m",
        "terra",
        "train",
        *METHODS[method],
        *(f"{name}={value}" for name, value in values.items()),
    ]


def same_actions(data: str, old_data: str) -> bool:
    """Whether the old domain can be measured with the new one's actions."""
    one, other = (load_tokens(Path(folder) / "held_out") for folder in (data, old_data))
    return (one.space, one.fps) == (other.space, other.fps)


def train_all(settings: dict[str, str], domains: dict[str, str], output: Path) -> bool:
    """Run what is not finished, `parallel` trainings at a time; whether all is finished."""
    jobs = []
    for name, data in domains.items():
        frames_there = len(load_tokens(Path(data) / "train").tokens)
        for frames in FRAMES:
            jobs += [
                (name, data, frames, method)
                for method in METHODS
                if frames <= frames_there or frames == next_above(frames_there)
            ]
    jobs.sort(key=lambda job: -job[2])
    waiting = [job for job in jobs if not (folder(output, *job) / "metrics.json").exists()]
    started, running, failed = time.monotonic(), {}, []
    while waiting or running:
        for process, (job, log) in list(running.items()):
            if process.poll() is not None:
                log.close()
                del running[process]
                print(
                    f"{time.monotonic() - started:.0f} s: {job[0]} {job[2]} {job[3]}: {process.returncode}", flush=True
                )
                failed += [job] if process.returncode else []
        out_of_time = time.monotonic() - started > float(settings["seconds"])
        if out_of_time and running:
            for process in running:
                process.terminate()  # saves its state
        while waiting and len(running) < int(settings["parallel"]) and not out_of_time:
            job = waiting.pop(0)
            folder(output, *job).mkdir(parents=True, exist_ok=True)
            log = (folder(output, *job) / "training.log").open("a")
            name, data, frames, method = job
            process = subprocess.Popen(
                command(settings, method, data, frames, folder(output, *job)), stdout=log, stderr=log
            )
            running[process] = (job, log)
        if out_of_time and not running:
            break
        time.sleep(0.5)
    for job in failed:
        print((folder(output, *job) / "training.log").read_text()[-1500:])
    return all((folder(output, *job) / "metrics.json").exists() for job in jobs)


def next_above(frames: int) -> int:
    """The smallest of FRAMES that a dataset of `frames` does not fill: it is trained on whole."""
    return next((each for each in FRAMES if each >= frames), 0)


def folder(output: Path, name: str, data: str, frames: int, method: str) -> Path:
    """The output folder of one training."""
    return output / name / f"{method}_{frames}"


def collect(domains: dict[str, str], output: Path) -> list[dict]:
    """The figures of all finished trainings."""
    rows = []
    for name, data in domains.items():
        there = len(load_tokens(Path(data) / "train").tokens)
        for frames in FRAMES:
            for method in METHODS:
                path = folder(output, name, data, frames, method) / "metrics.json"
                if not path.exists():
                    continue
                metrics = json.loads(path.read_text())
                start = metrics.get("start", {})
                rows.append(
                    {
                        "domain": name,
                        "frames": min(frames, there),
                        "method": method,
                        "cross_entropy": metrics["cross_entropy"],
                        "accuracy": metrics["accuracy"],
                        "start": start.get("cross_entropy"),
                        "steps": metrics["step"],
                        "seconds": metrics["seconds"],
                        "old": metrics.get("old", {}).get("cross_entropy"),
                        "old_start": start.get("old", {}).get("cross_entropy"),
                    }
                )
    return rows


def write_table(rows: list[dict], path: Path) -> None:
    """Write and print the figures as a table of Markdown."""
    lines = [
        "| domain | frames | training | nats a token | before | gain of full | old domain | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        full = next(
            (r for r in rows if (r["domain"], r["frames"], r["method"]) == (row["domain"], row["frames"], "full")), None
        )
        share = ""
        if row["method"] == "adapter" and full is not None and full["start"] != full["cross_entropy"]:
            share = f"{100 * (row['start'] - row['cross_entropy']) / (full['start'] - full['cross_entropy']):.0f} %"
        before = "" if row["start"] is None else f"{row['start']:.3f}"
        old = "" if row["old"] is None else f"{row['old']:.3f} ({row['old_start']:.3f} before)"
        lines.append(
            f"| {row['domain']} | {row['frames']:,} | {NAMES[row['method']]} | {row['cross_entropy']:.3f} | {before} | "
            f"{share} | {old} | {row['seconds']:.0f} |"
        )
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


def draw(rows: list[dict], path: Path) -> None:
    """Write the curves, a plot for each domain."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure = Figure(figsize=(3.6 * len(domains), 3.2), layout="constrained")
    for axes, domain in zip(figure.subplots(1, len(domains), squeeze=False)[0], domains, strict=True):
        for method, name in NAMES.items():
            points = sorted(
                (r["frames"], r["cross_entropy"]) for r in rows if (r["domain"], r["method"]) == (domain, method)
            )
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=COLORS[method], label=name)
        start = next((r["start"] for r in rows if r["domain"] == domain and r["start"] is not None), None)
        if start is not None:
            axes.axhline(start, color="0.5", linestyle=":", label="shipped model")
        axes.set(xscale="log", title=domain, xlabel="frames of the new domain", ylabel="held-out nats a token")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Train, and write what was found; returns the exit code."""
    settings = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    domains = dict(pair.split("=", 1) for pair in settings["domains"].split(","))
    output = Path(settings["output"])
    done = train_all(settings, domains, output)
    rows = collect(domains, output)
    write_json(output / "curves.json", rows)
    if rows:
        write_table(rows, output / "curves.md")
        draw(rows, output / "curves.png")
    return 0 if done else 75


if __name__ == "__main__":
    sys.exit(main())
