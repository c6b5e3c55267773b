"""Runs decode steps (passes) of `engine=graph` without the engine, for timing them and tracing their kernels."""

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
from terra.engine.graph.engine import check_gpu, make_backend
from terra.engine.graph.slots import FrameRequest, Slots
from terra.engine.graph.step import DecodeSteps
from terra.errors import ConfigError
from terra.world_model import LlamaActionConfig, load_world_model

# Names of kernels in a trace, and what the report calls their steps.
_FIRST, _ATTENTION, _SAMPLE = "_embed", ("_attend", "_attend_wide"), "_gumbel_argmax"
_GEMMS = "output", "gate and up", "down", "qkv"
_QKV_AND_ROPE = "qkv", "rope"
_STEPS = {
    **dict.fromkeys(_ATTENTION, "attention"),
    "_combine": "combine partials",
    "_add_rms_norm": "sum and norm",
    "_rope_and_store": "rope",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which decode steps a script measures."""
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="where the weights are kept")
    parser.add_argument("--shape", choices=list(SHAPES), default="terra_v1")
    parser.add_argument("--rollouts", type=int, default=1, help="batch size: sequence slots of a decode step")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[3, 22], help="numbers of context frames in the window"
    )
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=512, help="of all slots, at most: engine.step_tokens")
    parser.add_argument("--fp8", action="store_true", help="weights and cache in 8 bits")
    parser.add_argument("--fp8-weights", action="store_true", help="weights alone in 8 bits")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")


@dataclass(frozen=True)
class Passes:
    """Slots of random windows with `context` context frames each, and the requests of their next frames."""

    slots: Slots
    steps: DecodeSteps
    requests: Sequence[FrameRequest]
    context: int
    device: torch.device

    def begin(self) -> None:
        """Begin the next frame of every slot (again)."""
        self.slots.begin_frames(self.requests)

    def run(self, num_steps: int) -> None:
        """Launch `num_steps` decode steps."""
        self.steps.run([request.slot for request in self.requests], frozenset({SAMPLING}), num_steps)

    def wait(self) -> None:
        """Wait until the launched decode steps are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def prepare(arguments: argparse.Namespace) -> Iterator[Passes]:
    """Prefill the slots that the options of `add_arguments` describe, for each number of context frames in turn.

    Raises:
        ConfigError: contexts that don't fit the window, or a GPU that the kernels do not run on.
    """
    device, dtype = torch_device(arguments.device), torch_dtype(arguments.dtype)
    check_gpu(device)
    most = LlamaActionConfig(**SHAPES[arguments.shape]).layout.max_frames - 1
    if not 1 <= min(arguments.contexts) <= max(arguments.contexts) <= most:
        raise ConfigError(f"contexts: expected 1 to {most} frames, got {arguments.contexts}")
    folder = make_random_model(arguments.shape, arguments.output, dtype, arguments.device)
    model = load_world_model(folder, dtype=dtype, device=device)
    make_prompt = prompt_maker(EngineSpec.of(model.config), None)
    fp8 = {"fp8_weights": arguments.fp8 or arguments.fp8_weights, "fp8_cache": arguments.fp8}
    slots = Slots(model, arguments.rollouts, arguments.drafts, step_tokens=arguments.step_tokens, **fp8)
    steps = DecodeSteps(slots, make_backend(device))
    for context in arguments.contexts:
        requests = []
        for slot in range(arguments.rollouts):
            prompt, actions = make_prompt(context, 1, slot)
            slots.prefill(slot, prompt, seed=slot)
            requests.append(FrameRequest(slot, context, actions[0], SAMPLING))
        yield Passes(slots, steps, requests, context, device)


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(profiler: profile) -> list[Kernel]:
    """All kernels and copies that ran on the GPU during a profile."""
    events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]


def idle(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds in total, of all gaps, and of the longest gap between kernels, which may overlap."""
    spans = sorted((kernel.start, kernel.end) for kernel in kernels)
    begun = until = spans[0][0]
    gaps = [0.0]
    for start, end in spans:
        gaps.append(max(start - until, 0.0))
        until = max(until, end)
    return {"total_ms": (until - begun) / 1e3, "idle_ms": sum(gaps) / 1e3, "longest_ms": max(gaps) / 1e3}


def added(trace: Iterable[Kernel]) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds that each kernel adds to a layer, in a layer's order, and that layers, lm head, ... add to a pass.

    A kernel adds the time from the latest end of all earlier kernels to its own end, because kernels begin before
    those ahead of them are done (programmatic dependent launch). Medians over layers, means over passes.

    Args:
        trace: the kernels of whole passes of a model with two layers or more, in any order.
    """
    kernels = sorted(trace, key=lambda kernel: kernel.start)
    until, adds = kernels[0].start, []
    for kernel in kernels:
        adds.append(max(kernel.end - until, 0.0))
        until = max(until, kernel.end)
    names = [kernel.name for kernel in kernels]
    begins = [index for index, name in enumerate(names) if name == _FIRST] + [len(names)]
    # Microseconds that a step adds, by pass and layer: some steps occur twice in a layer.
    of_layer: dict[str, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    of_pass: dict[str, float] = defaultdict(float)
    for begin, end in itertools.pairwise(begins):
        attentions = [index for index in range(begin, end) if names[index] in _ATTENTION]
        period = attentions[1] - attentions[0]
        steps = _steps(names[attentions[0] : attentions[1]])
        # Behind the last layer the lm head follows, where other layers are followed by the next one's QKV projection.
        last = attentions[-1] + max(offset for offset, step in enumerate(steps) if step not in _QKV_AND_ROPE)
        for index in range(begin, end):
            if attentions[0] <= index <= last:
                layer, offset = divmod(index - attentions[0], period)
                of_layer[steps[offset]][begin, layer] += adds[index]
                part = "layers"
            elif index + 1 < end and names[index + 1] == _SAMPLE:
                part = "lm head"
            else:
                part = "sampling" if names[index] == _SAMPLE else "the rest"
            of_pass[part] += adds[index] / (len(begins) - 1)
    return {step: statistics.median(each.values()) for step, each in of_layer.items()}, dict(of_pass)


def _steps(kernels: Sequence[str]) -> list[str]:
    """The report's names of the kernels from one attention to the next."""
    gemms = iter(_GEMMS)
    return [next(gemms) if name == "_gemm" else _STEPS.get(name, name) for name in kernels]
