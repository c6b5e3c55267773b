"""The one thread that computes on a CPU: networks take turns with all cores instead of sharing the cores."""

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

_T = TypeVar("_T")

_NAME = "terra-cores"
_STAT = Path("/proc/stat")  # Linux only, as is GNU's OpenMP in PyTorch's wheels
_OTHERS = 0.15  # cores: what others may use before threads stop to spin
_SECONDS = 0.1  # between two looks at what others use; the kernel counts in steps of 0.01


def on_cores(work: Callable[[], _T]) -> Future[_T]:
    """Call `work` in the process's one thread for computing, after what was given to it before.

    This avoids oversubscription. OpenMP keeps a team of threads (PyTorch's intra-op threads) for each thread that has
    computed in parallel. Once a process has more such threads than cores, GNU's OpenMP lets a team sleep between two
    operations instead of wait actively, and waking it takes longer than the small operations of an engine: a frame
    takes half as long again. So an engine, a tokenizer and a decoder on a CPU compute here, each a frame at a time, and
    Terra's other threads compute on one core each.

    Where other processes use the cores, waiting actively is worse by far: see `SpinLimiter`.

    The thread has as many intra-op threads as its first caller, for good. In the thread itself `work` is called at
    once.
    """
    if not threading.current_thread().name.startswith(_NAME):
        return _thread().submit(_computed, work)
    done: Future[_T] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


def _computed(work: Callable[[], _T]) -> _T:
    if (limiter := _limiter()) is not None:
        limiter.look()
    return work()


class SpinLimiter:
    """Lets OpenMP's threads sleep instead of spin while other processes use the cores.

    A thread of GNU's OpenMP that waits for its team spins for milliseconds before it sleeps. If another process holds
    a core meanwhile, the thread that all wait for does not run, and a frame takes several times as long. The variable
    against it, GOMP_SPINCOUNT, is read when torch is imported: `import terra` sets it, if it comes first. OpenMP also
    stops to spin while a process has more OpenMP threads than cores (libgomp's manual, GOMP_SPINCOUNT). So where torch
    was imported first, and while others use the cores, this class keeps a second team, which never computes.

    Args:
        num_threads: intra-op threads of the thread that computes.
        read_cores: see `used_by_others`.
    """

    def __init__(self, num_threads: int, read_cores: Callable[[], tuple[float, float] | None] | None = None) -> None:
        self._num_threads, self._read_cores = num_threads, read_cores or used_by_others
        self._seen = self._read_cores()
        self._end: threading.Event | None = None

    @property
    def limits(self) -> bool:
        """Whether waiting threads sleep at once now."""
        return self._end is not None

    def look(self) -> None:
        """Let threads sleep or spin, by what other processes have used of the cores since the last look."""
        now, before = self._read_cores(), self._seen
        if now is None or before is None or now[0] - before[0] < _SECONDS:
            return
        others, self._seen = (now[1] - before[1]) / (now[0] - before[0]), now
        self._limit(others > len(os.sched_getaffinity(0)) - self._num_threads + _OTHERS)

    def _limit(self, limits: bool) -> None:
        if limits == self.limits:
            return
        if self._end is not None:
            self._end.set()
            self._end = None
            return
        self._end, ready = threading.Event(), threading.Event()
        arguments = (self._num_threads, ready, self._end)
        threading.Thread(target=_keep_team, args=arguments, name="terra-idle-team", daemon=True).start()
        ready.wait()


def _keep_team(num_threads: int, ready: threading.Event, end: threading.Event) -> None:
    """Start a team of OpenMP threads, which sleep until `end` is set."""
    torch.set_num_threads(num_threads)
    torch.zeros(1 << 20).add_(1)  # large enough for PyTorch to compute it in parallel
    ready.set()
    end.wait()


def used_by_others() -> tuple[float, float] | None:
    """The time, and the seconds that other processes have used of this process's cores; None where that is unknown.

    Both count from an arbitrary moment, so that only differences mean something.
    """
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
        # Columns of `man 5 proc_stat`: user, nice, system; then idle and iowait; then irq, softirq, steal.
        ticks = sum(int(line[column]) for line in lines if line[0] in cores for column in (1, 2, 3, 6, 7, 8))
    except (OSError, AttributeError, LookupError, ValueError):  # not on Linux
        return None
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


@functools.cache
def _limiter() -> SpinLimiter | None:
    """None where spinning is limited already, and where nothing waits for a second thread."""
    limited = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return None if limited or torch.get_num_threads() == 1 else SpinLimiter(torch.get_num_threads())


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, _NAME, torch.set_num_threads, (torch.get_num_threads(),))
