"""Measures `Pipeline.drive`: frames a second of one driver who sees each picture before the next action.

    python scripts/drive_benchmark.py experiment=demo                                    the model that ships
    python scripts/drive_benchmark.py model=folder model.path=DIR context=DIR/contexts/NAME trajectory=DRIVE.json \\
        engine=graph engine.drafts=63

Further arguments are those of `terra generate`; the trajectory's actions are driven again and again. The rate is of all
measured frames, window slides among them. On a GPU some frames more are traced: how long it had nothing to do. The
profiler slows the host, so that this idle time is overstated.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile

from terra.benchmark.passes import idle, kernels_of
from terra.cli import command
from terra.config.files import plain
from terra.config.spec import PipelineSpec
from terra.context import load_context
from terra.generate_settings import GenerateSettings
from terra.pipeline import Pipeline
from terra.rollout import load_action_file
from tokenizer.settings import checked


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=60, help="measured")
    parser.add_argument("--warm", type=int, default=10, help="frames before them")
    parser.add_argument("--traced", type=int, default=4, help="frames after them, on a GPU")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments, overrides = parser.parse_known_args()
    sys.argv = [sys.argv[0], *overrides]
    reports: list[dict[str, Any]] = []
    command("generate", lambda config: reports.append(measure(config, arguments)))
    (report,) = reports
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    says = (
        "{frames_per_second:.1f} frames/s; a frame {p50_ms:.1f} ms (p99 {p99_ms:.1f}), decoding alone {decode_ms:.1f}"
    )
    traced = report["gpu"]
    idle_says = "" if traced is None else "; GPU idle {idle_ms:.0f} of {total_ms:.0f} ms".format(**traced)
    print(says.format(**report) + idle_says)


def measure(config: DictConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Drive, and time each frame until its picture is on the CPU."""
    settings = checked(GenerateSettings, plain(config))
    with Pipeline.from_spec(PipelineSpec.from_settings(settings)) as pipeline:
        spec, size = pipeline.engine.spec, pipeline.tokenizer.config.image_size
        path = settings.trajectory or settings.actions
        assert path is not None
        actions, _ = load_action_file(path, spec, settings.num_frames, sample_id=settings.sample_id)
        context = load_context(settings.context, num_frames=settings.num_context, image_size=size, fps=spec.fps)
        given = settings.num_context - 1
        drive = pipeline.drive(context, actions[:given], settings.sampling, settings.seed)
        orders = itertools.cycle(actions[given:])

        def seconds(count: int) -> list[float]:
            times = [time.perf_counter()]
            for _ in range(count):
                drive.step(next(orders))
                times.append(time.perf_counter())
            return list(np.diff(times))

        seconds(arguments.warm)
        frames = seconds(arguments.frames)
        traced = None
        if pipeline.decoder.device.type == "cuda" and arguments.traced:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                seconds(arguments.traced)
            traced = idle(kernels_of(profiler))
        drive.close()
        tokens = pipeline.wait(pipeline.encode(context[:1]))
        decoding = [decode_seconds(pipeline, tokens) for _ in range(10)]
    return {
        "frames": len(frames),
        "frames_per_second": len(frames) / sum(frames),
        "p50_ms": 1000 * float(np.median(frames)),
        "p99_ms": 1000 * float(np.percentile(frames, 99)),
        "decode_ms": 1000 * float(np.median(decoding)),
        "gpu": traced,
        "seconds": frames,
    }


def decode_seconds(pipeline: Pipeline, tokens: torch.Tensor) -> float:
    """Seconds until one frame is on the CPU."""
    begun = time.perf_counter()
    pipeline.decoder.decode(tokens).cpu()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
