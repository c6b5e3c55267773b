"""The one thread that computes on a CPU: networks take turns with all cores instead of sharing the cores."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")

_NAME = "terra-cores"


def on_cores(work: Callable[[], _T]) -> Future[_T]:
    """Call `work` in the process's one thread for computing, after what was given to it before.

    This avoids oversubscription. OpenMP keeps a team of threads (PyTorch's intra-op threads) for each thread that has
    computed in parallel. Once a process has more such threads than cores, GNU's OpenMP lets a team sleep between two
    operations instead of wait actively, and waking it takes longer than the small operations of an engine: a frame
    takes half as long again. So an engine, a tokenizer and a decoder on a CPU compute here, each a frame at a time, and
    Terra's other threads compute on one core each.

    By default OpenMP's threads spin for milliseconds before they sleep, and a frame takes several times as long if
    another process holds one of the cores meanwhile. Terra's commands set GOMP_SPINCOUNT=1000, so that threads spin for
    microseconds; other programs may set it before `import torch`.

    The thread has as many intra-op threads as its first caller, for good. In the thread itself `work` is called at
    once.
    """
    if not threading.current_thread().name.startswith(_NAME):
        return _thread().submit(work)
    done: Future[_T] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, _NAME, torch.set_num_threads, (torch.get_num_threads(),))
