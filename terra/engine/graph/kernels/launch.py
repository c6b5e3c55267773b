"""Programmatic dependent launch (PDL), and the limits of a GPU that tile sizes follow.

With PDL a kernel is launched before the kernel ahead of it is done, and waits for that kernel's results where it needs
them (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 or
higher). What it may read before the wait is what no kernel of the same pass writes: weights, their scales and norms,
RoPE tables, the keys and values of earlier passes, what the host writes between passes (`holder`, `shared`), and
`start`, which `accept` writes as the last kernel of the PREVIOUS pass. A CUDA graph holds one pass, and a graph's
replay begins when the one before has ended. Two passes in one graph would be a race.
"""

# pyright: reportIndexIssue=false

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)  # compute capability from which on there are PDL and TMA


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel begin, and wait until all kernels ahead are done. Their results must not be read before.

    Every CTA of a kernel must come here, also one that has nothing to do: a kernel counts as done for the next one only
    when all its CTAs are, and that one's wait must include the kernels ahead of this one.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@dataclass(frozen=True)
class DeviceLimits:
    """What launches depend on.

    Attributes:
        num_sms: streaming multiprocessors.
        shared_memory: bytes of shared memory that a CTA can have (opt-in).
        pdl: whether kernels can be launched with PDL.
        tma: whether kernels can read tiles by the Tensor Memory Accelerator (TMA).
    """

    num_sms: int
    shared_memory: int
    pdl: bool
    tma: bool

    @property
    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments of every launch: the kernel's PDL, and Triton's option."""
        return {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a GPU."""
    hopper = torch.cuda.get_device_capability(device) >= _HOPPER
    return DeviceLimits(
        torch.cuda.get_device_properties(device).multi_processor_count,
        max_shared_mem(torch.cuda.current_device() if device.index is None else device.index),
        pdl=hopper,
        tma=hopper,
    )
