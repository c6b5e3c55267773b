"""Rollouts with memory: every engine, batch, fork, rewind and record has the same frames and the same memory."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from entry import read_settings
from hypothesis import given, settings, strategies as st
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from tiny import COLS, DEVICE, FEW_BLOCKS, ROWS, save_tiny
from tiny_adapter import save_memory_adapter
from tiny_driving import SIZE, write_driving
from tiny_rollouts import Batch, told
from window_plans import CountingEngine, memory_plans

from decoder import FramewiseDecoder
from decoder.video import to_frames
from terra.actions import Waypoints
from terra.config.files import register_resolvers
from terra.config.spec import PipelineSpec
from terra.driving.control import Driver, Steering
from terra.engine.base import Engine, EngineSpec
from terra.engine.hf import HFEngine
from terra.errors import ActionError, CheckpointError, ConfigError, EngineError, TerraError
from terra.generate import run as generate
from terra.memory import MemoryRule, expected_poses, memory_in_use, memory_times, place_action, poses_along
from terra.pipeline import Pipeline
from terra.place_map import load_map
from terra.prompt import build_prompt
from terra.recall import PlaceMap, Recall
from terra.sampling import SamplingParams, window_seed
from terra.serving.rollout import Fork, LiveRollout, context_moments
from terra.window_plan import plan_windows, window_at
from terra.windows import SlidingSession, remembered
from terra.world_model import LlamaActionV2ForCausalLM, load_adapter
from tokenizer import LFQTokenizer

pytestmark = pytest.mark.slow

MEMORY, OVERLAP, WINDOW = 2, 2, 8
NUM = 18  # frames: a window of 8 and three that add 4, 4 and 2
SAMPLING = SamplingParams(temperature=1.0)
TIMES = Waypoints().times


def drive(num_frames: int, angle: float = 0.5) -> torch.Tensor:
    """The actions of a car that turns left, then right."""
    driver, actions = Driver(Steering(angle, 6.0), 10.0), []
    for index in range(num_frames - 1):
        driver = driver.told(Steering(-angle, 6.0)) if index == 7 else driver
        actions.append(torch.from_numpy(driver.action(TIMES)))
        driver = driver.moved()
    return torch.stack(actions)


def context(seed: int, num: int = 3) -> torch.Tensor:
    return torch.randint(0, 64, (num, ROWS, COLS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def memory_model(tmp_path_factory) -> Path:
    """The tiny model of the other tests, trained with memory (so its config says)."""
    folder = tmp_path_factory.mktemp("models") / "memory"
    return save_tiny(folder, LlamaActionV2ForCausalLM, memory={"frames": MEMORY})


@pytest.fixture(scope="module")
def hf(memory_model, wait):
    engine = HFEngine(memory_model, device=DEVICE)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer) -> LFQTokenizer:
    return LFQTokenizer.from_pretrained(tiny_tokenizer)


def pipeline_of(engine: Engine, loaded: LFQTokenizer, memory: MemoryRule | None = None) -> Pipeline:
    return Pipeline(loaded, engine, FramewiseDecoder(loaded), overlap=OVERLAP, memory=memory)


@pytest.fixture(scope="module")
def pipeline(hf, loaded) -> Pipeline:
    return pipeline_of(hf, loaded, hf.spec.memory)


@pytest.fixture(scope="module")
def made(pipeline, wait) -> torch.Tensor:
    return wait(pipeline.rollout_tokens(context(0), drive(NUM), SAMPLING, 5))


def engine_of(kind: str, model: Path) -> Engine:
    if kind == "jacobi":
        from terra.engine.jacobi import JacobiEngine

        return JacobiEngine(model, drafts=4, device=DEVICE)
    if kind == "graph":
        from terra.engine.graph.engine import GraphEngine

        return GraphEngine(model, drafts=4, max_sessions=3, dtype="float32", device=DEVICE)
    from terra.engine.vllm.engine import VllmEngine

    return VllmEngine(model, max_sessions=8, engine_args=FEW_BLOCKS)


@pytest.mark.parametrize("kind", ["jacobi", "graph", "vllm"])
def test_all_engines_make_the_same(memory_model, loaded, wait, made, kind):
    engine = engine_of(kind, memory_model)
    pipeline = pipeline_of(engine, loaded, engine.spec.memory)

    async def alone_and_together():
        alone = await pipeline.rollout_tokens(context(0), drive(NUM), SAMPLING, 5)
        others = [pipeline.rollout_tokens(context(n), drive(NUM, 0.1 * n), SAMPLING, n) for n in (1, 2)]
        together = await asyncio.gather(pipeline.rollout_tokens(context(0), drive(NUM), SAMPLING, 5), *others)
        await engine.close()
        return alone, together[0]

    for tokens in wait(alone_and_together()):
        assert torch.equal(tokens, made)


def test_a_window_is_a_prompt_of_memory_frames_and_recent_ones(hf, pipeline, wait, made):
    actions = drive(NUM)
    poses = poses_along(actions.numpy(), Waypoints(), 10.0)
    record = pipeline.describe_memory(made, actions, 3)
    assert record is not None
    windows = pipeline.plan(NUM, 3)
    assert [each.start for each in windows] == [0, 6, 10, 14]
    assert len(record["windows"]) == 3
    for index, (window, chosen) in enumerate(zip(windows[1:], record["windows"], strict=True), 1):
        now = window.start + OVERLAP - 1
        times = memory_times(len(chosen), WINDOW - len(chosen) - OVERLAP, 10.0)
        expected = expected_poses(poses[now], actions[now].numpy(), Waypoints(), times)
        places = place_action(expected, poses[chosen], Waypoints())
        given = torch.cat([torch.from_numpy(places), actions[window.start : window.start + OVERLAP - 1]])
        prompt = build_prompt(made[[*chosen, window.start, window.start + 1]], given)

        async def window_alone(prompt=prompt, window=window, index=index):
            session = await hf.open(prompt, SAMPLING, window_seed(5, index))
            end = window.start + window.num_frames
            return [each async for each in session.run(actions[window.start + OVERLAP - 1 : end - 1])]

        frames = torch.stack(wait(window_alone()))
        assert torch.equal(frames, made[window.start + OVERLAP : window.start + window.num_frames])


def test_memory_changes_what_is_made_and_none_changes_nothing(tiny_model, hf, loaded, pipeline, wait, made):
    before = HFEngine(tiny_model, device=DEVICE)  # the same weights, and a config.json without the section
    assert before.spec.memory is None

    def make(pipeline: Pipeline) -> torch.Tensor:
        return wait(pipeline.rollout_tokens(context(0), drive(NUM), SAMPLING, 5))

    without = make(pipeline_of(before, loaded))
    assert torch.equal(make(pipeline_of(hf, loaded)), without)
    assert not torch.equal(without, made)
    assert torch.equal(without[:WINDOW], made[:WINDOW])  # the first window remembers nothing
    assert pipeline_of(hf, loaded).describe_memory(without, drive(NUM), 3) is None
    wait(before.close())


def test_stepping_rewinding_and_forking_make_the_same(pipeline, wait, made):
    spec, actions = pipeline.engine.spec, drive(NUM).numpy()
    moments = context_moments(context(0), torch.from_numpy(actions[:2]), Driver(Steering(0.0, 5.0), 10.0), spec)
    start = Fork(moments, 3, SAMPLING, 5, None, pipeline.memory)

    async def all_ways():
        live = LiveRollout(pipeline, start, 4)
        for action in actions[2:]:
            await live.step(action)
        got = [live.moments]
        for frame in (17, 14, 11, 10, 7, 6, 4, 2):
            await live.rewind(frame)
            for action in actions[frame:]:
                await live.step(action)
            got.append(live.moments)
        for frame in (9, 11, 13):
            other = LiveRollout(pipeline, live.fork(frame), 4)
            for action in actions[frame:]:
                await other.step(action)
            got.append(other.moments)
            await other.close()
        await live.close()
        return [np.stack([moment.tokens for moment in each]) for each in got]

    for tokens in wait(all_ways()):
        assert np.array_equal(tokens, made.numpy())


def test_a_session_without_memory_stays_without(pipeline, hf, loaded, wait):
    actions = drive(NUM).numpy()
    spec = pipeline.engine.spec
    moments = context_moments(context(0), torch.from_numpy(actions[:2]), Driver(Steering(0.0, 5.0), 10.0), spec)

    async def forgetful():
        live = LiveRollout(pipeline, Fork(moments, 3, SAMPLING, 5), 100)
        for action in actions[2:]:
            await live.step(action)
        await live.close()
        return np.stack([moment.tokens for moment in live.moments])

    expected = wait(pipeline_of(hf, loaded).rollout_tokens(context(0), drive(NUM), SAMPLING, 5))
    assert np.array_equal(wait(forgetful()), expected.numpy())


def test_a_map_is_remembered_from_the_beginning(pipeline, wait, made):
    place = PlaceMap(context(9, 5), np.array([[2.0 * k, 0.5 * k, 0.1 * k] for k in range(5)]))

    def make(count: int) -> torch.Tensor:
        return wait(pipeline.rollout_tokens(context(0), drive(NUM)[: count - 1], SAMPLING, 5, place=place))

    tokens = make(NUM)
    assert torch.equal(make(6), tokens[:6])
    assert not torch.equal(tokens, made)
    record = pipeline.describe_memory(tokens, drive(NUM), 3, place)
    assert record is not None
    assert [len(each) for each in record["windows"]] == [MEMORY] * 4
    assert set(record["windows"][0]) <= set(range(-5, 0))
    with pytest.raises(
        ConfigError, match=r"num_context: expected 1 to 5 \(the window holds 8, 2 of them memory\), got 6"
    ):
        pipeline.plan(NUM, 6, has_map=True)
    with pytest.raises(ConfigError, match=r"map: expected at least 2 frames \(memory\), got 1"):
        pipeline.recall(context(0), drive(3), PlaceMap(place.tokens[:1], place.poses[:1]))


def test_a_map_without_memory_is_refused(hf, loaded, wait):
    place = PlaceMap(context(9, 5), np.zeros((5, 3)))
    with pytest.raises(ConfigError, match="map: expected none for rollouts without memory, got one"):
        wait(pipeline_of(hf, loaded).rollout_tokens(context(0), drive(NUM), SAMPLING, 5, place=place))


@given(memory_plans())
def test_windows_with_memory_tile_the_rollout(plan):
    num_frames, num_context, max_frames, overlap, memory, has_map = plan
    windows = list(plan_windows(*plan[:5], has_map=has_map))
    made = [frame for w in windows for frame in range(w.start + w.num_given, w.start + w.num_frames)]
    assert made == list(range(num_context, num_frames))
    for index, window in enumerate(windows):
        held = memory if index or has_map else 0
        assert window.num_given < window.num_frames <= max_frames - held
        for last in range(window.start + window.num_given - 1, window.start + window.num_frames - 1):
            assert window_at(last, max_frames, overlap, memory, has_map=has_map) == (index, window.start)


@settings(max_examples=60)
@given(memory_plans(), st.integers(0, 1000), st.sampled_from(["view", "recent"]), st.data())
def test_a_session_opens_the_planned_windows_with_what_the_record_says(plan, seed, kind, data):
    num_frames, num_context, max_frames, overlap, memory, has_map = plan
    engine, rule = CountingEngine(max_frames), MemoryRule(frames=memory, kind=kind)
    turns = data.draw(st.lists(st.floats(-1, 1), min_size=num_frames - 1, max_size=num_frames - 1))
    actions = torch.tensor([[[0.3 * turn, 2.0, 0.5]] for turn in turns])
    frames = torch.arange(num_frames)[:, None, None]
    place = PlaceMap(5000 + frames[:memory], np.zeros((memory, 3))) if has_map else None
    if has_map and len(frames) < memory:
        return
    cut = data.draw(st.integers(num_context - 1, num_frames - 1))

    async def rollout():
        start = actions[: num_context - 1]
        recall = Recall.begin(rule, engine.spec, frames[:num_context], start, place)
        prompt = build_prompt(frames[:num_context], start)
        session = await SlidingSession.open(engine, prompt, SAMPLING, seed, overlap, recall=recall)
        made = [await session.step(action) for action in actions[num_context - 1 : cut]]
        made += [frame async for frame in session.run(actions[cut:])]
        await session.close()
        return [int(frame) for frame in made]

    assert asyncio.run(rollout()) == list(range(num_context, num_frames))
    windows = list(plan_windows(*plan[:5], has_map=has_map))
    recall = Recall.begin(rule, engine.spec, frames, actions, place)
    chosen = remembered(recall, actions, windows)
    if not has_map:
        chosen = [[], *chosen]
    assert engine.opened == [
        (
            [5000 - 1 - each if each < 0 else each for each in memory_frames]
            + list(range(window.start, window.start + window.num_given)),
            [0.0] * len(memory_frames) + [0.5] * (window.num_given - 1),
            window_seed(seed, index),
        )
        for index, (window, memory_frames) in enumerate(zip(windows, chosen, strict=True))
    ]


@settings(max_examples=60)
@given(memory_plans(), st.data())
def test_a_session_that_goes_on_remembers_what_the_undisturbed_one_does(plan, data):
    num_frames, num_context, max_frames, overlap, memory, has_map = plan
    engine, rule = CountingEngine(max_frames), MemoryRule(frames=memory)
    turns = data.draw(st.lists(st.sampled_from([-1, -0.3, 0, 1]), min_size=num_frames - 1, max_size=num_frames - 1))
    actions = torch.tensor([[[0.6 * turn, 2.0, 0.5]] for turn in turns])
    frames = torch.arange(num_frames)[:, None, None]
    place = PlaceMap(5000 + frames[:memory], np.zeros((memory, 3))) if has_map else None
    if has_map and len(frames) < memory:
        return
    last = data.draw(st.integers(num_context - 1, num_frames - 2))
    windows = list(plan_windows(*plan[:5], has_map=has_map))
    whole = Recall.begin(rule, engine.spec, frames, actions, place)
    chosen = [[]] * (not has_map) + remembered(whole, actions, windows)
    index, start = window_at(last, max_frames, overlap, memory, has_map=has_map)

    async def go_on():
        poses = poses_along(actions.numpy(), Waypoints(times=(0.5,)), 10.0)
        known = zip(frames[: last + 1], poses[: last + 1], strict=True)
        recall = Recall(rule, engine.spec, num_context, known, place=place)
        prompt = build_prompt(frames[start : last + 1], actions[start:last])
        session = await SlidingSession.open(engine, prompt, SAMPLING, 1, overlap, index, recall=recall)
        await session.step(actions[last])
        return session.memory

    assert asyncio.run(go_on()) == chosen[index]


def test_a_long_session_remembers_its_newest_frames(pipeline, wait, monkeypatch):
    whole = Recall.begin(MemoryRule(frames=2), pipeline.engine.spec, context(0, 80), drive(80))
    assert min(whole.choose(74, 2, drive(80)[75])) < 60
    monkeypatch.setattr("terra.recall.MOST_CANDIDATES", 10)
    monkeypatch.setattr("terra.serving.rollout.MOST_CANDIDATES", 10)
    num, spec = 80, pipeline.engine.spec
    actions = drive(num).numpy()
    expected = wait(pipeline.rollout_tokens(context(0), torch.from_numpy(actions), SAMPLING, 5))
    record = pipeline.describe_memory(expected, torch.from_numpy(actions), 3)
    assert record is not None
    windows = pipeline.plan(num, 3)[1:]
    for window, chosen in zip(windows, record["windows"], strict=True):
        assert window.start - 10 <= min(chosen) <= max(chosen) < window.start
    moments = context_moments(context(0), torch.from_numpy(actions[:2]), Driver(Steering(0.0, 5.0), 10.0), spec)

    async def all_ways():
        live = LiveRollout(pipeline, Fork(moments, 3, SAMPLING, 5, None, pipeline.memory), 8)
        for action in actions[2:]:
            await live.step(action)
        got = [live.moments]
        assert len(live.moments) == 18  # 10 and the history
        with pytest.raises(EngineError, match="frame: expected one of those kept, 75 to 79"):
            await live.rewind(74)
        for frame in (78, 75):
            await live.rewind(frame)
            for action in actions[frame:]:
                await live.step(action)
            got.append(live.moments)
        await live.close()
        return got

    for moments in wait(all_ways()):
        assert all(np.array_equal(moment.tokens, expected[moment.index]) for moment in moments)


def test_a_closed_session_refuses(pipeline, wait):
    place = PlaceMap(context(9, 5), np.zeros((5, 3)))

    async def late():
        session = await pipeline.open(context(0), drive(3), SAMPLING, 5, place=place)
        assert session.memory == []
        await session.close()
        await session.step(drive(3)[0])

    with pytest.raises(EngineError, match="the session is closed"):
        wait(late())


def test_a_wrong_action_at_a_window_s_start_chooses_nothing(pipeline, wait, made):
    async def drive_on():
        actions = drive(NUM)
        session = await pipeline.open(context(0), actions[:2], SAMPLING, 5)
        frames = []
        for action in actions[2:]:
            for wrong in (torch.full((6, 3), torch.nan), torch.zeros(5, 3)):
                with pytest.raises(EngineError, match="action: expected"):
                    await session.step(wrong)
            frames.append(await session.step(action))
        await session.close()
        return torch.stack(frames)

    assert torch.equal(wait(drive_on()), made[3:])


def test_the_environment_remembers(pipeline, loaded, made):
    from terra.environment import DriveContext, WorldEnv

    frames = pipeline.decoder.decode(context(1))
    tokens, actions = pipeline.wait(pipeline.encode(frames)), drive(NUM)
    expected = pipeline.wait(pipeline.rollout_tokens(tokens, actions, SAMPLING, 5))
    env = WorldEnv(pipeline, DriveContext(frames, actions[:2]), sampling=SAMPLING)
    env.reset(seed=5)
    got = [env.step(action.numpy())[-1]["tokens"] for action in actions[2:]]
    assert np.array_equal(np.stack(got), expected[3:].numpy())


def test_how_many_frames_are_remembered():
    rule = MemoryRule(frames=4, range=30.0)
    assert memory_in_use(rule, "auto") is rule
    assert memory_in_use(rule, 0) is None
    assert memory_in_use(rule, 2) == rule.replace(frames=2)
    assert memory_in_use(None, "auto") is memory_in_use(None, 0) is None
    with pytest.raises(ConfigError, match="memory: expected at most 4, as in training, got 5"):
        memory_in_use(rule, 5)
    with pytest.raises(
        ConfigError, match=r"memory: expected 0 or auto \(the model was trained without memory\), got 1"
    ):
        memory_in_use(None, 1)


class TestCommands:
    """`terra generate`, `terra replay` and `terra rollout`."""

    @pytest.fixture
    def batch(self, tmp_path, memory_model, tiny_tokenizer) -> Batch:
        return Batch(tmp_path, memory_model, tiny_tokenizer)

    def make(self, batch: Batch, **changes: object) -> Path:
        settings = {
            "context": batch.folder / "c0",
            "trajectory": batch.folder / "drive.json",
            "tokenizer.pretrained": batch.tokenizer,
            "world_model.pretrained": batch.model,
            "engine": "hf",
            "overlap": OVERLAP,
            "num_frames": 14,
            "seed": 3,
            "output": batch.folder / "made",
        } | changes
        register_resolvers()
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return generate(read_settings("generate", overrides), Console(quiet=True))

    def test_the_record_says_what_was_remembered_and_replay_agrees(self, batch):
        folder = self.make(batch)
        record = json.loads((folder / "rollout.json").read_text())
        assert record["memory"] == {
            "frames": 2,
            "field_of_view": 90.0,
            "range": 40.0,
            "kind": "view",
            "windows": record["memory"]["windows"],
        }
        assert [each["start"] for each in record["windows"]] == [0, 6, 10]
        assert [len(each) for each in record["memory"]["windows"]] == [2, 2]
        assert told(folder)[0] == 0

    def test_without_memory_the_record_is_as_before(self, batch, tiny_model):
        records = [
            json.loads((self.make(batch, output=batch.folder / name, **changes) / "rollout.json").read_text())
            for name, changes in {
                "none": {"memory": 0},
                "before": {"world_model.pretrained": tiny_model},
            }.items()
        ]
        assert "memory" not in records[0]
        assert records[0].keys() == records[1].keys()
        assert records[0]["pixels_sha256"] == records[1]["pixels_sha256"]
        assert told(batch.folder / "none")[0] == 0

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"memory": 3}, "memory: expected at most 2, as in training, got 3"),
            ({"memory": "all"}, "memory: expected auto, or a number of frames, 0 or more, got 'all'"),
            ({"memory": -1}, "memory: expected auto, or a number of frames, 0 or more, got -1"),
            ({"overlap": 6}, r"overlap: expected 1 to 5 \(the window holds 8, 2 of them memory\), got 6"),
        ],
    )
    def test_bad_settings_are_one_line(self, batch, changes, line):
        with pytest.raises(ConfigError, match=line):
            self.make(batch, **changes)
        assert not (batch.folder / "made").exists()

    def write_map(self, batch: Batch, rows: list[str] | None = None, header: str = "file,x_m,y_m,heading_deg") -> Path:
        path = batch.folder / "map.csv"
        path.write_text("\n".join([header, *(rows or [f"c1/{k}.png,{2 * k},0.5,{5 * k}" for k in range(3)])]) + "\n")
        return path

    def test_lines_of_adapters_with_different_memory(self, tmp_path, tiny_model, tiny_tokenizer):
        batch = Batch(tmp_path, tiny_model, tiny_tokenizer)
        frames = {"more": 2, "less": 1}
        folders = {
            name: save_memory_adapter(tmp_path / name, tiny_model, frames=count) for name, count in frames.items()
        }
        save_memory_adapter(tmp_path / "far", tiny_model, frames=3)
        place = {"map": str(self.write_map(batch, ["c1/0.png,0,0.5,0", "c1/1.png,2,0.5,5"])), "map_pose": [1, 0, 0.1]}
        lines = [batch.line(0, id=name, adapter=name, **place) for name in ("less", "more", "far")]
        batch.write(*lines, batch.line(0), batch.line(0, id="base", **place))
        given = {f"+adapters.{name}": tmp_path / name for name in (*folders, "far")}
        assert batch.run(num_frames=14, **given) == 3
        reasons = {row["id"]: row["reason"] for row in batch.index() if row["status"] == "failed"}
        assert reasons.keys() == {"far", "base"}
        assert "expected 3 to 1000 frames, got 2" in reasons["far"]
        assert reasons["base"] == "map: expected none for rollouts without memory, got one"
        assert batch.record("r0").get("memory") is None
        for name, folder in folders.items():
            record, alone = batch.record(name), tmp_path / f"alone_{name}"
            assert record["memory"]["frames"] == frames[name]
            batch.write(batch.line(0, **place))
            assert batch.run(output=alone, num_frames=14, adapter=folder) == 0
            assert torch.equal(batch.tokens(name), batch.tokens("r0", alone))
            assert told(batch.output / "rollouts" / name)[0] == 0

    def test_a_place_of_which_there_are_pictures(self, batch):
        folder = self.make(batch, map=self.write_map(batch), map_pose="[1,0,0.1]")
        record = json.loads((folder / "rollout.json").read_text())
        assert [each["num_frames"] for each in record["windows"]] == [6, 6, 6]
        assert [each["start"] for each in record["windows"]] == [0, 4, 8]
        assert record["memory"]["map"]["pose"] == [1, 0, 0.1]
        assert len(record["memory"]["windows"]) == 3
        assert set(record["memory"]["windows"][0]) <= {-1, -2, -3}
        assert told(folder)[0] == 0
        Image.open(batch.folder / "c1/2.png").rotate(180).save(batch.folder / "c1/2.png")
        with pytest.raises(ConfigError, match=r"map .*map.csv: expected the content that the rollout was made from"):
            told(folder)

    @pytest.mark.parametrize(
        ("rows", "changes", "line"),
        [
            (None, {"memory": 0}, "map: expected none for rollouts without memory, got one"),
            (None, {"num_context": 6}, "num_context: expected 1 to 5"),
            (None, {"map_pose": "[1,2]"}, r"map_pose: expected \[x, y, heading\] in meters and radians"),
            (None, {"limits.map_frames": 2}, "map=.*map.csv: expected 1 to 2 frames, got 3"),
            (["c1/0.png,0,0,0"], {}, "map=.*map.csv: expected 2 to 1000 frames, got 1"),
            (["c1/0.png,0,0,left"], {}, "map.csv: line 2: heading_deg: expected a number below 1e7, got 'left'"),
            (["c1/0.png,0,0"], {}, "map.csv: line 2: expected 4 columns, got 3"),
            (
                ["c1/9.png,0,0,0", "c1/0.png,0,0,0"],
                {},
                "c1/9.png: expected a folder, a glob or a video, got no such path",
            ),
            (
                ["file"],
                {"map": "none.csv"},
                "map=none.csv: expected a CSV, or the MP4 of an episode .*, got no such file",
            ),
        ],
    )
    def test_bad_maps_are_one_line(self, batch, rows, changes, line):
        path = self.write_map(batch, rows)
        with pytest.raises(TerraError, match=line):
            self.make(batch, **({"map": path} | changes))
        assert not (batch.folder / "made").exists()

    def test_a_map_declares_its_units(self, batch):
        path = self.write_map(batch, header="file,x,y,heading")
        with pytest.raises(
            TerraError, match="line 1: expected the columns file, x_m, y_m and heading_rad or heading_deg"
        ):
            self.make(batch, map=path)
        with pytest.raises(ConfigError, match="map_pose: expected none without map=, got one"):
            self.make(batch, map_pose="[0,0,0]")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\n\n",
            b"\x00\x01\xff\xfe",
            b"file,x_m,y_m,heading_rad",
            b"file,x_m,y_m,heading_rad\n",
            b"file,x_m,y_m,heading_rad\n\n",
            b"file,x_m,y_m,heading_rad,heading_deg\na.png,0,0,0,0",
            b"file,x_m,x_m,heading_rad\nc1/0.png,0,0,0",
            b"file,x_m,y_m,heading_rad\nc1/0.png,nan,0,0",
            b"file,x_m,y_m,heading_rad\nc1/0.png,1e300,0,0",
            b"file,x_m,y_m,heading_rad\n,0,0,0",
            b"file,x_m,y_m,heading_rad\n..,0,0,0",
            b"file,x_m,y_m,heading_rad\nc1/0\x00.png,0,0,0",
            b"file,x_m,y_m,heading_rad\n" + b"a" * 5000 + b",0,0,0",
            b'file,x_m,y_m,heading_rad\n"' + b"a" * 200_000 + b",0,0,0",
            b"file,x_m,y_m,heading_rad\ndrive.json,0,0,0",
            b"file,x_m,y_m,heading_rad\n" + b"c1/0.png,0,0,0\n" * 1001,
        ],
    )
    def test_hostile_maps_are_one_line(self, batch, content):
        path = batch.folder / "map.csv"
        path.write_bytes(content)
        with pytest.raises(TerraError) as caught:
            load_map(path, (4 * ROWS, 4 * COLS), 10.0)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000 + len(str(path))
        for wrong in (batch.folder, batch.folder / "c1/0.png", batch.folder / "drive.json"):
            with pytest.raises(TerraError, match="map="):
                load_map(wrong, (4 * ROWS, 4 * COLS), 10.0)

    def test_an_episode_of_a_dataset_is_a_map(self, tmp_path, pipeline, wait):
        write_driving(tmp_path / "data", num_frames=20)
        video = min((tmp_path / "data/train").glob("*/*.mp4"))
        found = load_map(video, SIZE, 10.0)
        assert len(found.pixels) == len(found.poses) == 20
        with pytest.raises(TerraError, match="expected pictures of 16x12 pixels, the model's, got 32x16"):
            load_map(video, (4 * ROWS, 4 * COLS), 10.0)
        pixels = found.pixels[:, :12, :16]
        place = wait(pipeline.encode_map(pixels, found.seen_from(found.poses[0])))
        assert torch.equal(place.tokens, pipeline.tokenizer.encode(to_frames(pixels)))
        assert place.poses[0].tolist() == [0, 0, 0]

    def test_lines_of_a_batch_with_maps(self, batch):
        path = self.write_map(batch)
        batch.write(
            batch.line(0, num_frames=14, map="map.csv", map_pose=[1, 0, 0.1]),
            batch.line(2, num_frames=14, map=str(path), seed=0),
            batch.line(4, num_frames=14, seed=0),
        )
        assert batch.run() == 0
        for name, changes in {
            "r0": {"map": path, "map_pose": "[1,0,0.1]"},
            "r2": {"map": path},
            "r4": {},
        }.items():
            made = self.make(batch, seed=0, output=batch.folder / name, **changes)
            assert torch.equal(load_file(made / "tokens.safetensors")["tokens"], batch.tokens(name))
            memories = [json.loads((made / "rollout.json").read_text())["memory"], batch.record(name)["memory"]]
            paths = [memory["map"].pop("path") for memory in memories if "map" in memory]
            assert memories[0] == memories[1]
            assert paths in ([], ["../map.csv", "../../../map.csv"])
        assert not torch.equal(batch.tokens("r0"), batch.tokens("r2"))
        assert told(batch.output / "rollouts" / "r0")[0] == 0
        assert batch.run() == 0
        Image.open(batch.folder / "c1/2.png").rotate(180).save(batch.folder / "c1/2.png")
        assert batch.run() == 3
        reasons = {each["id"]: each.get("reason", "") for each in batch.index()}
        assert all("inputs.map_sha256" in reasons[name] for name in ("r0", "r2"))
        assert not reasons["r4"]
        before = batch.tokens("r2")
        assert batch.run(on_change="redo") == 0
        assert not torch.equal(batch.tokens("r2"), before)

    def test_bad_lines_with_maps_fail_alone(self, batch):
        self.write_map(batch)
        small = batch.folder / "small.csv"
        small.write_text("file,x_m,y_m,heading_deg\nc1/0.png,0,0,0\n")
        expected = "map_pose: expected [x, y, heading] in meters and radians or null, got"
        lines = {
            "map_pose: expected none without map, got one": {"map_pose": [0, 0, 0]},
            f"{expected} [1, 2]": {"map": "map.csv", "map_pose": [1, 2]},
            f"{expected} [1, 2, 1e+300]": {"map": "map.csv", "map_pose": [1, 2, 1e300]},
            "expected a CSV, or the MP4 of an episode of a dataset, got no such file": {"map": "none.csv"},
            "expected 2 to 1000 frames, got 1": {"map": "small.csv"},
            "map: expected a path": {"map": 3},
        }
        batch.write(*(batch.line(2 * k, **changes) for k, changes in enumerate(lines.values())), batch.line(20))
        assert batch.run() == 3
        *failed, good = batch.index()
        for message, each in zip(lines, failed, strict=True):
            assert message in each["reason"]
            assert "\n" not in each["reason"]
        assert good["status"] == "done"

    def test_a_batch_without_memory_takes_no_map(self, batch):
        self.write_map(batch)
        batch.write(batch.line(0, map="map.csv"))
        assert batch.run(memory=0) == 3
        assert batch.index()[0]["reason"] == "map: expected none for rollouts without memory, got one"

    def test_a_batch_goes_on_with_the_same(self, batch):
        batch.write(*(batch.line(index, num_frames=14) for index in range(3)))
        assert batch.run() == 0
        before = {name: batch.tokens(name) for name in batch.names()}
        assert batch.record("r0")["memory"]["windows"] == batch.record("r2")["memory"]["windows"]
        made = self.make(batch, seed=0)
        assert torch.equal(load_file(made / "tokens.safetensors")["tokens"], before["r0"])
        (batch.output / "rollouts" / "r1" / "video.mp4").unlink()
        assert batch.run() == 0
        assert all(torch.equal(batch.tokens(name), tokens) for name, tokens in before.items())
        with pytest.raises(ConfigError, match="memory"):
            batch.run(memory=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": {"frames": 7}}, r"memory.frames: expected 1 to 6 \(the window holds 8\), got 7"),
        ({"memory": {"frames": 0}}, "memory: frames: expected"),
        ({"memory": {"frames": 2, "range": 1.0}}, "memory: range: expected"),
        ({"memory": {"frames": 2, "extent": 1.0}}, "memory: .*extent"),
        (
            {
                "memory": {"frames": 2},
                "num_action_tokens": 1,
                "action_dim": 2,
                "num_spatio_embeddings": ROWS * COLS + 1,
                "action_space": {"kind": "keys", "names": ["a", "b"]},
            },
            "memory: expected none, for the model's keys of a, b: it has no poses",
        ),
    ],
)
def test_bad_sections_of_a_config_are_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        save_tiny(tmp_path / "bad", LlamaActionV2ForCausalLM, **changes)


def test_a_config_without_memory_has_no_such_key(tiny_model, memory_model):
    assert "memory" not in json.loads((tiny_model / "config.json").read_text())
    section = json.loads((memory_model / "config.json").read_text())["memory"]
    assert MemoryRule(**section) == MemoryRule(frames=2)


def test_an_adapter_may_bring_memory(tiny_model, tmp_path):
    folder = save_memory_adapter(tmp_path / "adapter", tiny_model, range=20)
    assert load_adapter(folder, tiny_model).config.memory_rule == MemoryRule(frames=MEMORY, range=20.0)
    engine = HFEngine(tiny_model, adapter=folder, device=DEVICE)
    assert engine.spec.memory == MemoryRule(frames=MEMORY, range=20.0)


@pytest.mark.parametrize("kind", ["hf", "jacobi", "graph", "vllm"])
def test_an_adapter_remembers_beside_a_model_that_does_not(tiny_model, tiny_tokenizer, tmp_path, kind):
    folder = save_memory_adapter(tmp_path / "adapter", tiny_model)
    for name, part in (("tokenizer", tiny_tokenizer), ("world_model", tiny_model)):
        (tmp_path / name).symlink_to(part)
    few = {"engine_args": FEW_BLOCKS} if kind == "vllm" else {}
    other = save_memory_adapter(tmp_path / "other", tiny_model, frames=1)

    def made(name: str | None, **given):
        with Pipeline.from_pretrained(
            tmp_path, engine=kind, device=DEVICE, overlap=OVERLAP, **few, **given
        ) as pipeline:
            work = pipeline.rollout_tokens(context(0), drive(NUM), SAMPLING, 5, adapter=name)
            tokens = pipeline.wait(work)
            return tokens, pipeline.describe_memory(tokens, drive(NUM), 3, adapter=name)

    both = {"adapters": {"remembers": folder, "less": other}}
    remembers, memory = made("remembers", **both)
    assert torch.equal(remembers, (alone := made(None, adapter=folder))[0])
    assert memory is not None
    assert memory == alone[1]
    less, memory = made("less", **both)
    assert torch.equal(less, made(None, adapter=other)[0])
    assert memory is not None
    assert memory["frames"] == 1
    forgets, memory = made(None, **both)
    assert torch.equal(forgets, made(None)[0])
    assert memory is None
    with pytest.raises(
        ConfigError, match=r"^adapters\.remembers: overlap: expected 1 to 5 .*2 of them memory\), got 6"
    ):
        PipelineSpec.from_pretrained(tmp_path, engine=kind, device=DEVICE, overlap=6, **both)


def test_other_worlds_have_no_memory(hf):
    from terra.actions import Keys

    spec = EngineSpec(hf.spec.layout, 64, 10.0, Keys(names=("a",)))
    with pytest.raises(ActionError, match="memory: expected a world of waypoints, got one of keys of a"):
        Recall.begin(MemoryRule(frames=1), spec, context(0), torch.zeros(2, 1, 1))
