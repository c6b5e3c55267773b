"""Measures several drivers at once in one process, without a server: each sees its pictures while it drives on.

    python scripts/drivers_benchmark.py --drivers 16 --contexts $WORLD/contexts model=folder model.path=$WORLD \\
        context=$WORLD/contexts/scene_1 trajectory=$WORLD/contexts/scene_1/recorded.json num_frames=30 \\
        engine=graph engine.drafts=63 decoder.compiled=true

Further arguments are those of `terra generate`; all drivers drive the trajectory's actions again and again, from the
contexts in turn and with seeds of their own. A driver's next frame begins right behind the one before, unless the
pictures of two frames are missing. With --trace they drive on under a profiler, which slows the host: how idle the GPU
was, and what it did.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile

from decoder.thread import DecodedFrames
from terra.benchmark.passes import Kernel, idle, kernels_of
from terra.cli import command
from terra.config.files import plain
from terra.config.spec import PipelineSpec
from terra.context import load_context
from terra.engine.base import WarmsUp
from terra.errors import ConfigError
from terra.generate_settings import GenerateSettings
from terra.pipeline import Pipeline
from terra.prompt import Action, Actions, FrameTokens
from terra.rollout import load_action_file
from tokenizer import Frames
from tokenizer.settings import checked

_SHOWN_KERNELS, _NAME_LENGTH = 10, 40
_FRAMES_AHEAD = 2
"""Frames that have begun and whose pictures are missing, at most, as `live.ahead` of `terra serve`."""


@dataclass
class Driven:
    """When each of a driver's frames was there (s), and for each picture the time of its frame and its own."""

    frames: list[float] = field(default_factory=list)
    pictures: list[tuple[float, float]] = field(default_factory=list)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drivers", type=int, default=16)
    parser.add_argument(
        "--contexts", type=Path, help="a folder of contexts; by default all drive from that of context="
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="measured")
    parser.add_argument("--warm", type=int, default=25, help="frames of each driver before: their windows slide")
    parser.add_argument(
        "--trace", type=float, default=0.0, metavar="SECONDS", help="that are traced after those measured"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments, overrides = parser.parse_known_args()
    sys.argv = [sys.argv[0], *overrides]
    reports: list[dict[str, Any]] = []
    command("generate", lambda config: reports.append(measure(config, arguments)))
    (report,) = reports
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    says = (
        "{least:.1f} to {most:.1f} frames/s each, {all:.1f} total; {passes_a_frame:.1f} passes a frame; between two "
        "frames {between_ms[0]:.0f} ms (p99 {between_ms[1]:.0f}), "
        "a picture {picture_ms[0]:.0f} ms (p99 {picture_ms[1]:.0f})"
    )
    print(says.format(**report))
    if (gpu := report["gpu"]) is not None:
        shares = ", ".join(f"{name[:_NAME_LENGTH]} {share:.0f} %" for name, share in gpu["kernel_percent"].items())
        idle_for = f"GPU idle {gpu['idle_percent']:.0f} %, for {gpu['longest_ms']:.1f} ms at most"
        print(f"{idle_for}; of all kernels' time {shares}")


def measure(config: DictConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all drivers drive; returns frames a second of the slowest, the fastest and all, passes, and milliseconds.

    Raises:
        ConfigError: no such contexts, no actions, too few seconds, or nothing to trace.
    """
    if arguments.trace and not torch.cuda.is_available():
        raise ConfigError("--trace: expected a CUDA GPU, found none")
    settings = checked(GenerateSettings, plain(config))
    folders = [settings.context]
    if arguments.contexts:
        folders = sorted(str(each) for each in arguments.contexts.glob("*/"))
        if not folders:
            raise ConfigError(f"--contexts: expected a folder of context folders, got {arguments.contexts}")
    spec = PipelineSpec.from_settings(settings, sessions=arguments.drivers)
    with Pipeline.from_spec(spec) as pipeline:
        size, fps = pipeline.tokenizer.config.image_size, pipeline.engine.spec.fps
        path = settings.trajectory or settings.actions
        if path is None:
            raise ConfigError("trajectory, actions: expected one of them, got neither")
        actions, _ = load_action_file(path, pipeline.engine.spec, settings.num_frames, sample_id=settings.sample_id)
        contexts = [load_context(each, num_frames=settings.num_context, image_size=size, fps=fps) for each in folders]
        return pipeline.wait(drive_together(pipeline, settings, contexts, actions, arguments))


async def drive_together(
    pipeline: Pipeline,
    settings: GenerateSettings,
    contexts: list[Frames],
    actions: Actions,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """See `measure`."""
    if isinstance(pipeline.engine, WarmsUp):
        await pipeline.engine.warm_up(pipeline.slid_context)
    await pipeline.decoding.warm_up(pipeline.tokenizer.rows, pipeline.tokenizer.cols)
    all_driven = [Driven() for _ in range(arguments.drivers)]
    given = itertools.cycle(contexts)
    drives = [
        asyncio.create_task(drive(pipeline, settings, next(given), actions, seed, driven))
        for seed, driven in enumerate(all_driven)
    ]
    try:
        while min(len(each.frames) for each in all_driven) < arguments.warm:
            await unless_one_ends(drives, 0.05)
        begun, passes, made = time.perf_counter(), sum(pipeline.engine.counters.passes), count(all_driven)
        await unless_one_ends(drives, arguments.seconds)
        ended, frames = time.perf_counter(), count(all_driven) - made
        passes = sum(pipeline.engine.counters.passes) - passes
        gpu = await trace(drives, arguments.trace) if arguments.trace else None
    finally:
        for task in drives:
            task.cancel()
        await asyncio.wait(drives)
    times = [np.array(each.frames) for each in all_driven]
    within = [each[(each >= begun) & (each < ended)] for each in times]
    if min(len(each) for each in within) < 2:
        raise ConfigError(f"--seconds: expected time for two frames of each driver, got {arguments.seconds:g}")
    rates = [len(each) / (ended - begun) for each in within]
    gaps = np.concatenate([np.diff(each) for each in within])
    pictures = [shown - at for each in all_driven for at, shown in each.pictures if begun <= at and shown < ended]
    return {
        "drivers": arguments.drivers,
        "least": min(rates),
        "most": max(rates),
        "all": sum(rates),
        "frames_per_second": rates,
        "passes_a_frame": passes / max(frames, 1),
        "between_ms": (1000 * np.percentile(gaps, (50, 99))).tolist(),
        "picture_ms": (1000 * np.percentile(pictures, (50, 99))).tolist(),
        "gpu": gpu,
    }


async def trace(drives: list[asyncio.Task[None]], seconds: float) -> dict[str, Any]:
    """See `used`, of all kernels and copies during so many seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        await unless_one_ends(drives, seconds)
    return used(kernels_of(profiler))


def used(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The GPU's idle share and longest pause, and the kernels that took most time, in percent of all kernels' time.

    Raises:
        ConfigError: no kernels.
    """
    if not kernels:
        raise ConfigError("--trace: expected kernels of a GPU, found none")
    found = idle(kernels)
    times = defaultdict[str, float](float)
    for kernel in kernels:
        times[kernel.name] += kernel.end - kernel.start
    longest, total = sorted(times.items(), key=lambda item: -item[1])[:_SHOWN_KERNELS], sum(times.values())
    return {
        "idle_percent": 100 * found["idle_ms"] / found["total_ms"],
        "longest_ms": found["longest_ms"],
        "kernel_percent": {name: 100 * spent / total for name, spent in longest},
    }


async def unless_one_ends(drives: list[asyncio.Task[None]], seconds: float) -> None:
    """Wait for so many seconds, and raise the error of a drive that ends before: no drive ends without one."""
    done, _ = await asyncio.wait(drives, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def count(all_driven: list[Driven]) -> int:
    """Frames of all drivers."""
    return sum(len(each.frames) for each in all_driven)


async def drive(
    pipeline: Pipeline, settings: GenerateSettings, context: Frames, actions: Actions, seed: int, driven: Driven
) -> None:
    """Drive until the task is cancelled."""
    given = settings.num_context - 1
    tokens = await pipeline.encode(context)
    async with asyncio.TaskGroup() as pictures:
        session = await pipeline.open(tokens, actions[:given], settings.sampling, seed)
        try:
            chosen = itertools.cycle(actions[given:])
            making = deque[asyncio.Task[None]]()
            while True:
                async with aclosing(session.run_live(while_shown(chosen, driven))) as frames:
                    async for frame in frames:
                        driven.frames.append(now := time.perf_counter())
                        making.append(pictures.create_task(show(pipeline, frame, now, driven)))
                if making:
                    await making.popleft()
        finally:
            await session.close()


def while_shown(actions: Iterator[Action], driven: Driven) -> Iterator[Action | None]:
    """Actions of frames that may begin; None while pictures of `_FRAMES_AHEAD` frames are missing."""
    begun = len(driven.frames)
    while True:
        may_begin = begun - len(driven.pictures) < _FRAMES_AHEAD
        begun += may_begin
        yield next(actions) if may_begin else None


async def show(pipeline: Pipeline, frame: FrameTokens, at: float, driven: Driven) -> None:
    """Decode a frame, which was there at a time, to pixels on the CPU."""
    decoding = pipeline.decoding.start(DecodedFrames.pixels)
    decoding.add(frame[None])
    await decoding.finish()
    driven.pictures.append((at, time.perf_counter()))


if __name__ == "__main__":
    main()
