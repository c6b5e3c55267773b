"""Tests of the vLLM engine beyond the engines' contract: the v1 architecture, samplers, sequence slots, failures."""

import asyncio
import multiprocessing
import re
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from engine_rollouts import (
    FILTERED,
    GREEDY,
    PATIENCE,
    PLAIN,
    SAMPLINGS,
    check_cancelled_closing,
    check_closing,
    make_prompt,
    ran,
    soon,
    stepped,
)
from tiny import FEW_BLOCKS, save_tiny, tiny_config
from tiny_adapter import change_tensors
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from terra.engine.hf import HFEngine
from terra.engine.vllm import sampling, sampling_v2
from terra.engine.vllm.engine import VllmEngine
from terra.engine.vllm.processing import render
from terra.engine.vllm.pump import Stream
from terra.engine.vllm.sampling import request_params
from terra.errors import CheckpointError, ConfigError, EngineError
from terra.sampling import sample_tokens
from terra.world_model import LlamaActionForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def v1_model(tmp_path_factory):
    return save_tiny(
        tmp_path_factory.mktemp("v1"), LlamaActionForCausalLM, num_attention_heads=4, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def v1_engine(v1_model, wait):
    engine = VllmEngine(v1_model, max_sessions=4, engine_args={"max_num_batched_tokens": 256, **FEW_BLOCKS})
    yield engine
    wait(engine.close())


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_v1_equals_hugging_face(v1_engine, v1_model, wait, params):
    prompt, actions = make_prompt(0)
    expected = wait(stepped(HFEngine(v1_model), prompt, actions, params))
    assert torch.equal(wait(ran(v1_engine, prompt, actions, params)), expected)


def test_more_sessions_than_sequence_slots_wait_for_each_other(v1_engine, wait):
    async def many():
        return await asyncio.gather(*(ran(v1_engine, *make_prompt(seed)) for seed in range(10)))

    assert len(wait(many())) == 10


def test_live_sessions_leave_their_sequence_slots_to_runs(v1_engine, wait):
    """As many live sessions as there are sequence slots, none of which closes before the runs are done."""
    prompt, actions = make_prompt(2)
    expected = wait(stepped(v1_engine, prompt, actions))

    async def drive(served: asyncio.Event) -> torch.Tensor:
        session = await v1_engine.open(prompt, PLAIN, 1)
        frames = [await session.step(action) for action in actions[:-1]]
        await served.wait()
        frames.append(await session.step(actions[-1]))
        await session.close()
        return torch.stack(frames)

    async def together():
        served = asyncio.Event()
        drives = [asyncio.create_task(drive(served)) for _ in range(4)]
        made = await soon(asyncio.gather(*(ran(v1_engine, prompt, actions) for _ in range(3))))
        served.set()
        return [*made, *await soon(asyncio.gather(*drives))]

    assert all(torch.equal(frames, expected) for frames in wait(together()))


def test_a_cancelled_step_can_be_taken_again(v1_engine, wait):
    prompt, actions = make_prompt(1)
    expected = wait(stepped(v1_engine, prompt, actions))

    async def cancelled():
        session = await v1_engine.open(prompt, PLAIN, 1)
        frames = [await session.step(actions[0])]
        step = asyncio.ensure_future(session.step(actions[1]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        frames += [await session.step(action) for action in actions[1:]]
        await session.close()
        return torch.stack(frames)

    assert torch.equal(wait(cancelled()), expected)


def row_params(seed: int) -> VllmSamplingParams:
    return VllmSamplingParams(**request_params(FILTERED, seed, native=False))


def chosen(logits: torch.Tensor) -> list[int | None]:
    """The one token left in each row, or None where all are left."""
    return [int(row.argmax()) if torch.isinf(row).any() else None for row in logits]


def expected_tokens(logits: torch.Tensor, seeds: list[int], positions: list[int]) -> list[int]:
    return sample_tokens(logits, FILTERED, torch.tensor(seeds), torch.tensor(positions)).tolist()


def test_request_params_of_each_kind():
    assert request_params(GREEDY, 5, native=True) == {"temperature": 0.0}
    native = request_params(FILTERED, 5, native=True)
    assert native == {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 5}
    assert sampling.read_params(row_params(5)) == (FILTERED, 5)
    assert sampling.read_params(VllmSamplingParams(temperature=0.0)) is None


def test_v1_runner_sampler_follows_the_batch():
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=tiny_config()))
    sampler = sampling.PositionKeyedSampler(config, torch.device("cpu"), False)
    assert not sampler.is_argmax_invariant()
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    outputs: list[list[int]] = [[], [1, 2], [3]]
    added = [(row, row_params(row), [0] * 4, output) for row, output in enumerate(outputs)]
    sampler.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    sampler.update_state(None)
    assert chosen(sampler.apply(logits.clone())) == expected_tokens(logits, [0, 1, 2], [3, 5, 4])
    # Rows 0 and 2 change places, row 1 leaves; outputs grow through the runner's own lists.
    outputs[0].append(9)
    moved = [(0, 2, MoveDirectionality.SWAP)]
    sampler.update_state(BatchUpdate(batch_size=3, removed=[1], added=[], moved=moved))
    first, middle, last = chosen(sampler.apply(logits.clone()))
    assert [first, last] == expected_tokens(logits[[0, 2]], [2, 0], [4, 4])
    assert middle is None
    sampler.update_state(BatchUpdate(2, removed=[], added=[], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert chosen(sampler.apply(logits.clone())) == [*expected_tokens(logits[:1], [0], [4]), None, None]


def test_v1_runner_sampler_leaves_slots_and_greedy_rows_alone():
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=tiny_config()))
    sampler = sampling.PositionKeyedSampler(config, torch.device("cpu"), False)
    # Twelve tokens fed: the next position is an action slot.
    added = [(0, row_params(0), [0] * 12, []), (1, VllmSamplingParams(temperature=0.0), [0] * 4, [])]
    sampler.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    logits = torch.randn(2, 64)
    assert torch.equal(sampler.apply(logits.clone()), logits)


def test_v2_runner_sampler():
    sampler = sampling_v2.PositionKeyedSampler(None, SimpleNamespace())
    assert sampler.add_request(5, row_params(8))
    assert not sampler.add_request(6, VllmSamplingParams(temperature=0.0))
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    context = SimpleNamespace(pos=torch.tensor([11, 3]), expanded_idx_mapping=torch.tensor([6, 5]))
    assert chosen(sampler.apply(logits.clone(), context)) == [None, *expected_tokens(logits[1:], [8], [3])]
    assert not sampler.add_request(5, VllmSamplingParams(temperature=0.0))
    assert torch.equal(sampler.apply(logits.clone(), context), logits)


def test_mismatched_weights_never_reach_vllm(v1_model, tmp_path):
    for path in v1_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(CheckpointError, match=r"layers\.1"):
        VllmEngine(tmp_path)


def test_a_request_that_vllm_refuses_fails_alone(v1_engine, wait, monkeypatch):
    prompt, actions = make_prompt(3)
    expected = wait(stepped(v1_engine, prompt, actions))
    process = v1_engine._pump._llm.input_processor.process_inputs
    refused = []

    def picky(request_id, rendered, params, **rest):
        if len(rendered["prompt_token_ids"]) == len(whole_window):
            refused.append(request_id)
            raise ValueError("too long for me\nand for you")
        return process(request_id, rendered, params, **rest)

    long_prompt, long_actions = make_prompt(4, num_context=7, num_actions=1)
    whole_window = [0] * (7 * 18)
    monkeypatch.setattr(v1_engine._pump._llm.input_processor, "process_inputs", picky)

    async def together():
        bad = [way(v1_engine, long_prompt, long_actions) for way in (stepped, ran)]
        good = [way(v1_engine, prompt, actions) for way in (stepped, ran)]
        return await soon(asyncio.gather(*bad, *good, return_exceptions=True))

    *errors, first, second = wait(together())
    assert len(refused) == 2
    for error in errors:
        assert isinstance(error, EngineError)
        assert str(error) == "vLLM refused the request: ValueError: too long for me"
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert v1_engine.failure is None
    monkeypatch.undo()
    assert wait(soon(ran(v1_engine, long_prompt, long_actions))).shape[0] == 1


def test_a_request_that_vllm_ends_early_fails_alone(v1_engine, wait, monkeypatch):
    prompt, actions = make_prompt(5)
    expected = wait(stepped(v1_engine, prompt, actions[:1]))

    async def together():
        runs = [ran(v1_engine, prompt, actions), stepped(v1_engine, prompt, actions)]
        good = [way(v1_engine, prompt, actions[:1]) for way in (ran, stepped)]
        return await soon(asyncio.gather(*runs, *good, return_exceptions=True))

    with monkeypatch.context() as patch:
        patch.setattr(v1_engine._pump._core.engine_core.scheduler, "max_model_len", 4 * 18 + 6)
        *errors, first, second = wait(together())
    for error in errors:
        assert isinstance(error, EngineError)
        assert re.fullmatch(r"vLLM ended the request \d+ tokens early: length", str(error))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert v1_engine.failure is None
    assert len(wait(soon(ran(v1_engine, prompt, actions)))) == len(actions)


def test_a_stream_whose_event_loop_is_closed_harms_nobody(v1_engine, wait):
    prompt, actions = make_prompt(6)

    async def leave():
        ids = prompt.ids(6).tolist()
        rendered = render(ids, torch.cat([prompt.actions, actions[:1]]), [12, 30, 48])
        v1_engine._pump.add(Stream("left", 12, 12), rendered, 12, request_params(PLAIN, 0, native=False), more=False)

    asyncio.run(leave())
    assert len(wait(soon(ran(v1_engine, prompt, actions)))) == len(actions)
    assert v1_engine.failure is None


def test_a_failed_engine_tells_everyone_who_waits(v1_engine, wait, monkeypatch):
    """Who steps, who is idle, who is still in the queue and who comes later. The engine is gone afterwards."""
    prompt, actions = make_prompt(0)
    reason = "the vLLM engine failed: RuntimeError: out of memory"
    queued = threading.Event()

    def broken():
        assert queued.wait(PATIENCE)
        raise RuntimeError("out of memory\non every device")

    async def fails():
        idle = await v1_engine.open(prompt, PLAIN, 0)
        await soon(idle.step(actions[0]))
        monkeypatch.setattr(v1_engine._pump._core, "get_output", broken)
        work = [asyncio.create_task(way(v1_engine, prompt, actions)) for way in (stepped, ran)]
        await asyncio.sleep(0.5)  # the core is at work by now
        work += [asyncio.create_task(way(v1_engine, prompt, actions)) for way in (stepped, ran)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in work)
        queued.set()
        errors = await soon(asyncio.gather(*work, return_exceptions=True))
        assert [(type(error), str(error)) for error in errors] == [(EngineError, reason)] * 4
        for late in (idle.step(actions[1]), stepped(v1_engine, prompt, actions), ran(v1_engine, prompt, actions)):
            with pytest.raises(EngineError, match=reason):
                await soon(late)

    wait(fails())
    assert v1_engine.failure == reason
    assert v1_engine.counters.kv_cache_usage is None
    wait(v1_engine.close())
    wait(v1_engine.close())


def test_a_core_that_hangs_in_a_step_fails_everyone_in_time(v1_model, wait, monkeypatch):
    """Who steps, who runs, who comes later, and who closes the engine, while the step still hangs."""
    engine = VllmEngine(v1_model, max_sessions=4, step_seconds=0.5, engine_args=FEW_BLOCKS)
    prompt, actions = make_prompt(0)
    reason = "the vLLM engine failed: expected the end of a step in 0.5 s, got none"
    released, get_output = threading.Event(), engine._pump._core.get_output

    def hangs():
        assert released.wait(2 * PATIENCE)
        return get_output()

    monkeypatch.setattr(engine._pump._core, "get_output", hangs)

    async def fails():
        work = [asyncio.create_task(way(engine, prompt, actions)) for way in (stepped, ran, stepped)]
        errors = await soon(asyncio.gather(*work, return_exceptions=True))
        assert [(type(error), str(error)) for error in errors] == [(EngineError, reason)] * 3
        for late in (stepped(engine, prompt, actions), ran(engine, prompt, actions)):
            with pytest.raises(EngineError, match=reason):
                await soon(late)
        await soon(engine.close())

    wait(fails())
    assert engine.failure == reason
    assert not released.is_set()
    released.set()
    engine._pump._thread.join(PATIENCE)  # frees the device, late
    assert not engine._pump._thread.is_alive()


def test_a_cancelled_close_closes(v1_model, wait):
    wait(check_cancelled_closing(VllmEngine(v1_model, max_sessions=4, engine_args=FEW_BLOCKS)))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_step_has_some_time(v1_model, seconds):
    with pytest.raises(ConfigError, match=r"engine\.step_seconds: expected more than 0, got"):
        VllmEngine(v1_model, step_seconds=seconds)


def test_sessions_share_few_kv_blocks_and_a_closed_engine_fails_those_who_wait(v1_model, wait):
    """Live sessions and runs on a KV cache of two windows, with as many sequence slots as there are sessions."""
    engine = VllmEngine(v1_model, max_sessions=16, engine_args={"num_gpu_blocks_override": 12})
    reference = HFEngine(v1_model)
    rollouts = [(*make_prompt(500 + index), PLAIN, index) for index in range(7)]
    expected = [wait(ran(reference, *rollout)) for rollout in rollouts]

    async def together():
        sessions = [await engine.open(prompt, sampling, seed) for prompt, _, sampling, seed in rollouts]
        frames = [[] for _ in sessions]
        for turn in range(5):
            runs = [asyncio.create_task(ran(engine, *rollout)) for rollout in rollouts[:2]]
            for index, session in enumerate(sessions[:4]):  # one by one
                frames[index].append(await soon(session.step(rollouts[index][1][turn])))
            steps = (session.step(rollouts[index][1][turn]) for index, session in enumerate(sessions[4:], 4))
            for index, frame in enumerate(await soon(asyncio.gather(*steps)), 4):  # all at once
                frames[index].append(frame)
            for made, right in zip(await soon(asyncio.gather(*runs)), expected, strict=False):
                assert torch.equal(made, right)
        for session in sessions:
            await session.close()
        return [torch.stack(each) for each in frames]

    for frames, right in zip(wait(together()), expected, strict=True):
        assert torch.equal(frames, right)
    wait(check_closing(engine))


@pytest.mark.parametrize("length", [-1, 100, 143, None, "4k"])
def test_a_window_longer_than_vllm_takes_is_refused(v1_model, length):
    with pytest.raises(ConfigError, match=r"engine_args\.max_model_len: expected 144 tokens \(a window\) or more, got"):
        VllmEngine(v1_model, engine_args={"max_model_len": length})


def test_weights_that_are_no_numbers_are_refused(v1_model, tmp_path):
    shutil.copytree(v1_model, tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path / "model/model.safetensors", lambda tensors: tensors[name].view(-1)[5].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=f"model: {name}: expected finite numbers, got nan"):
        VllmEngine(tmp_path / "model")


@pytest.mark.parametrize(("arguments", "message"), [({"block_size": 7}, ""), ({"num_gpu_blocks_override": 4}, "")])
def test_an_engine_that_cannot_start_says_why(v1_model, arguments, message):
    with pytest.raises(EngineError, match=f"vLLM could not start: {message}"):
        VllmEngine(v1_model, engine_args=arguments)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or a CPU")
def test_processes_that_share_a_model_equal_hugging_face_and_end_with_their_engine(v1_model, wait):
    """Tensor parallelism: two processes, each with half of the heads, of the MLP and of the vocabulary."""
    engine = VllmEngine(v1_model, max_sessions=4, tensor_parallel_size=2, engine_args=FEW_BLOCKS)
    reference = HFEngine(v1_model)
    for seed, params in enumerate(SAMPLINGS):
        prompt, actions = make_prompt(seed)
        expected = wait(stepped(reference, prompt, actions, params))
        for way in (ran, stepped):
            assert torch.equal(wait(way(engine, prompt, actions, params)), expected)
    workers = [child for child in multiprocessing.active_children() if child.name.startswith("VllmWorker")]
    assert len(workers) == 2
    workers[1].kill()
    with pytest.raises(EngineError, match="the vLLM engine failed"):
        wait(soon(ran(engine, *make_prompt(0))))
    wait(engine.close())
    workers[0].join(PATIENCE)  # a thread of vLLM ends the other worker, too
    assert not workers[0].is_alive()
