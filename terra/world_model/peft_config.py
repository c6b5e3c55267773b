"""Reads adapter_config.json, as PEFT writes it, and refuses what is more than plain LoRA on the base model.

Each key is read, ignored because it can't change what the tensors mean, or expected to have PEFT's default. A key of a
later PEFT is expected to be null, false or empty.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from terra.errors import CheckpointError
from tokenizer.checkpoint import read_json
from tokenizer.settings import Positive, Settings, checked

IGNORED: Mapping[str, str] = {
    "task_type": "says what the model is for",
    "auto_mapping": "names the class of the base model",
    "base_model_name_or_path": "names the base model, which is given",
    "revision": "names a version of the base model",
    "peft_version": "names the writer",
    "inference_mode": "says whether the factors are trained",
    "runtime_config": "says how to compute; PEFT ignores it in files",
    "target_modules": "chooses the weights, which the tensors name",
    "exclude_modules": "chooses the weights, which the tensors name",
    "layers_to_transform": "chooses the layers, which the tensors name",
    "layers_pattern": "chooses the layers, which the tensors name",
    "lora_dropout": "acts in training alone",
    "loftq_config": "is read with init_lora_weights=loftq alone, which is refused",
    "corda_config": "is read with init_lora_weights=corda alone, which is refused",
    "lora_ga_config": "is read with init_lora_weights=lora_ga alone, which is refused",
    "eva_config": "chooses the first A; ranks that it changes stand in rank_pattern",
    "megatron_core": "names a module that is read with megatron_config alone",
    "qalora_group_size": "is read with use_qalora alone",
}
"""Keys of which any value leaves alpha / rank * B @ A what it is, and why."""

INITIALIZATIONS: Mapping[str, str] = {
    "gaussian": "draws A; B is 0",
    "eva": "takes A from activations; B is 0",
    "orthogonal": "draws A and B whose product is 0",
    "mica": "takes B from the base weight; A is 0",
}
"""Values of `init_lora_weights` that leave the base model's weights as they are, and why, beside true and false.

The others of PEFT 0.21 ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq") take the first B @ A out of the
base weight, so that the factors belong to weights that no file holds.
"""

_DEFAULTS: Mapping[str, Any] = {"bias": "none"}
"""PEFT's defaults that are neither null nor false nor empty, of keys that are neither read nor ignored."""


class AdapterConfig(Settings):
    """The keys of adapter_config.json that are read; the others are checked, see `read_adapter_config`.

    Attributes:
        peft_type: the kind of adapter.
        r: rank of the factors.
        lora_alpha: their sum is scaled by `lora_alpha` / `r`.
        modules_to_save: names of modules that stand whole in the file, in place of the base model's.
        init_lora_weights: what the factors were before training.
    """

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, le=512)]
    lora_alpha: Positive
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True


def read_adapter_config(path: Path) -> AdapterConfig:
    """The settings of a LoRA adapter that is added to the untouched base model.

    Args:
        path: the file.

    Raises:
        CheckpointError: no readable file; another kind of adapter; or a key whose value may change what the tensors
            mean, with the value.
    """
    content = read_json(path)
    config = checked(AdapterConfig, content, str(path), CheckpointError)
    _check_initialization(path, config.init_lora_weights)
    for key in sorted(content.keys() - AdapterConfig.model_fields.keys() - IGNORED.keys()):
        value = content[key]
        if not _is_off(value) and value != _DEFAULTS.get(key):
            default = f"{_shown(_DEFAULTS[key])} or null" if key in _DEFAULTS else "null, false or empty"
            name = key if key.isidentifier() else _shown(key)
            raise CheckpointError(f"{path}: {name}: expected {default}, for a plain LoRA adapter, got {_shown(value)}")
    return config


def _check_initialization(path: Path, value: bool | str | None) -> None:
    if isinstance(value, str) and value.lower() not in INITIALIZATIONS:
        raise CheckpointError(
            f"{path}: init_lora_weights: expected true, false, {', '.join(INITIALIZATIONS)}, got {_shown(value)}, "
            "which may take the factors out of the base weights: convert the adapter to plain LoRA by PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
