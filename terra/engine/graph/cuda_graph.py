"""Decode steps as CUDA graphs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenizer.cuda_graphs import capture_graph

_WARM_UPS = 3


def capture(work: Callable[[], None], mutated: Sequence[Tensor]) -> Callable[[], None]:
    """`work` as a CUDA graph that is captured at the first call and replayed at every call.

    Args:
        work: see `tokenizer.cuda_graphs.capture_graph`. Each warm-up runs to its end before the next one begins: the
            attention kernel reads `start` before it waits for the kernels ahead (PDL), so one pass must not begin while
            the last one ends. Between two replays of a graph the graph's boundary sees to it.
        mutated: tensors that make a difference when the work is done twice. The warm-ups change them, and their values
            are restored.
    """
    graph: torch.cuda.CUDAGraph | None = None

    def replay() -> None:
        nonlocal graph
        if graph is None:
            kept = [tensor.clone() for tensor in mutated]
            device = torch.device("cuda", torch.cuda.current_device())
            graph, _ = capture_graph(work, device, warm_ups=_WARM_UPS)
            for tensor, before in zip(mutated, kept, strict=True):
                tensor.copy_(before)
        graph.replay()

    return replay
