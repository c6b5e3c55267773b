"""Measures how long a GPU idles between the frames of one rollout, from a trace of all kernels and copies.

    python scripts/idle_trace.py
    python scripts/idle_trace.py --model path/to/checkpoint --context 20 --output idle.json

`engine=graph` runs without drafts, with one action at a time (`step`) and with all actions sent ahead (`run`). The
profiler slows the host, so that gaps are longer than without it. The limit is 3 ms.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from terra.benchmark.measure import SAMPLING, ran, stepped
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.passes import idle, kernels_of
from terra.benchmark.prompts import prompt_maker
from terra.engine.base import EngineSpec
from terra.engine.graph.engine import GraphEngine
from terra.errors import ConfigError, TerraError
from terra.tables import print_table
from terra.world_model import load_config

BAR_MS = 3.0


def main() -> None:
    """Parse the command line, trace, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; else one of random weights is made")
    parser.add_argument("--weights", type=Path, default=Path("outputs/benchmark"), help="where random ones are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1", help="of random ones")
    parser.add_argument("--context", type=int, default=3, help="frames that stand in the window")
    parser.add_argument("--frames", type=int, default=2, help="traced; one before them is not")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if arguments.frames < 1:
        parser.error(f"--frames: expected 1 or more, got {arguments.frames}")
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU, found none")
    try:
        folder = arguments.model or make_random_model(arguments.shape, arguments.weights, torch.bfloat16, "cuda")
        report = asyncio.run(trace(folder, arguments.context, arguments.frames))
    except TerraError as error:
        parser.error(str(error))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    table = Table("way", "frames", "ms, all", "longest gap, ms", "", "all gaps, ms")
    for way, found in report.items():
        verdict = "ok" if found["longest_ms"] < BAR_MS else "MISS"
        times = f"{found['total_ms']:.1f}", f"{found['longest_ms']:.3f}", verdict, f"{found['idle_ms']:.2f}"
        table.add_row(way, str(arguments.frames), *times)
    print_table(Console(), table)
    sys.exit(any(found["longest_ms"] >= BAR_MS for found in report.values()))


async def trace(folder: Path, context: int, frames: int) -> dict[str, dict[str, Any]]:
    """Trace some frames with `step` and with `run`; returns the result of `idle` for each."""
    spec = EngineSpec.of(load_config(folder))
    most = spec.layout.max_frames - 1 - frames
    if not 1 <= context <= most:
        raise ConfigError(f"--context: expected 1 to {most} frames before {1 + frames} more, got {context}")
    engine = GraphEngine(folder, drafts=0, device="cuda")
    prompt, actions = prompt_maker(spec, None)(context, 1 + frames, 0)
    report = {}
    for way, go_on in (("step", stepped), ("run", ran)):
        session = await engine.open(prompt, SAMPLING, seed=0)
        await stepped(session, actions[:1])
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await go_on(session, actions[1:])
        await session.close()
        report[way] = idle(kernels_of(profiler))
    await engine.close()
    return report


if __name__ == "__main__":
    main()
