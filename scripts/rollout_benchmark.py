"""Measures what `terra rollout` adds to the bare engine, in time and in memory, and how it scales with GPUs.

    python scripts/rollout_benchmark.py --output outputs/rollout_benchmark --rollouts 64 engine=hf
    python scripts/rollout_benchmark.py --output outputs/rollout_benchmark --memory 100,2000
    python scripts/rollout_benchmark.py --output outputs/rollout_benchmark --gpus 1,2,4 engine=graph

The first command makes rollouts with bare sessions (tokens alone) and with `terra rollout` (videos and files, too), on
one engine in one process. The second runs `terra rollout engine=persistence` in a process for each length of a manifest
and compares the peak memory of the main processes. The third runs, for each number of GPUs, that many processes on
one folder, each with a GPU of its own and an equal share of rollouts, and compares frames a second from the moment that
a process has claimed its first rollout. Further arguments are those of `terra rollout`. The result is one JSON line.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTEXTS = Path(__file__).resolve().parent.parent / "terra" / "demo" / "contexts"


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for what is made; its runs are removed")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--frames", type=int, default=25, help="frames of a rollout, three context frames included")
    parser.add_argument("--repeats", type=int, default=1)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--memory", type=counts, metavar="LINES,LINES", help="manifest lengths")
    way.add_argument("--gpus", type=counts, metavar="N,N", help="numbers of GPUs; --rollouts are for each GPU")
    arguments, overrides = parser.parse_known_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.memory:
        found = measure_memory(arguments.output, arguments.memory, overrides)
    elif arguments.gpus:
        found = measure_gpus(arguments.output, arguments.rollouts, arguments.frames, arguments.gpus, overrides)
    else:
        size = (arguments.rollouts, arguments.frames, arguments.repeats)
        found = measure_speed(arguments.output, *size, overrides)
    print(json.dumps(found))


def counts(text: str) -> list[int]:
    """Parse numbers such as "1,2,4"."""
    found = [int(part) for part in text.split(",") if int(part) > 0]
    if len(found) != text.count(",") + 1:
        raise ValueError
    return found


def measure_speed(output: Path, num: int, num_frames: int, repeats: int, overrides: list[str]) -> dict[str, Any]:
    """Frames a second of the bare engine and of a batch, measured in turns, and the ratio of the medians."""
    from terra.config.files import compose, plain
    from terra.config.spec import PipelineSpec
    from terra.pipeline import Pipeline
    from terra.rollouts.folder import RolloutFolder
    from terra.rollouts.manifest import count_rollouts
    from terra.rollouts.runner import BatchRunner
    from terra.rollouts.settings import BatchSettings
    from terra.rollouts.source import Tally
    from tokenizer.settings import checked

    manifest = write_manifest(output / "manifest.jsonl", num)
    run = output / "run"
    given = [f"manifest={manifest}", f"output={run}", f"num_frames={num_frames}", f"at_once={num}"]
    settings = checked(BatchSettings, plain(compose("rollout", [*given, *overrides])))
    spec = PipelineSpec.from_settings(settings, sessions=settings.at_once)
    seconds: dict[str, list[float]] = {"bare": [], "batch": []}
    stages: dict[str, float] = {}
    with Pipeline.from_spec(spec) as pipeline:
        asyncio.run(run_bare(pipeline, settings, num_frames=4))  # warm: contexts in the prefix cache, code compiled
        for _ in range(repeats):
            seconds["bare"].append(asyncio.run(run_bare(pipeline, settings, num_frames=num_frames)))
            shutil.rmtree(run, ignore_errors=True)
            folder = RolloutFolder(run, {"made_with": spec.made_with()}, "refuse")
            tally = Tally(count_rollouts(settings))
            with folder.open():
                begun = time.perf_counter()
                BatchRunner(pipeline, folder, settings, tally, lambda: None).run()
                seconds["batch"].append(time.perf_counter() - begun)
            if tally.done != num:
                raise RuntimeError(f"expected {num} rollouts, got {tally.done}: {tally.failures}")
            stages = {name: round(value, 2) for name, value in tally.seconds.items()}
    made = num * (num_frames - settings.num_context)
    rates = {name: made / statistics.median(values) for name, values in seconds.items()}
    return {
        "rollouts": num,
        "frames_each": num_frames - settings.num_context,
        **{f"{name}_frames_per_second": round(rate, 2) for name, rate in rates.items()},
        "share_of_bare": round(rates["batch"] / rates["bare"], 3),
        "batch_stage_seconds": stages,
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }


async def run_bare(pipeline: Any, settings: Any, *, num_frames: int) -> float:
    """Seconds until the bare engine has all rollouts' tokens; contexts are tokenized before."""
    from dataclasses import replace

    from terra.rollouts.inputs import Inputs
    from terra.rollouts.manifest import parse_line, read_lines

    async def here(_threads: str, work: Any) -> Any:
        return work()

    inputs = Inputs(pipeline, settings.contexts, here, settings.limits)
    jobs = [
        replace(job, num_frames=num_frames)
        for line in read_lines(settings.manifest)
        for job in parse_line(line, settings)
    ]
    given = [((await inputs.context(job))[0], await inputs.actions(job), job) for job in jobs]

    begun = time.perf_counter()
    made = (pipeline.rollout_tokens(context, actions, job.sampling, job.seed) for context, actions, job in given)
    await asyncio.gather(*made)
    return time.perf_counter() - begun


def measure_gpus(output: Path, num: int, num_frames: int, gpus: list[int], overrides: list[str]) -> dict[str, Any]:
    """Frames a second for each number of GPUs, the speedup over the first, and how many rollouts have equal tokens."""
    warm = run_on_gpus(output / "warm", 1, num, 4, overrides)  # what is compiled is kept on the disk
    print(f"warm: {warm:.2f} frames/s", file=sys.stderr, flush=True)
    rates = {}
    for count in gpus:
        rates[count] = run_on_gpus(output / f"run_{count}", count, num, num_frames, overrides)
        print(f"GPUs: {count}, {rates[count]:.2f} frames/s", file=sys.stderr, flush=True)

    def tokens(count: int, index: int) -> bytes:
        return (output / f"run_{count}" / "rollouts" / f"r{index}" / "tokens.safetensors").read_bytes()

    first, compared = gpus[0], num * min(gpus)
    same = {count: sum(tokens(count, index) == tokens(first, index) for index in range(compared)) for count in gpus[1:]}
    return {
        "rollouts_of_each_gpu": num,
        "frames_of_a_rollout": num_frames,
        "frames_per_second": {str(count): round(rate, 2) for count, rate in rates.items()},
        "gain": {str(count): round(rate / rates[first], 3) for count, rate in rates.items()},
        "same_tokens": {str(count): f"{equal} of {compared}" for count, equal in same.items()},
    }


def run_on_gpus(run: Path, count: int, num: int, num_frames: int, overrides: list[str]) -> float:
    """Frames a second of one process for each GPU, each counted from its first claim to the end of all."""
    shutil.rmtree(run, ignore_errors=True)
    manifest = write_manifest(run.with_suffix(".jsonl"), num * count)
    command = [sys.executable, "-m", "terra", "rollout"]
    # None takes more than its share before the others have begun.
    settings = [f"manifest={manifest}", f"output={run}", f"num_frames={num_frames}", f"at_once={min(num, 64)}"]
    command += [*settings, *overrides]
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)})
        for gpu in range(count)
    ]
    begun: dict[int, float] = {}
    while any(process.poll() is None for process in processes):
        for process in processes:
            if process.pid not in begun and holds_claim(process.pid):
                begun[process.pid] = time.time()
        time.sleep(0.02)
    codes = [process.returncode for process in processes]
    if any(codes) or len(begun) < count:
        raise RuntimeError(f"{' '.join(command)}: exit codes {codes}, {len(begun)} of {count} took a rollout")
    lines = [json.loads(line) for line in (run / "index.jsonl").read_text().splitlines()]
    ended = max(json.loads(line)["time"] for line in (run / "log.jsonl").read_text().splitlines())
    frames = sum(line["num_frames"] for line in lines)
    return frames * count / sum(ended - each for each in begun.values())


def holds_claim(pid: int) -> bool:
    """Whether a process has a rollout's claim open (Linux)."""
    opened = Path(f"/proc/{pid}/fd")
    try:
        return any(descriptor.readlink().suffix == ".claim" for descriptor in opened.iterdir())
    except OSError:  # closed, or the process ended, meanwhile
        return False


def measure_memory(output: Path, lengths: list[int], overrides: list[str]) -> dict[str, Any]:
    """The peak resident memory (MiB) of the command's process for each length of a manifest, and its growth."""
    found = {}
    for length in lengths:
        manifest, run = write_manifest(output / f"manifest_{length}.jsonl", length), output / f"run_{length}"
        shutil.rmtree(run, ignore_errors=True)
        command = [sys.executable, "-m", "terra", "rollout", f"manifest={manifest}"]
        command += [f"output={run}", "engine=persistence", "num_context=1", "num_frames=2", *overrides]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise RuntimeError(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
        found[length] = usage.ru_maxrss / 1024
        shutil.rmtree(run)
    first, last = found[lengths[0]], found[lengths[-1]]
    return {
        "largest_mib": {str(length): round(mib, 1) for length, mib in found.items()},
        "growth": round(last / first - 1, 4),
    }


def write_manifest(path: Path, num: int) -> Path:
    """Write a manifest of rollouts over the shipped contexts, with different seeds."""
    places = sorted(folder for folder in CONTEXTS.iterdir() if folder.is_dir())
    with path.open("w") as file:
        for index in range(num):
            place = places[index % len(places)]
            trajectory = min(place.glob("*.json"))
            line = {"id": f"r{index}", "context": str(place), "trajectory": str(trajectory), "seed": index}
            file.write(json.dumps(line) + "\n")
    return path


if __name__ == "__main__":
    main()
