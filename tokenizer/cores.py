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

    OpenMP keeps a team of threads for each thread that has computed in parallel. Once the teams of a process have more
    threads than there are cores, GNU's OpenMP lets them sleep between two operations instead of wait actively, and
    waking them takes longer than the small operations of an engine: a frame takes half as long again. So an engine, a
    tokenizer and a decoder on a CPU compute here, each a frame at a time, and Terra's other threads on one core each.

    By default they wait actively for milliseconds, so that another busy process delays a frame of two threads several
    times over. Terra's commands set GOMP_SPINCOUNT to some microseconds; set it before `import torch` elsewhere.

    The thread uses as many cores as its first caller may. In the thread itself `work` is called at once.
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
