"""Live sessions of a model with memory: what they say of it, with and without it, and on a map."""

import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from entry import read_settings
from rich.console import Console
from safetensors.torch import load_file
from tiny import COLS, ROWS, save_tiny
from tiny_adapter import save_memory_adapter
from tiny_serving import OVERLAP, HeldEngine, Served, make_pipeline, pictures

from terra.config.files import register_resolvers
from terra.engine.persistence import PersistenceEngine
from terra.errors import ConfigError, ContextError
from terra.generate import run as generate
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
    limits = {"max_frames": 6}
    with Served(model, tiny_tokenizer, places, data, map=str(places.parent / "map.csv"), uploads=limits) as served:
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


def make_job(server, **changes) -> dict:
    """The record and the tokens of a video job."""
    body = {"scene": "day", "trajectory_name": "left", "num_frames": NUM, "seed": 5} | changes
    answer = httpx.post(f"{server.url}/v1/videos", json=body)
    assert answer.status_code == 200, answer.text
    video = server.wait_for(answer.json()["id"])
    assert video["status"] == "completed", video
    (folder,) = server.data.glob(f"**/{video['id']}")
    record = json.loads((folder / "rollout.json").read_text())
    return record | {"tokens": load_file(folder / "tokens.safetensors")["tokens"]}


def generated(server, places, output, **changes) -> dict:
    """The record and the tokens of `terra generate` with the server's settings."""
    values = {
        "context": places / "day",
        "trajectory": places / "day/left.json",
        "tokenizer.pretrained": server.tokenizer,
        "world_model.pretrained": server.model,
        "engine": "hf",
        "sampling.temperature": 1.0,
        "sampling.top_k": server.settings.sampling.top_k,
        "sampling.top_p": server.settings.sampling.top_p,
        "overlap": OVERLAP,
        "num_frames": NUM,
        "seed": 5,
        "output": output,
    } | changes
    register_resolvers()
    overrides = [f"{key}={value}" for key, value in values.items()]
    folder = generate(read_settings("generate", overrides), Console(quiet=True))
    record = json.loads((folder / "rollout.json").read_text())
    return record | {"tokens": load_file(folder / "tokens.safetensors")["tokens"]}


def test_a_job_is_what_generate_makes_of_the_same_map(server, places, tmp_path):
    with_map = {"map": places.parent / "map.csv", "map_pose": str(POSE).replace(" ", "")}
    requests = {"map": ({"map_pose": POSE}, with_map), "usual": ({}, {}), "none": ({"memory": False}, {"memory": 0})}
    made = {}
    for name, (asked, settings) in requests.items():
        job, expected = make_job(server, **asked), generated(server, places, tmp_path / name, **settings)
        assert torch.equal(job["tokens"], expected["tokens"])
        maps = [(each.get("memory") or {}).get("map", {}) for each in (job, expected)]
        assert {Path(each.pop("path")).name for each in maps if each} <= {"map.csv"}  # relative to each one's folder
        assert job.get("memory") == expected.get("memory")
        assert job["windows"] == expected["windows"]
        made[name] = job
    assert set(made["map"]["memory"]["windows"][0]) <= {-1, -2, -3}
    assert "memory" not in made["none"]
    assert not torch.equal(made["map"]["tokens"], made["usual"]["tokens"])


def test_a_job_takes_a_form_too(server, places):
    fields = {"trajectory_name": "left", "scene": "day", "map_pose": "[1.0, 2.0, 0.3]", "num_frames": NUM, "seed": 5}
    files = {name: (None, str(value)) for name, value in fields.items()}
    video = httpx.post(f"{server.url}/v1/videos", files=files).json()
    assert server.wait_for(video["id"])["status"] == "completed"
    (folder,) = server.data.glob(f"**/{video['id']}")
    assert torch.equal(load_file(folder / "tokens.safetensors")["tokens"], make_job(server, map_pose=POSE)["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"map_pose": [1, 2]}, "map_pose: List should have at least 3 items"),
        ({"map_pose": [1, 2, 3, 4]}, "map_pose: List should have at most 3 items"),
        ({"map_pose": [1, 2, 1e300]}, "map_pose.2: Input should be less than or equal to 10000000"),
        ({"map_pose": "1,2,3"}, "map_pose: Input should be a valid"),
        ({"map_pose": POSE, "memory": False}, "map_pose: expected none without memory, got one"),
        ({"memory": 2}, "memory: Input should be a valid boolean"),
    ],
)
def test_bad_requests_are_one_line(server, changes, message):
    answer = httpx.post(f"{server.url}/v1/videos", json={"scene": "day", "trajectory_name": "left"} | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert "\n" not in answer.json()["error"]["message"]


def test_a_long_context_leaves_no_room_for_the_map(server, places):
    files = [("files", ("file", (places / "day/0.png").read_bytes(), "image/png"))] * 6
    context = httpx.post(f"{server.url}/v1/contexts", files=files).json()["id"]
    body = {"context": context, "trajectory": json.loads((places / "day/left.json").read_text()), "num_frames": NUM}
    assert httpx.post(f"{server.url}/v1/videos", json=body).status_code == 200
    error = httpx.post(f"{server.url}/v1/videos", json=body | {"map_pose": POSE}).json()["error"]
    assert error["message"] == "num_context: expected 1 to 5 (the window holds 8, 2 of them memory), got 6"


def test_jobs_with_a_map_after_a_restart(server, model, tiny_tokenizer, places, tmp_path):
    def served(**changes) -> Served:
        values = {"map": str(places.parent / "map.csv"), "drain_seconds": 0} | changes
        return Served(model, tiny_tokenizer, places, tmp_path / "data", **values)

    def left_undone() -> str:
        body = {"scene": "day", "trajectory_name": "left", "num_frames": NUM, "seed": 5, "map_pose": POSE}
        with served(engine=HeldEngine(PersistenceEngine.from_pretrained(model).spec)) as held:
            return httpx.post(f"{held.url}/v1/videos", json=body).json()["id"]

    name = left_undone()
    with served() as again:
        assert again.wait_for(name)["status"] == "completed"
        (folder,) = again.data.glob(f"**/{name}")
        assert torch.equal(
            load_file(folder / "tokens.safetensors")["tokens"], make_job(server, map_pose=POSE)["tokens"]
        )
    name = left_undone()
    other = places.parent / "other.csv"
    other.write_text((places.parent / "map.csv").read_text().replace("0,1,0", "0,1,1"))
    for changes in ({"map": str(other)}, {"map": None}):
        with served(**changes) as last:
            error = last.wait_for(name)["error"]
        assert error["message"] == "the job began with another map than the one that is served now"
        name = left_undone()


def test_a_server_without_a_map_says_so(tiny_model, tiny_tokenizer, scenes, tmp_path):
    body = {"scene": "day", "trajectory_name": "left", "map_pose": POSE}
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path / "data", persistence=True) as server:
        error = httpx.post(f"{server.url}/v1/videos", json=body).json()["error"]
    assert (error["message"], error["param"]) == ("map_pose: expected none without map=, got one", "map_pose")


def test_a_map_of_too_few_frames_is_refused_at_the_start(model, tiny_tokenizer, places, tmp_path):
    path = places.parent / "small.csv"
    path.write_text("file,x_m,y_m,heading_deg\nscenes/day/0.png,0,0,0\n")
    served = Served(model, tiny_tokenizer, places, tmp_path / "data", adapters={}, map=str(path))
    with pytest.raises(ContextError, match=r"map=.*small.csv: expected 2 to 1000 frames, got 1"), served:
        pass


def test_scenes_tell_where_they_are(server):
    found = {each["id"]: each.get("map_pose") for each in httpx.get(f"{server.url}/v1/scenes").json()["data"]}
    assert found == {"day": None, "night": POSE}


def test_a_fork_has_its_own_memory(server, actions):
    with server.connect() as talk:
        talk.say(type="open", fork="fork_1", memory=False)
        assert "expected no model, sampling, actions, speed, memory or map_pose" in talk.hear("error")["message"]
    with server.connect() as talk:
        talk.say(type="open", scene="day", map_pose=[1, 2])
        assert "map_pose" in talk.hear("error")["message"]
    with server.connect() as talk:
        talk.say(type="open", scene="day", map_pose=POSE, memory=False)
        assert talk.hear("error")["message"] == "map_pose: expected none without memory, got one"


@pytest.fixture(scope="module")
def adapted_server(tiny_model, tiny_tokenizer, places, tmp_path_factory):
    """A model without memory, beside an adapter with memory, and a map."""
    folder = save_memory_adapter(tmp_path_factory.mktemp("adapter"), tiny_model)
    data, road = tmp_path_factory.mktemp("data"), str(places.parent / "map.csv")
    with Served(tiny_model, tiny_tokenizer, places, data, adapters={"remembers": folder}, map=road) as served:
        yield served


def test_an_adapter_remembers_beside_a_model_that_does_not(adapted_server, actions):
    base, adapter = (card["memory"] for card in httpx.get(f"{adapted_server.url}/v1/models").json()["data"])
    assert (base, adapter) == (0, 2)
    with adapted_server.open(**opening(actions, scene="night")) as talk:
        assert not {"memory", "map"} & talk.opened.keys()
        forgets = drive(talk, actions)
    with adapted_server.open(**opening(actions, scene="night", model="remembers")) as talk:
        assert (talk.opened["memory"], talk.opened["map"]) == (2, True)
        remembers = drive(talk, actions)
    assert not any("memory" in frame for frame in forgets)
    assert set(remembers[0]["memory"]) <= {-1, -2, -3}


def test_a_video_of_such_an_adapter_remembers(adapted_server):
    assert make_job(adapted_server, scene="night").get("memory") is None
    remembered = make_job(adapted_server, scene="night", model="remembers", map_pose=POSE)["memory"]
    assert (remembered["frames"], len(remembered["windows"])) == (2, 4)
    body = {"scene": "night", "trajectory_name": "left", "num_frames": NUM, "map_pose": POSE}
    answer = httpx.post(f"{adapted_server.url}/v1/videos", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "map_pose: expected none without memory, got one"
    assert answer.json()["error"]["param"] == "map_pose"


def test_settings_that_leave_no_room_are_refused(server):
    layout, settings = server.service.model.spec.layout, server.settings
    with pytest.raises(
        ConfigError, match=r"num_context: expected 1 to 5 \(the window holds 8, 2 of them memory\), got 6"
    ):
        check_windows(settings.replace(num_context=6), layout, 2)
    with pytest.raises(ConfigError, match="map: expected none for rollouts without memory, got one"):
        check_windows(settings, layout, 0)
    with pytest.raises(ConfigError, match="overlap: expected 1 to 5"):
        check_windows(settings.replace(overlap=OVERLAP + 4), layout, 2)
