"""How long, how fast and on what to train: the settings of the loop."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from terra.errors import ConfigError

_WHOLE, _REAL = (int, int | None), (float, float | None)


def check_numbers(settings: object, positive: Collection[str]) -> None:
    """Check a dataclass's int and float fields, optional or not: those in `positive` are above 0, others 0 or more.

    Raises:
        ConfigError: a value of another type or out of bounds; the first such field.
    """
    for name, kind in type(settings).__annotations__.items():
        value = getattr(settings, name)
        if kind not in _WHOLE + _REAL or (value is None and kind not in (int, float)):
            continue
        allowed = int if kind in _WHOLE else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(f"{name}: expected {'a whole number' if allowed is int else 'a number'}, got {value!r}")
        if not (value > 0 if name in positive else value >= 0):
            bound = "above 0" if name in positive else "of 0 or more"
            raise ConfigError(f"{name}: expected a number {bound}, got {value}")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long and how fast to train.

    Attributes:
        output: folder for `log.jsonl`, `tensorboard/` and `state/`.
        batch_size: samples that one process puts through the model at once.
        accumulate: batches whose gradients are averaged before an update: a step sees batch_size x accumulate x
            processes samples.
        max_steps, max_seconds: the run ends at the first of the two that it meets. Seconds are those spent in the loop,
            compilation and saving included, over all resumed parts of the run.
        schedule: what the cosine decay of the learning rate and all else that changes over a run follow: "steps", or
            "time", from the end of the first step (which compiles) to `max_seconds`.
        learning_rate: peak, after `warmup_steps` of linear warm-up.
        final_learning_rate: the end of the cosine, as a fraction of the peak.
        weight_decay: AdamW's, on parameters of two and more axes.
        clip_norm: bound of the gradient's norm.
        ema_decay: of the averaged weights, a step.
        ema_every_steps: the average takes the weights in only so often, with the decay of as many steps.
        compile_model: torch.compile the model's forward.
        save_every_seconds, log_every_seconds: of loop time.
        peak_flops: of the device, for the model FLOPs utilisation; 989e12 is the dense bf16 peak of an H100 or H200 SXM
            (NVIDIA's data sheets).
        seed: of the samples drawn; the weights' start is the caller's, the same in every process.
    """

    output: Path
    batch_size: int
    accumulate: int = 1
    max_steps: int | None = None
    max_seconds: float | None = None
    schedule: Literal["steps", "time"] = "steps"
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.05
    warmup_steps: int = 100
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    ema_every_steps: int = 1
    compile_model: bool = False
    save_every_seconds: float = 120.0
    log_every_seconds: float = 10.0
    peak_flops: float = 989e12
    seed: int = 0

    def __post_init__(self) -> None:
        limit = {"steps": self.max_steps, "time": self.max_seconds}
        if self.schedule not in limit:
            raise ConfigError(f"schedule: expected steps or time, got {self.schedule!r}")
        if limit[self.schedule] is None:
            needed = "max_steps" if self.schedule == "steps" else "max_seconds"
            raise ConfigError(f"{needed}: expected a number with schedule={self.schedule}, got null")
        positive = ("batch_size", "accumulate", "ema_every_steps", "max_steps", "max_seconds", "learning_rate")
        check_numbers(self, (*positive, "clip_norm", "log_every_seconds", "peak_flops"))
        for name in ("final_learning_rate", "ema_decay", "beta2"):
            if not getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a fraction in [0, 1), got {getattr(self, name)}")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "LoopConfig":
        """Pick this class's fields out of a flat configuration that also holds other things.

        Raises:
            ConfigError: a value is not allowed, or a field without a default is missing.
        """
        picked: dict[str, Any] = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        missing = {"output", "batch_size"} - picked.keys()
        if missing:
            raise ConfigError(f"{', '.join(sorted(missing))}: expected in the configuration, got none")
        picked["output"] = Path(picked["output"])
        return cls(**picked)
