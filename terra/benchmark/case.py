"""Measures one case in a process of its own: `python -m terra.benchmark.case FOLDER CASE`; FOLDER holds plan.json.

Each workload's result is written to a file of its own in FOLDER/results as soon as it is measured; existing results are
kept.
"""

import asyncio
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from terra.benchmark.plan import Case, Workload
from terra.errors import EngineError

BANDWIDTH = "bandwidth"
"""The name of the case that measures the device's memory bandwidth instead of an engine."""


def result_path(folder: Path, case: str, workload: str) -> Path:
    """The path of a workload's result."""
    return folder / "results" / f"{case}__{workload}.json"


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all: to a temporary file that is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def read_case(content: dict[str, Any]) -> Case:
    """Parse a case of plan.json."""
    workloads: Any = tuple(Workload(**workload) for workload in content["workloads"])
    return Case(**{**content, "workloads": workloads})


def run_case(folder: Path, name: str) -> None:
    """Measure the workloads of case `name` that have no result yet."""
    plan = json.loads((folder / "plan.json").read_text())
    if name == BANDWIDTH:
        from terra.benchmark.measure import time_bandwidth

        rates = time_bandwidth(plan["device"], plan["bandwidth_bytes"], repeats=10)
        write_json(result_path(folder, BANDWIDTH, BANDWIDTH), rates)
        return
    case = next(read_case(content) for content in plan["cases"] if content["name"] == name)
    left = [workload for workload in case.workloads if not result_path(folder, name, workload.name).exists()]
    if left and left[0].way.startswith("generate"):
        _run_generate(folder, plan, case, left)
    elif left:
        asyncio.run(_run_engine(folder, plan, case, left))


def _run_generate(folder: Path, plan: dict[str, Any], case: Case, workloads: list[Workload]) -> None:
    from terra.benchmark.measure import time_generate
    from terra.benchmark.prompts import prompt_maker
    from terra.device import torch_device, torch_dtype
    from terra.engine.base import EngineSpec
    from terra.world_model import load_world_model

    model = load_world_model(
        Path(plan["world_model"]), dtype=torch_dtype(plan["dtype"]), device=torch_device(plan["device"])
    )
    make_prompt = prompt_maker(EngineSpec.of(model.config), _drive(plan))
    warm = Workload("generate", 1, "warm", 1, 1, 1)
    time_generate(model, warm, 0, make_prompt, 4)
    for workload in workloads:
        repeats = [
            time_generate(model, workload, seed, make_prompt, plan["baseline_tokens"])
            for seed in range(workload.repeats)
        ]
        write_json(result_path(folder, case.name, workload.name), {"repeats": repeats})


async def _run_engine(folder: Path, plan: dict[str, Any], case: Case, workloads: list[Workload]) -> None:
    from terra.benchmark.measure import time_requests, time_rollouts
    from terra.benchmark.prompts import prompt_maker

    engine: Any = _make_engine(plan, case)
    make_prompt = prompt_maker(engine.spec, _drive(plan))
    await time_requests(engine, Workload("request", 1, "warm", 1, 1, 1), 999_999, make_prompt)
    for workload in workloads:
        measure = time_requests if workload.way == "request" else time_rollouts
        if workload.rollouts > 1:
            # Warm-up, not measured: the engine may compile or capture for a new batch size.
            await measure(engine, replace(workload, num_context=1), 888_888, make_prompt)
        repeats = []
        for repeat in range(workload.repeats):
            # Each repeat has contexts of its own, so that the prefix cache holds none of them.
            seed = case.workloads.index(workload) * 100 + repeat
            repeats.append(await measure(engine, workload, seed, make_prompt))
        write_json(result_path(folder, case.name, workload.name), {"repeats": repeats})
    await engine.close()


def _drive(plan: dict[str, Any]) -> Path | None:
    return None if plan["drive"] is None else Path(plan["drive"])


def _make_engine(plan: dict[str, Any], case: Case) -> Any:
    folder = Path(plan["world_model"])
    if case.engine == "hf":
        from terra.engine.hf import HFEngine

        return HFEngine(folder, dtype=plan["dtype"], device=plan["device"])
    if case.engine == "jacobi":
        from terra.engine.jacobi import JacobiEngine

        return JacobiEngine(folder, dtype=plan["dtype"], device=plan["device"], **case.arguments)
    rollouts = max(workload.rollouts for workload in case.workloads)
    if case.engine == "graph":
        from terra.engine.graph.engine import GraphEngine

        return GraphEngine(folder, dtype=plan["dtype"], device=plan["device"], max_sessions=rollouts, **case.arguments)
    from terra.engine.vllm.engine import VllmEngine

    arguments = case.arguments | plan["vllm"]
    if plan["device"] == "cpu":
        window = plan["kv_bytes_per_rollout"]
        arguments["cpu_kv_cache_gib"] = math.ceil(rollouts * window / 2**30) + 1
    return VllmEngine(folder, dtype=plan["dtype"], max_sessions=rollouts, **arguments)


def main() -> None:
    """Run the case that the command line names; an EngineError ends as one line on stderr."""
    try:
        run_case(Path(sys.argv[1]), sys.argv[2])
    except EngineError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
