"""What terra-serve refuses before it loads any weights, and what it does when its engine fails."""

import asyncio
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from entry import read_settings
from serving_fake import Serving
from tiny import COLS, ROWS, save_tiny, tiny_tokenizer_config
from tiny_serving import OVERLAP, FailingEngine, Served, scene_folder, wait_until
from websockets.exceptions import ConnectionClosed

from terra.cli import main
from terra.config.files import register_resolvers
from terra.config.spec import PipelineSpec
from terra.engine.base import EngineCounters
from terra.engine.persistence import PersistenceEngine
from terra.errors import ConfigError, EngineError
from terra.serving import run
from terra.serving.client import Client, ServerError
from terra.serving.metrics import Metrics
from terra.serving.run import check, load
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer

pytest_plugins = ["serving_fixtures"]


@pytest.fixture
def own_scenes(scenes, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(scenes, tmp_path / "scenes")


@pytest.fixture
def refused(tiny_model, tiny_tokenizer, scenes, tmp_path, monkeypatch, capsys):
    """Starts terra-serve with other settings than good ones; the one line that it ends with."""

    def weights(*_):
        raise AssertionError("weights were loaded")

    def start(**changes) -> str:
        settings = {
            "port": 0,
            "engine": "hf",
            "tokenizer.pretrained": tiny_tokenizer,
            "world_model.pretrained": tiny_model,
            "scenes": scenes,
            "data": tmp_path / "data",
            "overlap": OVERLAP,
        }
        arguments = [f"{key}={value}" for key, value in (settings | changes).items()]
        monkeypatch.setattr(sys, "argv", ["terra-serve", "hydra/job_logging=none", *arguments])
        monkeypatch.setattr(PipelineSpec, "build", weights)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    return start


class TestScenes:
    def test_too_short_a_trajectory(self, refused, own_scenes):
        path = own_scenes / "day/left.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"poses": document["poses"][:32]}))
        assert refused(scenes=own_scenes).startswith(f"{path}: covers 3.05 s = 2 frames at 10 fps")

    def test_too_short_a_trajectory_at_the_models_rate(self, refused, own_scenes):
        path = own_scenes / "night/straight.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"fps": 40, "poses": document["poses"][:32]}))
        assert refused(scenes=own_scenes).startswith(f"{path}: covers 3.05 s = 2 frames at 10 fps")

    def test_paths_that_end_before_the_last_waypoint(self, refused, own_scenes):
        document = {
            "format": "terra-trajectory",
            "frame": "ego",
            "axes": "x_forward_y_left",
            "units": {"position": "m", "time": "s"},
            "fps": 10,
            "times": [0.0, 1.5],
            "paths": [[[0.0, 0.0], [8.0, 0.1]]] * 9,
        }
        (own_scenes / "day/short.json").write_text(json.dumps(document))
        assert "expected paths that cover the waypoint at 1.95 s" in refused(scenes=own_scenes)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "line 1, column 2: expected JSON"), ("[1]", "expected a JSON object"), ("", "empty")],
    )
    def test_a_trajectory_that_is_none(self, refused, own_scenes, text, message):
        (own_scenes / "day/odd.json").write_text(text)
        assert message in refused(scenes=own_scenes)

    def test_a_trajectory_that_is_a_folder(self, refused, own_scenes):
        (own_scenes / "day/odd.json").mkdir()
        assert "odd.json: expected a readable file, got a folder" in refused(scenes=own_scenes)

    def test_too_few_pictures(self, refused, own_scenes):
        (own_scenes / "night/2.png").unlink()
        assert refused(scenes=own_scenes) == f"{own_scenes}/night: expected 3 or more PNG or JPEG pictures, got 2"

    def test_more_than_the_limits_allow(self, refused):
        assert "day/0.png: expected at most 0.0001 megapixels" in refused(**{"limits.picture_pixels": 100})
        assert "expected at most 99 bytes" in refused(**{"limits.json_bytes": 99})
        assert "expected at most 9 numbers" in refused(**{"limits.trajectory_numbers": 9})

    def test_no_folder_and_an_empty_one(self, refused, tmp_path):
        assert "scenes: expected a file or folder, found nothing at" in refused(scenes=tmp_path / "none")
        (tmp_path / "empty/.hidden").mkdir(parents=True)
        assert "expected folders of pictures, got none" in refused(scenes=tmp_path / "empty")


@pytest.mark.parametrize("fails", ["warm_up", "listen"])
def test_a_start_that_fails_after_the_weights_are_loaded(refused, monkeypatch, fails):
    """The server ends, and its models are closed."""
    warm_up, model, world = AsyncMock(), Mock(), Mock()
    service = SimpleNamespace(warm_up=warm_up, model=model, worlds={"other": SimpleNamespace(model=world)})
    monkeypatch.setattr(run, "load", lambda *_: service)
    if fails == "warm_up":
        warm_up.side_effect = error = EngineError("the engine failed: no memory")
        monkeypatch.setattr(run, "listen", Mock(side_effect=AssertionError("it listens")))
    else:
        error = ConfigError("127.0.0.1:8000: expected an address to listen at, got: Address already in use")
        monkeypatch.setattr(run, "listen", Mock(side_effect=error))
    assert refused() == str(error)
    assert model.close.call_count == world.close.call_count == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", 70000, "port: expected a whole number from 0 to 65535"),
        ("port", "x", "port: expected a whole number"),
        ("live.ahead", 0, "live.ahead: expected a whole number of at least 1"),
        ("live.ahead", 1.5, "live.ahead: expected a whole number"),
        ("jobs.lifetime_seconds", -1, "jobs.lifetime_seconds: expected a number above 0"),
        ("api_key", "' '", "api_key"),
        ("allowed_hosts", "[1]", "allowed_hosts: expected a list of words"),
        ("num_context", 8, "num_context: expected 1 to 7"),
        ("uploads.max_frames", 8, "uploads.max_frames: expected 1 to 7"),
        ("jobs.default_frames", 3, "jobs.default_frames: expected 4 (one more than num_context) to 300"),
        ("jobs.default_frames", 301, "jobs.default_frames: expected 4 (one more than num_context) to 300"),
        ("live.max_frames", 3, "live.max_frames: expected 4 (one more than num_context) or more"),
    ],
)
def test_settings_that_are_refused(refused, name, value, message):
    assert refused(**{name: value}).startswith(message)


def test_default_settings_serve_a_model_of_a_small_window(tmp_path):
    window = 5
    save_tiny(
        tmp_path / "world_model",
        LlamaActionV2ForCausalLM,
        num_temporal_embeddings=window,
        max_position_embeddings=window * (ROWS * COLS + 6),
    )
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(tmp_path / "tokenizer")
    register_resolvers()
    settings = read_settings(
        "serve", ["model=folder", f"model.path={tmp_path}", "scenes=null", f"data={tmp_path / 'data'}", "device=cpu"]
    )
    serving = Serving(lambda: (load(check(settings)), settings))
    (tmp_path / "scenes").mkdir()
    day = scene_folder(tmp_path / "scenes") / "day"
    pictures = sorted(day.glob("*.png"))
    try:
        with Client(serving.url) as client:
            context = client.create_context(*pictures, pictures[0])
            assert context["num_frames"] == window - 1
            with pytest.raises(ServerError, match="expected at most 4 pictures, got 5"):
                client.create_context(*pictures, *pictures[:2])
            drive = json.loads((day / "left.json").read_text())
            video = client.create_video(context=context["id"], trajectory=drive)
            assert client.wait(video["id"], every=0.05)["num_frames"] == settings.jobs.default_frames
    finally:
        serving.stop()


class TestFailedEngine:
    @pytest.fixture
    def failing(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        engine = FailingEngine(PersistenceEngine.from_pretrained(tiny_model).spec)
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=engine, jobs={"at_once": 1}) as served:
            served.engine = engine
            yield served

    def test_new_work_is_refused_and_jobs_wait_for_the_next_server(
        self, failing, tiny_model, tiny_tokenizer, scenes, tmp_path
    ):
        body = {"scene": "day", "trajectory_name": "left", "num_frames": 6}
        with failing.open() as talk, httpx.Client(base_url=failing.url) as http:
            names = [http.post("/v1/videos", json=body).json()["id"] for _ in range(2)]
            failing.wait_for(names[0], "in_progress")
            assert "terra_engine_up 1.0" in http.get("/metrics").text
            failing.engine.fail("out of memory")
            talk.say(type="step")
            assert talk.skip_to("error") == {"type": "error", "code": "engine_error", "message": "out of memory"}
            assert talk.hear("closed")["reason"] == "engine"
            with pytest.raises(ConnectionClosed, match="1011"):
                talk.listen()
            for answer in (http.get("/health"), http.post("/v1/videos", json=body)):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_failed"
                assert answer.json()["error"]["message"] == "out of memory"
            with failing.connect() as late:
                assert late.hear("error")["code"] == "engine_failed"
            assert "terra_engine_up 0.0" in http.get("/metrics").text
            for name in names:
                failing.wait_for(name, "queued")
        failing.__exit__()
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True) as again:
            assert [again.wait_for(name)["status"] for name in names] == ["completed"] * 2


def test_the_histogram_of_passes_is_the_engines():
    async def text(passes: tuple[int, ...]) -> str:
        engine = SimpleNamespace(counters=EngineCounters(passes=passes), failure=None)
        return Metrics().text(engine, {}).decode()

    told = asyncio.run(text((1, 6, 0, 1, 1)))
    found = dict(re.findall(r"^terra_engine_pass_tokens_(\S+) (\S+)$", told, re.MULTILINE))
    assert found["sum"] == "13.0"
    assert found["count"] == "9.0"
    cumulative = [found[f'bucket{{le="{most}"}}'] for most in ("0.0", "1.0", "2.0", "4.0", "8.0", "+Inf")]
    assert cumulative == ["1.0", "7.0", "7.0", "9.0", "9.0", "9.0"]
    assert "terra_engine_pass_tokens_count 0.0" in asyncio.run(text(()))


@pytest.mark.slow
def test_vllm_tells_its_kv_use_and_its_end(vllm_engine, tiny_model, tiny_tokenizer, scenes, tmp_path, monkeypatch):
    def kv_use() -> float:
        text = httpx.get(f"{served.url}/metrics").text
        return float(re.search(r"^terra_engine_kv_cache_usage (.+)$", text, re.MULTILINE).group(1))

    def broken():
        raise RuntimeError("out of memory")

    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=vllm_engine) as served:
        assert kv_use() == 0
        with served.open() as talk:
            talk.step()
            one = kv_use()
            assert 0 < one == vllm_engine.counters.kv_cache_usage
            with served.open(seed=1) as other:
                other.step()
                assert kv_use() > one  # the context's blocks are shared, the frame's are not
        wait_until(lambda: kv_use() == 0)  # what the prefix cache keeps is free for others
        with served.open() as talk:
            monkeypatch.setattr(vllm_engine._pump._core, "get_output", broken)
            talk.say(type="step")
            assert talk.skip_to("error")["message"] == "the vLLM engine failed: RuntimeError: out of memory"
        assert httpx.get(f"{served.url}/health").status_code == 503
        assert vllm_engine.failure == "the vLLM engine failed: RuntimeError: out of memory"
        assert vllm_engine.counters.kv_cache_usage is None
        assert math.isnan(kv_use())
