"""Live sessions of a model with memory: what they say of it, with and without it, and on a map."""

import json
import shutil

import httpx
import numpy as np
import pytest
import torch
from tiny import COLS, ROWS, save_tiny
from tiny_serving import OVERLAP, Served, make_pipeline, pictures

from terra.errors import ConfigError
from terra.place_map import load_map
from terra.prompt import Actions
from terra.recall import PlaceMap
from terra.serving.service import check_windows
from terra.trajectory import load_trajectory
from terra.world_model import LlamaActionV2ForCausalLM

pytest_plugins = ["serving_fixtures"]

NUM = 18
POSE = [1.0, 2.0, 0.3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "memory"
    return save_tiny(folder, LlamaActionV2ForCausalLM, memory={"frames": 2})


@pytest.fixture(scope="module")
def places(scenes, tmp_path_factory):
    """The scenes, of which night knows where it is on a map, and the map."""
    folder = shutil.copytree(scenes, tmp_path_factory.mktemp("places") / "scenes")
    (folder / "night" / "scene.json").write_text(json.dumps({"map_pose": POSE}))
    rows = [f"scenes/day/{k}.png,{3 * k},1,{20 * k}" for k in range(3)]
    (folder.parent / "map.csv").write_text("\n".join(["file,x_m,y_m,heading_deg", *rows]))
    return folder


@pytest.fixture(scope="module")
def server(model, tiny_tokenizer, places, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    with Served(model, tiny_tokenizer, places, data, map=str(places.parent / "map.csv")) as served:
        yield served


@pytest.fixture(scope="module")
def actions(scenes) -> Actions:
    return torch.from_numpy(load_trajectory(scenes / "day/left.json").actions(NUM - 1))


def drive(talk, actions: Actions, first: int = 2) -> list[dict]:
    return [talk.step(action=action.tolist()) for action in actions[first:]]


def tokens(server) -> np.ndarray:
    (session,) = server.service.sessions.values()
    return np.stack([moment.tokens for moment in session.rollout.moments])


def opening(actions: Actions, **changes) -> dict:
    return {"seed": 5, "actions": actions[:2].tolist(), "format": "png"} | changes


def test_a_session_remembers_and_says_what(server, model, tiny_tokenizer, scenes, actions):
    with make_pipeline(model, tiny_tokenizer) as pipeline:
        context = pipeline.wait(pipeline.encode(pictures(scenes / "day")))
        expected = pipeline.wait(pipeline.rollout_tokens(context, actions, server.settings.sampling, 5))
        record = pipeline.describe_memory(expected, actions, 3)
        windows = pipeline.plan(NUM, 3)
    assert record is not None
    chosen = dict(zip(range(1, len(windows)), record["windows"], strict=True))
    said = [
        chosen.get(index, [])
        for index, window in enumerate(windows)
        for _ in range(window.num_given, window.num_frames)
    ]
    with server.open(**opening(actions)) as talk:
        assert (talk.opened["memory"], talk.opened["map"]) == (2, False)
        assert [frame["memory"] for frame in drive(talk, actions)] == said
        assert np.array_equal(tokens(server), expected.numpy())
        talk.say(type="rewind", frame=11)
        talk.hear("rewound")
        assert talk.frame()["memory"] == said[11 - 3]
        assert [frame["memory"] for frame in drive(talk, actions, 11)] == said[12 - 3 :]
        assert np.array_equal(tokens(server), expected.numpy())
        talk.say(type="fork", frame=8)
        name = talk.skip_to("forked")["fork"]
    with server.connect() as talk:
        talk.say(type="open", fork=name, format="png")
        assert talk.hear("opened")["memory"] == 2
        talk.frame()
        drive(talk, actions, 8)
        assert np.array_equal(tokens(server), expected.numpy())


def test_a_session_that_forgets_is_one_without_memory(server, tiny_model, tiny_tokenizer, scenes, actions):
    with make_pipeline(tiny_model, tiny_tokenizer) as pipeline:
        context = pipeline.wait(pipeline.encode(pictures(scenes / "day")))
        expected = pipeline.wait(pipeline.rollout_tokens(context, actions, server.settings.sampling, 5))
    with server.open(**opening(actions, memory=False)) as talk:
        assert not {"memory", "map"} & talk.opened.keys()
        assert not any("memory" in frame for frame in drive(talk, actions))
        assert np.array_equal(tokens(server), expected.numpy())


@pytest.mark.parametrize("changes", [{"scene": "night"}, {"scene": "day", "map_pose": POSE}])
def test_a_map_is_remembered_from_where_the_scene_is(server, model, tiny_tokenizer, places, actions, changes):
    with make_pipeline(model, tiny_tokenizer) as pipeline:
        place = load_map(places.parent / "map.csv", (4 * ROWS, 4 * COLS), 10.0)
        known = pipeline.wait(pipeline.encode_map(place.pixels, place.seen_from(POSE)))
        assert isinstance(known, PlaceMap)
        context = pipeline.wait(pipeline.encode(pictures(places / changes["scene"])))
        expected = pipeline.wait(
            pipeline.rollout_tokens(context, actions, server.settings.sampling, 5, place=known)
        ).numpy()
    with server.open(**opening(actions, **changes)) as talk:
        assert talk.opened["map"]
        frames = drive(talk, actions)
        assert set(frames[0]["memory"]) <= {-1, -2, -3}
        assert np.array_equal(tokens(server), expected)
        for frame in (2, 5, 6, 10):
            talk.say(type="rewind", frame=frame)
            talk.hear("rewound")
            talk.frame()
            drive(talk, actions, frame)
            assert np.array_equal(tokens(server), expected)


def test_models_tell_their_memory(server):
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["memory"] == 2


def test_a_video_job_remembers_too(server, actions):
    body = {"scene": "day", "trajectory_name": "left", "num_frames": NUM, "seed": 5}
    video = httpx.post(f"{server.url}/v1/videos", json=body).json()
    assert server.wait_for(video["id"])["status"] == "completed"
    (record,) = server.data.glob(f"**/{video['id']}/rollout.json")
    assert len(json.loads(record.read_text())["memory"]["windows"]) == 3


def test_a_fork_has_its_own_memory(server, actions):
    with server.connect() as talk:
        talk.say(type="open", fork="fork_1", memory=False)
        assert "expected no model, sampling, actions, speed, memory or map_pose" in talk.hear("error")["message"]
    with server.connect() as talk:
        talk.say(type="open", scene="day", map_pose=[1, 2])
        assert "map_pose" in talk.hear("error")["message"]


def test_settings_that_leave_no_room_are_refused(server, tiny_model):
    spec, settings = server.service.model.spec, server.settings
    with pytest.raises(
        ConfigError, match=r"num_context: expected 1 to 5 \(the window holds 8, 2 of them memory\), got 6"
    ):
        check_windows(settings.replace(num_context=6), spec)
    with pytest.raises(ConfigError, match="map: expected none for rollouts without memory, got one"):
        check_windows(settings.replace(memory=0), spec)
    with pytest.raises(ConfigError, match="overlap: expected 1 to 5"):
        check_windows(settings.replace(overlap=OVERLAP + 4), spec)
