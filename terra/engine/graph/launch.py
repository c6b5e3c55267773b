"""Kernels that begin before the one ahead of them is done, and wait for its results where they need them.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization": compute capability 9.0 or higher.
"""

# pyright: reportIndexIssue=false

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PROCESSORS_OF_CPU = 4


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel begin; go on when the ones before are done. What they write must not be read before.

    Every program of a kernel that is launched early must come here, so that what is done includes what came before.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def launched_early(device: torch.device) -> dict[str, bool]:
    """A launch's options: empty where kernels can't begin early."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if can else {}


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few elsewhere, where kernels are only tried."""
    if device.type != "cuda":
        return _PROCESSORS_OF_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count
