"""Measures what pixels add to tokens: pictures to MP4 by the pipeline, in turns with the same tokens by the engine.

    python scripts/pixels_overhead.py experiment=demo engine=jacobi                           the model that ships
    python scripts/checkpoint_synthesize.py output=outputs/synthetic version=v1               Terra v1's size, on a GPU
    python scripts/pixels_overhead.py experiment=demo model=terra_v1 \\
        world_model.pretrained=outputs/synthetic tokenizer.pretrained=outputs/synthetic tokenizer.device=cuda \\
        engine=graph engine.drafts=0 decoder.dtype=bfloat16 num_frames=25

Further arguments are those of `terra generate`. On a GPU the limit is 5 %; a CPU has no limit, because pixels take the
cores that tokens need.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from decoder.video import VideoWriter, to_uint8
from terra.cli import command
from terra.config.files import plain
from terra.config.spec import PipelineSpec
from terra.context import load_context
from terra.generate_settings import GenerateSettings
from terra.pipeline import Pipeline, RolloutRequest
from terra.rollout import load_action_file
from tokenizer import TokenGrid
from tokenizer.settings import checked

BAR = 0.05


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, after one that warms up")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments, overrides = parser.parse_known_args()
    sys.argv = [sys.argv[0], *overrides]
    reports: list[dict[str, Any]] = []
    command("generate", lambda config: reports.append(measure(config, arguments.rounds)))
    (report,) = reports
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    says = "{video:.2f} s from pictures to an MP4, {tokens:.2f} s the tokens alone (medians): {added:+.1%}"
    verdict = {True: "ok   ", False: "MISS ", None: ""}[report["ok"]]
    print(verdict + says.format(**report))
    sys.exit(report["ok"] is False)


def measure(config: DictConfig, rounds: int) -> dict[str, Any]:
    """Seconds with and without pixels, and the relative difference."""
    settings = checked(GenerateSettings, plain(config))
    pipeline = Pipeline.from_spec(PipelineSpec.from_settings(settings))
    spec, size = pipeline.engine.spec, pipeline.tokenizer.config.image_size
    assert settings.trajectory is not None
    actions, _ = load_action_file(settings.trajectory, spec, settings.num_frames, sample_id=settings.sample_id)
    sampling = settings.sampling

    def read() -> torch.Tensor:
        return load_context(settings.context, num_frames=settings.num_context, image_size=size, fps=spec.fps)

    def video(path: Path) -> TokenGrid:
        request = RolloutRequest(read(), actions, settings.seed)
        with VideoWriter(path, spec.fps, (size[1], size[0])) as writer:
            encode = lambda _request, frames: writer.extend(to_uint8(frames))  # noqa: E731
            (rollout,) = pipeline.generate([request], sampling, on_pixels=encode)
        return rollout.tokens

    seconds: dict[str, list[float]] = {"tokens": [], "video": []}
    with pipeline, tempfile.TemporaryDirectory() as folder:
        context = pipeline.wait(pipeline.encode(read()))
        for turn in range(rounds + 1):
            begun = time.perf_counter()
            alone = pipeline.wait(pipeline.rollout_tokens(context, actions, sampling, settings.seed))
            between = time.perf_counter()
            beside = video(Path(folder) / "video.mp4")
            if not torch.equal(alone, beside):
                raise RuntimeError("expected the same tokens with pixels and without")
            if turn:  # the first one warms up
                seconds["tokens"].append(between - begun)
                seconds["video"].append(time.perf_counter() - between)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    added = medians["video"] / medians["tokens"] - 1
    ok = added <= BAR if next(pipeline.tokenizer.parameters()).device.type == "cuda" else None
    return {**medians, "added": added, "ok": ok, "seconds": seconds}


if __name__ == "__main__":
    main()
