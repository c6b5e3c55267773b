"""Adapters in use: merged by every engine, named by every record, and off where none is named."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from engine_rollouts import SAMPLINGS, make_prompt, ran
from test_replay import change, told
from tiny import save_tiny
from tiny_adapter import save_adapter

from terra.config.files import register_resolvers
from terra.engine.graph.engine import GraphEngine
from terra.engine.hf import HFEngine
from terra.engine.jacobi import JacobiEngine
from terra.engine.persistence import PersistenceEngine
from terra.errors import CheckpointError, ConfigError
from terra.generate import run as generate
from terra.rollout import read_record
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model, write_weights
from terra.world_model.adapter import adapter_sha256

pytestmark = pytest.mark.slow

ENGINES = {
    "hf": lambda *folder, **adapter: HFEngine(*folder, **adapter),
    "jacobi": lambda *folder, **adapter: JacobiEngine(*folder, drafts=8, **adapter),
    "graph": lambda *folder, **adapter: GraphEngine(*folder, drafts=4, dtype="float32", device="cpu", **adapter),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("adapters") / "base", LlamaActionV2ForCausalLM)


@pytest.fixture(scope="module")
def adapter(base) -> Path:
    return save_adapter(base.parent / "adapter", base, seed=1)


@pytest.fixture(scope="module")
def merged(base, adapter) -> Path:
    write_weights(load_world_model(base, adapter=adapter), base.parent / "merged", "1GB")
    return base.parent / "merged"


def rollouts(engine) -> list[torch.Tensor]:
    async def every() -> list[torch.Tensor]:
        try:
            prompt, actions = make_prompt(3)
            return [await ran(engine, prompt, actions, sampling, seed=2) for sampling in SAMPLINGS]
        finally:
            await engine.close()

    return asyncio.run(every())


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_merges_the_adapter(name, base, adapter, merged):
    expected, got = rollouts(HFEngine(merged)), rollouts(ENGINES[name](base, adapter=adapter))
    plain = rollouts(ENGINES[name](base))
    for one, other, without in zip(expected, got, plain, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(other, without)


@pytest.mark.parametrize("name", ENGINES)
def test_without_an_adapter_the_base_is_as_before(name, base):
    for one, other in zip(rollouts(HFEngine(base)), rollouts(ENGINES[name](base, adapter=None)), strict=True):
        assert torch.equal(one, other)


def test_a_world_of_other_actions_needs_no_weights(base, adapter):
    assert PersistenceEngine.from_pretrained(base, adapter).spec == PersistenceEngine.from_pretrained(base).spec


class TestRecord:
    @pytest.fixture
    def made(self, tmp_path, tiny_model, tiny_tokenizer, request) -> Path:
        from entry import read_settings
        from rich.console import Console
        from tiny_rollouts import Batch

        batch = Batch(tmp_path, tiny_model, tiny_tokenizer)
        settings = {
            "context": batch.folder / "c0",
            "trajectory": batch.folder / "drive.json",
            "tokenizer.pretrained": batch.tokenizer,
            "world_model.pretrained": batch.model,
            "adapter": save_adapter(tmp_path / "adapter", tiny_model, seed=4),
            "engine": "hf",
            "overlap": 2,
            "num_frames": 6,
            "output": batch.folder / "made",
        }
        register_resolvers()
        values = [f"{key}={value}" for key, value in settings.items()]
        return generate(read_settings("generate", values), Console(quiet=True))

    def test_the_record_names_the_adapter_and_replay_uses_it(self, made, tmp_path):
        folder = tmp_path / "adapter"
        assert read_record(made)["adapter"] == {"folder": str(folder), "sha256": adapter_sha256(folder)}
        assert told(made)[0] == 0

    def test_replay_refuses_another_adapter(self, made, tmp_path, tiny_model):
        save_adapter(tmp_path / "adapter", tiny_model, seed=5)
        with pytest.raises(ConfigError, match=r"adapter: expected the weights \w{12} of the rollout, got \w{12}"):
            told(made)

    def test_a_missing_adapter_is_one_line(self, made):
        record = json.loads((made / "rollout.json").read_text())
        change(made, adapter={**record["adapter"], "folder": "/no/such/folder"})
        with pytest.raises(CheckpointError, match=r"/no/such/folder/adapter_config\.json"):
            told(made)

    def test_without_the_adapter_other_tokens_come_out(self, made):
        change(made, adapter=None)
        assert told(made)[0] == 1
