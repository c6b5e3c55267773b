"""Several worlds on one server: each has its routes, jobs and sessions; the page lists the scenes of all."""

import socket

import httpx
import pytest
import torch
from entry import read_settings

pytest.importorskip("fastapi", reason="needs terra's extra serve")
from forkserver import forkserver_with
from safetensors.torch import load
from serving_fake import DRIVING, KEYS, VECTOR, fake
from tiny import save_tiny, tiny_tokenizer_config
from tiny_serving import OVERLAP, Talk, run_and_exit, scene_folder as driving_scenes, wait_until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from terra.errors import ConfigError
from terra.pipeline import Pipeline
from terra.serving.client import Client
from terra.serving.run import run
from terra.serving.service import check_names
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer

SPACES = {"terra-demo": DRIVING, "doom": KEYS, "arm": VECTOR}
URLS = {
    "": {"terra-demo": "./", "doom": "worlds/doom/", "arm": "worlds/arm/"},
    "worlds/doom/": {"terra-demo": "../../", "doom": "./", "arm": "../arm/"},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    serving = fake(tmp_path_factory.mktemp("worlds"), seconds_a_frame=0.0, others={"doom": KEYS, "arm": VECTOR})
    yield serving
    serving.stop()


def opened(url: str, **message: object) -> Talk:
    talk = Talk(connect(f"{url.replace('http', 'ws')}v1/live", compression=None).__enter__())
    talk.say(type="open", **message)
    talk.opened = talk.hear("opened")
    return talk


@pytest.mark.parametrize("page", URLS)
def test_the_worlds_are_listed_relative_to_the_page(served, page):
    listed = httpx.get(f"{served.url}/{page}v1/worlds").json()["data"]
    assert {each["id"]: each["url"] for each in listed} == URLS[page]
    for each in listed:
        url = httpx.URL(f"{served.url}/{page}").join(each["url"])
        (card,) = httpx.get(url.join("v1/models")).json()["data"]
        assert (card["id"], card["action_space"]["kind"]) == (each["id"], SPACES[each["id"]].kind)
        assert httpx.get(url).text.startswith("<!doctype html>")
        assert httpx.get(url.join("page/app.js")).status_code == 200


def test_scenes_and_sessions_are_of_one_world(served):
    listed = httpx.get(f"{served.url}/worlds/doom/v1/scenes").json()["data"]
    assert [each["id"] for each in listed] == ["room", "yard"]
    assert httpx.get(f"{served.url}/v1/scenes/room/image").status_code == 404
    picture = httpx.get(f"{served.url}/worlds/doom/v1/scenes/room/image")
    assert picture.headers["content-type"] == "image/png"
    talk = opened(f"{served.url}/worlds/doom/", scene="room")
    assert talk.opened["model"] == "doom"
    assert served.service.worlds["doom"].sessions
    assert not served.service.sessions
    talk.close()
    with pytest.raises(InvalidStatus):
        opened(f"{served.url}/worlds/moon/", scene="room")
    assert httpx.get(f"{served.url}/worlds/moon/v1/scenes").status_code == 404


def test_jobs_are_kept_by_their_world(served, tmp_path):
    with Client(f"{served.url}/worlds/doom") as doom, Client(served.url) as main:
        made = doom.create_video(scene="room", actions_name="look", num_frames=9)
        assert doom.wait(made["id"], timeout=60, every=0.02)["model"] == "doom"
        tokens = load(doom.download(made["id"], tmp_path / "tokens.safetensors", "tokens").read_bytes())["tokens"]
        assert len(tokens) == 9
        assert httpx.get(f"{served.url}/v1/videos/{made['id']}").status_code == 404
        own = main.create_video(scene="day", trajectory_name="left", num_frames=9)
        main.wait(own["id"], timeout=60, every=0.02)
        assert httpx.get(f"{served.url}/worlds/doom/v1/videos/{own['id']}").status_code == 404


def test_the_key_guards_all_worlds(tmp_path):
    serving = fake(tmp_path, seconds_a_frame=0.0, others={"doom": KEYS}, api_key="secret")
    try:
        for path in ("v1/scenes", "v1/worlds", "worlds/doom/v1/scenes", "worlds/doom/metrics", "worlds/doom/v1/videos"):
            assert httpx.get(f"{serving.url}/{path}").status_code == 401, path
            given = httpx.get(f"{serving.url}/{path}", headers={"Authorization": "Bearer secret"})
            assert given.status_code == 200, path
        assert httpx.get(f"{serving.url}/worlds/doom/").status_code == 200
        foreign = httpx.get(f"{serving.url}/worlds/doom/v1/scenes", headers={"Origin": "http://example.org"})
        assert foreign.status_code == 403
        talk = Talk(connect(f"{serving.url.replace('http', 'ws')}/worlds/doom/v1/live", compression=None).__enter__())
        talk.say(type="open", scene="room")
        assert talk.hear("error")["code"] == "invalid_api_key"
    finally:
        serving.stop()


def test_a_failed_engine_of_any_world_is_told(served):
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
    engine = served.service.worlds["arm"].model.pipeline.engine
    engine.failure = "out of memory"
    try:
        assert httpx.get(f"{served.url}/health").json()["error"]["message"] == "out of memory"
        assert httpx.get(f"{served.url}/worlds/doom/health").json()["status"] == "ok"
    finally:
        engine.failure = None


def test_names_that_are_taken(tmp_path):
    settings = read_settings("serve", ["worlds={terra-demo: elsewhere}", f"data={tmp_path}"])
    with pytest.raises(ConfigError, match=r"worlds\.terra-demo: expected another name than the base model's"):
        check_names(settings)


def test_a_world_that_is_not_there_is_told_before_any_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr(Pipeline, "from_spec", None)
    settings = read_settings("serve", [f"worlds={{doom: {tmp_path / 'none'}}}", f"data={tmp_path}", "device=cpu"])
    with pytest.raises(ConfigError, match=r"worlds\.doom: expected a checkpoint folder .* found no folder /.*/none"):
        run(settings)


def test_unpacked_worlds_are_served_beside_the_demo_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRA_WORLDS", str(tmp_path))
    for name in ("doom", "half"):
        (tmp_path / name / "world_model").mkdir(parents=True)
    (tmp_path / "doom" / "world_model" / "config.json").write_text("{}")
    assert read_settings("serve").worlds == {"doom": tmp_path / "doom"}
    assert read_settings("serve", ["worlds={}"]).worlds == {}
    assert read_settings("serve", ["model=doom"]).worlds == {}


@pytest.mark.slow
def test_the_command_serves_two_models(tmp_path):
    for name, layers in {"one": 1, "two": 3}.items():
        save_tiny(tmp_path / name / "world_model", LlamaActionV2ForCausalLM, num_hidden_layers=layers)
        LFQTokenizer(tiny_tokenizer_config()).save_pretrained(tmp_path / name / "tokenizer")
        (tmp_path / name / "contexts").mkdir()
        driving_scenes(tmp_path / name / "contexts")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = ["model=folder", f"model.path={tmp_path / 'one'}", f"scenes={tmp_path / 'one' / 'contexts'}"]
    overrides += [f"worlds={{two: {tmp_path / 'two'}}}", f"data={tmp_path / 'data'}", f"port={port}"]
    overrides += ["engine=hf", "device=cpu", "uploads.max_frames=4", f"overlap={OVERLAP}"]
    process = forkserver_with("terra.serving.run", "terra.engine.hf").Process(
        target=run_and_exit, args=(overrides, tmp_path / "said")
    )
    process.start()
    url = f"http://127.0.0.1:{port}"
    tokens = {}
    try:
        wait_until(lambda: answers(url) or not process.is_alive(), 60)
        for name, address in {"one": url, "two": f"{url}/worlds/two"}.items():
            with Client(address) as client:
                made = client.create_video(scene="day", trajectory_name="left", num_frames=6)
                client.wait(made["id"], timeout=60, every=0.05)
                path = client.download(made["id"], tmp_path / f"{name}.safetensors", "tokens")
                tokens[name] = load(path.read_bytes())["tokens"]
    finally:
        process.terminate()
        process.join(30)
    assert process.exitcode == 0
    said = (tmp_path / "said").read_text().splitlines()
    assert [line for line in said if "engine" in line] == ["two: engine hf", "one: engine hf"]
    assert said[-1] == "stopped by SIGTERM"
    assert not torch.equal(tokens["one"], tokens["two"])
    assert (tmp_path / "data" / "worlds" / "two" / "jobs.sqlite3").exists()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
