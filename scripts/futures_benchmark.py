"""Times several futures of one context with `engine=graph`: how soon they begin, and frames a second of all.

    python scripts/futures_benchmark.py --futures 64 --context 22 --frames 3
    python scripts/futures_benchmark.py --drafts 7
    python scripts/futures_benchmark.py --checkpoint WORLD/world_model --drive ROLLOUT/tokens.safetensors --drafts 7

Without `--checkpoint` the weights are random: their ms a pass mean something and the drafts that they accept do not.
"First frame" is that of the future that is first, "first frames of all" that of the last one. The first round compiles
kernels and captures decode steps; each round has a new context, which is read once.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from terra.benchmark.measure import SAMPLING
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.prompts import MakePrompt, prompt_maker
from terra.device import torch_dtype
from terra.engine.graph.engine import GraphEngine
from terra.errors import ConfigError, TerraError
from terra.tables import print_table


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="where the weights are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1")
    parser.add_argument("--checkpoint", type=Path, help="a trained world_model folder, instead of random weights")
    parser.add_argument(
        "--drive", type=Path, help="a rollout's tokens.safetensors, of which contexts are excerpts; else random tokens"
    )
    parser.add_argument("--futures", type=int, default=64)
    parser.add_argument("--context", type=int, default=22, help="context frames")
    parser.add_argument("--frames", type=int, default=3, help="of each future; they and the context fit the window")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=512, help="of all futures, at most: engine.step_tokens")
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
    table = Table(
        "round",
        "first frame (s)",
        "passes to it",
        "first frames of all (s)",
        "frames/s of all",
        "passes a frame",
        "ms a pass",
    )
    for number, found in enumerate(rounds):
        firsts = f"{found.first:.2f}", f"{found.passes_to_first:.0f}", f"{found.of_all:.2f}"
        speed = f"{found.rate:.1f}", f"{found.passes:.1f}", f"{found.milliseconds:.3f}"
        table.add_row(str(number) if number else "warm-up", *firsts, *speed)
    print_table(Console(), table)


@dataclass(frozen=True)
class Found:
    """What a round of `make_futures` took.

    Attributes:
        first: seconds until one future has its first frame, with the context's time.
        passes_to_first: decode steps (passes) over each future until then.
        of_all: seconds until all futures have their first frames.
        rate: frames/s of all futures, with the context's time.
        passes: passes over a future for each of its frames.
        milliseconds: a pass over all futures together, after the first frames; NaN if each has but one frame.
    """

    first: float
    passes_to_first: float
    of_all: float
    rate: float
    passes: float
    milliseconds: float


async def measure(arguments: argparse.Namespace) -> list[Found]:
    """See `make_futures`, for each round."""
    folder = arguments.checkpoint or make_random_model(
        arguments.shape, arguments.output, torch_dtype(arguments.dtype), arguments.device
    )
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
    try:
        make_prompt = prompt_maker(engine.spec, arguments.drive)
        if not 1 <= arguments.context <= (most := engine.spec.layout.max_frames - arguments.frames):
            raise ConfigError(
                f"--context: expected 1 to {most} frames before {arguments.frames}, got {arguments.context}"
            )
        return [await make_futures(engine, make_prompt, arguments, seed) for seed in range(arguments.rounds)]
    finally:
        await engine.close()


async def make_futures(engine: GraphEngine, make_prompt: MakePrompt, arguments: argparse.Namespace, seed: int) -> Found:
    """Open so many futures of one context, which differ in their seeds, and make frames of all."""
    prompt, actions = make_prompt(arguments.context, arguments.frames, seed)
    before = sum(engine.counters.passes)
    firsts: list[float] = []
    passes_at_firsts: list[int] = []
    begun = time.perf_counter()

    async def future(number: int) -> None:
        session = await engine.open(prompt, SAMPLING, number)
        frames = 0
        async for _ in session.run(actions):
            frames += 1
            if frames == 1:
                firsts.append(time.perf_counter() - begun)
                passes_at_firsts.append(sum(engine.counters.passes))
        await session.close()

    await asyncio.gather(*(future(number) for number in range(arguments.futures)))
    seconds, passes = time.perf_counter() - begun, sum(engine.counters.passes)
    after_firsts = (passes - max(passes_at_firsts)) / arguments.futures  # over each future
    num_frames = arguments.futures * arguments.frames
    return Found(
        first=min(firsts),
        passes_to_first=(min(passes_at_firsts) - before) / arguments.futures,
        of_all=max(firsts),
        rate=num_frames / seconds,
        passes=(passes - before) / num_frames,
        milliseconds=(seconds - max(firsts)) * 1000 / after_firsts if after_firsts else float("nan"),
    )


if __name__ == "__main__":
    main()
