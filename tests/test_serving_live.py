"""Live sessions of terra-serve over WebSocket, against a real server in a thread."""

import asyncio
import io
import itertools
import json
import threading
from collections import deque
from contextlib import aclosing
from dataclasses import astuple, replace
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from tiny import DEVICE
from tiny_serving import KEY, HeldEngine, Served, Talk, make_pipeline, pictures, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from window_plans import plans

from decoder import FramewiseDecoder
from decoder.video import to_uint8
from terra.driving.control import Driver, Path, Steering
from terra.engine.base import EngineSpec
from terra.engine.graph.engine import GraphEngine
from terra.engine.persistence import PersistenceEngine
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.serving.client import Client, ServerError
from terra.serving.messages import Control, Open, frame_message, read_frame
from terra.serving.model import Model, encode_picture
from terra.serving.rollout import Fork, LiveRollout, context_moments
from terra.trajectory import load_trajectory
from terra.window_plan import plan_windows, window_at
from tokenizer import LFQTokenizer

pytest_plugins = ["serving_fixtures"]

NUM = 20  # frames: three windows of 8


@pytest.fixture(scope="module", params=["hf", "graph"])
def server(request, tiny_model, tiny_tokenizer, scenes, tmp_path_factory):
    """The graph engine chooses a frame's action while the frame before is on its way."""
    options = {"drafts": 4, "max_sessions": 5, "dtype": "float32", "device": DEVICE}
    engine = GraphEngine(tiny_model, **options) if request.param == "graph" else None
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path_factory.mktemp("data"), engine=engine) as served:
        yield served


@pytest.fixture(scope="module")
def quick(tiny_model, tiny_tokenizer, scenes, tmp_path_factory):
    """A server whose model costs nothing, with small limits."""
    live = {"sessions": 4, "sessions_per_client": 3, "history": 12}
    data = tmp_path_factory.mktemp("quick")
    with Served(tiny_model, tiny_tokenizer, scenes, data, persistence=True, live=live) as served:
        yield served


@pytest.fixture(scope="module")
def actions(scenes):
    return load_trajectory(scenes / "day/left.json").actions(NUM - 1)


@pytest.fixture(scope="module")
def generated(server, scenes, actions):
    """What terra-generate makes of these actions."""
    with make_pipeline(server.model, server.tokenizer) as pipeline:
        request = RolloutRequest(pictures(scenes / "day"), torch.from_numpy(actions), seed=5)
        (rollout,) = pipeline.generate([request], server.settings.sampling)
    return rollout


def given_actions(actions: np.ndarray) -> dict:
    return {"seed": 5, "actions": actions[:2].tolist(), "format": "png"}


def pixels(frame: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(frame["picture"])))


def check_frames(frames: list[dict], generated, first: int) -> None:
    expected = to_uint8(generated.frames)
    for index, frame in enumerate(frames, first):
        assert frame["index"] == index
        assert np.array_equal(pixels(frame), expected[index]), index


class TestTokens:
    def test_a_session_makes_what_terra_generate_makes(self, server, actions, generated):
        with server.open(**given_actions(actions)) as talk:
            check_frames(talk.context, generated, 0)
            frames = [talk.step(action=action.tolist()) for action in actions[2:]]
            check_frames(frames, generated, 3)
            (session,) = server.service.sessions.values()
            tokens = np.stack([moment.tokens for moment in session.rollout.moments])
            assert np.array_equal(tokens, generated.tokens.numpy())
        assert [frame["generated"] for frame in talk.context + frames] == [False] * 3 + [True] * (NUM - 3)
        sent = [frame["action"] for frame in (talk.context + frames)[1:]]
        assert np.array_equal(np.array(sent, np.float32), actions)

    @pytest.mark.slow
    @pytest.mark.parametrize("frame", [2, 5, 6, 7, 8, 12, 13, 14, 18])
    def test_rewound_it_makes_the_same_again(self, server, actions, generated, frame):
        with server.open(**given_actions(actions)) as talk:
            for action in actions[2:]:
                talk.step(action=action.tolist())
            talk.say(type="rewind", frame=frame)
            assert talk.hear("rewound")["frame"] == frame
            check_frames([talk.frame()], generated, frame)
            check_frames([talk.step(action=action.tolist()) for action in actions[frame:]], generated, frame + 1)

    def test_a_fork_goes_on_as_the_rollout_does(self, server, actions, generated):
        with server.open(**given_actions(actions)) as talk:
            for action in actions[2:15]:
                talk.step(action=action.tolist())
            talk.say(type="fork", frame=9)
            name = talk.hear("forked")["fork"]
        with server.connect() as talk:
            talk.say(type="open", fork=name, format="png")
            opened = talk.hear("opened")
            assert (opened["frame"], opened["num_context"], opened["seed"]) == (9, 3, 5)
            check_frames([talk.frame()], generated, 9)
            check_frames([talk.step(action=action.tolist()) for action in actions[9:]], generated, 10)
        with server.connect() as talk:
            talk.say(type="open", fork=name, seed=6, format="png")
            talk.hear("opened")
            talk.frame()
            other = [talk.step(action=action.tolist()) for action in actions[9:]]
        assert any(not np.array_equal(pixels(frame), to_uint8(generated.frames)[frame["index"]]) for frame in other)

    def test_many_at_once_are_each_as_if_alone(self, server, actions, generated):
        talks = [server.open(**given_actions(actions)) for _ in range(4)]
        for action, index in zip(actions[2:], itertools.count(3), strict=False):
            for talk in talks:
                talk.say(type="step", action=action.tolist())
            for talk in talks:
                check_frames(talk.drive(1), generated, index)
        for talk in talks:
            talk.close()

    def test_driving_again_from_the_headers_actions(self, server):
        with server.open(seed=1, format="png") as talk:
            talk.say(type="control", steering=0.2, speed=4.0)
            first = talk.drive(4)
            talk.say(type="path", points=[[4, 0], [9, 1]], times=[1, 2])
            first += talk.drive(8)
        with server.open(seed=1, format="png") as talk:
            again = [talk.step(action=frame["action"]) for frame in first]
        for one, other in zip(first, again, strict=True):
            assert np.array_equal(pixels(one), pixels(other))


@given(plans())
def test_the_window_at_each_frame_is_that_of_the_plan(plan):
    num_frames, num_context, max_frames, overlap = plan
    for index, window in enumerate(plan_windows(num_frames, num_context, max_frames, overlap)):
        for last in range(window.start + window.num_given - 1, window.start + window.num_frames - 1):
            assert window_at(last, max_frames, overlap) == (index, window.start)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "graph", "vllm"])
def test_rewinding_on_each_engine(request, wait, tiny_tokenizer, scenes, actions, kind):
    engine = request.getfixturevalue(f"{kind}_engine")
    pipeline: Pipeline = make_pipeline(None, tiny_tokenizer, engine)  # pyright: ignore[reportArgumentType]
    context = pipeline.tokenizer.encode(pictures(scenes / "day"))
    start = context_moments(
        context, torch.from_numpy(actions[:2]), Driver(Steering(0.0, 5.0), 10.0), pipeline.engine.spec
    )

    async def both():
        sampling = SamplingParams(temperature=1.0)
        known = torch.from_numpy(actions)
        rollout = await pipeline.rollout(RolloutRequest(pictures(scenes / "day"), known, 5), sampling)
        live = LiveRollout(pipeline, Fork(start, 3, sampling, 5), 1000)
        for action in actions[2:]:
            await live.step(action)
        got = [np.stack([moment.tokens for moment in live.moments])]
        for frame in (17, 13, 7, 4):
            await live.rewind(frame)
            for action in actions[frame:]:
                await live.step(action)
            got.append(np.stack([moment.tokens for moment in live.moments]))
        await live.close()
        return rollout.tokens.numpy(), got

    expected, got = wait(both())
    for tokens in got:
        assert np.array_equal(tokens, expected)


class AheadEngine(PersistenceEngine):
    """Frames begin while up to `ahead` frames before them are on their way."""

    def __init__(self, spec: EngineSpec, ahead: int) -> None:
        super().__init__(spec)
        self._ahead = ahead

    async def open(self, prompt, sampling, seed, adapter=None):
        session = await super().open(prompt, sampling, seed, adapter)

        async def run_live(actions):
            begun = deque(itertools.islice(actions, 1))
            while begun:
                begun.extend(itertools.islice(actions, self._ahead + 1 - len(begun)))
                yield await session.step(begun.popleft())

        session.run_live = run_live  # pyright: ignore[reportAttributeAccessIssue]
        return session


def live_rollout(tiny_model, tiny_tokenizer, ahead: int) -> LiveRollout:
    """A rollout from three context frames, that stands, by an `AheadEngine`."""
    engine = AheadEngine(PersistenceEngine.from_pretrained(tiny_model).spec, ahead)
    pipeline = make_pipeline(tiny_model, tiny_tokenizer, engine)
    driver = Driver(Steering(0.0, 0.0), engine.spec.fps)
    context = torch.zeros(3, pipeline.tokenizer.rows, pipeline.tokenizer.cols, dtype=torch.int64)
    standing = torch.from_numpy(driver.action(engine.spec.waypoint_times)).repeat(2, 1, 1)
    moments = context_moments(context, standing, driver, engine.spec)
    return LiveRollout(pipeline, Fork(moments, 3, SamplingParams(), 5), 1000)


ORDERS = st.builds(Steering, st.floats(-0.5, 0.5), st.floats(0.0, 20.0))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.integers(0, 3), st.dictionaries(st.integers(3, 22), ORDERS), st.sets(st.integers(3, 22)))
def test_an_order_counts_from_the_next_frame_that_begins(tiny_model, tiny_tokenizer, ahead, orders, given_actions):
    """However many frames are in the making: no frame's car has gone another way than its action says."""
    live = live_rollout(tiny_model, tiny_tokenizer, ahead)
    spec = PersistenceEngine.from_pretrained(tiny_model).spec
    own = Steering(0.0, 7.0)
    order, begun = Steering(0.0, 0.0), []

    def choose():
        for index in range(3, 23):
            begun.append(own if index in given_actions else order)
            yield Driver(own, spec.fps).action(spec.waypoint_times) if index in given_actions else "driver"

    async def drive():
        nonlocal order
        async with aclosing(live.run(choose())) as moments:
            async for moment in moments:
                if (told := orders.get(moment.index)) is not None:
                    live.tell(live.driver.told(order := told))

    asyncio.run(drive())
    car = Driver(order, spec.fps, live.moments[2].driver.pose)
    for moment, followed in zip(live.moments[3:], begun, strict=True):
        car = car.told(followed)
        assert np.array_equal(moment.action, car.action(spec.waypoint_times))
        car = car.moved()
        assert np.allclose(astuple(moment.driver.pose), astuple(car.pose), atol=1e-4)
    assert live.driver.order == order


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_path_begins_where_the_car_was_told_of_it(tiny_model, tiny_tokenizer, ahead):
    """At the newest complete frame, though the car has gone on in frames that had begun."""
    live = live_rollout(tiny_model, tiny_tokenizer, ahead)
    live_times = PersistenceEngine.from_pretrained(tiny_model).spec.waypoint_times
    times = np.arange(0.1, 5.0, 0.1)
    live.tell(live.driver.told(Steering(0.0, 5.0)))

    async def drive():
        async with aclosing(live.run(itertools.repeat("driver", 9))) as moments:
            async for moment in moments:
                if moment.index == 4:  # in a window of 8 frames
                    points = [[5 * seconds + seconds**2, 0.0] for seconds in times]
                    live.tell(live.driver.told(Path.given(points, times, live.driver.pose, live.driver.fps)))

    asyncio.run(drive())
    told = live.moments[4].driver
    assert isinstance(live.driver.order, Path)
    for index in range(5, 12):
        car = replace(told, pose=live.moments[index - 1].driver.pose, num_since=index - 5)
        expected = told.told(Steering(0.0, 5.0)) if index <= 4 + ahead else replace(car, order=live.driver.order)
        assert np.allclose(live.moments[index].action, expected.action(live_times), atol=1e-5)
    assert live.driver.num_since == live.last.index - 4


class TestControl:
    def test_it_waits_until_it_is_told_something(self, server):
        with server.open() as talk:
            assert talk.opened["size"] == list(server.service.model.image_size)
            assert talk.opened["camera"]["fov_degrees"] == 75.0
            with pytest.raises(TimeoutError):
                talk.listen(0.2)
            talk.say(type="control", steering=0.0, speed=3.0)
            talk.hear("resumed")
            frames = talk.drive(6)
        assert [frame["index"] for frame in frames] == list(range(3, 9))
        assert all(frame["latency_ms"] > 0 for frame in frames)
        assert frames[-1]["frames_per_second"] > 0
        assert frames[-1]["speed"] == pytest.approx(3.0)

    def test_the_car_goes_where_it_is_told(self, server):
        ends = {}
        for steering in (-0.3, 0.0, 0.3):
            with server.open() as talk:
                talk.say(type="control", steering=steering, speed=5.0)
                frame = talk.drive(10)[-1]
                ends[steering] = frame["pose"]
                assert frame["action"][-1][0] * steering >= 0
        assert ends[-0.3][1] < ends[0.0][1] < ends[0.3][1]
        assert ends[-0.3][2] < ends[0.0][2] < ends[0.3][2]

    def test_pause_step_and_resume(self, server):
        with server.open() as talk:
            talk.step()
            talk.say(type="control", steering=0.1, speed=2.0)
            with pytest.raises(TimeoutError):
                talk.listen(0.2)
            talk.say(type="step")
            talk.say(type="step")
            assert [frame["index"] for frame in talk.drive(2)] == [4, 5]
            talk.say(type="resume")
            talk.hear("resumed")
            talk.drive(3)
            talk.say(type="pause")
            talk.skip_to("paused")
            under_way = talk.rest(0.4)
            assert len(under_way) <= 3
            assert all(message["type"] == "frame" for message in under_way)

    def test_not_further_ahead_than_acknowledged(self, server):
        with server.open() as talk:
            talk.say(type="resume")
            talk.hear("resumed")
            assert [talk.frame()["index"] for _ in range(2)] == [3, 4]
            with pytest.raises(TimeoutError):
                talk.listen(0.3)
            talk.say(type="ack", index=3)
            assert talk.frame()["index"] == 5
            with pytest.raises(TimeoutError):
                talk.listen(0.2)
            talk.say(type="ack", index=9)  # none that was sent
            with pytest.raises(TimeoutError):
                talk.listen(0.2)

    def test_after_a_rewind_not_further_ahead_than_acknowledged_since(self, server):
        with server.open() as talk:
            talk.say(type="control", steering=0.0, speed=3.0)
            talk.drive(9)
            talk.say(type="pause")
            talk.skip_to("paused")
            talk.say(type="rewind", frame=5)
            talk.skip_to("rewound")
            assert talk.frame()["index"] == 5
            talk.say(type="resume")
            talk.hear("resumed")
            assert [talk.frame()["index"] for _ in range(2)] == [6, 7]
            with pytest.raises(TimeoutError):
                talk.listen(0.3)
            talk.say(type="ack", index=6)
            assert talk.frame()["index"] == 8

    def test_a_rewound_car_drives_on_from_where_it_was_at_that_frame(self, server):
        with server.open() as talk:
            talk.say(type="control", steering=0.2, speed=5.0)
            poses = {frame["index"]: frame["pose"] for frame in talk.drive(8)}
            talk.say(type="pause")
            talk.skip_to("paused")
            talk.say(type="rewind", frame=6)
            talk.skip_to("rewound")
            assert talk.frame()["pose"] == poses[6]
            assert talk.step()["pose"] == poses[7]

    def test_rewind_in_full_flight(self, server):
        with server.open() as talk:
            talk.say(type="control", steering=0.0, speed=3.0)
            talk.drive(9)
            talk.say(type="rewind", frame=5)
            talk.skip_to("rewound")
            indices = [frame["index"] for frame in talk.drive(6)]
            assert indices == list(range(5, 11))
            for frame in (1, 99):
                talk.say(type="rewind", frame=frame)
                assert talk.skip_to("error")["code"] == "invalid_frame"
            after = [frame["index"] for frame in talk.drive(3)]
            assert after == list(range(after[0], after[0] + 3))

    def test_history_has_an_end(self, quick):
        with quick.open() as talk:
            talk.say(type="control", steering=0.0, speed=3.0)
            talk.drive(30)
            talk.say(type="pause")
            talk.skip_to("paused")
            talk.say(type="rewind", frame=10)
            message = talk.skip_to("error")
            assert message["code"] == "invalid_frame"
            oldest = int(message["message"].split("kept, ")[1].split()[0])
            assert oldest > 20
            talk.say(type="rewind", frame=oldest)
            talk.skip_to("rewound")
            assert talk.step()["index"] == oldest  # its picture first
            assert talk.drive(1)[0]["index"] == oldest + 1

    def test_python_client(self, server):
        with Client(server.url) as client, client.open(scene="day", seed=2, format="webp") as drive:
            assert [frame.index for frame in drive.context] == [0, 1, 2]
            assert drive.fps == 10.0
            frames = [drive.step(steering=0.1, speed=4.0) for _ in range(5)]
            assert [frame.index for frame in frames] == [3, 4, 5, 6, 7]
            assert Image.open(io.BytesIO(frames[0].picture)).format == "WEBP"
            assert drive.rewind(4).index == 4
            again = drive.step(steering=0.1, speed=4.0)
            assert (again.index, again.picture) == (5, frames[2].picture)
            fork = drive.fork(4)
            with client.open(fork=fork, format="webp") as other:
                assert [frame.index for frame in other.context] == [4]
                assert other.step(steering=0.1, speed=4.0).picture == again.picture
            with pytest.raises(ServerError, match="expected one of those kept") as refused:
                drive.rewind(50)
            assert refused.value.code == "invalid_frame"
            with pytest.raises(ServerError) as refused:
                client.open(scene="none")
            assert refused.value.code == "scene_not_found"


@pytest.mark.parametrize(("kind", "most"), [("png", 0), ("jpeg", 6), ("webp", 6)])
def test_a_picture_in_each_format(kind, most):
    rows, cols = np.mgrid[0:48, 0:64]
    picture = np.stack([4 * rows, 3 * cols, 255 - 2 * rows - cols], axis=-1).astype(np.uint8)
    file = encode_picture(picture, kind, 95)
    read = Image.open(io.BytesIO(file))
    assert (read.format, read.mode) == (kind.upper(), "RGB")
    assert np.abs(np.asarray(read).astype(int) - picture).max() <= most
    assert kind == "png" or len(encode_picture(picture, kind, 30)) < len(file)


class TestLimits:
    def refused(self, talk: Talk) -> tuple[str, int]:
        code = talk.hear("error")["code"]
        assert talk.hear("closed")["reason"] == code
        with pytest.raises(ConnectionClosed) as closed:
            talk.listen()
        assert closed.value.rcvd is not None
        return code, closed.value.rcvd.code

    @pytest.mark.parametrize(
        ("message", "code"),
        [
            ("", "invalid_message"),
            (b"\0", "invalid_message"),
            ("{}", "invalid_message"),
            ('{"type": "pause"}', "not_open"),
            ('{"type": "open"}', "invalid_message"),
            ('{"type": "open", "scene": "day", "fork": "x"}', "invalid_message"),
            ('{"type": "open", "scene": "day", "seed": -1}', "invalid_message"),
            ('{"type": "open", "scene": "../day"}', "scene_not_found"),
            ('{"type": "open", "context": "x"}', "context_not_found"),
            ('{"type": "open", "fork": "x"}', "fork_not_found"),
            ('{"type": "open", "scene": "day", "actions": []}', "invalid_actions"),
        ],
    )
    def test_what_does_not_open(self, quick, message, code):
        with quick.connect() as talk:
            talk.socket.send(message)
            assert self.refused(talk) == (code, 1008)

    @pytest.mark.slow
    def test_who_says_nothing(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        changes = {"live": {"idle_seconds": 1.5, "open_seconds": 1.5}}
        with (
            Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, **changes) as served,
            served.open() as talk,
            served.connect() as silent,
        ):
            assert talk.hear("closed")["reason"] == "idle"
            assert self.refused(silent) == ("open_timeout", 1008)

    def test_sessions_of_a_client_and_in_all(self, tiny_model, tiny_tokenizer, scenes, tmp_path, quick):
        talks = [quick.open() for _ in range(3)]
        with quick.connect() as talk:
            talk.say(type="open", scene="day")
            assert self.refused(talk) == ("too_many_sessions", 1013)
        talks.pop().close()
        wait_until(lambda: len(quick.service.sessions) == 2)
        quick.open().close()
        for talk in talks:
            talk.close()
        changes = {"live": {"sessions": 1}}
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, **changes) as served:
            first = served.open()
            with served.connect() as talk:
                talk.say(type="open", scene="day")
                assert self.refused(talk) == ("server_full", 1013)
            first.close()

    def test_mistakes_are_told_and_the_session_goes_on(self, quick):
        with quick.open() as talk:
            wrong = {
                "invalid_message": [
                    {"type": "control", "steering": 9.0, "speed": 1.0},
                    {"type": "control", "steering": 0.0},
                    {"type": "control", "steering": True, "speed": 1.0},
                    {"type": "path", "points": [[1, 2, 3]], "times": [1]},
                    {"type": "ack", "index": -1},
                    {"type": "what"},
                    [],
                ],
                "invalid_path": [
                    {"type": "path", "points": [[1, 0], [2, 0]], "times": [1]},
                    {"type": "path", "points": [[1, 0], [2, 0]], "times": [1, 1]},
                    {"type": "path", "points": [[900, 0]], "times": [1]},
                    {"type": "path", "points": [[5, 0], [6, 0]], "times": [0, 1]},
                ],
                "invalid_action": [
                    {"type": "step", "action": [[0, 1, 0.5]]},
                    {"type": "step", "action": [[0, 1, 0.5]] * 6},
                ],
                "invalid_frame": [{"type": "rewind", "frame": 1}, {"type": "fork", "frame": 3}],
                "already_open": [{"type": "open", "scene": "day"}],
            }
            for code, messages in wrong.items():
                for message in messages:
                    talk.socket.send(json.dumps(message))
                    assert talk.hear("error")["code"] == code
            assert talk.step()["type"] == "frame"
            for _ in range(100):
                talk.socket.send("nonsense")
            while (last := talk.listen())["type"] != "closed":
                pass
            assert last["reason"] == "too_many_mistakes"

    def test_forks_have_a_limit(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        changes = {"live": {"forks": 2, "max_frames": 6}}
        with (
            Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, **changes) as served,
            served.open() as talk,
        ):
            for _ in range(2):
                talk.say(type="fork", frame=2)
                talk.hear("forked")
            talk.say(type="fork", frame=2)
            assert talk.hear("error")["code"] == "too_many_forks"
            talk.say(type="resume")
            talk.hear("resumed")
            assert [frame["index"] for frame in [*talk.drive(2), talk.frame()]] == [3, 4, 5]
            assert talk.hear("closed")["reason"] == "max_frames"

    def test_a_client_that_forks_on_loses_its_oldest_fork(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        changes = {"live": {"forks_per_client": 4}}
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, **changes) as served:
            with served.open() as talk:
                for _ in range(5):
                    talk.say(type="fork", frame=2)
                first, *others = [talk.hear("forked")["fork"] for _ in range(5)]
            for fork in (*others, first):
                with served.connect() as talk:
                    talk.say(type="open", fork=fork)
                    answer = talk.listen()
                    assert answer["type"] == "opened" if fork != first else answer["code"] == "fork_not_found"

    def test_the_api_key(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, api_key=KEY) as served:
            for wrong in ({}, {"api_key": "guess"}, {"api_key": "ü"}):
                with served.connect() as talk:
                    talk.say(type="open", scene="day", **wrong)
                    assert self.refused(talk) == ("invalid_api_key", 1008)
            served.open(api_key=KEY).close()
            with Client(served.url, api_key=KEY) as client, client.open(scene="day") as drive:
                assert drive.step().index == 3

    def test_a_foreign_page_opens_nothing(self, quick):
        with pytest.raises(InvalidStatus, match="403"):
            quick.connect(origin="http://evil.test")

    def test_too_long_a_message(self, quick):
        with quick.open() as talk:
            talk.socket.send(json.dumps({"type": "pause", "padding": "x" * 100_000}))
            talk.rest(5)
            with pytest.raises(ConnectionClosed, match="1009"):
                talk.listen()


class TestTogether:
    @pytest.mark.slow
    def test_a_slow_reader_slows_nobody(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        changes = {"live": {"ahead": 150}, "send_buffer": 4096}
        # Small buffers: they are full after a few frames, and nobody reads.
        with (
            Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, **changes) as served,
            served.connect(max_queue=1, receive_buffer=2048) as slow,
        ):
            slow.say(type="open", scene="day", format="png")
            slow.say(type="control", steering=0.0, speed=1.0)
            with served.open() as other:
                other.say(type="control", steering=0.0, speed=1.0)
                frames = other.drive(60)
                held, _ = served.service.sessions.values()
                wait_until(lambda: held.rollout.last.index == 152, 20)  # as far ahead as it may be
                assert held._outbox.qsize() > 0
            assert [frame["index"] for frame in frames] == list(range(3, 63))
            slow.hear("opened")
            indices = []
            while len(indices) < 153:
                message = slow.listen()
                if message["type"] == "frame":
                    indices.append(message["index"])
                    slow.say(type="ack", index=message["index"])
            assert indices == list(range(153))

    def test_opening_and_closing_leaves_nothing(self, quick):
        for index in range(30):
            talk = quick.open()
            if index % 3 == 0:
                talk.say(type="resume")
                talk.hear("resumed")
            if index % 3 == 1:
                talk.say(type="close")
                assert talk.hear("closed")["reason"] == "client"
            talk.close()
        wait_until(lambda: not quick.service._seats)
        assert not quick.service.sessions

        async def tasks():
            return [task.get_coro().__qualname__ for task in asyncio.all_tasks()]

        wait_until(lambda: not any("LiveSession" in name for name in quick.call(tasks())))

    def test_cancelled_again_while_it_ends_it_leaves_nothing(self, server):
        async def drive() -> tuple[set[str], bool]:
            sent = asyncio.Semaphore(0)

            async def send(_: object) -> None:
                sent.release()

            session, _ = await server.service.open(Open(type="open", scene="day"), "test", send)
            running = asyncio.create_task(session.run())
            await session.handle(Control(type="control", steering=0.0, speed=2.0))
            for _ in range(6):  # three context frames, a word, two frames
                await sent.acquire()
            before = asyncio.all_tasks()
            while not running.done():
                running.cancel()
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            left = {task.get_coro().__qualname__ for task in before & asyncio.all_tasks()}
            return left, session.rollout._session is None

        left, is_closed = server.call(drive())
        assert not any("LiveSession" in name for name in left)
        assert is_closed

    def test_shutdown_tells_everyone(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        engine = HeldEngine(PersistenceEngine.from_pretrained(tiny_model).spec)
        served = Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=engine, drain_seconds=20.0)
        with served:
            talk = served.open()
            body = {"scene": "day", "trajectory_name": "left", "num_frames": 6}
            with httpx.Client(base_url=served.url) as http:
                made = http.post("/v1/videos", json=body).json()["id"]
                served.wait_for(made, "in_progress")
                served.server.should_exit = True
                assert talk.hear("closed")["reason"] == "shutdown"
                assert http.get("/health").json() == {"status": "shutting_down"}
                refused = http.post("/v1/videos", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                with served.connect() as late:  # refused before it says anything
                    assert late.hear("error")["code"] == "shutting_down"
                engine.release()
                served._thread.join(20)
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True) as again:
            assert again.wait_for(made)["status"] == "completed"


KINDS = ["open", "control", "path", "ack", "pause", "resume", "step", "rewind", "fork", "what"]
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 2, 3, 5, 1e308])
VALUES = NUMBERS | st.none() | st.text(max_size=5) | st.lists(st.lists(NUMBERS, max_size=4), max_size=7)
NAMES = ["steering", "speed", "points", "times", "index", "frame", "action", "scene", "seed", "x"]
SENSIBLE = st.sampled_from(
    [
        {"type": "control", "steering": 0.1, "speed": 3.0},
        {"type": "path", "points": [[1, 0], [2, 1]], "times": [0.5, 1.5]},
        {"type": "step"},
        {"type": "ack", "index": 3},
        {"type": "rewind", "frame": 3},
        {"type": "fork", "frame": 2},
        {"type": "pause"},
        {"type": "resume"},
    ]
)
MESSAGES = SENSIBLE | st.fixed_dictionaries({"type": st.sampled_from(KINDS)}).flatmap(
    lambda kind: st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3).map(lambda rest: kind | rest)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MESSAGES | st.text(max_size=20) | st.binary(max_size=20), max_size=12))
def test_no_message_breaks_a_session(server, messages):
    with server.open() as talk:
        for message in messages:
            talk.socket.send(json.dumps(message) if isinstance(message, dict) else message)
        # Whatever was said, it answers an order that is one.
        talk.say(type="fork", frame=2)
        talk.say(type="close")
        kinds = []
        while (message := talk.listen())["type"] != "closed":
            kinds.append(message["type"])
        assert "forked" in kinds
        assert message["reason"] == "client"


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4), st.binary(max_size=50))
def test_frame_messages_are_read_back(header, picture):
    message = frame_message(header, picture)
    assert read_frame(message) == (header, picture)
    with pytest.raises(ValueError, match="frame: expected"):
        read_frame(message[: 4 + len(json.dumps(header, separators=(",", ":"))) - 1])


def test_on_a_gpu_the_pictures_that_wait_are_decoded_together(tiny_model, tiny_tokenizer, monkeypatch):
    """The first one does not wait for others; each session gets its own. Engine and batch sizes are warmed up."""

    class OnGpu(FramewiseDecoder):
        device = torch.device("cuda")

        def decode(self, tokens):
            at_work.set()
            assert gate.wait(10)
            sizes.append(len(tokens))
            return super().decode(tokens)

    sizes, at_work, gate = [], threading.Event(), threading.Event()
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    engine, engine_warm = PersistenceEngine.from_pretrained(tiny_model), AsyncMock()
    monkeypatch.setattr(engine, "warm_up", engine_warm, raising=False)
    model = Model(Pipeline(tokenizer, engine, OnGpu(tokenizer)), "tiny", picture_threads=2, upload_threads=1)
    shape = (6, tokenizer.config.rows, tokenizer.config.cols)
    grids = np.random.default_rng(0).integers(tokenizer.codebook_size, size=shape)

    async def shown():
        gate.set()
        await model.warm_up()
        assert sizes == [1, 4, 16]
        engine_warm.assert_awaited_once_with(model.pipeline.slid_context)
        for each in (sizes, at_work, gate):
            each.clear()
        first = asyncio.create_task(model.picture(grids[0], "png", 85))
        await asyncio.to_thread(at_work.wait, 10)
        others = [asyncio.create_task(model.picture(grid, "png", 85)) for grid in grids[1:]]
        await asyncio.sleep(0)  # they begin
        gate.set()
        return await asyncio.gather(first, *others)

    made = asyncio.run(shown())
    assert sizes == [1, 5]
    wanted = to_uint8(tokenizer.decode(torch.from_numpy(grids)))
    for picture, pixels in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture))), pixels)
    model.close()


@pytest.mark.slow
def test_health_answers_while_others_drive(server):
    talks = [server.open() for _ in range(3)]
    for talk in talks:
        talk.say(type="control", steering=0.0, speed=2.0)
    threads = [threading.Thread(target=talk.drive, args=(15,)) for talk in talks]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=server.url) as http:
        while any(thread.is_alive() for thread in threads):
            assert http.get("/health").status_code == 200
        text = http.get("/metrics").text
    for talk in talks:
        talk.close()
    assert 'terra_frames_total{kind="live"}' in text
    assert "terra_first_frame_seconds_count" in text
