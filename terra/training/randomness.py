"""Counter-based random numbers: a batch depends on (seed, draw, rank) alone, so that a resumed run needs no state."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class StepRandom:
    """The random generators of one batch of one process.

    Attributes:
        host: generator on the CPU that chooses samples, so that a run draws the same samples on every device.
        device: generator on the batch's device, for noise of a batch's size.
    """

    host: torch.Generator
    device: torch.Generator


def step_random(seed: int, draw: int, device: torch.device, rank: int = 0) -> StepRandom:
    """The generators of batch `draw` (from 0, over the whole run) of process `rank` of a run seeded with `seed`."""
    host_seed, device_seed = np.random.SeedSequence([seed, draw, rank]).generate_state(2, np.uint64)
    return StepRandom(
        host=torch.Generator("cpu").manual_seed(int(host_seed)),
        device=torch.Generator(device).manual_seed(int(device_seed)),
    )


def draw_indices(random: StepRandom, high: int, size: int, device: torch.device) -> torch.Tensor:
    """Draw `size` indices in [0, high) with replacement, int64, and send them to `device` without waiting for it."""
    return send(torch.randint(high, (size,), generator=random.host), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for the device."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
