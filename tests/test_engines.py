"""One contract for all engines, and the equalities between them.

The same on a GPU: `TERRA_TEST_DEVICE=cuda pytest tests/test_engines.py -k "not vllm"`.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rollouts import (
    GREEDY,
    PATIENCE,
    PLAIN,
    SAMPLINGS,
    WINDOW,
    check_cancelled_closing,
    check_closing,
    make_prompt,
    ran,
    ran_live,
    soon,
    stepped,
)
from tiny import COLS, DEVICE, ROWS, save_tiny

from terra.benchmark.prompts import prompt_maker
from terra.engine.base import Engine, EngineCounters, RunsLive, Session, WarmsUp, run_live
from terra.engine.graph import slots as slots_module
from terra.engine.graph.engine import GraphEngine, check_gpu, make_backend
from terra.engine.graph.kv_cache import SHARED_MULTIPLE
from terra.engine.graph.slots import FrameRequest, Slots
from terra.engine.graph.step import DecodeSteps
from terra.engine.hf import HFEngine
from terra.engine.jacobi import JacobiEngine
from terra.engine.persistence import PersistenceEngine
from terra.errors import CheckpointError, ConfigError, EngineError
from terra.prompt import build_prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model

WRONG_SHAPE = r"expected an action of shape \(6, 3\), waypoints at 0\.45, .* s, got "
MORE_THAN_SEATS = 40
"""Sessions; the engines' fixtures compute at most 32 at once."""


@pytest.fixture(params=["persistence", "hf", "jacobi", "graph", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(f"{request.param}_engine")


class TestContract:
    def test_is_an_engine(self, engine, wait):
        assert isinstance(engine, Engine)
        session = wait(engine.open(make_prompt(0)[0], GREEDY, 0))
        assert isinstance(session, Session)
        wait(session.close())

    def test_a_frame_for_an_action(self, engine, wait):
        frames = wait(stepped(engine, *make_prompt(0)))
        assert frames.shape == (WINDOW - 3, ROWS, COLS)
        assert frames.dtype == torch.int64
        assert frames.min() >= 0
        assert frames.max() < 64

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    def test_run_equals_step(self, engine, wait, sampling):
        prompt, actions = make_prompt(1)
        expected = wait(stepped(engine, prompt, actions, sampling))
        assert torch.equal(wait(ran(engine, prompt, actions, sampling)), expected)
        assert torch.equal(wait(ran_live(engine, prompt, actions, sampling)), expected)

    @pytest.mark.parametrize("switches", [(1,), (2,), (1, 2), (1, 2, 3, 4)])
    def test_step_and_run_mix(self, engine, wait, switches):
        prompt, actions = make_prompt(2)
        expected = wait(stepped(engine, prompt, actions))

        async def mixed():
            session = await engine.open(prompt, PLAIN, 1)
            frames = []
            bounds = [0, *switches, len(actions)]
            for turn, (start, end) in enumerate(itertools.pairwise(bounds)):
                if turn % 3 == 1:
                    frames += [await session.step(action) for action in actions[start:end]]
                elif turn % 3 == 2:
                    frames += [frame async for frame in run_live(session, iter(actions[start:end]))]
                else:
                    frames += [frame async for frame in session.run(actions[start:end])]
            await session.close()
            return torch.stack(frames)

        assert torch.equal(wait(mixed()), expected)

    def test_one_context_frame_is_enough(self, engine, wait):
        prompt, actions = make_prompt(3, num_context=1, num_actions=2)
        assert torch.equal(wait(ran(engine, prompt, actions)), wait(stepped(engine, prompt, actions)))

    def test_a_frame_is_the_caller_s_to_change(self, engine, wait):
        prompt, actions = make_prompt(3, num_actions=3)
        expected = wait(stepped(engine, prompt, actions))

        async def changed():
            session = await engine.open(prompt, PLAIN, 1)
            frames = []
            for action in actions:
                frame = await session.step(action)
                frames.append(frame.clone())
                frame.fill_(0)
            await session.close()
            return torch.stack(frames)

        assert torch.equal(wait(changed()), expected)

    def test_token_zero_is_an_image_token(self, engine, wait):
        prompt, actions = make_prompt(4, num_actions=2)
        zeros = build_prompt(torch.zeros_like(prompt.tokens), prompt.actions)
        assert wait(ran(engine, zeros, actions)).shape == (2, ROWS, COLS)

    def test_alone_equals_among_sixteen_others(self, engine, wait):
        prompt, actions = make_prompt(5)
        alone = wait(stepped(engine, prompt, actions))

        async def together():
            others = [make_prompt(100 + index) for index in range(16)]
            way = itertools.cycle([stepped, ran, ran_live])
            work = [next(way)(engine, *other, seed=index) for index, other in enumerate(others)]
            return (await asyncio.gather(stepped(engine, prompt, actions), *work))[0]

        assert torch.equal(wait(together()), alone)

    def test_sessions_of_one_context_are_what_they_are_alone(self, engine, wait):
        """As a planner's candidates are: the same frames before, other actions and seeds after."""
        prompt, _ = make_prompt(9)
        rollouts = [(make_prompt(100 + index)[1][:3], SAMPLINGS[index % 3], index) for index in range(12)]
        alone = [wait(ran(engine, prompt, *rollout)) for rollout in rollouts]

        async def together():
            return await asyncio.gather(*(ran(engine, prompt, *rollout) for rollout in rollouts))

        for frames, expected in zip(wait(together()), alone, strict=True):
            assert torch.equal(frames, expected)

    def test_window_has_an_end(self, engine, wait):
        prompt, actions = make_prompt(6)

        async def overrun():
            session = await engine.open(prompt, PLAIN, 1)
            for action in actions:
                await session.step(action)
            try:
                await session.step(actions[0])
            finally:
                await session.close()

        with pytest.raises(EngineError, match="the window holds 8 frames: room for 0 more, got 1"):
            wait(overrun())

    def test_too_many_known_actions_make_no_frame(self, engine, wait):
        prompt, actions = make_prompt(6, num_actions=WINDOW)
        with pytest.raises(EngineError, match="room for 5 more, got 8"):
            wait(ran(engine, prompt, actions))

    def test_a_live_run_raises_what_its_actions_raise(self, engine, wait):
        """Or what they are refused for; behind the frames before, and the session goes on."""
        prompt, actions = make_prompt(6)
        expected = wait(stepped(engine, prompt, actions))

        def raising() -> Iterator[torch.Tensor]:
            yield from actions[:2]
            raise LookupError("no third action")

        async def with_errors():
            session = await engine.open(prompt, PLAIN, 1)
            frames: list[torch.Tensor] = []

            async def run(chosen: Iterator[torch.Tensor]) -> None:
                async for frame in run_live(session, chosen):
                    frames.append(frame)

            with pytest.raises(LookupError, match="no third action"):
                await run(raising())
            with pytest.raises(EngineError, match="expected finite numbers"):
                await run(iter([actions[2], actions[3] / 0]))
            with pytest.raises(EngineError, match="the window holds 8 frames: room for 0 more, got 1"):
                await run(itertools.chain(actions[3:], actions))
            await session.close()
            return torch.stack(frames)

        assert torch.equal(wait(soon(with_errors())), expected)

    def test_no_actions_give_no_frames(self, engine, wait):
        async def nothing():
            session = await engine.open(make_prompt(6)[0], PLAIN, 1)
            frames = [frame async for frame in session.run(torch.zeros(0, 6, 3))]
            frames += [frame async for frame in run_live(session, iter([]))]
            await session.close()
            return frames

        assert wait(nothing()) == []

    def test_closed_session_refuses(self, engine, wait):
        prompt, actions = make_prompt(7)

        async def after_close():
            session = await engine.open(prompt, PLAIN, 1)
            await session.close()
            await session.close()
            await session.step(actions[0])

        with pytest.raises(EngineError, match="closed"):
            wait(after_close())

    @pytest.mark.parametrize("live", [False, True])
    def test_abandoned_run_leaves_the_session_usable(self, engine, wait, live):
        prompt, actions = make_prompt(8)
        expected = wait(stepped(engine, prompt, actions))

        async def abandon():
            session = await engine.open(prompt, PLAIN, 1)
            run = run_live(session, iter(actions)) if live else session.run(actions)
            frames = [await anext(run)]
            await run.aclose()
            frames += [await session.step(action) for action in actions[1:]]
            await session.close()
            return torch.stack(frames)

        assert torch.equal(wait(abandon()), expected)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda prompt: (prompt.tokens[:, :2], prompt.actions), "expected 12 tokens a frame"),
            (lambda prompt: (prompt.tokens + 64, prompt.actions), "expected token ids 0 to 63"),
            (lambda prompt: (prompt.tokens.repeat(4, 1, 1), torch.zeros(11, 6, 3)), "at most 7 context frames, got 12"),
            (lambda prompt: (prompt.tokens, torch.zeros(2, 5, 3)), WRONG_SHAPE + r"\(5, 3\)"),
            (lambda prompt: (prompt.tokens, torch.zeros(2, 6, 2)), WRONG_SHAPE + r"\(6, 2\)"),
        ],
    )
    def test_bad_prompts_are_refused(self, engine, wait, spoil, message):
        with pytest.raises(ValueError, match=message):
            wait(engine.open(build_prompt(*spoil(make_prompt(0)[0])), PLAIN, 0))

    def test_bad_seed_is_refused(self, engine, wait):
        with pytest.raises(ValueError, match="seed: expected 0 to"):
            wait(engine.open(make_prompt(0)[0], PLAIN, -1))

    @pytest.mark.parametrize("action", [torch.full((6, 3), torch.nan), torch.zeros(5, 3), torch.zeros(6, 2)])
    def test_bad_actions_are_refused(self, engine, wait, action):
        async def step():
            session = await engine.open(make_prompt(0)[0], PLAIN, 0)
            try:
                await session.step(action)
            finally:
                await session.close()

        with pytest.raises(EngineError, match="action: expected"):
            wait(step())

    def test_a_bad_request_fails_alone(self, engine, wait):
        prompt, actions = make_prompt(12)
        alone = wait(stepped(engine, prompt, actions))

        async def beside_bad_ones():
            bad = await engine.open(make_prompt(0)[0], PLAIN, 0)
            steps = [bad.step(torch.full((6, 3), torch.nan)) for _ in range(3)]
            good = stepped(engine, prompt, actions)
            frames, *errors = await soon(asyncio.gather(good, *steps, return_exceptions=True))
            assert [type(error) for error in errors] == [EngineError] * 3
            last = await soon(bad.step(torch.zeros(6, 3)))  # the session itself goes on
            await bad.close()
            return frames, last

        frames, last = wait(beside_bad_ones())
        assert torch.equal(frames, alone)
        assert last.shape == (ROWS, COLS)

    def test_says_that_it_is_well_and_what_it_computed(self, engine, wait):
        before = engine.counters
        assert isinstance(before, EngineCounters)
        prompt, actions = make_prompt(13, num_actions=2)
        wait(stepped(engine, prompt, actions, seed=13))
        after = engine.counters
        assert engine.failure is None
        counted = after.sampled - before.sampled
        assert counted == (0 if isinstance(engine, PersistenceEngine) else 2 * ROWS * COLS)
        read = after.prefilled + after.cached - before.prefilled - before.cached
        assert read == (0 if isinstance(engine, PersistenceEngine) else 3 * (ROWS * COLS + 6))
        assert after.kv_cache_usage is None or 0.0 <= after.kv_cache_usage <= 1.0
        passes = [count - was for was, count in itertools.zip_longest(before.passes, after.passes, fillvalue=0)]
        assert min(passes, default=0) >= 0
        if isinstance(engine, JacobiEngine | GraphEngine):
            assert sum(tokens * count for tokens, count in enumerate(passes)) == counted
        else:
            assert not passes

    def test_idle_sessions_give_way(self, engine, wait):
        """More live sessions than any engine here can compute at once, all of them open all the time."""
        rollouts = [(*make_prompt(300 + index, num_actions=2), PLAIN, index) for index in range(MORE_THAN_SEATS)]
        alone = [wait(stepped(engine, *rollout)) for rollout in rollouts]

        async def live():
            sessions = [await engine.open(prompt, sampling, seed) for prompt, _, sampling, seed in rollouts]
            frames = [[], []]
            for turn in range(2):  # all sessions are idle between their steps
                for session, (_, actions, _, _) in zip(sessions, rollouts, strict=True):
                    frames[turn].append(await soon(session.step(actions[turn])))
            for session in sessions:
                await session.close()
            return [torch.stack(both) for both in zip(*frames, strict=True)]

        for frames, expected in zip(wait(live()), alone, strict=True):
            assert torch.equal(frames, expected)

    def test_runs_beside_idle_sessions(self, engine, wait):
        rollouts = [(*make_prompt(400 + index, num_actions=2), PLAIN, index) for index in range(MORE_THAN_SEATS)]
        runs = rollouts[:4]
        alone = [wait(ran(engine, *rollout)) for rollout in runs]

        async def beside():
            sessions = [await engine.open(prompt, sampling, seed) for prompt, _, sampling, seed in rollouts]
            first = [session.step(actions[0]) for session, (_, actions, _, _) in zip(sessions, rollouts, strict=True)]
            firsts = await soon(asyncio.gather(*first))
            made = await soon(asyncio.gather(*(ran(engine, *rollout) for rollout in runs)))
            second = await soon(sessions[0].step(rollouts[0][1][1]))
            for session in sessions:
                await session.close()
            return made, torch.stack([firsts[0], second])

        made, first = wait(beside())
        for frames, expected in zip(made, alone, strict=True):
            assert torch.equal(frames, expected)
        assert torch.equal(first, alone[0])


async def cancel_open(engine: Engine) -> list[object]:
    return [await cancelled(engine.open(make_prompt(51)[0], PLAIN, 1), turns=0)]


async def cancel_prefill(engine: Engine) -> list[object]:
    prompt, actions = make_prompt(51)
    sessions = [await engine.open(prompt, PLAIN, seed) for seed in range(3)]
    outcomes = [await cancelled(session.step(actions[0]), turns=turns) for turns, session in enumerate(sessions, 1)]
    for session in sessions:
        await session.close()
    return outcomes


async def cancel_between_frames(engine: Engine) -> list[object]:
    prompt, actions = make_prompt(51)
    session = await engine.open(prompt, PLAIN, 1)
    run = session.run(actions)
    await soon(anext(run))
    outcome = await cancelled(anext(run), turns=1)
    await run.aclose()
    await session.close()
    return [outcome]


async def cancel_close(engine: Engine) -> list[object]:
    prompt, actions = make_prompt(51)
    session = await engine.open(prompt, PLAIN, 1)
    await soon(session.step(actions[0]))
    outcome = await cancelled(session.close(), turns=0)
    await session.close()
    with pytest.raises(EngineError, match="closed"):
        await soon(session.step(actions[1]))
    return [outcome]


async def cancelled(work: Coroutine[Any, Any, object], turns: int) -> object:
    """Cancel a coroutine after some turns of the event loop; what came of it."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    return (await soon(asyncio.gather(task, return_exceptions=True)))[0]


class TestCancellation:
    @pytest.mark.parametrize("cancel", [cancel_open, cancel_prefill, cancel_between_frames, cancel_close])
    def test_the_engine_and_its_other_sessions_go_on(self, engine, wait, cancel):
        prompt, actions = make_prompt(50)
        expected = wait(ran(engine, prompt, actions))

        async def beside() -> torch.Tensor:
            other = asyncio.create_task(ran(engine, prompt, actions))
            for outcome in await cancel(engine):
                at_once = isinstance(engine, PersistenceEngine) and isinstance(outcome, torch.Tensor)
                assert at_once or isinstance(outcome, asyncio.CancelledError)
            return await soon(other)

        assert torch.equal(wait(beside()), expected)
        assert torch.equal(wait(ran(engine, prompt, actions)), expected)
        assert engine.failure is None


@pytest.mark.parametrize("kind", ["hf", "jacobi"])
def test_nothing_follows_a_frame_that_was_cancelled(request, wait, kind):
    engine = request.getfixturevalue(f"{kind}_engine")
    prompt, actions = make_prompt(52)

    async def go_on() -> None:
        session = await engine.open(prompt, PLAIN, 1)
        assert isinstance(await cancelled(session.step(actions[0]), turns=1), asyncio.CancelledError)
        with pytest.raises(EngineError, match="the session is closed"):
            await soon(session.step(actions[0]))
        await session.close()

    wait(go_on())


class TestModels:
    """What holds for engines that have weights."""

    @pytest.fixture(params=["hf", "jacobi", "graph", "vllm"])
    def engine(self, request: pytest.FixtureRequest) -> Engine:
        return request.getfixturevalue(f"{request.param}_engine")

    def test_a_temperature_may_be_an_integer(self, engine, wait):
        prompt, actions = make_prompt(8)
        greedy, whole = (wait(ran(engine, prompt, actions, how)) for how in (GREEDY, SamplingParams(temperature=0)))
        assert torch.equal(greedy, whole)

    def test_seed_decides(self, engine, wait):
        prompt, actions = make_prompt(9)
        first, same, other = (wait(ran(engine, prompt, actions, seed=seed)) for seed in (1, 1, 2))
        assert torch.equal(first, same)
        assert not torch.equal(first, other)

    def test_actions_matter(self, engine, wait):
        prompt, actions = make_prompt(10)
        assert not torch.equal(
            wait(ran(engine, prompt, actions, GREEDY)), wait(ran(engine, prompt, actions + 5.0, GREEDY))
        )

    def test_an_action_changes_nothing_before_it(self, engine, wait):
        prompt, actions = make_prompt(11)
        changed = actions.clone()
        changed[3] += 5.0
        first, second = wait(ran(engine, prompt, actions)), wait(ran(engine, prompt, changed))
        assert torch.equal(first[:3], second[:3])
        assert not torch.equal(first[3], second[3])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", [stepped, ran])
def test_hf_equals_vllm(hf_engine, vllm_engine, wait, sampling, way):
    for seed in range(3):
        prompt, actions = make_prompt(20 + seed)
        expected = wait(stepped(hf_engine, prompt, actions, sampling, seed))
        assert torch.equal(wait(way(vllm_engine, prompt, actions, sampling, seed)), expected)
        assert len(expected.unique()) > 5


EIGHT = ("fp8_weights", "fp8_cache")


def hf(checkpoint: Path, _: int) -> Engine:
    return HFEngine(checkpoint, device=DEVICE)


def jacobi(checkpoint: Path, drafts: int) -> Engine:
    return JacobiEngine(checkpoint, drafts=drafts, device=DEVICE)


def graph(checkpoint: Path, drafts: int) -> GraphEngine:
    return GraphEngine(checkpoint, drafts=drafts, max_sessions=3, dtype="float32", device=DEVICE)


@pytest.mark.parametrize("make", [hf, jacobi, graph])
def test_closing_fails_those_who_wait(tiny_model, wait, make):
    """For vLLM, of which a process runs one engine at a time, see test_vllm."""
    wait(check_closing(make(tiny_model, 1)))


@pytest.mark.parametrize("make", [hf, jacobi, graph])
def test_a_cancelled_close_closes(tiny_model, wait, make):
    """For vLLM see test_vllm."""
    wait(check_cancelled_closing(make(tiny_model, 1)))


@pytest.mark.parametrize("calls", [1, 20], ids=["prefill", "second frame"])
@pytest.mark.parametrize("make", [hf, jacobi])
def test_a_step_that_raises_fails_the_engine(tiny_model, wait, monkeypatch, make, calls):
    """For graph see below, for vLLM test_vllm."""
    engine, count = make(tiny_model, 0), itertools.count(1)

    def fail(*arguments: Any) -> torch.Tensor:
        if next(count) >= calls:
            raise RuntimeError("no memory left\non any device")
        return sample_tokens(*arguments)

    samples = {hf: "terra.world_model.window", jacobi: "terra.engine.jacobi"}
    monkeypatch.setattr(f"{samples[make]}.sample_tokens", fail)
    prompt, actions = make_prompt(0)
    reason = "the engine failed: RuntimeError: no memory left"

    async def together() -> list[object]:
        idle = await engine.open(prompt, PLAIN, 0)
        work = [way(engine, prompt, actions) for way in (ran, stepped, ran)]
        outcomes = await soon(asyncio.gather(*work, return_exceptions=True))
        late = (idle.step(actions[0]), engine.open(prompt, PLAIN, 0))
        return [*outcomes, *await soon(asyncio.gather(*late, return_exceptions=True))]

    assert [(type(each), str(each)) for each in wait(together())] == [(EngineError, reason)] * 5
    assert engine.failure == reason
    wait(engine.close())


@pytest.mark.parametrize("make", [jacobi, graph])
@pytest.mark.parametrize("drafts", [5, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 1, 100))])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_hf_equals_drafted(tiny_model, hf_engine, wait, make, sampling, drafts):
    drafted = make(tiny_model, drafts)
    for seed in range(2):
        prompt, actions = make_prompt(20 + seed)
        expected = wait(ran(hf_engine, prompt, actions, sampling, seed))
        assert torch.equal(wait(ran(drafted, prompt, actions, sampling, seed)), expected)
    wait(drafted.close())


@pytest.mark.parametrize("make", [jacobi, graph])
def test_drafts_are_at_least_none(tiny_model, make):
    with pytest.raises(ConfigError, match="drafts: expected 0 or more, got -1"):
        make(tiny_model, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_sessions", "step_tokens", "drafts"), [(1, 128, 3), (2, 128, 3), (7, 5, 3), (32, 128, 3), (16, 4096, 31)]
)
def test_graph_sessions_take_turns(tiny_model, graph_engine, wait, max_sessions, step_tokens, drafts):
    """Windows that lose their slot and get another one, and kinds of sampling side by side, change nothing.

    Nor does the number of tokens that a step reads: 1, some or all drafts of each slot.
    """
    rollouts = [(*make_prompt(60 + index), SAMPLINGS[index % 3], index) for index in range(9)]
    alone = [wait(stepped(graph_engine, *rollout)) for rollout in rollouts]
    sizes = {"drafts": drafts, "max_sessions": max_sessions, "step_tokens": step_tokens}
    engine = GraphEngine(tiny_model, **sizes, dtype="float32", device=DEVICE)

    async def together():
        ways = itertools.cycle([stepped, ran, ran_live])
        return await asyncio.gather(*(next(ways)(engine, *rollout) for rollout in rollouts))

    for frames, expected in zip(wait(together()), alone, strict=True):
        assert torch.equal(frames, expected)
    wait(engine.close())


def test_graph_asks_for_an_action_when_its_frame_begins(tiny_model, graph_engine, wait):
    """While the frames before are on their way: nobody takes them here until all actions have been asked for."""
    prompt, actions = make_prompt(15)
    asked = threading.Event()

    def choose() -> Iterator[torch.Tensor]:
        assert threading.current_thread() is not threading.main_thread()
        yield from actions
        asked.set()

    async def drive() -> torch.Tensor:
        session = await graph_engine.open(prompt, PLAIN, 1)
        assert isinstance(session, RunsLive)
        run = session.run_live(choose())
        frames = [await anext(run)]
        assert asked.wait(PATIENCE)  # the event loop stands still
        frames += [frame async for frame in run]
        await session.close()
        return torch.stack(frames)

    assert torch.equal(wait(drive()), wait(stepped(graph_engine, prompt, actions)))


def test_graph_sessions_that_run_live_take_turns(tiny_model, wait):
    """With fewer slots than sessions; each frame is a request of its own."""
    engine = GraphEngine(tiny_model, drafts=3, max_sessions=1, dtype="float32", device=DEVICE)
    order: list[int] = []
    begun, both = threading.Event(), threading.Event()

    def choose(number: int) -> Iterator[torch.Tensor]:
        for action in make_prompt(number)[1]:
            order.append(number)
            begun.set()
            assert both.wait(PATIENCE)  # until the other's request is there, too
            yield action

    async def drive(number: int) -> None:
        session = await engine.open(make_prompt(number)[0], PLAIN, 1)
        if number == 17:
            await asyncio.to_thread(begun.wait, PATIENCE)
            asyncio.get_running_loop().call_soon(both.set)
        async for _ in run_live(session, choose(number)):
            pass
        await session.close()

    async def together() -> None:
        await asyncio.gather(drive(16), drive(17))

    wait(soon(together()))
    wait(engine.close())
    assert order == [16, *[16, 17] * (WINDOW - 4), 17]  # the other's first request is behind a second one


def test_a_frame_that_nobody_wants_gives_its_slot_away(tiny_model, graph_engine, wait, monkeypatch):
    """At once: nobody waits for its end. The session that gave it up may go on."""
    monkeypatch.setattr("terra.engine.graph.scheduler._STEPS_PER_TURN", 1)
    events: list[str] = []
    cancelled = threading.Event()
    run, prefill = DecodeSteps.run, Slots.prefill

    def noted_run(self: DecodeSteps, *rest: Any) -> None:
        events.append("step")
        run(self, *rest)
        assert cancelled.wait(PATIENCE)

    def noted_prefill(self: Slots, *rest: Any, **more: Any) -> None:
        events.append("prefill")
        prefill(self, *rest, **more)

    monkeypatch.setattr(DecodeSteps, "run", noted_run)
    monkeypatch.setattr(Slots, "prefill", noted_prefill)
    engine = GraphEngine(tiny_model, drafts=0, max_sessions=1, dtype="float32", device=DEVICE)
    inputs = make_prompt(18), make_prompt(19)

    async def drive() -> list[torch.Tensor]:
        session = await engine.open(inputs[0][0], PLAIN, 1)
        wanted = asyncio.create_task(anext(session.run(inputs[0][1])))
        while "step" not in events:
            await asyncio.sleep(0)
        wanted.cancel()
        await asyncio.wait({wanted})
        other = asyncio.create_task(ran(engine, *inputs[1]))
        await asyncio.sleep(0)
        cancelled.set()
        await other
        frames = torch.stack([await session.step(action) for action in inputs[0][1]])
        await session.close()
        return [frames, other.result()]

    made = wait(soon(drive()))
    wait(engine.close())
    assert events[:3] == ["prefill", "step", "prefill"]
    for each, frames in zip(inputs, made, strict=True):
        assert torch.equal(wait(ran(graph_engine, *each)), frames)


def test_graph_warm_up_changes_no_token(tiny_model, graph_engine, wait, monkeypatch):
    """The steps over each number of slots are built before the first session, and no other ones later."""
    monkeypatch.setattr(slots_module, "SHARED_MULTIPLE", 8)
    rollouts = [(*make_prompt(60 + index), PLAIN, index) for index in range(5)]
    alone = [wait(ran(graph_engine, *rollout)) for rollout in rollouts]
    engine = GraphEngine(tiny_model, drafts=3, max_sessions=5, dtype="float32", device=DEVICE)
    assert isinstance(engine, WarmsUp)
    monkeypatch.setattr(engine, "_compiles", True)

    async def together() -> list[torch.Tensor]:
        await engine.warm_up(3)
        built = set(engine._scheduler._steps._unfiltered)
        assert built == set(itertools.product((1, 4, 5), (False, True)))
        first = await ran(engine, *rollouts[0])
        await engine.warm_up(3)  # too late: it does nothing
        frames = [first, *await asyncio.gather(*(ran(engine, *rollout) for rollout in rollouts[1:]))]
        assert set(engine._scheduler._steps._unfiltered) == built
        return frames

    for frames, expected in zip(wait(together()), alone, strict=True):
        assert torch.equal(frames, expected)
    counters = engine.counters
    assert counters.prefilled == 5 * 3 * (ROWS * COLS + 6)
    assert sum(given * count for given, count in enumerate(counters.passes)) == counters.sampled
    wait(engine.close())
    with pytest.raises(EngineError, match="closed"):
        wait(engine.warm_up(3))


def test_a_graph_warm_up_that_fails_is_the_engines_failure(tiny_model, wait, monkeypatch):
    def fail(self: DecodeSteps, num_context: int) -> None:
        raise RuntimeError("no memory\nfor this")

    monkeypatch.setattr(DecodeSteps, "warm_up", fail)
    engine = GraphEngine(tiny_model, drafts=3, dtype="float32", device=DEVICE)
    monkeypatch.setattr(engine, "_compiles", True)
    with pytest.raises(EngineError, match=r"^the engine failed: RuntimeError: no memory$"):
        wait(engine.warm_up(3))
    assert engine.failure == "the engine failed: RuntimeError: no memory"
    wait(engine.close())


@pytest.mark.parametrize("multiple", [SHARED_MULTIPLE, 8], ids=["copied", "shared"])
@pytest.mark.parametrize("max_sessions", [1, 3, 16])
def test_graph_copies_a_context_that_a_slot_holds(tiny_model, graph_engine, wait, monkeypatch, max_sessions, multiple):
    """Also from a window that has gone on, was closed or had lost its slot; never from a slot that others have.

    The most of a context is shared; these contexts are too short for it, unless smaller multiples of tokens are.
    """
    if multiple != SHARED_MULTIPLE and DEVICE != "cpu":
        pytest.skip("the kernels read whole blocks of 128 keys; tests/test_graph_kernels.py")
    monkeypatch.setattr(slots_module, "SHARED_MULTIPLE", multiple)
    shared: list[int] = []
    share = Slots._share
    monkeypatch.setattr(Slots, "_share", lambda *given: (shared.append(given[3]), share(*given)))
    prompts = [make_prompt(index)[0] for index in (70, 71)]
    rollouts = [(prompts[index % 2], make_prompt(80 + index)[1], PLAIN, index) for index in range(10)]
    alone = [wait(ran(graph_engine, *rollout)) for rollout in rollouts]
    engine = GraphEngine(tiny_model, drafts=3, max_sessions=max_sessions, dtype="float32", device=DEVICE)

    async def in_turn() -> list[torch.Tensor]:
        early = await engine.open(*(rollouts[0][index] for index in (0, 2, 3)))
        frames = [await early.step(action) for action in rollouts[0][1][:2]]
        others = await asyncio.gather(*(ran(engine, *rollout) for rollout in rollouts[1:]))
        frames += [await early.step(action) for action in rollouts[0][1][2:]]
        await early.close()
        return [torch.stack(frames), *others, await ran(engine, *rollouts[0])]

    for frames, expected in zip(wait(in_turn()), [*alone, alone[0]], strict=True):
        assert torch.equal(frames, expected)
    tokens = 3 * (ROWS * COLS + 6)
    assert engine.counters.prefilled + engine.counters.cached == 11 * tokens
    if max_sessions == 16:
        assert engine.counters.prefilled == 2 * tokens
    assert set(shared) == ({(tokens - 7) // 8 * 8} if multiple == 8 and max_sessions > 1 else set())
    wait(engine.close())


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels read whole blocks of 128 keys, more than these contexts have")
def test_a_session_that_shares_waits_while_another_shares_nothing(tiny_model, graph_engine, wait, monkeypatch):
    monkeypatch.setattr(slots_module, "SHARED_MULTIPLE", 8)
    (prompt, actions), (other_prompt, other_actions) = make_prompt(72), make_prompt(73)
    expected = [wait(ran(graph_engine, prompt, actions)), wait(ran(graph_engine, other_prompt, other_actions))]
    engine = GraphEngine(tiny_model, drafts=3, max_sessions=3, dtype="float32", device=DEVICE)
    slots, kinds = engine._scheduler._slots, []
    any_share = slots.any_share
    monkeypatch.setattr(slots, "any_share", lambda given: kinds.append(any_share(given)) or kinds[-1])

    async def in_turn() -> list[torch.Tensor]:
        holder, sharer = [await engine.open(prompt, PLAIN, 1) for _ in range(2)]
        await holder.step(actions[0])
        frames = [await sharer.step(actions[0])]
        other = await ran(engine, other_prompt, other_actions)
        assert kinds[-1] is False
        frames += [await sharer.step(action) for action in actions[1:]]
        assert kinds[-1] is True
        return [torch.stack(frames), other]

    for frames, right in zip(wait(in_turn()), expected, strict=True):
        assert torch.equal(frames, right)
    wait(engine.close())


def test_slots_share_a_context_until_they_are_filled_anew(tiny_model, monkeypatch):
    """Whoever holds the context: a slot that is filled anew leaves it to one of the others, copied once."""
    monkeypatch.setattr(slots_module, "SHARED_MULTIPLE", 8)
    slots = Slots(load_world_model(tiny_model), 6, 0)
    prompts = [make_prompt(index)[0] for index in (70, 71)]
    slots.prefill(0, prompts[0], 0)
    keys = slots.cache.keys[:, 0, :, :40].clone()
    slots.copy_context(0, [1, 2], 3, [1, 2])
    slots.copy_context(2, [3], 3, [3])
    assert slots.holder.tolist() == [0, 0, 0, 0, 4, 5]
    assert slots.shared.tolist() == [40, 40, 40, 40, 0, 0]
    assert not slots.cache.keys[:, 1:4, :, :40].any()
    slots.prefill(0, prompts[1], 0)
    assert slots.holder.tolist() == [0, 1, 1, 1, 4, 5]
    assert slots.shared.tolist() == [0, 40, 40, 40, 0, 0]
    assert torch.equal(slots.cache.keys[:, 1, :, :40], keys)
    snapshot = slots.swap_out(3, 2)
    slots.release([1, 2])
    assert slots.holder.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(slots.cache.keys[:, 3, :, :40], keys)
    assert not slots.any_share(range(6))
    slots.swap_in(5, snapshot)
    assert torch.equal(slots.cache.keys[:, 5, :, :40], keys)


def test_a_context_is_copied_to_slots_in_8_bits(tiny_model):
    slots = Slots(load_world_model(tiny_model, device=torch.device(DEVICE)), 3, 0, fp8_cache=True)
    prompts = [make_prompt(index)[0] for index in (70, 71)]
    slots.prefill(0, prompts[0], 0)
    expected = slots.cache.keys[:, 0].float(), slots.cache.values[:, 0].float()
    for slot in (1, 2):  # what another window left
        slots.prefill(slot, prompts[1], 0)
        slots.cache.keys[:, slot, :, -1:] = 1.0
    slots.copy_context(0, [1, 2], 3, [1, 2])
    for slot in (1, 2):
        assert torch.equal(slots.cache.keys[:, slot].float(), expected[0])
        assert torch.equal(slots.cache.values[:, slot].float(), expected[1])


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_a_captured_prefill_leaves_what_another_one_does(tiny_model, fp8_cache):
    """To the bit, in each slot; contexts of other lengths are read as without it."""
    device = torch.device(DEVICE)
    plain, captured = (Slots(load_world_model(tiny_model, device=device), 3, 3, fp8_cache=fp8_cache) for _ in range(2))
    captured.capture_prefill(3, make_backend(device).capture)
    for number, (slot, num_context) in enumerate([(1, 3), (0, 3), (2, 2), (1, 3)]):
        prompt, _ = make_prompt(80 + number, num_context)
        for slots in (plain, captured):
            slots.prefill(slot, prompt, seed=number)
        for name in ("ids", "action_embeddings", "seed", "start", "last"):
            assert torch.equal(getattr(captured, name), getattr(plain, name)), name
        for one, other in ((captured.cache.keys, plain.cache.keys), (captured.cache.values, plain.cache.values)):
            assert torch.equal(one.float(), other.float())


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_no_decode_step_where_it_asks_for_no_result(tiny_model):
    """Else the GPU has nothing to do until the host has given it the next step."""
    device = torch.device(DEVICE)
    slots = Slots(load_world_model(tiny_model, device=device), 3, 3)
    steps = DecodeSteps(slots, make_backend(device))
    prompt, actions = make_prompt(74)
    try:
        # The first round compiles kernels and captures steps, for which the host waits.
        for mode, sampling in (("default", PLAIN), ("error", SamplingParams(temperature=0.5))):
            torch.cuda.set_sync_debug_mode(mode)
            slots.prefill(0, prompt, 0)
            slots.copy_context(0, [1, 2], 3, [1, 2])
            slots.begin_frames([FrameRequest(slot, 3, actions[0], sampling) for slot in range(3)])
            steps.run(range(3), frozenset({sampling}), ROWS * COLS)
            answer, frames = slots.ask_start(), slots.copy_frames([(0, 3), (2, 3)])
            slots.begin_frames([FrameRequest(1, 4, actions[1], sampling)])
            slots._share([1, 2], 0, 8)
            slots.release([0])
            slots.release([1, 2])
            torch.cuda.set_sync_debug_mode("default")
            assert answer() == [slots.last_of(3)] * 3
            assert frames()[0].shape == (2, ROWS * COLS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.parametrize(
    "eight", [{"fp8_weights": True}, {"fp8_cache": True}, {"fp8_weights": True, "fp8_cache": True}]
)
def test_graph_in_8_bits_is_the_same_alone_beside_others_and_with_drafts(tiny_model, graph_engine, wait, eight):
    """Summed in float32, on a model so small that no value comes so near to where its rounding to 8 bits changes."""
    rollouts = [(*make_prompt(70 + index), SAMPLINGS[index % 3], index) for index in range(4)]
    made = []
    for slots, drafts in [(1, 0), (4, 0), (4, 7)]:
        options = {"max_sessions": slots, "dtype": "float32", "device": DEVICE, **eight}
        engine = GraphEngine(tiny_model, drafts=drafts, **options)

        async def together(engine=engine):
            return await asyncio.gather(*(ran(engine, *rollout) for rollout in rollouts))

        made.append(torch.stack(wait(together())))
        wait(engine.close())
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    full = torch.stack([wait(ran(graph_engine, *rollout)) for rollout in rollouts])
    assert 0.1 < (made[0] == full).float().mean() < 1.0


@pytest.mark.needs_cuda
@pytest.mark.parametrize(
    ("dtype", "eight"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float32", True)],
    ids=["fp32", "bf16", "fp8", "fp8_in_fp32"],
)
def test_graph_makes_the_same_alone_beside_others_and_with_drafts(tmp_path, wait, dtype, eight):
    """On a model so large that sums in another order would change tokens."""
    size = {"vocab_size": 1025, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    grid = {"num_image_patches": 96, "num_spatio_embeddings": 102, "max_position_embeddings": 8 * 102}
    checkpoint = save_tiny(tmp_path / "model", LlamaActionV2ForCausalLM, **size, **heads, **grid)

    def made(slots: int, drafts: int, kind: str, **options: int) -> torch.Tensor:
        engine = GraphEngine(checkpoint, drafts=drafts, max_sessions=slots, dtype=kind, device=DEVICE, **options)
        make = prompt_maker(engine.spec, None)

        async def together() -> list[torch.Tensor]:
            return await asyncio.gather(*(ran(engine, *make(3, 5, seed), seed=seed) for seed in range(6)))

        frames = torch.stack(wait(together()))
        wait(engine.close())
        return frames

    options = {"fp8_weights": eight, "fp8_cache": eight}
    alone = made(1, 0, dtype, **options)
    # The last pass has 1,024 tokens: GEMMs that sum their splits, and attention with the most queries a CTA.
    for slots, drafts, tokens in [(4, 0, 128), (6, 0, 128), (1, 31, 128), (6, 15, 128), (16, 63, 1024)]:
        assert torch.equal(made(slots, drafts, dtype, step_tokens=tokens, **options), alone), (slots, drafts)
    # So rounding does change tokens here.
    rounded_otherwise = "bfloat16" if dtype == "float32" and not eight else "float32"
    assert not torch.equal(made(1, 0, rounded_otherwise), alone)


@pytest.mark.parametrize("given", [True, False, None])
def test_batch_invariance_is_no_option(tiny_model, given):
    words = r"engine\.batch_invariant: engine=graph has no such option: it is always batch-invariant on a GPU"
    with pytest.raises(ConfigError, match=words):
        GraphEngine(tiny_model, drafts=0, device="cpu", batch_invariant=given)


def test_graph_engine_sends_an_old_gpu_to_vllm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, refused in (((7, 5), True), ((8, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if not refused:
            check_gpu(torch.device("cuda"))
            continue
        with pytest.raises(ConfigError, match=r"8\.0 or higher, got 7\.5 \(Tesla T4\): use engine=vllm$"):
            check_gpu(torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "step"), [(Slots, "prefill"), (DecodeSteps, "run"), (Slots, "copy_frames")], ids=["prefill", "run", "copy"]
)
@pytest.mark.parametrize("frames", [1, 3])
def test_graph_engine_that_fails_says_so(tiny_model, wait, monkeypatch, kind, step, frames):
    engine = graph(tiny_model, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(kind, step, fail)
    prompt, actions = make_prompt(0)
    assert engine.failure is None
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine failed: RuntimeError: no memory left"):
            wait(soon(ran(engine, prompt, actions[:frames])))
    assert engine.failure == "the engine failed: RuntimeError: no memory left"
    wait(engine.close())


def test_a_graph_engine_that_fails_while_it_hands_out_says_so_to_all(tiny_model, wait, monkeypatch):
    """Also to the session whose only frame was complete in the same turn."""

    def fail() -> torch.Tensor:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(Slots, "copy_frames", lambda self, frames: fail)
    monkeypatch.setattr("terra.engine.graph.scheduler._STEPS_PER_TURN", 64)  # a frame a turn
    engine = GraphEngine(tiny_model, drafts=0, max_sessions=1, dtype="float32", device=DEVICE)
    prompt, actions = make_prompt(0)

    async def together() -> list[object]:
        work = (ran(engine, prompt, actions[:1], seed=seed) for seed in range(2))
        return await soon(asyncio.gather(*work, return_exceptions=True))

    assert [str(each) for each in wait(together())] == ["the engine failed: RuntimeError: no memory left"] * 2
    wait(engine.close())


def test_the_device_has_the_next_steps_before_the_host_waits_for_it(tiny_model, graph_engine, wait, monkeypatch):
    """With several sessions; tokens are those of sessions alone."""
    events: list[str] = []
    run, ask = DecodeSteps.run, Slots.ask_start

    def noted_run(self: DecodeSteps, slots: Sequence[int], *rest: Any) -> None:
        events.append("steps" if len(slots) > 1 else "steps of one")
        run(self, slots, *rest)

    def noted_ask(self: Slots) -> Callable[[], list[int]]:
        events.append("question")
        answer = ask(self)

        def wait_for_it() -> list[int]:
            events.append("answer")
            return answer()

        return wait_for_it

    monkeypatch.setattr(DecodeSteps, "run", noted_run)
    monkeypatch.setattr(Slots, "ask_start", noted_ask)
    engine = GraphEngine(tiny_model, drafts=3, max_sessions=3, dtype="float32", device=DEVICE)
    inputs = [make_prompt(seed) for seed in (90, 91, 92)]

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*(ran(engine, *each, seed=seed) for seed, each in enumerate(inputs)))

    made = wait(together())
    wait(engine.close())
    triples = list(itertools.pairwise(itertools.pairwise(events)))
    assert (("steps", "question"), ("question", "steps")) in triples
    assert (("steps", "question"), ("question", "answer")) not in triples
    for seed, (each, frames) in enumerate(zip(inputs, made, strict=True)):
        assert torch.equal(wait(ran(graph_engine, *each, seed=seed)), frames)


def test_the_device_goes_on_with_others_during_a_prefill(tiny_model, graph_engine, wait, monkeypatch):
    """Steps of the sessions that are there are queued before each prefill; tokens are those of sessions alone."""
    events: list[str] = []
    requests: list[Any] = []
    run, prefill, request = DecodeSteps.run, Slots.prefill, GraphEngine.request

    def noted_request(self: GraphEngine, *rest: Any) -> Any:
        requests.append(request(self, *rest))
        return requests[-1]

    def noted_run(self: DecodeSteps, slots: Sequence[int], samplings: frozenset[SamplingParams], steps: int) -> None:
        events.append(f"{steps} steps of {len(slots)}")
        until = time.monotonic() + 10
        while len(requests) < min(len(slots) + 1, 3) and time.monotonic() < until:
            time.sleep(0.001)  # the next session comes while the frames of those before are under way
        run(self, slots, samplings, steps)

    def noted_prefill(self: Slots, *rest: Any, **more: Any) -> None:
        events.append("prefill")
        prefill(self, *rest, **more)

    monkeypatch.setattr(DecodeSteps, "run", noted_run)
    monkeypatch.setattr(GraphEngine, "request", noted_request)
    monkeypatch.setattr(Slots, "prefill", noted_prefill)
    engine = GraphEngine(tiny_model, drafts=0, max_sessions=3, dtype="float32", device=DEVICE)
    inputs = [make_prompt(seed) for seed in (93, 94, 95)]

    async def one_by_one() -> list[torch.Tensor]:
        begun = []
        for seed, each in enumerate(inputs):
            begun.append(asyncio.create_task(ran(engine, *each, seed=seed)))
            while events.count("prefill") <= seed:
                await asyncio.sleep(0)
        return await asyncio.gather(*begun)

    made = wait(one_by_one())
    wait(engine.close())
    before_prefills = [before for before, event in itertools.pairwise(["nothing", *events]) if event == "prefill"]
    assert before_prefills == ["nothing", "3 steps of 1", "3 steps of 2"]
    for seed, (each, frames) in enumerate(zip(inputs, made, strict=True)):
        assert torch.equal(wait(ran(graph_engine, *each, seed=seed)), frames)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_graph_engine_has_no_biases(tmp_path, bias):
    checkpoint = save_tiny(tmp_path, LlamaActionV2ForCausalLM, **{bias: True})
    with pytest.raises(CheckpointError, match="world_model: expected no biases with engine=graph, got attention_bias"):
        GraphEngine(checkpoint, drafts=0, dtype="float32", device=DEVICE)


def test_graph_engine_asks_for_8_bits_that_are_there(tiny_model, monkeypatch):
    monkeypatch.setattr("terra.engine.graph.engine.has_fp8", lambda device: False)
    for eight in ({"fp8_weights": True}, {"fp8_cache": True}):
        with pytest.raises(ConfigError, match=r"engine\.fp8: expected a GPU"):
            GraphEngine(tiny_model, drafts=0, dtype="float32", device=DEVICE, **eight)


@pytest.mark.parametrize(("name", "most"), [("max_sessions", 4096), ("step_tokens", 131072)])
def test_graph_engine_has_room_for_a_session_and_a_token(tiny_model, name, most):
    for wrong in (0, most + 1):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 to {most}, got {wrong}"):
            GraphEngine(tiny_model, drafts=0, dtype="float32", device=DEVICE, **{name: wrong})


def test_frames_of_a_graph_session_that_is_closed_are_not_made(tiny_model, wait):
    """A window may have lost its slot, and a closed window is not kept."""
    engine = GraphEngine(tiny_model, drafts=0, max_sessions=1, dtype="float32", device=DEVICE)

    async def closed() -> None:
        prompt, actions = make_prompt(30)
        first = await engine.open(prompt, PLAIN, 1)
        await first.step(actions[0])
        other = asyncio.create_task(ran(engine, prompt, actions))
        await asyncio.sleep(0)  # has asked for all its frames
        left = asyncio.create_task(first.step(actions[1]))
        await asyncio.sleep(0)
        await first.close()
        with pytest.raises(EngineError, match="the session is closed"):
            await left
        assert not other.done()  # it did not have to be waited for
        await other

    wait(closed())
    wait(engine.close())


def test_numbers_that_overflow_in_a_graph_session_stay_in_it(tiny_model, graph_engine, wait):
    """Its slot goes to the next session, whose attention multiplies masked values by 0."""
    prompt, actions = make_prompt(31)
    expected = wait(ran(graph_engine, prompt, actions))
    engine = GraphEngine(tiny_model, drafts=4, max_sessions=1, dtype="float32", device=DEVICE)
    slots = engine._scheduler._slots
    for _ in range(2):
        assert torch.equal(wait(ran(engine, prompt, actions)), expected)
        for held in (slots.cache.keys, slots.cache.values, slots.action_embeddings):
            held.fill_(torch.nan)
    wait(engine.close())


def test_a_copied_context_leaves_nothing_of_the_window_before(tiny_model, graph_engine, wait):
    prompt, actions = make_prompt(33)
    expected = wait(ran(graph_engine, prompt, actions))
    engine = GraphEngine(tiny_model, drafts=4, max_sessions=2, dtype="float32", device=DEVICE)
    slots = engine._scheduler._slots

    async def copied() -> torch.Tensor:
        source = await engine.open(prompt, PLAIN, 1)
        await source.step(actions[0])
        for held in (slots.cache.keys, slots.cache.values):
            held[:, 1] = torch.nan
        slots.action_embeddings[1] = torch.nan
        return await ran(engine, prompt, actions)

    assert torch.equal(wait(copied()), expected)
    assert engine.counters.cached
    wait(engine.close())


def test_a_graph_engine_does_not_grow_with_the_kinds_of_sampling(tiny_model, wait):
    engine = GraphEngine(tiny_model, drafts=0, max_sessions=3, dtype="float32", device=DEVICE)
    scheduler = engine._scheduler
    prompt, actions = make_prompt(32)
    for top_k in range(2, 8):
        wait(ran(engine, prompt, actions[:1], SamplingParams(temperature=0.5, top_k=top_k)))
    assert len(scheduler._steps._logits) == 1
    assert 1 <= len(scheduler._slots.sampled_with) <= 3
    wait(engine.close())
