"""Loading of world-model checkpoints and adapters: every name and shape is checked before a weight is read."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from terra.errors import CheckpointError
from terra.world_model.adapter import Adapter
from terra.world_model.config import LlamaActionConfig
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM
from tokenizer.checkpoint import FLOATS, Layout, load_tensors, read_config, verify_layout

ARCHITECTURES: dict[str, type[LlamaActionForCausalLM] | type[LlamaActionV2ForCausalLM]] = {
    cls.__name__: cls for cls in (LlamaActionForCausalLM, LlamaActionV2ForCausalLM)
}
"""The classes by the name that a config.json's `architectures` gives."""


def load_config(folder: Path) -> LlamaActionConfig:
    """Read and check config.json of a checkpoint folder, and check its weights' names and shapes against it.

    Raises:
        CheckpointError: config.json is another model's or contradicts itself, or the weights do not fit it.
    """
    content = read_config(folder / "config.json")
    where = folder / "config.json"
    if content.get("model_type") != LlamaActionConfig.model_type:
        raise CheckpointError(
            f"{where}: model_type: expected {LlamaActionConfig.model_type!r}, got {content.get('model_type')!r:.80}"
        )
    named = content.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in ARCHITECTURES:
        got = reprlib.repr(named)
        raise CheckpointError(f"{where}: architectures: expected one of {sorted(ARCHITECTURES)}, got {got}")
    try:
        config = LlamaActionConfig.from_dict(content)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    verify_layout(folder, _layout(config), FLOATS)
    return config


def load_adapter(folder: Path, base: Path) -> Adapter:
    """Read an adapter's files and check them against the base model in the folder `base`; no weight is loaded.

    Raises:
        CheckpointError: see `load_config` and `terra.world_model.adapter.Adapter.read`.
    """
    return Adapter.read(folder, base, load_config(base), _layout)


def _layout(config: LlamaActionConfig) -> Layout:
    """Names and shapes of a model's tensors."""
    with torch.device("meta"):
        model = ARCHITECTURES[(config.architectures or [])[0]](config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def load_world_model(
    folder: Path,
    *,
    adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LlamaActionForCausalLM | LlamaActionV2ForCausalLM:
    """Load a checked checkpoint folder for inference.

    Args:
        folder: the checkpoint.
        adapter: folder of a LoRA adapter, which is merged into the weights; see `terra.world_model.adapter`.
        dtype: element type of the weights.
        device: where the model is to run.

    Raises:
        CheckpointError: see `load_config` and `load_adapter`, and for weights that are no finite numbers.
    """
    lora = None if adapter is None else load_adapter(adapter, folder)
    config = load_config(folder) if lora is None else lora.config
    architecture = ARCHITECTURES[(config.architectures or [])[0]]
    tensors = load_tensors(folder)
    if lora is not None:
        tensors = lora.merge(tensors)
    with _no_progress_bar():
        # Given the tensors and no folder, transformers reads no generation_config.json, adapters or other files of it.
        model = architecture.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType, reportReturnType]


def write_weights(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, folder: Path, max_shard_size: str) -> None:
    """Write config.json and safetensors files of at most `max_shard_size` ("45MB") into a folder."""
    with _no_progress_bar():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    permissions = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(permissions)  # safetensors makes files that only the owner can read


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
