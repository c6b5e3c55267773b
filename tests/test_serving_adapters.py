"""Adapters on a server: each is a model of its own, for video jobs, live sessions and scenes."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from test_serving_start import refused  # noqa: F401 (a fixture)
from tiny_adapter import save_adapter, save_decoder
from tiny_serving import OVERLAP, Served, pictures, scene_folder

from decoder.video import to_uint8
from terra.config import files
from terra.config.files import compose
from terra.pipeline import Pipeline, Rollout, RolloutRequest
from terra.rollout import pixels_sha256
from terra.serving.client import Client, ServerError
from terra.trajectory import load_trajectory
from terra.world_model.adapter import adapter_sha256

pytestmark = pytest.mark.slow

NUM = 12  # frames: two windows
MODELS = ("terra-demo", "night", "rain")


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, of which the second brings scenes and a decoder of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {name: save_adapter(folder / name, tiny_model, seed=seed) for seed, name in ((2, "night"), (3, "rain"))}
    save_decoder(found["rain"], tiny_tokenizer)
    (found["rain"] / "contexts").mkdir()
    scene_folder(found["rain"] / "contexts")
    return found


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes for the base model, for the adapter night, and for one that no server has."""
    folder = scene_folder(tmp_path_factory.mktemp("scenes"))
    for name, adapter in (("moon", "night"), ("drift", "snow")):
        shutil.copytree(folder / "day", folder / name)
        (folder / name / "scene.json").write_text(json.dumps({"adapter": adapter}))
    return folder


@pytest.fixture(scope="module")
def server(tiny_model, tiny_tokenizer, scenes, adapters, tmp_path_factory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    with Served(tiny_model, tiny_tokenizer, scenes, data, adapters=adapters) as served:
        yield served


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def actions(scenes: Path) -> np.ndarray:
    return load_trajectory(scenes / "day/left.json").actions(NUM - 1)


@pytest.fixture(scope="module")
def alone(server, adapters, scenes, actions, tmp_path_factory) -> dict[str, Rollout]:
    """What each model makes of the scene day when it is the only one."""
    pair = tmp_path_factory.mktemp("pair")
    (pair / "tokenizer").symlink_to(server.tokenizer)
    (pair / "world_model").symlink_to(server.model)
    made = {}
    for name in MODELS:
        given = {"engine": "hf", "device": "cpu", "overlap": OVERLAP, "adapter": adapters.get(name)}
        with Pipeline.from_pretrained(pair, **given) as pipeline:
            request = RolloutRequest(pictures(scenes / "day"), torch.from_numpy(actions), seed=5)
            (made[name],) = pipeline.generate([request], server.settings.sampling)
    return made


def job(**changes: Any) -> dict[str, Any]:
    return {"scene": "day", "trajectory_name": "left", "num_frames": NUM, "seed": 5} | changes


def made(http: httpx.Client, name: str) -> torch.Tensor:
    return load(http.get(f"/v1/videos/{name}/content", params={"variant": "tokens"}).content)["tokens"]


def live_tokens(server: Served, session: str) -> np.ndarray:
    return np.stack([moment.tokens for moment in server.service.sessions[session].rollout.moments])


def test_models_are_listed_as_by_vllm(http, adapters):
    listed = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in listed] == [
        ("terra-demo", "terra-demo", None),
        ("night", adapters["night"].name, "terra-demo"),
        ("rain", adapters["rain"].name, "terra-demo"),
    ]
    assert listed[0] | {"id": "", "root": "", "parent": ""} == listed[1] | {"id": "", "root": "", "parent": ""}


def test_jobs_and_sessions_of_all_models_at_once_equal_each_alone(server, http, actions, alone, adapters):
    posted = {name: http.post("/v1/videos", json=job(model=name)).json() for name in MODELS}
    assert {name: each["model"] for name, each in posted.items()} == {name: name for name in MODELS}
    given = {"seed": 5, "actions": actions[:2].tolist(), "format": "png"}
    with contextlib.ExitStack() as stack:
        talks = {name: stack.enter_context(server.open(model=name, **given)) for name in MODELS}
        for action in actions[2:]:
            for talk in talks.values():
                talk.say(type="step", action=action.tolist())
            frames = {name: talk.drive(1)[0] for name, talk in talks.items()}
        for name, talk in talks.items():
            assert talk.opened["model"] == name
            assert np.array_equal(live_tokens(server, talk.opened["session"]), alone[name].tokens.numpy())
            last = np.asarray(Image.open(io.BytesIO(frames[name]["picture"])))
            assert np.array_equal(last, to_uint8(alone[name].frames)[-1])
    for name, each in posted.items():
        assert server.wait_for(each["id"])["status"] == "completed"
        assert torch.equal(made(http, each["id"]), alone[name].tokens)
        record = json.loads((server.data / "results" / each["id"] / "rollout.json").read_text())
        folder = adapters.get(name)
        location = folder and os.path.relpath(folder, server.data / "results" / each["id"])
        described = folder and {"name": name, "folder": location, "sha256": adapter_sha256(folder)}
        assert record["adapter"] == described
        assert record["pixels_sha256"] == pixels_sha256(to_uint8(alone[name].frames))
    assert len({each.tokens.numpy().tobytes() for each in alone.values()}) == len(MODELS)


def test_a_fork_and_a_rewind_keep_the_adapter(server, actions, alone):
    expected = alone["night"].tokens.numpy()
    with server.open(model="night", seed=5, actions=actions[:2].tolist()) as talk:
        for action in actions[2:]:
            talk.step(action=action.tolist())
        talk.say(type="fork", frame=6)
        fork = talk.hear("forked")["fork"]
        talk.say(type="rewind", frame=5)
        talk.skip_to("rewound")
        talk.frame()
        for action in actions[5:]:
            talk.step(action=action.tolist())
        assert np.array_equal(live_tokens(server, talk.opened["session"]), expected)
    with server.connect() as talk:
        talk.say(type="open", fork=fork)
        opened = talk.hear("opened")
        assert opened["model"] == "night"
        talk.frame()
        for action in actions[6:]:
            talk.step(action=action.tolist())
        assert np.array_equal(live_tokens(server, opened["session"]), expected)
    with server.connect() as talk:
        talk.say(type="open", fork=fork, model="rain")
        assert (
            "expected no model, sampling, actions, speed, memory or map_pose with a fork"
            in talk.hear("error")["message"]
        )


def test_an_unknown_model_is_refused(server, http):
    expected = "expected one of terra-demo, night, rain, the models that are served"
    answer = http.post("/v1/videos", json=job(model="fog"))
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        {"message": expected, "type": "not_found_error", "param": "model", "code": "model_not_found"},
    )
    with server.connect() as talk:
        talk.say(type="open", scene="day", model="fog")
        assert talk.hear("error") == {"type": "error", "code": "model_not_found", "message": expected}
    with Client(server.url) as client:
        with pytest.raises(ServerError, match="expected one of"):
            client.open(scene="day", model="fog")
        with client.open(scene="day", model="rain") as drive:
            assert drive.opened["model"] == "rain"


def test_a_scene_may_have_an_adapter(server, http):
    listed = {each["id"]: each.get("model") for each in http.get("/v1/scenes").json()["data"]}
    assert listed == {"day": None, "night": None, "moon": "night", "rain-day": "rain", "rain-night": "rain"}
    for asked, expected in (({}, "night"), ({"model": "rain"}, "rain"), ({"model": "terra-demo"}, "terra-demo")):
        with server.open(scene="moon", **asked) as talk:
            assert talk.opened["model"] == expected
        assert http.post("/v1/videos", json=job(scene="moon", num_frames=4, **asked)).json()["model"] == expected


def test_a_scene_without_its_adapter_is_said_once(tiny_model, tiny_tokenizer, scenes, tmp_path, caplog):
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, adapters={}) as served:
        assert list(served.service.scenes.all) == ["day", "night"]
        assert [card["id"] for card in httpx.get(f"{served.url}/v1/models").json()["data"]] == ["terra-demo"]
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert said == [
        f"{scenes / name}: left out: the scene is for the adapter {adapter}, which is not served"
        for name, adapter in (("drift", "snow"), ("moon", "night"))
    ]


def test_jobs_after_a_restart_with_other_adapters(tiny_model, tiny_tokenizer, scenes, adapters, alone, tmp_path):
    def served(**given: Path) -> Served:
        return Served(tiny_model, tiny_tokenizer, scenes, tmp_path, adapters=given, jobs=jobs, drain_seconds=0)

    jobs = {"at_once": 1, "max_frames": 300}
    with served(**adapters) as first, httpx.Client(base_url=first.url, timeout=30) as http:
        http.post("/v1/videos", json=job(num_frames=60, trajectory_name="straight", seed=0))
        names = [http.post("/v1/videos", json=job(model=name)).json()["id"] for name in MODELS]
    changed = save_adapter(tmp_path / "changed", tiny_model, seed=7)
    with served(night=adapters["night"]) as again, httpx.Client(base_url=again.url, timeout=30) as http:
        *ended, gone = [again.wait_for(name) for name in names]
        for name, each in zip(MODELS, ended, strict=False):
            assert (each["status"], each["model"]) == ("completed", name)
            assert torch.equal(made(http, each["id"]), alone[name].tokens)
        message = "the job's model is not served now: expected one of terra-demo, night, got rain"
        assert (gone["status"], gone["model"], gone["error"]["message"]) == ("failed", "rain", message)
        http.post("/v1/videos", json=job(num_frames=60, trajectory_name="straight", seed=0))
        waits = http.post("/v1/videos", json=job(model="night")).json()["id"]
    with served(night=changed) as last:
        error = last.wait_for(waits)["error"]
    assert error["message"] == "the job began with other weights than those that are served now"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: expected JSON"),
        ('{"adapter": "a b"}', "adapter: expected a name of letters"),
        ('{"adapter": "night", "x": 1}', "expected adapter, map_pose, got 'x'"),
    ],
)
def test_a_wrong_scene_file_is_one_line(refused, scenes, tmp_path, text, message):  # noqa: F811
    own = shutil.copytree(scenes, tmp_path / "own")
    (own / "day" / "scene.json").write_text(text)
    line = refused(scenes=own)
    assert line.startswith(f"{own / 'day' / 'scene.json'}: ")
    assert message in line


def test_names_that_stand_in_each_others_way(refused, adapters, scenes, tmp_path):  # noqa: F811
    named = "adapters.terra-demo: expected another name than the base model's (model_name), got terra-demo"
    assert refused(model_name="terra-demo", **{"+adapters.terra-demo": adapters["night"]}) == named
    own = shutil.copytree(scenes, tmp_path / "own")
    (own / "day").rename(own / "rain-day")
    line = refused(scenes=own, **{"+adapters.rain": adapters["rain"]})
    assert line == f"{adapters['rain']}/contexts/day: expected no other scene rain-day, got {own}/rain-day"


def test_adapters_that_ship_are_served_with_the_demo_alone(tmp_path, monkeypatch):
    assert set(compose("serve", ["model=terra_v2"]).adapters) == set()
    monkeypatch.setattr(files, "DEMO", tmp_path)
    demo = f"world_model.pretrained={tmp_path / 'world_model'}"
    assert compose("serve", [demo]).adapters == {}
    for name in ("snow", "notes"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "adapters" / "snow" / "adapter_config.json").touch()
    assert compose("serve", [demo]).adapters == {"snow": str(tmp_path / "adapters" / "snow")}
    assert compose("serve", [demo, "adapters={night: DIR}"]).adapters == {"night": "DIR"}
