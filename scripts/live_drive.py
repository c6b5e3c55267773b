"""Measures live driving as a player has it: one action in, one picture out, one frame after the other.

    python scripts/live_drive.py --model outputs/town_hd_training/world --output outputs/live.json --drafts 31 63
    python scripts/live_drive.py --scenes 1 --frames 4 --output outputs/live.json                  the shipped model

Each row of the JSON file is one number of drafts and of bits: frames a second over all frames, of the slowest scene,
and milliseconds from an action to its picture. A scene starts from its pictures and follows its file of actions;
windows slide. The first frames of a scene, which may compile kernels and record CUDA graphs, are not counted.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoder.video import to_uint8, write_video
from terra.context import load_context
from terra.errors import ContextError, TerraError
from terra.pipeline import Pipeline
from terra.rollout import load_action_file
from terra.sampling import SamplingParams
from tokenizer.files import write_json

DEMO = Path(__file__).resolve().parent.parent / "terra" / "demo"
CONTEXT, WARM_UP = 3, 2


def main() -> None:
    """Parse the command line, measure, and write each row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder with tokenizer/, world_model/ and contexts/")
    parser.add_argument("--output", type=Path, required=True, help="a .json file")
    parser.add_argument("--video", type=Path, help="an .mp4 file: the first scene as the first row drives it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu | cuda")
    parser.add_argument("--drafts", type=int, nargs="+", default=[31])
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        choices=[8, 16],
        default=[16],
        help="8: FP8 weights and KV cache; int8 weights on a CPU",
    )
    parser.add_argument("--scenes", type=int, default=2, help="this many first ones of contexts/")
    parser.add_argument("--frames", type=int, default=60, help="generated frames of each scene that are counted")
    parser.add_argument("--temperature", type=float, default=0.9)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        for bits in arguments.bits:
            for drafts in arguments.drafts:
                rows.append(measure(arguments, drafts, bits, None if rows else arguments.video))
                write_json(arguments.output, {"rows": rows})
                print(rows[-1], flush=True)
    except TerraError as error:
        parser.error(str(error))


def measure(arguments: argparse.Namespace, drafts: int, bits: int, video: Path | None) -> dict[str, Any]:
    """One row: drive all scenes. Raises TerraError."""
    options: dict[str, Any] = {"drafts": drafts}
    if bits == 8:
        options |= {"int8_weights": True} if arguments.device == "cpu" else {"fp8_weights": True, "fp8_cache": True}
    sampling = SamplingParams(temperature=arguments.temperature)
    num_frames = CONTEXT + WARM_UP + arguments.frames
    seconds: list[list[float]] = []
    engine, device = "jacobi" if arguments.device == "cpu" else "graph", arguments.device
    with Pipeline.from_pretrained(arguments.model, engine=engine, device=device, **options) as pipeline:
        spec, size = pipeline.engine.spec, pipeline.tokenizer.image_size
        for number, scene in enumerate(scenes(arguments.model, arguments.scenes)):
            frames = load_context(scene, num_frames=CONTEXT, image_size=size, fps=spec.fps)
            actions, _ = load_action_file(actions_of(scene), spec, num_frames)
            drive = pipeline.drive(frames, actions[: CONTEXT - 1], sampling, seed=number)
            shown, spent = [], []
            for action in actions[CONTEXT - 1 :]:
                begun = time.perf_counter()
                shown.append(drive.step(action))
                spent.append(time.perf_counter() - begun)
            drive.close()
            seconds.append(spent[WARM_UP:])
            if video is not None and number == 0:
                write_video(to_uint8(torch.stack(shown)), video, fps=spec.fps)
    milliseconds = 1e3 * np.concatenate(seconds)
    return {
        "engine": engine,
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "drafts": drafts,
        "bits": bits,
        "temperature": arguments.temperature,
        "frames": len(milliseconds),
        "frames_per_s": float(1e3 / milliseconds.mean()),
        "slowest_scene_frames_per_s": min(len(each) / sum(each) for each in seconds),
        "median_ms": float(np.median(milliseconds)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
    }


def scenes(model: Path, count: int) -> list[Path]:
    """The first folders of a world's contexts/. Raises ContextError."""
    found = sorted(each for each in (model / "contexts").glob("*") if each.is_dir())[:count]
    if not found:
        raise ContextError(f"{model / 'contexts'}: expected folders of pictures and actions, got none")
    return found


def actions_of(scene: Path) -> Path:
    """A scene's recorded.json or, where there is none, its first file of actions. Raises ContextError."""
    files = sorted(each for each in scene.glob("*.json") if each.name != "scene.json")
    if not files:
        raise ContextError(f"{scene}: expected a file of actions, got none")
    return next((each for each in files if each.stem == "recorded"), files[0])


if __name__ == "__main__":
    main()
