"""`terra benchmark`: plans the cases, runs each one in a process with a time limit, and reports after each case."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from terra.benchmark.case import BANDWIDTH, result_path, write_json
from terra.benchmark.plan import CASES, Amount, Case, plan_cases
from terra.benchmark.report import print_report, write_report
from terra.benchmark.settings import BenchmarkSettings
from terra.device import dtype_name, has_fp8, torch_device, torch_dtype
from terra.errors import ConfigError

logger = logging.getLogger(__name__)


def run(settings: BenchmarkSettings) -> None:
    """Measure as conf/benchmark.yaml says, and print the table. Raises ConfigError and CheckpointError."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    given = settings.world_model
    benchmark(vars(settings) | {"world_model": None if given is None else str(given.folder())})
    print_report(Console(), json.loads((settings.output / "benchmark.json").read_text()))


def benchmark(values: dict[str, Any]) -> str:
    """Measure the cases of `values` (the settings of conf/benchmark.yaml) and return the table as text.

    The output folder holds plan.json, results/, logs/, benchmark.json, benchmark.txt and benchmark.png. Existing
    results are kept, so the same command continues where it was stopped; failed workloads are tried again.

    Raises:
        ConfigError: an impossible value, or a folder that holds another plan's results.
    """
    begun = monotonic()
    folder = Path(values["output"])
    plan, cases = _plan(values, folder)
    _keep_plan(folder, plan)
    failures: dict[str, str] = {}
    wanted = [(BANDWIDTH, [BANDWIDTH])] + [(case.name, [w.name for w in case.workloads]) for case in cases]
    for name, workloads in wanted:
        while left := [w for w in workloads if not result_path(folder, name, w).exists()]:
            remaining = values["max_seconds"] - (monotonic() - begun)
            if remaining < 1.0:
                failures |= {f"{name}__{workload}": "no time was left" for workload in left}
                break
            logger.info("%s: %d to measure, %.0f s left", name, len(left), remaining)
            limit = min(values["case_seconds"], remaining)
            reason = _run_process(folder, name, limit)
            still = [w for w in left if not result_path(folder, name, w).exists()]
            if still:
                # The workload that was being measured is given up; a new process continues with the others.
                failures[f"{name}__{still[0]}"] = reason
                logger.warning("%s: %s: %s", name, still[0], reason)
                workloads = [w for w in workloads if w != still[0]] if len(still) < len(left) else []
                failures |= {f"{name}__{w}": reason for w in still[1:] if not workloads}
        write_report(folder, plan, cases, failures)
    return write_report(folder, plan, cases, failures)


def _plan(values: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Case]]:
    import torch

    from terra.benchmark.model import Traffic, make_random_model
    from terra.benchmark.prompts import prompt_maker
    from terra.engine.base import EngineSpec
    from terra.world_model import load_config

    device = values["device"] or torch_device(None).type
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda, got {device!r}")
    dtype = values["dtype"] or dtype_name(torch_dtype(None, torch.device(device)))
    if (values["world_model"] is None) == (values["shape"] is None):
        raise ConfigError("world_model and shape: expected one of them, the other null")
    if values["world_model"] is None:
        model = make_random_model(values["shape"], folder, torch_dtype(dtype), device)
    else:
        model = Path(values["world_model"])
    spec = EngineSpec.of(load_config(model))
    drive = None if values["drive"] is None else Path(values["drive"])
    prompt_maker(spec, drive)  # refused before anything is measured
    fp8 = device == "cuda" and has_fp8(torch_device(device))
    amount = Amount(**{field.name: values[field.name] for field in dataclasses.fields(Amount)})
    cases = plan_cases(values["cases"] or CASES[device], amount, spec.layout.max_frames, fp8=fp8)
    traffic = Traffic.of(model)
    element = torch_dtype(dtype).itemsize
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    plan = {
        "device": device,
        "device_name": name,
        "dtype": dtype,
        "world_model": str(model.resolve()),
        "drive": None if drive is None else str(drive.resolve()),
        "element": element,
        "traffic": dataclasses.asdict(traffic),
        "kv_bytes_per_rollout": traffic.kv * element * spec.layout.max_length,
        "baseline_tokens": values["baseline_tokens"],
        "bandwidth_bytes": values["bandwidth_mib"][device] * 2**20,
        "vllm": values["vllm"],
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    return plan, cases


def _keep_plan(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / "plan.json"
    plan = json.loads(json.dumps(plan))
    if path.is_file():
        other = json.loads(path.read_text())
        differing = [key for key in plan if key != "cases" and plan[key] != other.get(key)]
        known = {case["name"]: case for case in other["cases"]}
        differing += [c["name"] for c in plan["cases"] if c["name"] in known and not _same_engine(c, known[c["name"]])]
        if differing:
            raise ConfigError(f"output: {folder} holds results of another plan (differing: {', '.join(differing)})")
    write_json(path, plan)


def _same_engine(case: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results of two plans' cases can share a table: equal engines, and equal workloads of equal names."""
    theirs = {_workload_key(workload): workload for workload in other["workloads"]}
    same_workloads = all(theirs.get(_workload_key(workload), workload) == workload for workload in case["workloads"])
    return same_workloads and all(case[key] == other[key] for key in case if key != "workloads")


def _workload_key(workload: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(workload.get(key) for key in ("way", "rollouts", "window_part"))


def _run_process(folder: Path, name: str, limit: float) -> str:
    """Run a case in a process; return an empty string, or why the process ended early."""
    log = folder / "logs" / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "terra.benchmark.case", str(folder), name]
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"took more than {limit:.0f} s"
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1] if lines else 'no output'}"[:300]
