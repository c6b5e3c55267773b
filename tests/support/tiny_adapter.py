"""Random LoRA adapters of small models, large enough that they change which tokens come out."""

from pathlib import Path

import torch

from terra.training.adapter import AdapterSettings, add_adapter
from terra.training.state import trained_parameters
from terra.world_model import load_world_model


def save_adapter(
    folder: Path, base: Path, *, seed: int, rank: int = 4, also: tuple[str, ...] = (), scale: float = 0.1
) -> Path:
    model = load_world_model(base)
    settings = AdapterSettings.from_values({"rank": rank, "also": also})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora = add_adapter(model, base, settings, new_actions=False)
        with torch.no_grad():
            for parameter in trained_parameters(model).values():
                parameter.normal_(0.0, scale)
    lora.save(folder)
    return folder
