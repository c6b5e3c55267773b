"""CUDA graphs: work of many kernels that the host launches at once."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

_one_at_a_time = threading.Lock()  # in a process: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs


def capture_graph(
    work: Callable[[], _T], device: torch.device, *, warm_ups: int, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture work as a CUDA graph; returns the graph, and the result of the work that each replay fills anew.

    A graph replays kernels with the addresses they were captured with. So all tensors that `work` shares with the
    outside must keep their addresses for as long as the graph lives: they are changed in place, never replaced.

    Args:
        work: launches kernels on a GPU and does not wait for any result.
        device: the GPU.
        warm_ups: how often `work` is done before, each time to its end: kernels are compiled, libraries choose theirs.
        pool: memory of graphs whose replays never overlap (`torch.cuda.graph_pool_handle`); None: the graph's own.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            work()
            stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate memory meanwhile, hence "thread_local".
    with _one_at_a_time, torch.cuda.graph(graph, pool, stream, "thread_local"):
        result = work()
    return graph, result
