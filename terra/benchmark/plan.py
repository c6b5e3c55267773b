"""The plan of a benchmark: its cases (an engine with its settings) and the workloads that each case measures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from terra.errors import ConfigError

Way = Literal["generate", "generate_again", "request", "run", "step"]
"""How frames are requested.

- `generate`: a Hugging Face `generate` call for each frame, which computes the whole history again, at sequence lengths
  that the process has not met before (cold).
- `generate_again`: the same at lengths that the process has met, whose kernels torch has chosen and prepared (warm).
- `request`: a new engine session for each frame, which computes the whole history again.
- `run`, `step`: one session for all frames, see `terra.engine.base.Session`; the actions are sent ahead or one by one.
"""

NUM_WARMUP_FRAMES = 1
"""Frames that a rollout generates before the measured ones. The first frame includes the prefill of the context."""

CASES = {
    "cuda": ("graph", "graph_fp8", "vllm", "vllm_fp8", "vllm_eager_per_frame", "hf_generate"),
    "cpu": ("jacobi", "jacobi_int8", "vllm", "hf", "hf_generate"),
}
"""The default cases, by kind of device."""


@dataclass(frozen=True)
class Workload:
    """One measurement: the frames of `rollouts` simultaneous rollouts in one part of the window ("start" or "end").

    `num_context` context frames are followed by `NUM_WARMUP_FRAMES` frames and then by `num_frames` measured ones,
    `repeats` times with new contexts.
    """

    way: Way
    rollouts: int
    window_part: str
    num_context: int
    num_frames: int
    repeats: int

    @property
    def name(self) -> str:
        """The workload's name within its case, fit for a file name."""
        return f"{self.way}_{self.rollouts}_{self.window_part}"


@dataclass(frozen=True)
class Case:
    """An engine with its settings. A case runs in a process of its own.

    Attributes:
        name: what `cases=` calls the case.
        label: what the table calls the case.
        weight_bytes: bytes of one weight of the decoder layers; None for the element type of the run.
        head_bytes: bytes of one weight of the lm head; None for the element type of the run.
        kv_bytes: bytes of one element of the KV cache; None for the element type of the run.
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
    """How much each case measures; conf/benchmark.yaml says what the numbers mean."""

    rollouts: Sequence[int]
    num_context: int
    num_frames: int
    repeats: int
    repeats_many: int


def plan_cases(names: Sequence[str], amount: Amount, max_frames: int, *, fp8: bool) -> list[Case]:
    """The cases named `names`, in that order; `fp8` says whether the device has FP8, else the FP8 cases are left out.

    Raises:
        ConfigError: an unknown name, or a window too short for `amount.num_context` and `amount.num_frames`.
    """
    last = max_frames - NUM_WARMUP_FRAMES - amount.num_frames
    if not 1 <= amount.num_context <= last:
        raise ConfigError(
            f"num_context: expected 1 to {last} ({amount.num_frames} + {NUM_WARMUP_FRAMES} frames must fit behind it "
            f"in a window of {max_frames}), got {amount.num_context}"
        )
    contexts = {"start": amount.num_context, "end": last}

    def workloads(*kinds: tuple[Way, int]) -> tuple[Workload, ...]:
        return tuple(
            Workload(
                way,
                rollouts,
                window_part,
                num_context,
                amount.num_frames,
                # A second repeat of `generate` would be `generate_again`.
                1 if way == "generate" else amount.repeats if rollouts <= 4 else amount.repeats_many,
            )
            for way, rollouts in kinds
            for window_part, num_context in contexts.items()
        )

    many: list[tuple[Way, int]] = [("run", rollouts) for rollouts in amount.rollouts]
    few = [kind for kind in many if kind[1] in (1, 16) or kind[1] >= 64]
    eager: dict[str, Any] = {"enforce_eager": True, "engine_args": {"enable_prefix_caching": False}}
    vllm_weights: dict[str, Any] = {"engine_args": {"quantization": "fp8"}}
    vllm_all: dict[str, Any] = {"engine_args": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}
    graph_weights = {"drafts": 0, "fp8_weights": True}
    graph_all = graph_weights | {"fp8_cache": True}
    generate = workloads(("generate", 1), ("generate_again", 1))
    per_frame, alone = workloads(("request", 1)), workloads(("run", 1))
    sessions = workloads(("run", 1), ("step", 1), *(kind for kind in many if kind[1] > 1))
    known = [
        Case("hf_generate", "Hugging Face generate, a call for each frame", "hf", generate),
        Case(
            "vllm_eager_per_frame", "vLLM, eager, a request for each frame, no prefix cache", "vllm", per_frame, eager
        ),
        Case("vllm", "engine=vllm", "vllm", sessions),
        Case("hf", "engine=hf", "hf", alone),
        Case("jacobi", "engine=jacobi", "jacobi", alone, {"drafts": 31}),
        Case(
            "jacobi_int8", "engine=jacobi, 8-bit weights", "jacobi", alone, {"drafts": 31, "int8_weights": True}, 1, 1
        ),
        Case("graph", "engine=graph", "graph", sessions, {"drafts": 0}),
        Case("graph_drafts", "engine=graph, 31 drafts", "graph", sessions, {"drafts": 31}),
        Case("graph_63_drafts", "engine=graph, 63 drafts", "graph", sessions, {"drafts": 63}),
        Case("graph_fp8", "engine=graph, FP8 weights and KV cache", "graph", workloads(*few), graph_all, 1, 1, 1),
        Case("graph_fp8_weights", "engine=graph, FP8 weights", "graph", workloads(*few), graph_weights, 1, 1),
        # vLLM does not quantize the lm head.
        Case("vllm_fp8", "engine=vllm, FP8 weights and KV cache", "vllm", workloads(*few), vllm_all, 1, None, 1),
        Case("vllm_fp8_weights", "engine=vllm, FP8 weights", "vllm", workloads(*few), vllm_weights, 1),
    ]
    by_name = {case.name: case for case in known}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"cases: expected some of {list(by_name)}, got {name!r}")
    return [by_name[name] for name in names if fp8 or "fp8" not in name]
