"""Counter-based random numbers: what a step draws depends on (seed, step) alone, so a resumed run needs no state."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class StepRandom:
    """The generators of one training step.

    Attributes:
        host: draws that choose samples; on the CPU, so that a run draws the same samples on every device.
        device: draws of the size of a batch, made where the batch lies.
    """

    host: torch.Generator
    device: torch.Generator


def step_random(seed: int, step: int, device: torch.device) -> StepRandom:
    """The generators of step `step` (from 0) of a run seeded with `seed` (>= 0)."""
    host_seed, device_seed = np.random.SeedSequence([seed, step]).generate_state(2, np.uint64)
    return StepRandom(
        host=torch.Generator("cpu").manual_seed(int(host_seed)),
        device=torch.Generator(device).manual_seed(int(device_seed)),
    )


def draw_indices(random: StepRandom, high: int, size: int, device: torch.device) -> torch.Tensor:
    """`size` indices in [0, high), with replacement, int64 on `device`, sent there without waiting for the device."""
    indices = torch.randint(high, (size,), generator=random.host)
    if device.type == "cuda":
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)
