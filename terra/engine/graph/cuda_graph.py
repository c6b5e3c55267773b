"""CUDA graphs: work of many kernels that the host launches at once. And copies for which the host does not wait."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 3  # compile, let libraries choose their kernels, allocate


def capture(work: Callable[[], None], mutated: Sequence[Tensor]) -> Callable[[], None]:
    """`work` as a CUDA graph that is captured at the first call and replayed at every call.

    A graph replays kernels with the addresses they were captured with. So all tensors that `work` shares with the
    outside must keep their addresses for as long as the graph lives: they are changed in place, never replaced.

    Args:
        work: launches kernels and does not wait for any result.
        mutated: tensors that make a difference when the work is done twice. The warm-up runs before the capture change
            them, and their values are restored.
    """
    graph: torch.cuda.CUDAGraph | None = None

    def replay() -> None:
        nonlocal graph
        if graph is None:
            kept = [tensor.clone() for tensor in mutated]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    work()
                    # The attention kernel reads `start` before it waits for the kernels ahead (PDL), so one pass must
                    # not begin while the last one ends. Between two replays of a graph the graph's boundary sees to it.
                    side.synchronize()
            for tensor, before in zip(mutated, kept, strict=True):
                tensor.copy_(before)
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made, capture_error_mode="thread_local"):
                work()
            graph = made
        graph.replay()

    return replay


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a tensor of the CPU to a device, behind the work that the device has been given before.

    The host does not wait for that work, as it would if the copy were from memory that is not pinned.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy tensors of one device to the CPU; the result waits for the copies.

    Work that the device is given later does not change them.
    """
    copies = tuple(tensor.to("cpu", copy=True, non_blocking=True) for tensor in tensors)
    copied = mark(tensors[0].device)

    def wait() -> tuple[Tensor, ...]:
        copied()
        return copies

    return wait


def mark(device: torch.device) -> Callable[[], None]:
    """A mark behind all work that the device has been given; the result waits until the device has come there.

    A CPU has done its work when it returns, so that there is nothing to wait for.
    """
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
