"""Synthetic checkpoints in the published layout: names, shapes, shards and sizes; and both engines on small ones."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny_published import SMALL, SMALL_TOKENIZER, write_small
from transformers import AutoModel

from terra.check.synthetic import (
    MAX_SHARD_BYTES,
    plan_shards,
    shard_index,
    tokenizer_config,
    world_model_config,
    world_model_layout,
)
from terra.cli import command
from terra.engine.base import Engine
from terra.engine.hf import HFEngine
from terra.engine.vllm.engine import VllmEngine
from terra.errors import CheckpointError
from terra.prompt import FrameTokens, build_prompt
from terra.sampling import SamplingParams
from terra.world_model import load_config
from terra.world_model.published import TOKENIZERS, WORLD_MODELS
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import read_json, read_layout

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def text_of(content: dict) -> str:
    """As both we and transformers write JSON."""
    return json.dumps(content, indent=2) + "\n"


@pytest.mark.parametrize("name", WORLD_MODELS)
def test_counts_and_shards_are_the_published_ones(name):
    published = WORLD_MODELS[name]
    layout = world_model_layout(world_model_config(name, {}))
    assert len(layout) == published.num_tensors
    assert sum(torch.Size(shape).numel() for shape in layout.values()) == published.num_parameters
    num_bytes = {key: 2 * torch.Size(shape).numel() for key, shape in layout.items()}
    shards = plan_shards(num_bytes, MAX_SHARD_BYTES)
    last = 2.503 if name == "world_model" else 19.288
    megabytes = [round(sum(num_bytes[key] for key in shard) / 1e6, 3) for shard in shards]
    assert megabytes == [1073.746, 482.386, 497.074, 494.969, 463.524, 1073.746, last]
    # The page of each file names its size and, for the index, its lines.
    index = text_of(shard_index(num_bytes, MAX_SHARD_BYTES))
    if name == "world_model":
        assert (len(index), index.count("\n")) == (16_851, 212)
    else:
        assert len(text_of(world_model_config(name, {}))) == 1_324


def test_every_shard_with_a_known_hash_is_one_of_seven():
    names = {f"model-{number:05d}-of-00007.safetensors" for number in range(1, 8)}
    for published in WORLD_MODELS.values():
        assert published.sha256.keys() <= names
        assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in published.sha256.values())
        assert published.tokenizer in TOKENIZERS


def test_the_tokenizer_of_the_published_config_is_the_default():
    assert LFQTokenizerConfig.from_dict(tokenizer_config({})) == LFQTokenizerConfig()
    with torch.device("meta"):
        state = LFQTokenizer(LFQTokenizerConfig()).state_dict()
    counts = (len(state), sum(tensor.numel() for tensor in state.values()))
    assert {(published.num_tensors, published.num_parameters) for published in TOKENIZERS.values()} == {counts}


@pytest.fixture(scope="module", params=["world_model", "world_model_v2"])
def repository(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("repository")
    write_small(folder, request.param)
    return request.param, folder


def test_files_are_those_of_the_published_repository(repository):
    name, folder = repository
    shards = [f"model-{number:05d}-of-00007.safetensors" for number in range(1, 8)]
    files = ["config.json", "generation_config.json", *shards, "model.safetensors.index.json"]
    assert sorted(path.name for path in (folder / name).iterdir()) == files
    published = WORLD_MODELS[name]
    tokenizer = folder / published.tokenizer
    assert sorted(path.name for path in tokenizer.iterdir()) == ["config.json", "model.safetensors"]
    weight_map = read_json(folder / name / "model.safetensors.index.json")["weight_map"]
    assert weight_map["model.embed_tokens.weight"] == shards[0]
    assert weight_map["model.norm.weight"] == shards[4]
    assert weight_map["lm_head.weight"] == shards[5]
    last = {key for key, shard in weight_map.items() if shard == shards[6]}
    assert last == {key for key in weight_map if key.startswith(("pos_embedding", "action_projection"))}
    config = load_config(folder / name)
    assert config.architectures == [published.architecture]
    assert config.num_action_tokens == 6
    assert "auto_map" in read_json(folder / name / "config.json")


def test_generation_config_has_the_published_size(repository):
    content = read_json(repository[1] / repository[0] / "generation_config.json")
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 262144)
    assert (len(text_of(content | tokens)), len(content) + 2) == (147, 7)


def test_transformers_loads_our_class_although_the_config_names_remote_code(repository):
    name, folder = repository
    assert type(AutoModel.from_pretrained(folder, subfolder=name)).__name__ == WORLD_MODELS[name].architecture


async def two_frames(engine: Engine, context: torch.Tensor, actions: torch.Tensor) -> list[FrameTokens]:
    session = await engine.open(build_prompt(context, actions[:0]), SamplingParams(temperature=0.9), 7)
    try:
        return [tokens async for tokens in session.run(actions)]
    finally:
        await session.close()
        await engine.close()


def test_both_engines_generate_the_same_two_frames_at_the_published_geometry(repository, wait):
    name, folder = repository
    tokenizer = LFQTokenizer.from_pretrained(folder, WORLD_MODELS[name].tokenizer)
    generator = torch.Generator().manual_seed(0)
    context = tokenizer.encode(torch.rand(1, 3, 288, 512, generator=generator) * 2 - 1)
    assert context.shape == (1, 18, 32)
    actions = torch.randn(2, 6, 3, generator=generator)
    expected = wait(two_frames(HFEngine(folder / name), context, actions))
    assert [tokens.shape for tokens in expected] == [(18, 32)] * 2
    got = wait(two_frames(VllmEngine(folder / name, max_sessions=1), context, actions))
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert tokenizer.decode(got[-1][None]).shape == (1, 3, 288, 512)


def test_script_writes_what_the_configurations_take(tmp_path, monkeypatch, capsys):
    settings = [f"output={tmp_path / 'Terra'}", "version=v1", "layers=1"]
    settings += [f"+world_model.{key}={value}" for key, value in SMALL.items() if key != "num_hidden_layers"]
    settings += [
        f"+tokenizer.{part}.{key}={value}" for part, keys in SMALL_TOKENIZER.items() for key, value in keys.items()
    ]
    synthesize = runpy.run_path(str(ROOT / "scripts/checkpoint_synthesize.py"))["synthesize"]
    monkeypatch.setattr(sys, "argv", ["checkpoint_synthesize.py", *settings])
    command("checkpoint_synthesize", synthesize)
    assert len(read_layout(tmp_path / "Terra/world_model")) == 16
    LFQTokenizer.from_pretrained(tmp_path / "Terra", "lfq_tokenizer_B_256")
    monkeypatch.setattr(sys, "argv", ["checkpoint_synthesize.py", *settings, "version=v3", "overwrite=true"])
    with pytest.raises(SystemExit) as stop:
        command("checkpoint_synthesize", synthesize)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: version: expected v1 or v2, got 'v3'\n"


def test_a_config_that_contradicts_itself_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="num_spatio_embeddings: expected"):
        write_small(tmp_path, "world_model", num_image_patches=144)
