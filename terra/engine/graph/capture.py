"""Work on a GPU as a CUDA graph: launched by the host at once instead of kernel by kernel."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UPS = 3  # compile, let libraries choose their kernels, allocate


def captured(work: Callable[[], None], changes: Sequence[Tensor]) -> Callable[[], None]:
    """`work` as a graph that is captured at the first call and replayed at every call.

    Args:
        work: reads and writes tensors that stay where they are, and asks the device nothing.
        changes: tensors that make a difference when work is done twice; what the trials before the capture do to them
            is undone.
    """
    graph: torch.cuda.CUDAGraph | None = None

    def replay() -> None:
        nonlocal graph
        if graph is None:
            kept = [tensor.clone() for tensor in changes]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    work()
                    side.synchronize()  # kernels begin early: a pass is not to begin while the last one ends
            for tensor, before in zip(changes, kept, strict=True):
                tensor.copy_(before)
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made, capture_error_mode="thread_local"):
                work()
            graph = made
        graph.replay()

    return replay
