"""Coordination of a run's processes: at which step they all stop, report and save, and the clock that they share."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import torch
from accelerate import Accelerator
from torch import distributed

from terra.training.settings import LoopConfig

StopReason = Literal["steps", "time", "sigterm"]

_REASONS: tuple[StopReason | None, ...] = (None, "steps", "time", "sigterm")
_SECONDS_BETWEEN_DECISIONS = 1.0
_MAX_STEPS_BETWEEN_DECISIONS = 50


@dataclass(frozen=True)
class Decision:
    """The actions that every process takes before its next steps.

    Attributes:
        stop: why the run ends here; None if it goes on.
        report: whether to log the means since the last report.
        save: whether to write the state.
        steps: number of steps to take before the next decision.
        elapsed: seconds of the run so far, by the first process's clock.
        starting: seconds, out of `elapsed`, spent in the first step of the run and of each resumption; these compile.
        seconds_per_step: mean duration of the steps since the last decision.
    """

    stop: StopReason | None
    report: bool
    save: bool
    steps: int
    elapsed: float
    starting: float
    seconds_per_step: float


class LoopCoordinator:
    """Makes the same `Decision` in every process: the first decides by its clock, and any process may stop the run.

    A single process decides before each step. Several processes exchange seven numbers about once a second, because an
    exchange waits for the device; between decisions they estimate the time from the number of steps, so that all of
    them use the same learning rate. The first step has a decision of its own, so that all processes know its duration.

    Args:
        accelerator: accelerate's view of the run's processes.
        config: the run's limits, and the intervals between reports and between saves.
        step: the step at which this process starts or resumes the run.
        elapsed, starting: the seconds before `step`, as in `Decision`.
    """

    def __init__(self, accelerator: Accelerator, config: LoopConfig, step: int, elapsed: float, starting: float):
        self._accelerator, self._config = accelerator, config
        self._elapsed_before, self._first_step = elapsed, step
        self._start = self._last_report = self._last_save = monotonic()
        self._last = Decision(None, False, False, 1, elapsed, starting, 0.0)
        self._last_step = step

    def decide(self, step: int, terminated: threading.Event) -> Decision:
        """Return the decision that all processes share; every process must call this method at the same steps."""
        mine = self._by_own_clock(step, terminated)
        self._last = mine if self._accelerator.num_processes == 1 else self._exchange(mine)
        self._last_step = step
        now = monotonic()
        if self._last.report:
            self._last_report = now
        return self._last

    def saved(self) -> None:
        """Restart the interval to the next save, so that the duration of a save does not count."""
        self._last_save = monotonic()

    def elapsed_at(self, step: int) -> float:
        """Seconds of the run when `step` begins, the same in all processes."""
        return self._last.elapsed + (step - self._last_step) * self._last.seconds_per_step

    @property
    def starting(self) -> float:
        """Seconds of the run spent in compiling first steps (see `Decision.starting`), the same in all processes."""
        return self._last.starting

    def elapsed(self) -> float:
        """Seconds of the run by this process's own clock, including the time before each resumption."""
        return self._elapsed_before + monotonic() - self._start

    def _by_own_clock(self, step: int, terminated: threading.Event) -> Decision:
        elapsed, now = self.elapsed(), monotonic()
        done = step - self._last_step
        seconds_per_step = (elapsed - self._last.elapsed) / done if done else self._last.seconds_per_step
        starting = self._last.starting
        if done and self._last_step == self._first_step:
            starting += elapsed - self._elapsed_before
        max_steps, max_seconds = self._config.max_steps, self._config.max_seconds
        stop: StopReason | None = None
        if terminated.is_set():
            stop = "sigterm"
        elif max_steps is not None and step >= max_steps:
            stop = "steps"
        elif max_seconds is not None and elapsed >= max_seconds:
            stop = "time"
        steps = 1
        if self._accelerator.num_processes > 1 and seconds_per_step > 0:
            steps = int(max(1.0, min(_SECONDS_BETWEEN_DECISIONS / seconds_per_step, _MAX_STEPS_BETWEEN_DECISIONS)))
            if max_steps is not None:
                steps = max(1, min(steps, max_steps - step))
        return Decision(
            stop=stop,
            report=now - self._last_report >= self._config.log_every_seconds,
            save=now - self._last_save >= self._config.save_every_seconds,
            steps=steps,
            elapsed=elapsed,
            starting=starting,
            seconds_per_step=seconds_per_step,
        )

    def _exchange(self, mine: Decision) -> Decision:
        """Reduce the decisions with a maximum; processes other than the first contribute only a request to stop."""
        reason = _REASONS.index(mine.stop) if self._accelerator.is_main_process or mine.stop == "sigterm" else 0
        rest = (mine.report, mine.save, mine.steps, mine.elapsed, mine.starting, mine.seconds_per_step)
        own = (reason, *(rest if self._accelerator.is_main_process else (0,) * len(rest)))
        numbers = torch.tensor(own, dtype=torch.float64).to(self._accelerator.device)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
        agreed, report, save, steps, *times = numbers.tolist()
        return Decision(_REASONS[int(agreed)], bool(report), bool(save), int(steps), *times)


@contextmanager
def catch_sigterm() -> Iterator[threading.Event]:
    """While the context is open, SIGTERM sets the yielded event instead of ending the process.

    Python lets only the main thread install a signal handler; in another thread the event is never set.
    """
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, previous)
