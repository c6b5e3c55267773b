"""The processes of a training run: one on a CPU or a GPU, or one for each GPU, started by accelerate or torchrun."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from terra.device import torch_device
from terra.errors import ConfigError


def start_processes(device: str | None) -> Accelerator:
    """Join the run's processes.

    `device` is "cpu" or "cuda", where each process has a GPU of its own; None takes GPUs if there are any.

    Processes other than the first log warnings and errors only. The training loop opens autocast itself, because
    accelerate's mixed precision patches `forward`, which breaks the compiled graph.

    Raises:
        ConfigError: no such device here, or more processes on this machine than GPUs.
    """
    kind = torch_device(device).type
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=kind == "cpu", mixed_precision="no", kwargs_handlers=[ddp])
    if kind == "cuda":
        if accelerator.local_process_index >= torch.cuda.device_count():
            raise ConfigError(
                f"device: expected at most {torch.cuda.device_count()} processes, one for each GPU, "
                f"got process {accelerator.local_process_index}"
            )
        torch.set_float32_matmul_precision("high")
    if not accelerator.is_main_process:
        logging.getLogger("terra").setLevel(logging.WARNING)
    return accelerator


@contextmanager
def convolution_search(on: bool) -> Iterator[None]:
    """Turn cuDNN's benchmark mode on or off: it times all algorithms at each new shape, which pays off in a loop."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def unwrapped(module: nn.Module) -> nn.Module:
    """The network inside the wrapper that the loop puts around it in a run of several processes."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
