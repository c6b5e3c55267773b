"""Times several futures of one context with `engine=graph`: how soon they begin, and frames a second of all.

    python scripts/futures_benchmark.py --futures 64 --context 22 --frames 3
    python scripts/futures_benchmark.py --fp8-weights

The weights are random, so that drafts, which are off by default, mean nothing. The first round compiles kernels and
captures decode steps; each round has a new context, which is read once.
"""

import argparse
import asyncio
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from terra.benchmark.measure import SAMPLING
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.prompts import MakePrompt, prompt_maker
from terra.device import torch_dtype
from terra.engine.graph.engine import GraphEngine
from terra.errors import ConfigError, TerraError


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="where the weights are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1")
    parser.add_argument("--futures", type=int, default=64)
    parser.add_argument("--context", type=int, default=22, help="context frames")
    parser.add_argument("--frames", type=int, default=3, help="of each future; they and the context fit the window")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=128, help="of all futures, at most: engine.step_tokens")
    parser.add_argument("--fp8", action="store_true", help="weights and cache in 8 bits")
    parser.add_argument("--fp8-weights", action="store_true", help="weights alone in 8 bits")
    parser.add_argument("--rounds", type=int, default=4, help="the first is a warm-up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    try:
        rounds = asyncio.run(measure(arguments))
    except TerraError as error:
        parser.error(str(error))
    table = Table("round", "first frame (s)", "first frames of all (s)", "frames/s of all")
    for number, (first, of_all, rate) in enumerate(rounds):
        table.add_row(str(number) if number else "warm-up", f"{first:.2f}", f"{of_all:.2f}", f"{rate:.1f}")
    Console().print(table)


async def measure(arguments: argparse.Namespace) -> list[tuple[float, float, float]]:
    """See `make_futures`, for each round."""
    folder = make_random_model(arguments.shape, arguments.output, torch_dtype(arguments.dtype), arguments.device)
    engine = GraphEngine(
        folder,
        drafts=arguments.drafts,
        max_sessions=arguments.futures,
        step_tokens=arguments.step_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        fp8_weights=arguments.fp8 or arguments.fp8_weights,
        fp8_cache=arguments.fp8,
    )
    make_prompt = prompt_maker(engine.spec, None)
    try:
        if not 1 <= arguments.context <= (most := engine.spec.layout.max_frames - arguments.frames):
            raise ConfigError(
                f"--context: expected 1 to {most} frames before {arguments.frames}, got {arguments.context}"
            )
        return [await make_futures(engine, make_prompt, arguments, seed) for seed in range(arguments.rounds)]
    finally:
        await engine.close()


async def make_futures(
    engine: GraphEngine, make_prompt: MakePrompt, arguments: argparse.Namespace, seed: int
) -> tuple[float, float, float]:
    """Seconds until one future has its first frame, and until all have; frames/s, with the context's time."""
    prompt, actions = make_prompt(arguments.context, arguments.frames, seed)
    begun, firsts = time.perf_counter(), []

    async def future(number: int) -> None:
        session = await engine.open(prompt, SAMPLING, number)
        frames = 0
        async for _ in session.run(actions):
            frames += 1
            if frames == 1:
                firsts.append(time.perf_counter() - begun)
        await session.close()

    await asyncio.gather(*(future(number) for number in range(arguments.futures)))
    seconds = time.perf_counter() - begun
    return min(firsts), max(firsts), arguments.futures * arguments.frames / seconds


if __name__ == "__main__":
    main()
