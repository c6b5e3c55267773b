"""How long a pass of `engine=graph` takes on random weights, and what the constants of its kernels change.

    python scripts/pass_benchmark.py --rollouts 64 --contexts 5 22
    python scripts/pass_benchmark.py --fp8 --try one_row._WARPS=8 --try "one_row._WARPS=8 one_row._ELEMENTS=24576"
    python scripts/pass_benchmark.py --rollouts 64 --try attention_kernel._FOR_LANES.num_warps=4

For tuning on another GPU. Each line says the least and the median of some rounds; the first and the last are of the
constants as they are, since a GPU that gets warm gets slower. A frame is as many passes as it has tokens and slots.
"""

import argparse
import contextlib
import dataclasses
import importlib
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from terra.benchmark.measure import SAMPLING
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.prompts import prompt_maker
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.engine.graph.lanes import Aim, Lanes
from terra.errors import ConfigError
from terra.world_model import load_world_model


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="where the weights are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1")
    parser.add_argument("--rollouts", type=int, default=1, help="windows that a pass is over")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3, 22], help="frames that stand in the window")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--fp8", action="store_true", help="weights and cache in 8 bits")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--passes", type=int, default=50, help="of a round; all are of one frame")
    parser.add_argument(
        "--try", dest="tries", type=constants_of, action="append", default=[], metavar="MODULE.CONSTANT=NUMBER ..."
    )
    try:
        found = measure(parser.parse_args())
    except ConfigError as error:
        parser.error(str(error))
    table = Table(Column("constants", overflow="fold"), "context frames", "ms a pass, least", "median")
    for constants, context, milliseconds in found:
        row = f"{min(milliseconds):.4f}", f"{statistics.median(milliseconds):.4f}"
        table.add_row(constants or "as they are", str(context), *row)
    Console().print(table)


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> list[tuple[str, int, list[float]]]:
    """For each context and each set of constants, milliseconds a pass of each round."""
    device, dtype, shape = torch_device(arguments.device), torch_dtype(arguments.dtype), arguments.shape
    folder = make_random_model(shape, arguments.output, dtype, arguments.device)
    model = load_world_model(folder, dtype=dtype, device=device)
    spec, fp8 = EngineSpec.of(model.config), {"fp8_weights": arguments.fp8, "fp8_cache": arguments.fp8}
    lanes = Lanes(model, arguments.rollouts, arguments.drafts, **fp8, batch_invariant=arguments.batch_invariant)
    make_prompt = prompt_maker(spec, None)
    if not 1 <= min(arguments.contexts) <= max(arguments.contexts) < spec.layout.max_frames:
        raise ConfigError(f"contexts: expected 1 to {spec.layout.max_frames - 1} frames, got {arguments.contexts}")
    found = []
    for context in arguments.contexts:
        aims = []
        for lane in range(arguments.rollouts):
            prompt, actions = make_prompt(context, 1, lane)
            lanes.begin(lane, prompt, seed=lane)
            aims.append(Aim(lane, context, actions[0], SAMPLING))
        for constants in [{}, *arguments.tries, {}]:
            with changed(constants.values()):
                milliseconds = time_passes(lanes, aims, arguments.rounds, arguments.passes, device)
            found.append((" ".join(constants), context, milliseconds))
    return found


def time_passes(lanes: Lanes, aims: list[Aim], rounds: int, passes: int, device: torch.device) -> list[float]:
    """Milliseconds a pass, of each round; what must be compiled and captured is so before."""
    lanes._passes.clear()  # captured with other constants
    lanes.aim(aims)
    numbers, samplings = [aim.lane for aim in aims], frozenset({SAMPLING})
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    lanes.advance(numbers, samplings, passes=passes)
    milliseconds = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        lanes.advance(numbers, samplings, passes=passes)
        wait()
        milliseconds.append((time.perf_counter() - begun) * 1000 / passes)
    return milliseconds


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant of one of the graph engine's modules, or a field of it, and another value."""

    module: ModuleType
    name: str
    field: str | None
    value: Any


def constants_of(text: str) -> dict[str, Constant]:
    """Read "one_row._WARPS=8 attention_kernel._FOR_ONE.stages=3"."""
    found = {}
    for part in text.split():
        try:
            place, value = part.split("=")
            module, name, *fields = place.split(".")
            constant = Constant(
                importlib.import_module(f"terra.engine.graph.{module}"), name, next(iter(fields), None), int(value)
            )
            getattr(getattr(constant.module, name), constant.field or "__class__")
        except (ValueError, AttributeError, ImportError) as error:
            expected = "expected MODULE.CONSTANT=NUMBER of terra.engine.graph"
            raise argparse.ArgumentTypeError(f"{expected}, got {part!r}: {error}") from None
        found[part] = constant
    return found


@contextlib.contextmanager
def changed(constants: Iterable[Constant]) -> Iterator[None]:
    """Give the constants their other values for a while."""
    with contextlib.ExitStack() as undo:
        for constant in constants:
            before = getattr(constant.module, constant.name)
            undo.callback(setattr, constant.module, constant.name, before)
            field = constant.field
            now = dataclasses.replace(before, **{field: constant.value}) if field else constant.value
            setattr(constant.module, constant.name, now)
        yield


if __name__ == "__main__":
    main()
