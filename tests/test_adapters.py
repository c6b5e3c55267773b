"""Adapters in use: merged by every engine, named by every record, and off where none is named."""

import asyncio
import json
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from engine_rollouts import SAMPLINGS, make_prompt, ran, stepped
from entry import read_settings
from tiny import save_tiny
from tiny_adapter import save_adapter
from tiny_rollouts import change, told

from terra.config.files import register_resolvers
from terra.config.spec import PipelineSpec
from terra.engine.adapted import AdaptedEngine
from terra.engine.base import WarmsUp
from terra.engine.graph.engine import GraphEngine
from terra.engine.hf import HFEngine
from terra.engine.jacobi import JacobiEngine
from terra.engine.persistence import PersistenceEngine
from terra.errors import ConfigError, EngineError, TerraError
from terra.generate import run as generate
from terra.locations import with_locations
from terra.pipeline import Pipeline, RolloutRequest
from terra.replay.models import recorded_spec
from terra.rollout import describe_inputs, rollout_record
from terra.rollout_record import read_record
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


@pytest.fixture(scope="module")
def two(base) -> dict[str, Path]:
    return {name: save_adapter(base.parent / name, base, seed=seed) for seed, name in ((2, "night"), (3, "rain"))}


@pytest.fixture(scope="module")
def pair(base, tiny_tokenizer) -> Path:
    """A folder with tokenizer/ and world_model/."""
    folder = base.parent / "pair"
    folder.mkdir()
    (folder / "world_model").symlink_to(base)
    (folder / "tokenizer").symlink_to(tiny_tokenizer)
    return folder


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
        assert read_record(made)["adapter"] == {"folder": "../adapter", "sha256": adapter_sha256(folder)}
        assert told(made)[0] == 0

    def test_replay_refuses_another_adapter(self, made, tmp_path, tiny_model):
        save_adapter(tmp_path / "adapter", tiny_model, seed=5)
        with pytest.raises(ConfigError, match=r"adapter: expected the weights \w{12} of the rollout, got \w{12}"):
            told(made)

    def test_an_adapter_that_moved_is_given_or_beside_the_record_else_one_line(self, made, tmp_path):
        moved = (tmp_path / "adapter").rename(tmp_path / "moved")
        with pytest.raises(ConfigError, match=r"^adapter: expected it at .*/adapter.*, found none: give adapter=DIR"):
            told(made)
        assert told(made, adapter=moved)[0] == 0
        moved.rename(made / "adapter")
        assert told(made)[0] == 0

    def test_without_the_adapter_other_tokens_come_out(self, made):
        change(made, adapter=None)
        assert told(made)[0] == 1


class TestNamed:
    """`adapters=` of engines that merge: one engine each, and each session names its own."""

    @pytest.mark.parametrize("name", ENGINES)
    def test_each_session_gets_its_own(self, name, base, two):
        make = ENGINES[name]
        alone = [rollouts(make(base)), *(rollouts(make(base, adapter=folder)) for folder in two.values())]
        together = AdaptedEngine(make(base), {each: make(base, adapter=folder) for each, folder in two.items()})
        assert together.adapters == ("night", "rain")
        prompt, actions = make_prompt(3)
        kinds = [(way, sampling, each) for way in (ran, stepped) for each in (None, *two) for sampling in SAMPLINGS]

        async def side_by_side() -> list[torch.Tensor]:
            return await asyncio.gather(
                *(way(together, prompt, actions, sampling, 2, each) for way, sampling, each in kinds)
            )

        expected = [frames for _ in (ran, stepped) for rolled in alone for frames in rolled]
        for made, right in zip(asyncio.run(side_by_side()), expected, strict=True):
            assert torch.equal(made, right)
        assert len({rolled[0].numpy().tobytes() for rolled in alone}) == 3
        assert together.counters.sampled == len(kinds) * alone[0][0].numel()
        asyncio.run(together.close())
        for named in (None, *two):
            with pytest.raises(EngineError, match="the engine is closed"):
                asyncio.run(together.open(prompt, SAMPLINGS[0], 0, named))

    def test_a_warm_up_reaches_each_engine_that_has_one(self, base, monkeypatch):
        plain, warm = PersistenceEngine.from_pretrained(base), AsyncMock()
        first, second = (ENGINES["graph"](base) for _ in range(2))
        for each in (first, second):
            monkeypatch.setattr(each, "warm_up", warm)
        engine = AdaptedEngine(first, {"night": plain, "rain": second})
        assert isinstance(engine, WarmsUp)
        asyncio.run(engine.warm_up(3))
        assert warm.await_count == 2
        asyncio.run(engine.close())

    @pytest.mark.parametrize("engines", [(), ("night",), ("night", "rain")])
    def test_an_unknown_name_is_one_line(self, engines, base):
        plain = PersistenceEngine.from_pretrained(base)
        engine = AdaptedEngine(plain, dict.fromkeys(engines, plain)) if engines else plain
        expected = "one of " + ", ".join(engines) if engines else r"none \(the engine was started without adapters\)"
        with pytest.raises(ConfigError, match=f"^adapter: expected {expected}, got 'fog'$"):
            asyncio.run(engine.open(make_prompt(0)[0], SAMPLINGS[0], 0, "fog"))

    def test_the_first_failure_stops_new_sessions(self, base):
        plain, broken = (PersistenceEngine.from_pretrained(base) for _ in range(2))
        engine = AdaptedEngine(plain, {"night": broken})
        broken.failure = "out of memory"
        assert engine.failure == "out of memory"
        with pytest.raises(EngineError, match="out of memory"):
            asyncio.run(engine.open(make_prompt(0)[0], SAMPLINGS[0], 0))


class TestPipeline:
    def test_a_request_names_its_adapter_across_windows(self, pair, two):
        given = {"engine": "jacobi", "device": "cpu"}
        night, rain = two.values()
        frames = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
        actions = torch.randn(10, 6, 3, generator=torch.Generator().manual_seed(1))

        def made(names, **adapters) -> list[torch.Tensor]:
            requests = [RolloutRequest(frames, actions, 5, name) for name in names]
            with Pipeline.from_pretrained(pair, **given, **adapters) as pipeline:
                return [rollout.tokens for rollout in pipeline.generate(requests, SAMPLINGS[1])]

        together = made((None, *two), adapters=two)
        for one, adapter in zip(together, (None, night, rain), strict=True):
            assert torch.equal(one, made([None], adapter=adapter)[0])
        assert not torch.equal(together[0], together[1])
        both = made((None, "rain"), adapter=night, adapters={"rain": rain})
        for one, expected in zip(both, together[1:], strict=True):
            assert torch.equal(one, expected)

    def test_the_records_know_each(self, pair, two):
        spec = PipelineSpec.from_pretrained(pair, engine="hf", device="cpu", adapters=two)
        described = {"folder": str(two["night"]), "sha256": adapter_sha256(two["night"])}
        assert spec.hashes()["adapters.night_sha256"] == described["sha256"]
        assert "adapters.night_sha256" not in spec.made_with()  # but in the inputs of rollouts that name it
        facts: dict = {"num_frames": 5, "num_context": 2, "seed": 0, "sampling": SAMPLINGS[1], "overlap": 3}
        facts |= {"seconds": {}, "inputs": describe_inputs(None, None, None, {})}
        record = rollout_record(spec.provenance(), spec.spec, adapter="night", **facts)
        assert record["adapter"] == {"name": "night", **described}
        assert rollout_record(spec.provenance(), spec.spec, **facts)["adapter"] is None
        folder = two["night"].parent / "made"
        again = recorded_spec(with_locations(record, folder), read_settings("replay", [f"folder={folder}"]))
        assert (again.adapter, again.adapters) == (two["night"], {})

    @pytest.mark.parametrize(
        ("adapters", "message"),
        [
            ({"a b": "x"}, "adapters: expected at most 32 folders by name, .* got {'a b': 'x'}"),
            ({"../x": "x"}, "adapters: expected .*, got"),
            ({"night": "/no/such"}, r"adapters\.night: /no/such/adapter_config\.json"),
            ({f"n{index}": "x" for index in range(33)}, "adapters: expected .*32"),
        ],
    )
    def test_a_wrong_setting_is_one_line(self, pair, adapters, message):
        with pytest.raises(TerraError, match=f"^{message}"):
            PipelineSpec.from_pretrained(pair, engine="hf", adapters=adapters)

    def test_modules_that_an_adapter_replaces_are_refused_where_sessions_share_them(self, pair, base, tmp_path):
        folder = save_adapter(tmp_path, base, seed=1, also=("action_projection",))
        for where, given in (("adapter", {"adapter": folder}), (r"adapters\.night", {"adapters": {"night": folder}})):
            assert PipelineSpec.from_pretrained(pair, engine="hf", **given)
            with pytest.raises(ConfigError, match=f"^{where}: {folder}: expected LoRA factors alone"):
                PipelineSpec.from_pretrained(pair, engine="vllm", **given)

    def test_an_adapter_of_another_rate_is_refused(self, pair, base, tmp_path):
        save_adapter(tmp_path, base, seed=1)
        config = json.loads((base / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "fps": 5.0}))
        with pytest.raises(ConfigError, match=r"adapters\.other: fps: expected the base's 10\.0, got 5\.0"):
            PipelineSpec.from_pretrained(pair, engine="hf", adapters={"other": tmp_path})
