"""The learning-rate schedule: the progress of a run, and the learning rate at a step."""

import math

from terra.training.settings import LoopConfig


def progress_at(config: LoopConfig, step: int, elapsed: float, starting: float) -> float:
    """Progress of the schedule in [0, 1] when `step` begins after `elapsed` seconds.

    With schedule=time, `starting` (the seconds of first steps, which compile) is subtracted; otherwise compilation
    would use up a short run's time at a high learning rate.
    """
    if config.schedule == "time":
        left = (config.max_seconds or math.inf) - elapsed
        trained = elapsed - starting
        return trained / (trained + left) if left > 0 else 1.0
    return min(step / (config.max_steps or math.inf), 1.0)


def completed_at(config: LoopConfig, step: int, elapsed: float) -> float:
    """Progress of the run in [0, 1] towards the first limit (steps or seconds) that it will reach."""
    return min(max(elapsed / (config.max_seconds or math.inf), step / (config.max_steps or math.inf)), 1.0)


def learning_rate_at(config: LoopConfig, step: int, progress: float) -> float:
    """The learning rate: linear warm-up over steps, times a cosine from the peak to `final_learning_rate` of it."""
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    low = config.final_learning_rate
    return config.learning_rate * warmup * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
