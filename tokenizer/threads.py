"""Runs torch's work on a CPU in threads that end with the work."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


def run_apart(name: str, cores: int, work: Callable[[], _T]) -> _T:
    """Call `work` in a thread of its own, which ends with it, and wait; gives its result, or raises what it raises.

    OpenMP keeps a team for each thread that has computed in parallel. Once all teams of a process have more threads
    than there are cores, GNU's OpenMP lets them sleep between two operations instead of wait actively, and waking them
    takes longer than the small operations of an engine on a CPU: a frame takes half as long again. The team of a thread
    ends with the thread, so that only the engine's thread should live on.

    Args:
        name: begins the thread's name.
        cores: threads that torch may use for an operation.
        work: what to do.
    """
    torch.get_num_threads()  # settles this thread's own number: the next line sets that of threads without one, too
    with ThreadPoolExecutor(1, name, torch.set_num_threads, (cores,)) as thread:
        return thread.submit(work).result()
