"""The training loop that the tokenizer and the world model share: AdamW, EMA, limits in steps or seconds, resume."""

import json
import logging
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from terra.errors import ConfigError
from terra.training.progress import ProgressLine
from terra.training.randomness import StepRandom, step_random
from terra.training.settings import LoopConfig
from terra.training.state import Ema, load_state, save_state

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]
StopReason = Literal["steps", "time", "sigterm"]


class Objective(Protocol):
    """What is trained: a model, the batches it sees and the loss on them."""

    @property
    def model(self) -> nn.Module:
        """Float32 parameters, on the device where training runs."""
        ...

    @property
    def samples(self) -> str:
        """What one element of a batch is called in logs, in the plural."""
        ...

    @property
    def flops_per_sample(self) -> float | None:
        """Floating-point operations of one sample's forward and backward pass; None if not known."""
        ...

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """A batch on the model's device that depends on `random` alone."""
        ...

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Scalars to log, of which "loss" is minimised; `progress` in [0, 1] is how far the run is."""
        ...


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run: the steps done in all its parts, its loop time, why it stopped, and the averaged weights."""

    step: int
    elapsed_seconds: float
    stopped_by: StopReason
    ema: Ema


def train(objective: Objective, config: LoopConfig) -> TrainingResult:
    """Train from the state in `config.output`, or from the start if there is none, until a limit or SIGTERM.

    The model is left with its last weights; `TrainingResult.ema.copy_to_model()` puts in the averaged ones. With
    `schedule="steps"` an interrupted and resumed run equals an uninterrupted one, bit for bit on the CPU.

    Raises:
        CheckpointError: the saved state is damaged or belongs to another model.
        ConfigError: the saved state was made with another seed, or the loss is no longer finite.
        OutputError: the output can't be written.
    """
    return Trainer(objective, config).run()


class Trainer:
    """One run of the loop; `train` is its public face."""

    def __init__(self, objective: Objective, config: LoopConfig):
        self.objective, self.config = objective, config
        self.device = next(objective.model.parameters()).device
        self.optimizer = _build_optimizer(objective.model, config)
        self.ema = Ema(objective.model, config.ema_decay)
        self.step = 0
        self._elapsed_before = 0.0
        self._resume()
        self._sums: dict[str, Tensor] = {}
        self._steps_summed = 0

    def run(self) -> TrainingResult:
        """Train until a limit or SIGTERM; the state is saved whatever the reason."""
        self.config.output.mkdir(parents=True, exist_ok=True)
        model = self.objective.model.train()
        if self.config.compile_model:
            model.compile()
        self._start = self._last_report = self._last_save = monotonic()
        total = 1000.0  # the bar shows how far the run is to its first limit
        with _catch_sigterm() as terminated, ProgressLine("training", total, every_seconds=0.0) as line:
            while (stop := self._stop_reason(terminated)) is None:
                self._train_step()
                now = monotonic()
                if now - self._last_report >= self.config.log_every_seconds:
                    line.show(total * self._completed(), self._report())
                if now - self._last_save >= self.config.save_every_seconds:
                    self._save()
            if self._steps_summed:
                line.show(total, self._report())
            self._save()
        logger.info("stopped by %s after %d steps, %.0f s", stop, self.step, self._elapsed())
        return TrainingResult(self.step, self._elapsed(), stop, self.ema)

    def _train_step(self) -> None:
        """One update; nothing here waits for the device."""
        progress = self._schedule_progress()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(progress)
        batch = self.objective.draw(step_random(self.config.seed, self.step, self.device), self.config.batch_size)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            parts = self.objective.loss(batch, progress)
        parts["loss"].backward()
        parts["gradient_norm"] = nn.utils.clip_grad_norm_(self.objective.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.step)
        for name, value in parts.items():
            value = value.detach().to(self.device, torch.float32, non_blocking=True)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._steps_summed += 1
        self.step += 1

    def _elapsed(self) -> float:
        return self._elapsed_before + monotonic() - self._start

    def _schedule_progress(self) -> float:
        if self.config.schedule == "time":
            return min(self._elapsed() / (self.config.max_seconds or math.inf), 1.0)
        return min(self.step / (self.config.max_steps or math.inf), 1.0)

    def _completed(self) -> float:
        """How far the run is to the first limit it will meet, in [0, 1]."""
        seconds, steps = self.config.max_seconds or math.inf, self.config.max_steps or math.inf
        return min(max(self._elapsed() / seconds, self.step / steps), 1.0)

    def _learning_rate(self, progress: float) -> float:
        # Warm-up counts steps under both schedules: compilation alone can take a tenth of a short lease.
        warmup = min(1.0, (self.step + 1) / (self.config.warmup_steps + 1))
        low = self.config.final_learning_rate
        return self.config.learning_rate * warmup * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))

    def _stop_reason(self, terminated: threading.Event) -> StopReason | None:
        if terminated.is_set():
            return "sigterm"
        if self.config.max_steps is not None and self.step >= self.config.max_steps:
            return "steps"
        if self.config.max_seconds is not None and self._elapsed() >= self.config.max_seconds:
            return "time"
        return None

    def _report(self) -> str:
        """Log the means since the last report (the one place that waits for the device); returns the progress text."""
        means = dict(
            zip(self._sums, (torch.stack(list(self._sums.values())) / self._steps_summed).tolist(), strict=True)
        )
        now = monotonic()
        samples_per_second = self._steps_summed * self.config.batch_size / max(now - self._last_report, 1e-9)
        self._last_report, self._sums, self._steps_summed = now, {}, 0
        if not math.isfinite(means["loss"]):
            raise ConfigError(
                f"{self.config.output}: expected a finite loss, got {means['loss']} before step {self.step}: "
                f"lower learning_rate={self.config.learning_rate:g}; the last saved state is from before"
            )
        rates = {f"{self.objective.samples}_per_second": samples_per_second}
        if self.device.type == "cuda" and self.objective.flops_per_sample is not None:
            rates["mfu"] = samples_per_second * self.objective.flops_per_sample / self.config.peak_flops
        elapsed, completed = self._elapsed(), self._completed()
        learning_rate = self._learning_rate(self._schedule_progress())
        record = {"step": self.step, "elapsed_seconds": elapsed, "learning_rate": learning_rate, **means, **rates}
        with (self.config.output / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        eta = elapsed * (1 - completed) / max(completed, 1e-9)
        numbers = " ".join(f"{name} {value:.4g}" for name, value in {**means, **rates}.items())
        return f"step {self.step} {numbers} eta {eta:.0f} s"

    def _save(self) -> None:
        if self._steps_summed:
            self._report()  # refuses to save weights that have gone to NaN
        scalars = {"step": self.step, "elapsed_seconds": self._elapsed(), "seed": self.config.seed}
        save_state(self.config.output / "state", self.objective.model, self.optimizer, self.ema, scalars)
        self._last_save = monotonic()

    def _resume(self) -> None:
        scalars = load_state(self.config.output / "state", self.objective.model, self.optimizer, self.ema)
        if scalars is None:
            return
        if scalars["seed"] != self.config.seed:
            raise ConfigError(
                f"seed: expected {scalars['seed']} of {self.config.output / 'state'}, got {self.config.seed}"
            )
        self.step, self._elapsed_before = int(scalars["step"]), float(scalars["elapsed_seconds"])
        logger.info("resuming %s at step %d, %.0f s", self.config.output, self.step, self._elapsed_before)


def _build_optimizer(model: nn.Module, config: LoopConfig) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2), fused=fused)


@contextmanager
def _catch_sigterm() -> Iterator[threading.Event]:
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
