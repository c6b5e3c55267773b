"""Jobs in parallel worker processes; a job that fails, or whose process dies, does not stop the others."""

import logging
import multiprocessing
import multiprocessing.connection
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Generic, TypeVar

from terra.errors import TerraError

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
# Does one job, given the job, the index of its worker, and a function to call with the number of parts just done.
# What it returns, which must be picklable, is one of the outcome's results.
Work = Callable[[Job, int, Callable[[int], None]], object]
# Shows progress, given the number of parts done so far and the number of jobs done or failed.
Show = Callable[[int, int], None]

_STOPPED = 143  # exit status of a worker ended by SIGTERM, as a shell reports it


@dataclass
class Outcome:
    """What the jobs done returned, one line for each failed job, and the number of jobs not begun for lack of time."""

    results: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_left: int = 0

    @property
    def num_done(self) -> int:
        """Number of jobs done."""
        return len(self.results)

    @property
    def num_ended(self) -> int:
        """Number of jobs done or failed."""
        return self.num_done + len(self.failed)


@dataclass(frozen=True)
class _Done:
    """A worker's message: the job is done, and what it returned."""

    result: object


@dataclass
class _Worker(Generic[Job]):
    process: ForkServerProcess
    connection: Connection
    job: Job | None = None


def run_jobs(
    jobs: Sequence[Job],
    work: Work[Job],
    *,
    workers: int,
    max_seconds: float | None = None,
    show: Show = lambda parts, done: None,
    describe: Callable[[Job], str] = str,
) -> Outcome:
    """Do all jobs; a `TerraError` in one job is recorded in the outcome, and the other jobs go on.

    SIGINT or SIGTERM stops the workers, whose `with` blocks still exit, and raises KeyboardInterrupt.

    Args:
        jobs: picklable jobs, begun in this order.
        work: a module-level function that does one job; worker processes import it.
        workers: number of worker processes; 0 does all jobs in this process.
        max_seconds: seconds after which no further job is begun; None for no limit.
        show: shows progress.
        describe: names a job in messages.
    """
    deadline = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
    outcome = Outcome()
    with _interruptible():
        run = _run_here if workers == 0 else _run_apart
        waiting = deque(jobs)
        run(waiting, work, min(workers, len(jobs)), deadline, show, describe, outcome)
    outcome.num_left = len(waiting)
    return outcome


def _run_here(
    waiting: deque[Job],
    work: Work[Job],
    workers: int,
    deadline: float,
    show: Show,
    describe: Callable[[Job], str],
    outcome: Outcome,
) -> None:
    parts = 0

    def advance(more: int) -> None:
        nonlocal parts
        parts += more
        show(parts, outcome.num_ended)

    while waiting and time.monotonic() < deadline:
        try:
            outcome.results.append(work(waiting.popleft(), 0, advance))
        except TerraError as error:
            _note_failure(outcome, str(error))
        advance(0)


def _run_apart(
    waiting: deque[Job],
    work: Work[Job],
    workers: int,
    deadline: float,
    show: Show,
    describe: Callable[[Job], str],
    outcome: Outcome,
) -> None:
    pool = {}
    parts = 0
    try:
        for index in range(workers):
            if time.monotonic() < deadline:
                pool[index] = _start_worker(work, index, waiting.popleft())
        while any(worker.job is not None for worker in pool.values()):
            busy = {worker.connection: index for index, worker in pool.items() if worker.job is not None}
            for ready in multiprocessing.connection.wait(list(busy)):
                index = busy[ready]
                worker = pool[index]
                message = _receive(worker, describe)
                if isinstance(message, int):
                    parts += message
                else:
                    if isinstance(message, _Done):
                        outcome.results.append(message.result)
                    else:
                        _note_failure(outcome, message)
                    worker.job = None
                    if waiting and time.monotonic() < deadline:
                        pool[index] = _give(worker, work, index, waiting.popleft())
                show(parts, outcome.num_ended)
    except BaseException:
        for worker in pool.values():
            worker.process.terminate()
        raise
    finally:
        for worker in pool.values():
            worker.connection.close()  # an idle worker exits when its pipe is closed
            worker.process.join()


def _note_failure(outcome: Outcome, reason: str) -> None:
    outcome.failed.append(reason)
    for line in reason.splitlines():
        logger.warning("failed: %s", line)


def _start_worker(work: Work[Job], index: int, job: Job) -> "_Worker[Job]":
    # forkserver imports modules once for all workers and, unlike fork, copies nothing of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", work.__module__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, index, logging.getLogger().level), daemon=True)
    process.start()
    theirs.close()
    ours.send(job)
    return _Worker(process, ours, job)


def _give(worker: "_Worker[Job]", work: Work[Job], index: int, job: Job) -> "_Worker[Job]":
    if not worker.connection.closed:
        worker.connection.send(job)
        worker.job = job
        return worker
    return _start_worker(work, index, job)


def _receive(worker: "_Worker[Job]", describe: Callable[[Job], str]) -> int | str | _Done:
    """Receive a worker's message: the number of parts just done, that the job is done, or why the job failed."""
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        worker.connection.close()
        assert worker.job is not None
        return f"{describe(worker.job)}: its process ended with status {worker.process.exitcode}"


def _serve(connection: Connection, work: Work[Job], index: int, log_level: int) -> None:
    # What a job says, such as which frames it leaves out, is shown as if it ran in the parent process.
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=log_level)
    # Ctrl-C reaches all processes of a terminal; the parent process decides what to do with its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_STOPPED))
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = work(job, index, connection.send)
        except TerraError as error:
            connection.send(str(error))
        else:
            connection.send(_Done(result))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt inside the context; only the main thread can set such a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
