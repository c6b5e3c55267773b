"""What is measured: cases (an engine with its settings) and the workloads of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from terra.errors import ConfigError

Way = Literal["generate", "generate_again", "request", "run", "step"]
"""How frames are asked for. `generate`: a Hugging Face `generate` call for each frame, and `request`: a new session for
each frame, both with the whole history; `run` and `step` are those of `terra.engine.base.Session`. `generate_again`: at
lengths that the process has generated at before, for which torch has chosen and prepared its kernels."""

DROPPED = 1
"""Frames of a rollout before the measured ones: the first pays for the context."""


CASES = {
    "cuda": ("graph", "graph_fp8", "ours", "fp8", "vllm_article", "hf_generate"),
    "cpu": ("jacobi", "ours", "ours_hf", "hf_generate"),
}
"""Those that are measured if nothing else is asked for, by the kind of the device."""


@dataclass(frozen=True)
class Workload:
    """One figure: `rollouts` at once, at a place of the window.

    `num_context` context frames are followed by `DROPPED` frames and then by `num_frames` measured ones, `repeats`
    times with new contexts.
    """

    way: Way
    rollouts: int
    place: str
    num_context: int
    num_frames: int
    repeats: int

    @property
    def name(self) -> str:
        """Its name within its case, fit for a file."""
        return f"{self.way}_{self.rollouts}_{self.place}"


@dataclass(frozen=True)
class Case:
    """An engine with its settings. A case runs in a process of its own.

    `weight_bytes`, `head_bytes` and `kv_bytes` are those of an element of the layers' weights, of the head's and of the
    KV cache, None for the element type of the run.
    """

    name: str
    label: str
    engine: Literal["hf", "jacobi", "graph", "vllm"]
    workloads: tuple[Workload, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    weight_bytes: int | None = None
    head_bytes: int | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    rollouts: Sequence[int]
    num_context: int
    num_frames: int
    repeats: int
    repeats_many: int


def plan_cases(names: Sequence[str], amount: Amount, max_frames: int, *, fp8: bool) -> list[Case]:
    """The cases of these names, in the order of the names; those in fp8 only where the device has it.

    Raises:
        ConfigError: an unknown name, or a window too short for the frames asked for.
    """
    last = max_frames - DROPPED - amount.num_frames
    if not 1 <= amount.num_context <= last:
        raise ConfigError(
            f"num_context: expected 1 to {last} ({amount.num_frames} + {DROPPED} frames must fit behind it in a "
            f"window of {max_frames}), got {amount.num_context}"
        )
    places = {"start": amount.num_context, "end": last}

    def workloads(*kinds: tuple[Way, int]) -> tuple[Workload, ...]:
        return tuple(
            Workload(
                way,
                rollouts,
                place,
                context,
                amount.num_frames,
                # A second repeat of `generate` would be `generate_again`.
                1 if way == "generate" else amount.repeats if rollouts <= 4 else amount.repeats_many,
            )
            for way, rollouts in kinds
            for place, context in places.items()
        )

    many: list[tuple[Way, int]] = [("run", rollouts) for rollouts in amount.rollouts]
    few = [kind for kind in many if kind[1] in (1, 16) or kind[1] >= 64]
    article: dict[str, Any] = {"enforce_eager": True, "engine_args": {"enable_prefix_caching": False}}
    fp8_weights, fp8_kv = {"quantization": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    eight = {"drafts": 0, "fp8_weights": True}
    eight_all, fp8_label = eight | {"fp8_cache": True}, "ours, CUDA graphs, fp8 weights and KV"
    article_workloads = workloads(("request", 1))
    generate = workloads(("generate", 1), ("generate_again", 1))
    ours = workloads(("run", 1), ("step", 1), *(kind for kind in many if kind[1] > 1))
    known = [
        Case("hf_generate", "Hugging Face generate, a call a frame", "hf", generate),
        Case("vllm_article", "vLLM, eager, a request a frame, no prefix cache", "vllm", article_workloads, article),
        Case("ours", "ours on vLLM", "vllm", ours),
        Case("ours_hf", "ours on Hugging Face, KV kept", "hf", workloads(("run", 1))),
        Case("jacobi", "ours, Jacobi drafts", "jacobi", workloads(("run", 1)), {"drafts": 32}),
        Case("graph", "ours, CUDA graphs", "graph", ours, {"drafts": 0}),
        Case("graph_drafts", "ours, CUDA graphs, drafts", "graph", ours, {"drafts": 31}),
        Case("graph_fp8", fp8_label, "graph", workloads(*few), eight_all, 1, 1, 1),
        Case("graph_fp8_weights", "ours, CUDA graphs, fp8 weights", "graph", workloads(*few), eight, 1, 1),
        # vLLM's fp8 leaves the head as it is.
        Case("fp8", "ours on vLLM, fp8 weights and KV", "vllm", workloads(*few), {"engine_args": fp8_kv}, 1, None, 1),
        Case("fp8_weights", "ours on vLLM, fp8 weights", "vllm", workloads(*few), {"engine_args": fp8_weights}, 1),
    ]  # fmt: skip
    by_name = {case.name: case for case in known}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"cases: expected some of {list(by_name)}, got {name!r}")
    return [by_name[name] for name in names if fp8 or "fp8" not in name]
