"""Kernels that begin before the one ahead of them is done, and wait for its results where they need them.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization": compute capability 9.0 or higher.
"""

# pyright: reportIndexIssue=false

import functools

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Elsewhere than on a GPU kernels are only tried.
_PROCESSORS_OF_CPU = 4
_SHARED_MEMORY_OF_CPU = 1 << 30


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel begin; go on when the ones before are done. What they write must not be read before.

    Every program of a kernel that is launched early must come here, so that what is done includes what came before.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def launched_early(device: torch.device) -> dict[str, bool]:
    """A launch's options: the kernel's EARLY, and that it begins early where kernels can."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _PROCESSORS_OF_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a GPU's shared memory that a program may use."""
    if device.type != "cuda":
        return _SHARED_MEMORY_OF_CPU
    return max_shared_mem(torch.cuda.current_device() if device.index is None else device.index)
