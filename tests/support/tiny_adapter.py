"""Random LoRA adapters of small models, large enough that they change which tokens come out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from terra.training.adapter import add_adapter
from terra.training.state import trained_parameters
from terra.training.world_model_settings import AdapterSettings
from terra.world_model import load_world_model
from tokenizer import LFQTokenizer
from tokenizer.lineage import tokens_sha256


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


def save_memory_adapter(folder: Path, base: Path, **rule: float) -> Path:
    """An adapter that was trained with memory, of two frames unless `rule` says otherwise (so its config says)."""
    save_adapter(folder, base, seed=1)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"memory": {"frames": 2} | rule}))
    return folder


def save_decoder(adapter: Path, base: Path) -> None:
    """Give an adapter a decoder of its own, which shows the tokens of the base tokenizer otherwise."""
    tokenizer = LFQTokenizer.from_pretrained(base)
    tokenizer.config = tokenizer.config.replace(same_tokens_as=tokens_sha256(base))
    with torch.no_grad():
        tokenizer.decoder.conv_out.weight.mul_(-2)
    tokenizer.save_pretrained(adapter / "decoder")


def change_tensors(path: Path, change: "Callable[[dict[str, torch.Tensor]], object]") -> None:
    """Let `change` alter the tensors of a safetensors file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def change_header(path: Path, change: "Callable[[dict[str, Any]], object]") -> None:
    """Let `change` alter the header of a safetensors file in place; its data stays."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
