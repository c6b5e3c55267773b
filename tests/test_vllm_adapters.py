"""Adapters of vLLM: one base model for all sessions, each of which names its own adapter or none."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from engine_rollouts import FILTERED, GREEDY, PLAIN, SAMPLINGS, make_prompt, ran, soon, stepped
from noisy_scores import largest_miss
from tiny import FEW_BLOCKS, save_tiny
from tiny_adapter import change_tensors, save_adapter

from terra.config.spec import PipelineSpec
from terra.engine.hf import HFEngine
from terra.engine.vllm.engine import VllmEngine
from terra.errors import CheckpointError, ConfigError
from terra.locations import DEMO
from terra.prompt import build_prompt
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM, load_world_model

pytestmark = pytest.mark.slow

NAMES = (None, "night", "rain")
ROUNDING = 1e-4
"""The most by which scores may differ that are summed in float32 in another order."""

SLOTS = 3  # sequence slots of the engine with adapters
PLAIN_SEEDS = range(40, 44)  # of the prompts that an engine without adapters reads as well


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("adapters") / "base", LlamaActionV2ForCausalLM)


@pytest.fixture(scope="module")
def folders(base) -> dict[str, Path]:
    """Two adapters of different ranks, of which vLLM takes neither as its largest."""
    made = ((2, 4, "night"), (3, 12, "rain"))
    return {name: save_adapter(base.parent / name, base, seed=seed, rank=rank) for seed, rank, name in made}


@pytest.fixture(scope="module")
def merged(base, folders) -> dict[str | None, HFEngine]:
    return {name: HFEngine(base, adapter=folders.get(name or "")) for name in NAMES}


@pytest.fixture(scope="module")
def without_adapters(base, wait) -> list[torch.Tensor]:
    """Rollouts of the base model by an engine that knows no adapter."""
    engine = VllmEngine(base, max_sessions=SLOTS, engine_args=FEW_BLOCKS)
    frames = [wait(ran(engine, *make_prompt(seed), PLAIN, 5)) for seed in PLAIN_SEEDS]
    wait(engine.close())
    return frames


@pytest.fixture(scope="module")
def engine(base, folders, without_adapters, wait):
    """The engine of most tests; those that start another stand last, as closing one frees what vLLM's engines share."""
    engine = VllmEngine(base, adapters=folders, max_sessions=SLOTS, engine_args=FEW_BLOCKS)
    yield engine
    wait(engine.close())


def model_of(engine: HFEngine) -> LlamaActionV2ForCausalLM:
    model = engine._thread.model
    assert isinstance(model, LlamaActionV2ForCausalLM)
    return model


@pytest.mark.parametrize("way", [stepped, ran])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_the_tokens_of_the_merged_model(engine, merged, wait, way, sampling, name):
    prompt, actions = make_prompt(20, num_context=2, num_actions=6)
    expected = wait(ran(merged[name], prompt, actions, sampling, 3))
    got = wait(way(engine, prompt, actions, sampling, 3, name))
    if not torch.equal(got, expected):
        assert sampling is not FILTERED
        assert largest_miss(model_of(merged[name]), prompt, actions, got, sampling, 3) < ROUNDING


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_the_bound_on_rounding_tells_one_adapter_from_another(engine, merged, wait, sampling):
    prompt, actions = make_prompt(21)
    for name in NAMES:
        got = wait(ran(engine, prompt, actions, sampling, 3, name))
        misses = {each: largest_miss(model_of(merged[each]), prompt, actions, got, sampling, 3) for each in NAMES}
        assert misses.pop(name) < ROUNDING
        assert min(misses.values()) > 1000 * ROUNDING


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_all_in_one_batch_give_what_each_gives_alone(engine, merged, wait, sampling):
    prompts = [make_prompt(seed) for seed in (30, 31)]
    expected = [wait(ran(merged[name], *prompt, sampling, 4)) for prompt in prompts for name in NAMES]

    async def together():
        return await soon(
            asyncio.gather(
                *(
                    way(engine, *prompt, sampling, 4, name)
                    for way in (stepped, ran)
                    for prompt in prompts
                    for name in NAMES
                )
            )
        )

    for got, right in zip(wait(together()), 2 * expected, strict=True):
        assert torch.equal(got, right)


def test_without_a_name_the_engine_is_one_without_adapters(engine, without_adapters, wait):
    prompts = [make_prompt(seed) for seed in PLAIN_SEEDS]

    async def base_beside(busy) -> list[torch.Tensor]:
        beside = (ran(engine, *prompts[0], PLAIN, 5, name) for name in busy)
        made = await soon(asyncio.gather(*(ran(engine, *prompt, PLAIN, 5) for prompt in prompts), *beside))
        return made[: len(prompts)]

    for busy in ([], ["rain"], ["rain", "night"]):
        for got, right in zip(wait(base_beside(busy)), without_adapters, strict=True):
            assert torch.equal(got, right)


def test_adapters_share_no_blocks_of_the_prefix_cache(engine, merged, wait):
    prompt, actions = make_prompt(50, num_context=7, num_actions=1)  # 126 tokens: 3 whole blocks of 32
    reused = []
    for name in (*NAMES, *NAMES):
        before = engine.counters.cached
        got = wait(ran(engine, prompt, actions, GREEDY, 0, name))
        reused.append(engine.counters.cached - before)
        assert torch.equal(got, wait(ran(merged[name], prompt, actions, GREEDY, 0)))
    assert reused == [0, 0, 0, 96, 96, 96]


def test_a_session_that_was_ended_while_idle_keeps_its_adapter(engine, merged, wait):
    """Twice as many live sessions as there are sequence slots, each of which is ended before its next step."""
    rollouts = [(make_prompt(60 + number), NAMES[number % 3]) for number in range(2 * SLOTS)]
    expected = [wait(ran(merged[name], *prompt, PLAIN, 6)) for prompt, name in rollouts]

    async def turns():
        sessions = [await engine.open(prompt, PLAIN, 6, name) for (prompt, _), name in rollouts]
        frames = [[] for _ in sessions]
        for turn in range(3):
            for session, made, ((_, actions), _) in zip(sessions, frames, rollouts, strict=True):
                made.append(await soon(session.step(actions[turn])))
        for session in sessions:
            await session.close()
        return [torch.stack(made) for made in frames]

    for got, right in zip(wait(turns()), expected, strict=True):
        assert torch.equal(got, right[:3])


def test_a_session_goes_from_one_way_to_the_other(engine, merged, wait):
    prompt, actions = make_prompt(70)

    async def both_ways():
        session = await engine.open(prompt, PLAIN, 7, "rain")
        frames = [frame async for frame in session.run(actions[:2])]
        frames += [await session.step(action) for action in actions[2:4]]
        frames += [frame async for frame in session.run(actions[4:])]
        await session.close()
        return torch.stack(frames)

    assert torch.equal(wait(both_ways()), wait(ran(merged["rain"], prompt, actions, PLAIN, 7)))


def test_an_unknown_name_is_one_line(engine, wait):
    assert engine.adapters == ("night", "rain")
    with pytest.raises(ConfigError, match=r"^adapter: expected one of night, rain, got 'fog'$"):
        wait(engine.open(make_prompt(0)[0], PLAIN, 0, "fog"))


def test_a_default_adapter_is_of_the_sessions_that_name_none(base, folders, merged, wait, tmp_path, tiny_tokenizer):
    (tmp_path / "world_model").symlink_to(base)
    (tmp_path / "tokenizer").symlink_to(tiny_tokenizer)
    given = {"adapter": folders["night"], "adapters": {"rain": folders["rain"]}}
    spec = PipelineSpec.from_pretrained(tmp_path, engine="vllm", device="cpu", **given)
    engine = spec.build_engine()
    assert isinstance(engine, VllmEngine)
    prompt, actions = make_prompt(80)

    async def together():
        return await soon(asyncio.gather(*(ran(engine, prompt, actions, PLAIN, 8, name) for name in (None, "rain"))))

    for got, name in zip(wait(together()), ("night", "rain"), strict=True):
        assert torch.equal(got, wait(ran(merged[name], prompt, actions, PLAIN, 8)))
    wait(engine.close())


class TestRefused:
    def test_modules_that_are_replaced(self, base, tmp_path):
        folder = save_adapter(tmp_path, base, seed=1, also=("action_projection",))
        message = "expected LoRA factors alone, .* got action_projection: use another engine$"
        for where, given in (("adapter", {"adapter": folder}), (r"adapters\.night", {"adapters": {"night": folder}})):
            with pytest.raises(ConfigError, match=f"^{where}: {folder}: {message}"):
                VllmEngine(base, **given)

    def test_factors_that_are_no_numbers(self, base, tmp_path):
        folder = save_adapter(tmp_path, base, seed=1)
        weights = folder / "adapter_model.safetensors"
        change_tensors(weights, lambda tensors: next(iter(tensors.values())).view(-1)[5].fill_(torch.inf))
        for given in ({"adapter": folder}, {"adapters": {"night": folder}}):
            with pytest.raises(CheckpointError, match=f"^{weights}: .*: expected finite numbers, got"):
                VllmEngine(base, **given)

    def test_another_rate(self, base, tmp_path):
        save_adapter(tmp_path, base, seed=1)
        config = json.loads((base / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "fps": 5.0}))
        with pytest.raises(ConfigError, match=r"^adapters\.night: fps: expected the base's 10\.0, got 5\.0$"):
            VllmEngine(base, adapters={"night": tmp_path})

    def test_arguments_that_the_adapters_decide(self, base, folders):
        with pytest.raises(ConfigError, match=r"^engine\.engine_args\.max_loras: expected none"):
            VllmEngine(base, adapters=folders, engine_args={"max_loras": 1})


def test_a_vocabulary_beyond_the_heads_that_vllm_adapts(tmp_path, wait):
    """The published 262,144 image tokens; vLLM refuses adapters of an lm head of more than 258,048 rows."""
    sizes = {"vocab_size": 262_145, "hidden_size": 64, "intermediate_size": 64}
    base = save_tiny(tmp_path / "base", LlamaActionForCausalLM, **sizes)
    folder = save_adapter(tmp_path / "night", base, seed=1)
    prompt, actions = make_prompt(90, num_actions=1)
    expected = wait(ran(HFEngine(base, adapter=folder), prompt, actions, GREEDY))
    engine = VllmEngine(base, adapters={"night": folder}, max_sessions=2, engine_args=FEW_BLOCKS)
    assert torch.equal(wait(ran(engine, prompt, actions, GREEDY, adapter="night")), expected)
    assert not torch.equal(wait(ran(engine, prompt, actions, GREEDY)), expected)
    wait(engine.close())


def test_the_shipped_model_with_an_adapter(tmp_path, wait):
    """One frame of the demo's model, whose weights and factors are bfloat16 files, computed in float32."""
    base = DEMO / "world_model"
    folder = save_adapter(tmp_path, base, seed=1, rank=8, scale=0.02)
    model = load_world_model(base, adapter=folder)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.image_vocab_size, (1, 9, 16), generator=generator)
    actions = torch.randn(1, 6, 3, generator=generator)
    prompt = build_prompt(tokens, actions[:0])
    engine = VllmEngine(base, adapters={"night": folder}, max_sessions=2, engine_args=FEW_BLOCKS)

    async def together():
        return await soon(asyncio.gather(*(ran(engine, prompt, actions, PLAIN, 9, name) for name in ("night", None))))

    adapted, plain = wait(together())
    wait(engine.close())
    assert largest_miss(model, prompt, actions, adapted, PLAIN, 9) < ROUNDING
    assert largest_miss(load_world_model(base), prompt, actions, plain, PLAIN, 9) < ROUNDING
    assert largest_miss(model, prompt, actions, plain, PLAIN, 9) > 1000 * ROUNDING
