"""Compares `engine=vllm` on one GPU with the same engine on several: are the tokens equal, and how fast is each?

    python scripts/tensor_parallel.py --output outputs/tp            the shipped model in float32, on two GPUs
    python scripts/tensor_parallel.py --output outputs/tp_terra --shape terra_v1 --dtype bfloat16 --tie 0.05
    VLLM_CPU_OMP_THREADS_BIND=nobind python scripts/tensor_parallel.py --output outputs/tp_cpu --shape tiny    on a CPU

Each number of GPUs makes the same rollouts, in a process of its own: random context frames and actions, a seed for each
rollout. Results already in the output folder are kept; a folder with those of another model is refused. Where the
tokens of a rollout differ, the first difference is scored with the Hugging Face model in float32, which reads the
tokens before it: logits / temperature + noise, as the sampler forms them. Its gap is the highest score of all tokens
less the lower one of the two that were sampled. A gap of at most `--tie` says that rounding decides between them, and
bfloat16 rounds more; a larger gap is an error, and the exit code is then 1.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from terra.benchmark.case import write_json
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.prompts import prompt_maker
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError, TerraError
from terra.noise import vocabulary_noise
from terra.prompt import Actions, Prompt
from terra.sampling import SamplingParams
from terra.tables import print_table
from terra.world_model import load_world_model
from terra.world_model.window import FramePrefix, WindowReader
from tokenizer.files import read_json

DEMO = Path(__file__).resolve().parent.parent / "terra" / "demo" / "world_model"
WARM_SEED = 1_000_000
"""Added to the seeds of rollouts that are not measured."""


def main() -> None:
    """Parse the command line, generate with each size, compare, print; exit with 1 if tokens differ without a tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results, and of a random model")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, default=DEMO, help="a world model's folder")
    model.add_argument("--shape", choices=list(SHAPES), help="random weights instead")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="GPUs that share the model, least first")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64], help="rollouts at once, one number a round")
    parser.add_argument("--frames", type=int, default=3, help="generated frames; all but the first one are timed")
    parser.add_argument("--context", type=int, default=3, help="context frames")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--tie", type=float, default=1e-4, help="largest gap of a tie")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    arguments = parser.parse_args()
    if arguments.frames < 2:
        parser.error(f"--frames: expected 2 or more, got {arguments.frames}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        check_same(arguments)
        if arguments.shape:
            dtype, device = torch_dtype(arguments.dtype), str(torch_device(None))
            arguments.model = apart(make_random_model, arguments.shape, arguments.output, dtype, device)
        for size in arguments.sizes:
            if not result_path(arguments, size).exists():
                apart(generate, arguments, size)
        report = compare(arguments)
    except TerraError as error:
        parser.error(str(error))
    write_json(arguments.output / "tensor_parallel.json", report)
    print(json.dumps(report))
    show(report)
    sys.exit(int(any(pair["by_more"] for pair in report["pairs"])))


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process of its own, because a GPU's memory is free again when its process ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def result_path(arguments: argparse.Namespace, size: int) -> Path:
    """The tokens and seconds with so many GPUs: a tensor of each for each round."""
    return arguments.output / f"tp{size}.safetensors"


def check_same(arguments: argparse.Namespace) -> None:
    """Refuse an output folder whose results are of another model or of other rollouts. Raises ConfigError."""
    names = ("model", "shape", "dtype", "rollouts", "frames", "context", "temperature")
    asked = {name: str(getattr(arguments, name)) for name in names}
    path = arguments.output / "plan.json"
    if path.exists():
        kept = read_json(path, ConfigError)
        differing = [name for name in names if kept.get(name) != asked[name]]
        if differing:
            raise ConfigError(f"--output: expected a folder of its own, got one of other {', '.join(differing)}")
    write_json(path, asked)


def rollouts_of(arguments: argparse.Namespace, spec: EngineSpec, count: int, seed: int) -> list[tuple[Prompt, Actions]]:
    """The context and the actions of each rollout of a round."""
    make_prompt = prompt_maker(spec, None)
    return [make_prompt(arguments.context, arguments.frames, seed + index) for index in range(count)]


def generate(arguments: argparse.Namespace, size: int) -> None:
    """Make all rounds with `size` GPUs and write their tokens and seconds."""
    if arguments.dtype == "float32":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention would multiply in TF32, errors of 1e-3
    from terra.engine.vllm.engine import VllmEngine

    given: dict[str, Any] = {"dtype": arguments.dtype, "max_sessions": max(arguments.rollouts), **arguments.engine}
    engine = VllmEngine(arguments.model, tensor_parallel_size=size, **given)
    sampling = SamplingParams(temperature=arguments.temperature)

    async def one(prompt: Prompt, actions: Actions, seed: int) -> tuple[Tensor, list[float]]:
        session = await engine.open(prompt, sampling, seed)
        frames, times = [], []
        async for frame in session.run(actions):
            frames.append(frame)
            times.append(perf_counter())
        await session.close()
        return torch.stack(frames), times

    async def round_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
        rollouts = rollouts_of(arguments, engine.spec, count, seed)
        made = await asyncio.gather(*(one(*rollout, seed + index) for index, rollout in enumerate(rollouts)))
        ends = [max(times) for times in zip(*(times for _, times in made), strict=True)]
        seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return torch.stack([frames for frames, _ in made]), torch.tensor(seconds, dtype=torch.float64)

    async def all_rounds() -> dict[str, Tensor]:
        found = {}
        for count in arguments.rollouts:
            await round_of(count, WARM_SEED)
            found[f"tokens.{count}"], found[f"seconds.{count}"] = await round_of(count, 0)
        await engine.close()
        return found

    save_file(asyncio.run(all_rounds()), result_path(arguments, size))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each further size has in common with the first one, and the speed of all."""
    first, *others = arguments.sizes
    results = {size: load_file(result_path(arguments, size)) for size in arguments.sizes}
    speeds = [
        {
            "gpus": size,
            "rollouts": count,
            "ms_a_frame": statistics.median(result[f"seconds.{count}"].tolist()) * 1000,
        }
        for count in arguments.rollouts
        for size, result in results.items()
    ]
    pairs = []
    for count, other in itertools.product(arguments.rollouts, others):
        one, two = (results[size][f"tokens.{count}"].flatten(1) for size in (first, other))
        differing = (one != two).any(1).nonzero()[:, 0].tolist()
        found = differences(arguments, one, two, differing) if differing else []
        by_more = sum(not difference["gap"] <= arguments.tie for difference in found)
        pairs.append(
            {
                "gpus": [first, other],
                "rollouts": count,
                "tokens": one[0].numel(),
                "equal": count - len(differing),
                "ties": len(differing) - by_more,
                "by_more": by_more,
                "differences": found,
            }
        )
    says = {key: getattr(arguments, key) for key in ("shape", "dtype", "context", "frames", "temperature", "tie")}
    return {**says, "model": str(arguments.model), "device": device_name(), "speeds": speeds, "pairs": pairs}


@torch.inference_mode()
def differences(
    arguments: argparse.Namespace, one: Tensor, two: Tensor, rollouts: list[int]
) -> list[dict[str, float | list[float]]]:
    """The first difference of each of `rollouts`, scored.

    Args:
        arguments: the command line's.
        one: tokens of all rollouts, (rollouts, frames * image_tokens).
        two: those of the other size.
        rollouts: indices of rollouts that differ.
    """
    torch.set_float32_matmul_precision("highest")
    model = load_world_model(arguments.model, dtype=torch.float32, device=torch_device(None))
    spec = EngineSpec.of(model.config)
    given = rollouts_of(arguments, spec, len(one), 0)
    layout, found = spec.layout, []
    for index in rollouts:
        prompt, actions = given[index]
        at = int((one[index] != two[index]).nonzero()[0, 0])
        frame, inside = divmod(at, layout.image_tokens)
        made = one[index].view(len(actions), *prompt.tokens.shape[1:])
        read = FramePrefix.after_context(
            torch.cat([prompt.tokens, made[:frame]])[None], torch.cat([prompt.actions, actions[: frame + 1]])[None]
        )
        ids = torch.cat([read.ids, made[frame].flatten()[None, :inside]], dim=1)
        positions = torch.arange(ids.shape[1])
        logits = WindowReader(model).feed(ids, positions, read.actions, last=1)[0, -1]
        seed, position = (torch.tensor([number], device=logits.device) for number in (index, ids.shape[1] - 1))
        scores = logits / arguments.temperature + vocabulary_noise(seed, position, len(logits))[0]
        candidates = [int(one[index, at]), int(two[index, at])]
        theirs = scores[candidates]
        found.append(
            {
                "rollout": index,
                "frame": frame,
                "token": inside,
                "candidates": candidates,
                "scores": theirs.tolist(),
                "gap": float(scores.max() - theirs.min()),
            }
        )
    return found


def device_name() -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def show(report: dict[str, Any]) -> None:
    """Print the report as two tables."""
    console = Console()
    speeds = Table("GPUs", "rollouts", "ms a frame of all", "frames/s total")
    for row in report["speeds"]:
        ms = row["ms_a_frame"]
        speeds.add_row(str(row["gpus"]), str(row["rollouts"]), f"{ms:.1f}", f"{1000 * row['rollouts'] / ms:.1f}")
    print_table(console, speeds)
    pairs = Table("GPUs", "rollouts", "equal", f"differ by a tie (<= {report['tie']:g})", "differ by more", "gaps")
    for pair in report["pairs"]:
        gaps = ", ".join(f"{difference['gap']:.2g}" for difference in pair["differences"]) or "none"
        numbers = [str(pair[key]) for key in ("rollouts", "equal", "ties", "by_more")]
        pairs.add_row(" and ".join(map(str, pair["gpus"])), *numbers, gaps)
    print_table(console, pairs)


if __name__ == "__main__":
    main()
