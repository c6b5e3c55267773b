"""What all processes of a run must do at the same step: stop, report, save, and which time they take it to be."""

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
    """What every process does now, before its next steps.

    Attributes:
        stop: why the run ends here; None if it goes on.
        report: log the means since the last report.
        save: write the state.
        steps: how many steps to take before the next decision.
        elapsed: seconds of the run so far, as the first process counts them.
        starting: how many of them went into the first steps of the run's parts, which compile.
        seconds_per_step: of the steps since the last decision.
    """

    stop: StopReason | None
    report: bool
    save: bool
    steps: int
    elapsed: float
    starting: float
    seconds_per_step: float


class Agreement:
    """The first process decides by its clock, the others follow; any process may ask to stop.

    A process alone decides before each step. Several exchange seven numbers about once a second, because an exchange
    waits for the device; between decisions they count time by steps, so that all of them use one learning rate. The
    first step is a decision of its own, so that all know what it took.

    Args:
        accelerator: of the run's processes.
        config: the limits, and how often to report and save.
        step: at which this part of the run begins.
        elapsed, starting: of the parts before, see `Decision`.
    """

    def __init__(self, accelerator: Accelerator, config: LoopConfig, step: int, elapsed: float, starting: float):
        self._accelerator, self._config = accelerator, config
        self._elapsed_before, self._first_step = elapsed, step
        self._start = self._last_report = self._last_save = monotonic()
        self._last = Decision(None, False, False, 1, elapsed, starting, 0.0)
        self._last_step = step

    def decide(self, step: int, terminated: threading.Event) -> Decision:
        """The decision for all processes; each calls this at the same steps."""
        mine = self._by_own_clock(step, terminated)
        self._last = mine if self._accelerator.num_processes == 1 else self._exchange(mine)
        self._last_step = step
        now = monotonic()
        if self._last.report:
            self._last_report = now
        return self._last

    def saved(self) -> None:
        """Count the time to the next save from now: saving itself may take long."""
        self._last_save = monotonic()

    def elapsed_at(self, step: int) -> float:
        """Seconds of the run when `step` begins, the same in all processes."""
        return self._last.elapsed + (step - self._last_step) * self._last.seconds_per_step

    @property
    def starting(self) -> float:
        """Seconds of the run that went into the first steps of its parts, the same in all processes."""
        return self._last.starting

    def elapsed(self) -> float:
        """Seconds of the run by this process's own clock, all resumed parts together."""
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
        """The largest of each number over the processes, of which only the first gives any but its wish to stop."""
        reason = _REASONS.index(mine.stop) if self._accelerator.is_main_process or mine.stop == "sigterm" else 0
        rest = (mine.report, mine.save, mine.steps, mine.elapsed, mine.starting, mine.seconds_per_step)
        own = (reason, *(rest if self._accelerator.is_main_process else (0,) * len(rest)))
        numbers = torch.tensor(own, dtype=torch.float64).to(self._accelerator.device)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
        agreed, report, save, steps, *times = numbers.tolist()
        return Decision(_REASONS[int(agreed)], bool(report), bool(save), int(steps), *times)


@contextmanager
def catch_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process; Python lets only the main thread ask for that."""
    terminated = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, previous)
