"""One seed gives the same tokens on every card: each run compares its hashes with those that are stored here."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rollouts import ran
from safetensors.torch import load_file, save_file
from tiny import DEVICE, save_tiny

from terra.engine.graph.engine import GraphEngine
from terra.prompt import Actions, Prompt, build_prompt
from terra.sampling import SamplingParams
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer.checkpoint import WEIGHTS_NAME

# The shape of town_hd's world model: two of its GEMMs have other bits on an H100 than on an H200 in cuBLAS.
SHAPE = {
    "vocab_size": 32769,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_image_patches": 576,
    "num_spatio_embeddings": 582,
    "num_temporal_embeddings": 25,
    "max_position_embeddings": 25 * 582,
}
SAMPLING = SamplingParams(temperature=0.9)

WEIGHTS = "c373cd23f6b00254"
TOKENS = {"bfloat16": "d369bf8fa9045ae4", "fp8": "d6ded943d7766951"}


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that are the same on every machine: `torch.rand` and a product round nowhere."""
    folder = save_tiny(tmp_path_factory.mktemp("bits") / "model", LlamaActionV2ForCausalLM, **SHAPE)
    tensors, generator = load_file(folder / WEIGHTS_NAME), torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        if tensors[name].ndim == 2:
            tensors[name] = (torch.rand(tensors[name].shape, generator=generator) - 0.5) * 0.25
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    assert _sha256(tensors[name] for name in sorted(tensors)) == WEIGHTS
    return folder


def _inputs(num_context: int, seed: int) -> tuple[Prompt, Actions]:
    """A random prompt, and the actions of two frames."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32768, (num_context, 18, 32), generator=generator)
    actions = torch.rand(num_context + 1, 6, 3, generator=generator)
    return build_prompt(tokens, actions[:-2]), actions[-2:]


@pytest.mark.needs_cuda
@pytest.mark.parametrize("drafts", [0, 31])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_the_tokens_of_a_seed_are_those_of_the_cards_that_ran_before(
    checkpoint: Path, wait: Callable[..., Any], kind: str, drafts: int
) -> None:
    """Two rollouts at once, two frames of each, behind 3 and behind 22 context frames."""
    options: dict[str, Any] = {"dtype": "bfloat16", "device": DEVICE, "fp8_weights": kind == "fp8"}
    engine = GraphEngine(checkpoint, drafts=drafts, max_sessions=2, **options)

    async def together(num_context: int) -> list[torch.Tensor]:
        return await asyncio.gather(
            *(ran(engine, *_inputs(num_context, seed), SAMPLING, seed=seed) for seed in range(2))
        )

    frames = [frame for num_context in (3, 22) for frame in wait(together(num_context))]
    wait(engine.close())
    assert _sha256(frames) == TOKENS[kind]
