"""LoRA adapters under training: put into a world model by peft, and written in its file format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from terra.training.start import WorldModel
from terra.training.state import trained_parameters
from terra.training.world_model_settings import AdapterSettings
from terra.world_model.adapter import (
    ACTION_MODULES,
    ADAPTER_WEIGHTS,
    ATTENTION_PROJECTIONS,
    BASE_SHA256,
    MLP_PROJECTIONS,
    PREFIX,
)
from tokenizer.checkpoint import CONFIG_NAME, checkpoint_sha256, write_json, write_tensors
from tokenizer.files import make_folder

_NAME = ".default.weight"  # the end of a factor's name while peft trains it


def add_adapter(
    model: WorldModel, base: Path, settings: AdapterSettings, *, new_actions: bool, new_config: bool = False
) -> "LoraTraining":
    """Freeze a model and put a LoRA adapter into it, of which one factor is random and the other 0.

    Args:
        model: the model, with the configuration that the adapted model is to have.
        base: the folder of the base model.
        settings: the adapter's.
        new_actions: whether `model` has other actions than the base model: the modules whose shapes depend on the
            action space are then trained too.
        new_config: whether `model` reads the tokens of another tokenizer than the base model, or remembers otherwise.
    """
    assert settings.rank is not None
    lora = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,  # pyright: ignore[reportArgumentType]
        target_modules=[*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS],
        bias="none",
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(lora, model)
    also = ACTION_MODULES if new_actions else settings.also
    for name in also:
        model.get_submodule(name).requires_grad_(True)
    return LoraTraining(model, base, lora, tuple(also), has_config=new_actions or new_config)


class LoraTraining:
    """A model with an adapter in it; `has_config` if the adapter needs a config.json of its own."""

    def __init__(self, model: WorldModel, base: Path, lora: LoraConfig, also: tuple[str, ...], *, has_config: bool):
        self.model, self._base, self._lora, self._also, self._has_config = model, base, lora, also, has_config

    def save(self, folder: Path) -> None:
        """Write the adapter in bfloat16, in PEFT's format; its weights last. Raises OutputError."""
        make_folder(folder)
        values = self._lora.to_dict() | {
            "base_model_name_or_path": self._base.name,
            "inference_mode": True,
            "modules_to_save": list(self._also) or None,
        }
        write_json(folder / "adapter_config.json", {name: _plain(value) for name, value in values.items()})
        if self._has_config:
            write_json(folder / CONFIG_NAME, self.model.config.to_diff_dict())
        metadata = {"format": "pt", BASE_SHA256: checkpoint_sha256(self._base)}
        tensors = {name: tensor.to(torch.bfloat16).cpu() for name, tensor in self._tensors()}
        write_tensors(folder / ADAPTER_WEIGHTS, tensors, metadata)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained_parameters(self.model).items():
            yield PREFIX + name.replace(_NAME, ".weight"), parameter.detach()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
