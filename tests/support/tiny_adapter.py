"""Random LoRA adapters of small models, large enough that they change which tokens come out."""

from pathlib import Path

import torch

from terra.training.adapter import AdapterSettings, add_adapter
from terra.training.state import trained_parameters
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


def save_decoder(adapter: Path, base: Path) -> None:
    """Give an adapter a decoder of its own, which shows the tokens of the base tokenizer otherwise."""
    tokenizer = LFQTokenizer.from_pretrained(base)
    tokenizer.config = tokenizer.config.replace(same_tokens_as=tokens_sha256(base))
    with torch.no_grad():
        tokenizer.decoder.conv_out.weight.mul_(-2)
    tokenizer.save_pretrained(adapter / "decoder")
