"""The training loop that tokenizer and world model share: AdamW, EMA, limits in steps or seconds, resume, many GPUs."""

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from terra.errors import ConfigError
from terra.progress import ProgressLine
from terra.training.coordination import LoopCoordinator, StopReason, catch_sigterm
from terra.training.log import TrainingLog
from terra.training.network import Network
from terra.training.processes import convolution_search
from terra.training.randomness import StepRandom, step_random
from terra.training.schedule import completed_at, learning_rate_at, progress_at
from terra.training.settings import LoopConfig
from terra.training.state import Ema, load_state, save_state

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]


class Objective(Protocol):
    """A training objective: a model, its batches and its loss.

    During `train` the loop moves `model` and `discriminator` to the device and replaces them by wrappers that average
    gradients over processes. Call a wrapper only as `self.model(...)`; for everything else take the module inside from
    `terra.training.processes.unwrapped`. After `train` both attributes are the plain modules again.

    An objective keeps what it must remember between steps in buffers of the two modules, because these are saved.

    Attributes:
        model: the trained network; its parameters are float32 and start equal in every process.
        discriminator: a second network that is trained against `model`, or None. Its parameters take no gradient in
            `loss`.
        samples: name of a batch's elements in logs, in the plural.
        tokens_per_sample: tokens of a sample, for the log's tokens/s; None logs no such rate.
        flops_per_sample: floating-point operations of one sample's forward and backward pass; None if not known.
    """

    model: nn.Module
    discriminator: nn.Module | None
    samples: str
    tokens_per_sample: int | None
    flops_per_sample: float | None

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw this process's next batch onto the model's device; it depends on `random` and `progress` alone.

        `progress` of the run is in [0, 1].
        """
        ...

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Compute the scalars to log; the loop minimizes "loss" over `model`. `progress` is as in `draw`."""
        ...

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Compute the scalars to log; the loop minimizes "discriminator_loss" over `discriminator`.

        The loop calls this method after `loss`, on the same batch, and only if there is a discriminator. `loss` may
        keep detached results for it.
        """
        ...

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Make what each save logs: numbers (0-d), pictures (uint8, 3 x height x width), videos (frames x a picture).

        Only the first process calls this method: in eval mode, not compiled, without gradients. In the context
        `ema.averaged()` the model has its averaged weights.
        """
        ...


@dataclass(frozen=True)
class TrainingResult:
    """A run's end: its steps and loop time since the first start, the reason for the stop, and the averaged weights."""

    step: int
    elapsed_seconds: float
    stopped_by: StopReason
    ema: Ema


def train(objective: Objective, config: LoopConfig, accelerator: Accelerator) -> TrainingResult:
    """Train from the state in `config.output`, or from the start if there is none, until a limit or SIGTERM.

    The model is left with its last weights; `TrainingResult.ema.copy_to_model()` replaces them by the averaged weights.
    With `schedule="steps"` an interrupted and resumed run equals an uninterrupted one, bit for bit on the CPU. Every
    process of the run must call this function, but only the first process writes files.

    Raises:
        CheckpointError: the saved state is damaged or belongs to another model.
        ConfigError: the saved state was made with another seed, or the loss is no longer finite.
        OutputError: the output can't be written.
    """
    trainer = Trainer(objective, config, accelerator)
    try:
        return trainer.run()
    finally:
        trainer.release()


class Trainer:
    """The state and the steps of one run; `train` is the public function around this class."""

    def __init__(self, objective: Objective, config: LoopConfig, accelerator: Accelerator):
        self.objective, self.config, self.accelerator = objective, config, accelerator
        self._model = Network.prepare(objective.model, config, accelerator)
        if config.compile_model:
            self._model.compile()
        self._discriminator = None
        if objective.discriminator is not None:
            self._discriminator = Network.prepare(objective.discriminator, config, accelerator)
        self.ema = Ema(self._model.raw, config.ema_decay, config.ema_every_steps)
        self.step = 0
        elapsed, starting = self._resume()
        objective.model = self._model.wrapped
        if self._discriminator is not None:
            objective.discriminator = self._discriminator.wrapped
        self._coordinator = LoopCoordinator(accelerator, config, self.step, elapsed, starting)
        self._sums: dict[str, Tensor] = {}
        self._steps_summed = 0
        self._summed_since = monotonic()

    def release(self) -> None:
        """Put the plain modules back into the objective in place of the wrappers."""
        self.objective.model = self._model.raw
        if self._discriminator is not None:
            self.objective.discriminator = self._discriminator.raw
        self.accelerator.free_memory()

    def run(self) -> TrainingResult:
        """Train until a limit or SIGTERM; the state is saved whatever the reason."""
        for network in self._networks().values():
            network.raw.train()
        total = 1000.0  # the bar shows how far the run is to its first limit
        with ExitStack() as stack:
            terminated = stack.enter_context(catch_sigterm())
            self._log = stack.enter_context(TrainingLog(self.config.output, self.step, self.accelerator))
            line = stack.enter_context(
                ProgressLine("training", total, every_seconds=0.0, done=total * self._completed())
            )
            while (decision := self._coordinator.decide(self.step, terminated)).stop is None:
                if decision.report and self._steps_summed:
                    line.show(total * self._completed(), self._report())
                if decision.save and self._steps_summed:
                    self._save(with_previews=True)
                for _ in range(decision.steps):
                    self._train_step()
            if self._steps_summed:
                line.show(total * self._completed(), self._report())
            self._save(with_previews=decision.stop != "sigterm")
        logger.info("stopped by %s after %d steps, %.0f s", decision.stop, self.step, decision.elapsed)
        return TrainingResult(self.step, decision.elapsed, decision.stop, self.ema)

    def _train_step(self) -> None:
        """Update the networks once, without waiting for the device."""
        progress = self._progress()
        for network in self._networks().values():
            network.set_learning_rate(learning_rate_at(self.config, self.step, progress))
        for part in range(self.config.accumulate):
            self._accumulate(part, progress)
        norms = {
            f"{name}gradient_norm": network.update(self.accelerator, self.config.clip_norm)
            for name, network in (("", self._model), ("discriminator_", self._discriminator))
            if network is not None
        }
        self._add(norms, 1)
        self.ema.update(self.step)
        self._steps_summed += 1
        self.step += 1

    def _accumulate(self, part: int, progress: float) -> None:
        """Add one batch's gradients; processes exchange gradients only with the step's last batch (`part`)."""
        accelerator, count = self.accelerator, self.config.accumulate
        draw = self.step * count + part
        random = step_random(self.config.seed, draw, accelerator.device, accelerator.process_index)
        batch = self.objective.draw(random, self.config.batch_size, progress)
        with ExitStack() as stack:
            if part < count - 1:
                for network in self._networks().values():
                    stack.enter_context(accelerator.no_sync(network.wrapped))
            if self._discriminator is not None:
                self._discriminator.raw.requires_grad_(False)
            with self._autocast():
                parts = self.objective.loss(batch, progress)
            accelerator.backward(parts["loss"] / count)
            if self._discriminator is not None:
                self._discriminator.raw.requires_grad_(True)
                with self._autocast():
                    discriminator_parts = self.objective.discriminator_loss(batch, progress)
                accelerator.backward(discriminator_parts["discriminator_loss"] / count)
                parts = parts | discriminator_parts
        self._add(parts, count)

    def _autocast(self) -> torch.autocast:
        kind = self.accelerator.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def _add(self, parts: dict[str, Tensor], count: int) -> None:
        for name, value in parts.items():
            value = value.detach().to(self.accelerator.device, torch.float32, non_blocking=True) / count
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _progress(self) -> float:
        coordinator = self._coordinator
        return progress_at(self.config, self.step, coordinator.elapsed_at(self.step), coordinator.starting)

    def _completed(self) -> float:
        return completed_at(self.config, self.step, self._coordinator.elapsed_at(self.step))

    def _report(self) -> str:
        """Log the means since the last report over all processes (this waits for the device); returns the text."""
        sums = self.accelerator.reduce(torch.stack(list(self._sums.values())), "mean")
        means = dict(zip(self._sums, (sums / self._steps_summed).tolist(), strict=True))  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
        now = monotonic()
        rates = self._rates(now - self._summed_since)
        self._summed_since, self._sums, self._steps_summed = now, {}, 0
        # A gradient that is not finite has already made weights that are none, also where the step's loss was finite.
        names = ("loss", "discriminator_loss", "gradient_norm", "discriminator_gradient_norm")
        bad = next((name for name in names if not math.isfinite(means.get(name, 0.0))), None)
        if bad is not None:
            raise ConfigError(
                f"{self.config.output}: expected a finite {bad.replace('_', ' ')}, got {means[bad]} before step "
                f"{self.step}: lower learning_rate={self.config.learning_rate:g}; the last saved state is from before"
            )
        elapsed, completed = self._coordinator.elapsed_at(self.step), self._completed()
        record = {
            "elapsed_seconds": elapsed,
            "learning_rate": learning_rate_at(self.config, self.step, self._progress()),
        }
        self._log.write(self.step, {**record, **means, **rates})
        eta = elapsed * (1 - completed) / max(completed, 1e-9)
        numbers = " ".join(f"{name} {value:.4g}" for name, value in {**means, **rates}.items())
        return f"step {self.step} {numbers} eta {eta:.0f} s"

    def _rates(self, seconds: float) -> dict[str, float]:
        """Samples and tokens per second of all processes, and the model FLOPs utilization of one device."""
        objective, config = self.objective, self.config
        samples = self._steps_summed * config.batch_size * config.accumulate / max(seconds, 1e-9)
        rates: dict[str, float] = {f"{objective.samples}_per_second": samples * self.accelerator.num_processes}
        if objective.tokens_per_sample is not None:
            rates["tokens_per_second"] = samples * self.accelerator.num_processes * objective.tokens_per_sample
        if self.accelerator.device.type == "cuda" and objective.flops_per_sample is not None:
            rates["mfu"] = samples * objective.flops_per_sample / config.peak_flops
        return rates

    def _save(self, with_previews: bool) -> None:
        if self._steps_summed:
            self._report()  # refuses to save weights that have gone to NaN
        if self.accelerator.is_main_process:
            times = {"elapsed_seconds": self._coordinator.elapsed(), "starting_seconds": self._coordinator.starting}
            scalars = {"step": self.step, **times, "seed": self.config.seed}
            networks = {name: (network.raw, network.optimizer) for name, network in self._networks().items()}
            save_state(self.config.output / "state", networks, self.ema, scalars)
            if with_previews:
                self._preview()
        self.accelerator.wait_for_everyone()
        self._coordinator.saved()
        self._summed_since = monotonic()

    def _preview(self) -> None:
        model = self._model.raw
        model.eval()
        with torch.no_grad(), self._autocast(), convolution_search(False), torch.compiler.set_stance("force_eager"):
            self._log.write_previews(self.step, self.objective.previews(self.ema))
        model.train()

    def _networks(self) -> dict[str, Network]:
        """The networks by their names in the state file, where the discriminator has always been called "rival"."""
        return {"model": self._model} | ({"rival": self._discriminator} if self._discriminator is not None else {})

    def _resume(self) -> tuple[float, float]:
        """Restore the saved state if there is one; return `Decision.elapsed` and `Decision.starting` at its step."""
        networks = {name: (network.raw, network.optimizer) for name, network in self._networks().items()}
        scalars = load_state(self.config.output / "state", networks, self.ema)
        if scalars is None:
            return 0.0, 0.0
        if scalars["seed"] != self.config.seed:
            raise ConfigError(
                f"seed: expected {scalars['seed']} of {self.config.output / 'state'}, got {self.config.seed}"
            )
        self.step = int(scalars["step"])
        elapsed, starting = float(scalars["elapsed_seconds"]), float(scalars["starting_seconds"])
        logger.info("resuming %s at step %d, %.0f s", self.config.output, self.step, elapsed)
        return elapsed, starting
