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
from terra.training.agreement import Agreement, StopReason, catch_sigterm
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
    """What is trained: a model, the batches it sees and the loss on them.

    During `train` the loop puts `model` and `rival` on the device and replaces them by wrapped modules that average
    gradients over processes: call them only as `self.model(...)`; `terra.training.processes.unwrapped` gives the module
    inside, for everything else. Afterwards they are the plain modules again.

    Attributes:
        model: what is trained; float32 parameters, equal in every process at the start.
        rival: a second network trained against it (a discriminator), or None. Its parameters take no gradient in
            `loss`. What an objective must remember between steps, it keeps in buffers of the two: they are saved.
        samples: what one element of a batch is called in logs, in the plural.
        tokens_per_sample: how many tokens the model predicts or makes of a sample, for tokens/s; None if it is no
            measure.
        flops_per_sample: floating-point operations of one sample's forward and backward pass; None if not known.
    """

    model: nn.Module
    rival: nn.Module | None
    samples: str
    tokens_per_sample: int | None
    flops_per_sample: float | None

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """This process's next batch, on the model's device; depends on `random` alone."""
        ...

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Scalars to log, of which "loss" is minimized over the model; `progress` in [0, 1] is how far the run is."""
        ...

    def rival_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Scalars to log, of which "rival_loss" is minimized over the rival; called after `loss` on the same batch.

        Only called if there is a rival. What `loss` computed may be kept for it, detached.
        """
        ...

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """What to log at each save, by the first process alone, in eval mode, not compiled, without gradients.

        Numbers (no axes), pictures (uint8, 3 x height x width) or videos (uint8, frames x 3 x height x width); {} if
        none. `ema.averaged()` is a context in which the model has its averaged weights.
        """
        ...


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run: the steps done in all its parts, its loop time, why it stopped, and the averaged weights."""

    step: int
    elapsed_seconds: float
    stopped_by: StopReason
    ema: Ema


def train(objective: Objective, config: LoopConfig, accelerator: Accelerator) -> TrainingResult:
    """Train from the state in `config.output`, or from the start if there is none, until a limit or SIGTERM.

    The model is left with its last weights; `TrainingResult.ema.copy_to_model()` puts in the averaged ones. With
    `schedule="steps"` an interrupted and resumed run equals an uninterrupted one, bit for bit on the CPU. Every process
    of the run calls this; only the first writes, so what is to be done once afterwards, do `if
    accelerator.is_main_process`.

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
    """One run of the loop; `train` is its public face."""

    def __init__(self, objective: Objective, config: LoopConfig, accelerator: Accelerator):
        self.objective, self.config, self.accelerator = objective, config, accelerator
        self._model = Network.prepare(objective.model, config, accelerator)
        if config.compile_model:
            self._model.compile()
        self._rival = None
        if objective.rival is not None:
            self._rival = Network.prepare(objective.rival, config, accelerator)
        self.ema = Ema(self._model.raw, config.ema_decay, config.ema_every_steps)
        self.step = 0
        elapsed, starting = self._resume()
        objective.model = self._model.wrapped
        if self._rival is not None:
            objective.rival = self._rival.wrapped
        self._agreement = Agreement(accelerator, config, self.step, elapsed, starting)
        self._sums: dict[str, Tensor] = {}
        self._steps_summed = 0
        self._summed_since = monotonic()

    def release(self) -> None:
        """Give the objective its plain networks back."""
        self.objective.model = self._model.raw
        if self._rival is not None:
            self.objective.rival = self._rival.raw
        self.accelerator.free_memory()

    def run(self) -> TrainingResult:
        """Train until a limit or SIGTERM; the state is saved whatever the reason."""
        for network in self._networks().values():
            network.raw.train()
        total = 1000.0  # the bar shows how far the run is to its first limit
        with ExitStack() as stack:
            terminated = stack.enter_context(catch_sigterm())
            self._log = stack.enter_context(TrainingLog(self.config.output, self.step, self.accelerator))
            line = stack.enter_context(ProgressLine("training", total, every_seconds=0.0))
            while (decision := self._agreement.decide(self.step, terminated)).stop is None:
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
        """One update; nothing here waits for the device."""
        progress = self._progress()
        for network in self._networks().values():
            network.set_learning_rate(learning_rate_at(self.config, self.step, progress))
        for part in range(self.config.accumulate):
            self._accumulate(part, progress)
        norms = {
            f"{name}gradient_norm": network.update(self.accelerator, self.config.clip_norm)
            for name, network in (("", self._model), ("rival_", self._rival))
            if network is not None
        }
        self._add(norms, 1)
        self.ema.update(self.step)
        self._steps_summed += 1
        self.step += 1

    def _accumulate(self, part: int, progress: float) -> None:
        """Add one batch's gradients to both networks'; processes exchange them with the step's last batch only."""
        accelerator, count = self.accelerator, self.config.accumulate
        draw = self.step * count + part
        random = step_random(self.config.seed, draw, accelerator.device, accelerator.process_index)
        batch = self.objective.draw(random, self.config.batch_size)
        with ExitStack() as stack:
            if part < count - 1:
                for network in self._networks().values():
                    stack.enter_context(accelerator.no_sync(network.wrapped))
            if self._rival is not None:
                self._rival.raw.requires_grad_(False)
            with self._autocast():
                parts = self.objective.loss(batch, progress)
            accelerator.backward(parts["loss"] / count)
            if self._rival is not None:
                self._rival.raw.requires_grad_(True)
                with self._autocast():
                    rival_parts = self.objective.rival_loss(batch, progress)
                accelerator.backward(rival_parts["rival_loss"] / count)
                parts = parts | rival_parts
        self._add(parts, count)

    def _autocast(self) -> torch.autocast:
        kind = self.accelerator.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def _add(self, parts: dict[str, Tensor], count: int) -> None:
        for name, value in parts.items():
            value = value.detach().to(self.accelerator.device, torch.float32, non_blocking=True) / count
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _progress(self) -> float:
        agreement = self._agreement
        return progress_at(self.config, self.step, agreement.elapsed_at(self.step), agreement.starting)

    def _completed(self) -> float:
        return completed_at(self.config, self.step, self._agreement.elapsed_at(self.step))

    def _report(self) -> str:
        """Log the means since the last report over all processes (this waits for the device); returns the text."""
        sums = self.accelerator.reduce(torch.stack(list(self._sums.values())), "mean")
        means = dict(zip(self._sums, (sums / self._steps_summed).tolist(), strict=True))  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
        now = monotonic()
        rates = self._rates(now - self._summed_since)
        self._summed_since, self._sums, self._steps_summed = now, {}, 0
        if not all(math.isfinite(means[name]) for name in ("loss", "rival_loss") if name in means):
            raise ConfigError(
                f"{self.config.output}: expected a finite loss, got {means['loss']} before step {self.step}: "
                f"lower learning_rate={self.config.learning_rate:g}; the last saved state is from before"
            )
        elapsed, completed = self._agreement.elapsed_at(self.step), self._completed()
        record = {
            "elapsed_seconds": elapsed,
            "learning_rate": learning_rate_at(self.config, self.step, self._progress()),
        }
        self._log.write(self.step, {**record, **means, **rates})
        eta = elapsed * (1 - completed) / max(completed, 1e-9)
        numbers = " ".join(f"{name} {value:.4g}" for name, value in {**means, **rates}.items())
        return f"step {self.step} {numbers} eta {eta:.0f} s"

    def _rates(self, seconds: float) -> dict[str, float]:
        """Samples and tokens a second of all processes, and the model FLOPs utilisation of one device."""
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
            times = {"elapsed_seconds": self._agreement.elapsed(), "starting_seconds": self._agreement.starting}
            scalars = {"step": self.step, **times, "seed": self.config.seed}
            networks = {name: (network.raw, network.optimizer) for name, network in self._networks().items()}
            save_state(self.config.output / "state", networks, self.ema, scalars)
            if with_previews:
                self._preview()
        self.accelerator.wait_for_everyone()
        self._agreement.saved()
        self._summed_since = monotonic()

    def _preview(self) -> None:
        model = self._model.raw
        model.eval()
        with torch.no_grad(), self._autocast(), convolution_search(False), torch.compiler.set_stance("force_eager"):
            self._log.write_previews(self.step, self.objective.previews(self.ema))
        model.train()

    def _networks(self) -> dict[str, Network]:
        return {"model": self._model} | ({"rival": self._rival} if self._rival is not None else {})

    def _resume(self) -> tuple[float, float]:
        """Restore the saved state if there is one; returns the seconds so far, and those of the parts' first steps."""
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
