"""What a step's place in the run says about its learning rate."""

import math

from terra.training.settings import LoopConfig


def progress_at(config: LoopConfig, step: int, elapsed: float, starting: float) -> float:
    """How far the schedule is when `step` begins after `elapsed` seconds, in [0, 1].

    `starting` of them went into the first steps of the run's parts; under schedule=time these don't count, for
    compilation alone would take a short run's high learning rate away from it.
    """
    if config.schedule == "time":
        left = (config.max_seconds or math.inf) - elapsed
        trained = elapsed - starting
        return trained / (trained + left) if left > 0 else 1.0
    return min(step / (config.max_steps or math.inf), 1.0)


def completed_at(config: LoopConfig, step: int, elapsed: float) -> float:
    """How far the run is to the first limit it will meet, in [0, 1]."""
    return min(max(elapsed / (config.max_seconds or math.inf), step / (config.max_steps or math.inf)), 1.0)


def learning_rate_at(config: LoopConfig, step: int, progress: float) -> float:
    """Linear warm-up over steps, under both schedules, times a cosine from the peak to its final fraction."""
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    low = config.final_learning_rate
    return config.learning_rate * warmup * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
