"""Kills `terra rollout` again and again, and compares its final output with that of an undisturbed run.

    python scripts/rollout_torture.py --output outputs/torture                       # 200 rollouts, 10 times kill -9
    python scripts/rollout_torture.py --output outputs/torture --rollouts 24 --frames 6 --kills 4 engine=hf

Further arguments are those of `terra rollout`, such as engine=hf or cluster=ray. The undisturbed run is made once and
kept. One JSON line holds the result. Exit code 0: every folder is complete, its tokens are byte for byte those of the
undisturbed run, nothing was made twice, and all kills met a process at work; 1: any of these failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

FILES = {"video.mp4", "tokens.safetensors", "rollout.json"}


def main() -> None:
    """Parse the command line, torture, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for both runs")
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--frames", type=int, default=25, help="frames of a rollout, context included")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments, overrides = parser.parse_known_args()
    size = (arguments.rollouts, arguments.frames)
    found = torture(arguments.output, *size, arguments.kills, random.Random(arguments.seed), overrides)
    print(json.dumps(found))
    sys.exit(0 if found["ok"] else 1)


def torture(
    output: Path, num_rollouts: int, num_frames: int, num_kills: int, moments: random.Random, overrides: list[str]
) -> dict[str, Any]:
    """Kill the command `num_kills` times at random moments of `num_rollouts` rollouts; returns the result."""
    output.mkdir(parents=True, exist_ok=True)
    manifest = output / "manifest.jsonl"
    write_manifest(manifest, num_rollouts, num_frames)
    command = [sys.executable, "-m", "terra", "rollout", f"manifest={manifest}"]
    command += ["at_once=8", *overrides]
    whole, tortured = output / "undisturbed", output / "tortured"
    started = time.monotonic()
    subprocess.run([*command, f"output={whole}"], check=True, stdout=subprocess.DEVNULL)
    undisturbed_seconds = time.monotonic() - started
    shutil.rmtree(tortured, ignore_errors=True)
    # A kill comes when so many rollouts are there, and a moment later: in any stage of any of them.
    marks = sorted(moments.sample(range(1, num_rollouts - 1), num_kills))
    kills, litter = [], 0
    for mark in marks:
        seconds = moments.uniform(0, undisturbed_seconds / num_rollouts)
        kills.append(kill_at([*command, f"output={tortured}"], tortured, mark, seconds))
        litter += count_incomplete(tortured)
    code = subprocess.run([*command, f"output={tortured}"], stdout=subprocess.DEVNULL).returncode
    found = compare(tortured, whole, num_rollouts)
    ok = code == 0 and litter == 0 and not any(found[key] for key in ("missing", "different", "incomplete", "twice"))
    return {
        "ok": ok and found["complete"] == num_rollouts and kills.count(True) == num_kills,
        "rollouts": num_rollouts,
        "kills": kills.count(True),
        "ended_before_the_kill": kills.count(False),
        "incomplete_after_a_kill": litter,
        "exit_code": code,
        "undisturbed_seconds": round(undisturbed_seconds, 1),
        **found,
    }


def write_manifest(path: Path, num_rollouts: int, num_frames: int) -> None:
    """Write a manifest of rollouts over the shipped contexts; lengths differ, so that they do not end together."""
    contexts = Path(__file__).resolve().parent.parent / "terra" / "demo" / "contexts"
    places = sorted(folder for folder in contexts.iterdir() if folder.is_dir())
    with path.open("w") as file:
        for index in range(num_rollouts):
            place = places[index % len(places)]
            trajectories = sorted(place.glob("*.json"))
            trajectory = trajectories[index // len(places) % len(trajectories)]
            length = max(4, num_frames - index * 7 % max(1, num_frames // 2))
            line = {"id": f"r{index:04d}", "context": str(place), "trajectory": str(trajectory), "seed": index}
            file.write(json.dumps(line | {"num_frames": length}) + "\n")


def kill_at(command: list[str], output: Path, mark: int, seconds: float) -> bool:
    """Run the command, and kill its process group some seconds after `mark` rollouts are done."""
    mark = max(mark, count(output) + 1)  # not while it is starting: what is to be met is work
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and count(output) < mark:
        time.sleep(0.01)
    time.sleep(seconds)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return running


def count(output: Path) -> int:
    """Number of finished rollouts."""
    rollouts = output / "rollouts"
    return sum(1 for _ in rollouts.iterdir()) if rollouts.exists() else 0


def count_incomplete(output: Path) -> int:
    """Number of rollouts under their final name that lack a file or have an empty file."""
    rollouts = output / "rollouts"
    return sum(not is_complete(folder) for folder in rollouts.iterdir()) if rollouts.exists() else 0


def is_complete(folder: Path) -> bool:
    """Whether a rollout's folder has all files, none of them empty."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return sizes.keys() == FILES and min(sizes.values()) > 0


def compare(tortured: Path, whole: Path, num_rollouts: int) -> dict[str, Any]:
    """Compare the rollouts of the two runs; returns the differences."""
    expected = {f"r{index:04d}" for index in range(num_rollouts)}
    made = {path.name for path in (tortured / "rollouts").iterdir()}
    tokens = Path("tokens.safetensors")
    different = [
        name
        for name in sorted(expected & made)
        if (tortured / "rollouts" / name / tokens).read_bytes() != (whole / "rollouts" / name / tokens).read_bytes()
    ]
    log = [json.loads(line) for line in (tortured / "log.jsonl").read_text().splitlines()]
    index = [json.loads(line) for line in (tortured / "index.jsonl").read_text().splitlines()]
    return {
        "complete": sum(row["status"] == "done" for row in index),
        "missing": sorted(expected - made),
        "different": different,
        "incomplete": [name for name in sorted(made) if not is_complete(tortured / "rollouts" / name)],
        "twice": [name for name, times in Counter(row["id"] for row in log).items() if times > 1],
        "left_over": sorted(path.name for path in tortured.iterdir() if path.name in ("claims", "partial")),
    }


if __name__ == "__main__":
    main()
