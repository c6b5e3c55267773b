"""Passes of `engine=graph` apart from the engine: for measuring them alone, and for seeing what they are made of."""

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile

from terra.benchmark.measure import SAMPLING
from terra.benchmark.model import SHAPES, make_random_model
from terra.benchmark.prompts import prompt_maker
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.engine.graph.lanes import Aim, Lanes
from terra.errors import ConfigError
from terra.world_model import LlamaActionConfig, load_world_model

# Kernels by name, and what they do.
_FIRST, _ATTENTION, _PICK = "_embed", "_attend_part", "_pick"
_PRODUCTS = "output", "gate and up", "down", "projection"
_PROJECTION = "projection", "rotation"
_STEPS = {
    _ATTENTION: "attention",
    "_combine": "its parts together",
    "_add_and_normalise": "sum and norm",
    "_rotate_and_store": "rotation",
    "_project": "projection",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What passes are made of, for the command line of a script."""
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="where the weights are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1")
    parser.add_argument("--rollouts", type=int, default=1, help="windows that a pass is over")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3, 22], help="frames that stand in the window")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--fp8", action="store_true", help="weights and cache in 8 bits")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")


@dataclass(frozen=True)
class Passes:
    """Lanes of random windows with so many context frames, aimed at the next frame."""

    lanes: Lanes
    aims: Sequence[Aim]
    context: int
    device: torch.device

    def again(self) -> None:
        """Begin the frame anew."""
        self.lanes.aim(self.aims)

    def make(self, count: int) -> None:
        """So many passes are under way then."""
        self.lanes.advance([aim.lane for aim in self.aims], frozenset({SAMPLING}), passes=count)

    def wait(self) -> None:
        """Until they are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def prepared(arguments: argparse.Namespace) -> Iterator[Passes]:
    """For each of the contexts asked for (`add_arguments`), on the same lanes.

    Raises:
        ConfigError: contexts that don't fit the window.
    """
    device, dtype = torch_device(arguments.device), torch_dtype(arguments.dtype)
    most = LlamaActionConfig(**SHAPES[arguments.shape]).layout.max_frames - 1
    if not 1 <= min(arguments.contexts) <= max(arguments.contexts) <= most:
        raise ConfigError(f"contexts: expected 1 to {most} frames, got {arguments.contexts}")
    folder = make_random_model(arguments.shape, arguments.output, dtype, arguments.device)
    model = load_world_model(folder, dtype=dtype, device=device)
    spec, fp8 = EngineSpec.of(model.config), {"fp8_weights": arguments.fp8, "fp8_cache": arguments.fp8}
    lanes = Lanes(model, arguments.rollouts, arguments.drafts, **fp8, batch_invariant=arguments.batch_invariant)
    make_prompt = prompt_maker(spec, None)
    for context in arguments.contexts:
        aims = []
        for lane in range(arguments.rollouts):
            prompt, actions = make_prompt(context, 1, lane)
            lanes.begin(lane, prompt, seed=lane)
            aims.append(Aim(lane, context, actions[0], SAMPLING))
        yield Passes(lanes, aims, context, device)


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(profiler: profile) -> list[Kernel]:
    """All that ran on the device, copies as well."""
    events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]


def added(trace: Iterable[Kernel]) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds that each step adds to a layer, in its order, and each to a pass: its layers, the head, ...

    A kernel adds what it ends later than everything before it, since kernels begin before those ahead of them are done.
    Medians over layers, means over passes.

    Args:
        trace: of whole passes of two layers or more, in any order.
    """
    kernels = sorted(trace, key=lambda kernel: kernel.start)
    until, adds = kernels[0].start, []
    for kernel in kernels:
        adds.append(max(kernel.end - until, 0.0))
        until = max(until, kernel.end)
    names = [kernel.name for kernel in kernels]
    begins = [index for index, name in enumerate(names) if name == _FIRST] + [len(names)]
    # Of each step, what it adds to each layer of each pass: some stand in a layer twice.
    of_layer: dict[str, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    of_pass: dict[str, float] = defaultdict(float)
    for begin, end in itertools.pairwise(begins):
        attentions = [index for index in range(begin, end) if names[index] == _ATTENTION]
        period = attentions[1] - attentions[0]
        steps = _steps(names[attentions[0] : attentions[1]])
        # What is behind the last layer stands where else the next one's projection does.
        last = attentions[-1] + max(place for place, step in enumerate(steps) if step not in _PROJECTION)
        for index in range(begin, end):
            if attentions[0] <= index <= last:
                layer, place = divmod(index - attentions[0], period)
                of_layer[steps[place]][begin, layer] += adds[index]
                part = "layers"
            elif index + 1 < end and names[index + 1] == _PICK:
                part = "head"
            else:
                part = "noise and choice" if names[index] == _PICK else "the rest"
            of_pass[part] += adds[index] / (len(begins) - 1)
    return {step: statistics.median(each.values()) for step, each in of_layer.items()}, dict(of_pass)


def _steps(kernels: Sequence[str]) -> list[str]:
    """What the kernels from one attention to the next do."""
    products = iter(_PRODUCTS)
    return [next(products) if name == "_product" else _STEPS.get(name, name) for name in kernels]
