"""The routes of terra-serve over HTTP, against a real server in a thread."""

import asyncio
import io
import json
import signal
import socket
import time

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from safetensors.torch import load
from tiny import COLS, ROWS
from tiny_serving import KEY, HeldEngine, Served, make_pipeline, pictures, wait_until

from decoder.video import probe_video, write_video
from terra.engine.persistence import PersistenceEngine
from terra.errors import ConfigError, OutputError
from terra.pipeline import RolloutRequest
from terra.serving.client import Client, ServerError
from terra.serving.contexts import Contexts
from terra.serving.run import bind, listen
from terra.trajectory import load_trajectory

pytest_plugins = ["serving_fixtures"]


@pytest.fixture(scope="module")
def locked(tiny_model, tiny_tokenizer, scenes, tmp_path_factory):
    data = tmp_path_factory.mktemp("locked")
    with Served(tiny_model, tiny_tokenizer, scenes, data, persistence=True, api_key=KEY) as served:
        yield served


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def error(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["message"]
    return answer.status_code, body["code"]


def job(**changes):
    return {"scene": "day", "trajectory_name": "left", "num_frames": 6, "seed": 3} | changes


def png(width: int = 4 * COLS, height: int = 4 * ROWS, seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def upload(http, *files: bytes) -> httpx.Response:
    return http.post("/v1/contexts", files=[("files", ("../../etc/passwd", data)) for data in files])


class TestWhatIsServed:
    def test_health(self, http):
        assert http.get("/health").json() == {"status": "ok"}

    def test_models(self, http):
        (card,) = http.get("/v1/models").json()["data"]
        assert card["id"] == "terra-demo"
        assert (card["fps"], card["size"], card["frame_tokens"]) == (10.0, f"{4 * COLS}x{4 * ROWS}", ROWS * COLS)

    def test_scenes(self, http, scenes):
        listed = http.get("/v1/scenes").json()["data"]
        assert [each["id"] for each in listed] == ["day", "night"]
        assert listed[0] == {"id": "day", "num_frames": 3, "trajectories": ["left", "straight"]}
        picture = http.get("/v1/scenes/day/image")
        assert picture.headers["content-type"] == "image/png"
        last = np.asarray(Image.open(io.BytesIO(picture.content)))
        assert np.array_equal(last, np.asarray(Image.open(scenes / "day" / "2.png")))
        document = http.get("/v1/scenes/day/trajectories/left").json()
        assert document == json.loads((scenes / "day" / "left.json").read_text())

    @pytest.mark.parametrize(
        "path",
        ["/v1/scenes/none/image", "/v1/scenes/day/trajectories/none", "/v1/scenes/..%2F..%2Fetc/image", "/v1/nothing"],
    )
    def test_what_is_not_there(self, http, path):
        assert error(http.get(path))[0] == 404

    def test_wrong_method(self, http):
        assert error(http.put("/v1/videos")) == (405, "method_not_allowed")

    def test_metrics(self, http):
        http.get("/v1/videos/guessed-name")
        text = http.get("/metrics").text
        assert 'terra_jobs{status="queued"} 0.0' in text
        assert "terra_live_sessions 0.0" in text
        assert "guessed-name" not in text

    def test_openapi_and_its_page(self, http):
        paths = http.get("/openapi.json").json()["paths"]
        assert {"/v1/videos", "/v1/contexts", "/v1/scenes", "/v1/models", "/health", "/metrics"} <= paths.keys()
        page = http.get("/docs").text
        assert "/v1/videos/{video_id}/content" in page
        assert "<script" not in page

    def test_page_files_come_from_memory(self, http):
        for name in ("../settings.py", "..%2Fsettings.py", "%2Fetc%2Fpasswd", ""):
            assert http.get(f"/page/{name}").status_code == 404


class TestVideos:
    def test_a_job_from_beginning_to_end(self, server, http, scenes, tmp_path):
        made = http.post("/v1/videos", json=job(num_frames=14)).json()
        assert made["object"] == "video"
        assert made["status"] in ("queued", "in_progress")
        assert (made["num_frames"], made["seconds"], made["seed"]) == (14, "1.4", 3)
        done = server.wait_for(made["id"])
        assert (done["status"], done["progress"], done["error"]) == ("completed", 100, None)
        assert done["expires_at"] > done["completed_at"] >= done["created_at"]
        content = http.get(f"/v1/videos/{made['id']}/content")
        assert content.headers["content-type"] == "video/mp4"
        (tmp_path / "got.mp4").write_bytes(content.content)
        assert probe_video(tmp_path / "got.mp4").num_frames == 14
        gif = http.get(f"/v1/videos/{made['id']}/content", params={"variant": "gif"})
        assert gif.content[:4] == b"GIF8"
        tensors = load(http.get(f"/v1/videos/{made['id']}/content", params={"variant": "tokens"}).content)
        with make_pipeline(server.model, server.tokenizer) as pipeline:
            actions = torch.from_numpy(load_trajectory(scenes / "day/left.json").actions(13))
            request = RolloutRequest(pictures(scenes / "day"), actions, seed=3)
            (rollout,) = pipeline.generate([request], server.settings.sampling)
        assert torch.equal(tensors["tokens"], rollout.tokens)
        assert torch.equal(tensors["actions"], actions)

    def test_a_document_and_an_uploaded_context(self, server, http, scenes):
        context = upload(http, png(seed=1), png(seed=2)).json()
        document = json.loads((scenes / "day/left.json").read_text())
        request = {"context": context["id"], "trajectory": document, "num_frames": 5, "sampling": {"temperature": 0.0}}
        done = server.wait_for(http.post("/v1/videos", json=request).json()["id"])
        assert (done["status"], done["num_context"]) == ("completed", 2)

    def test_multipart_as_openai_has_it(self, server, http, scenes):
        answer = http.post(
            "/v1/videos",
            data={"num_frames": "5", "seed": "7", "sampling": '{"top_k": 5}'},
            files=[
                ("input_reference", ("a.png", png())),
                ("trajectory", ("t.json", (scenes / "day/left.json").read_bytes())),
            ],
        )
        assert answer.status_code == 200, answer.text
        assert server.wait_for(answer.json()["id"])["seed"] == 7

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            (job(scene="none"), (404, "scene_not_found")),
            (job(trajectory_name="none"), (404, "trajectory_not_found")),
            (job(model="other"), (404, "model_not_found")),
            (job(scene=None, trajectory_name=None, trajectory={}, context="ctx_none"), (400, "invalid_trajectory")),
            (job(num_frames=1), (400, "invalid_request")),
            (job(num_frames=3), (400, "invalid_request")),
            (job(num_frames=41), (400, "too_many_frames")),
            (job(num_frames=True), (400, "invalid_request")),
            (job(seed=-1), (400, "invalid_request")),
            (job(seed=2**63), (400, "invalid_request")),
            (job(sampling={"top_p": 0}), (400, "invalid_request")),
            (job(sampling={"temperature": 1e-40}), (400, "invalid_request")),
            (job(sampling={"heat": 1}), (400, "invalid_request")),
            (job(nonsense=1), (400, "invalid_request")),
            (job(trajectory={}), (400, "invalid_request")),
            (job(context="ctx_none"), (400, "invalid_request")),
            ({}, (400, "invalid_request")),
            ([], (400, "invalid_request")),
        ],
    )
    def test_refusals(self, http, request_, expected):
        assert error(http.post("/v1/videos", json=request_)) == expected

    def test_an_unknown_context(self, http, scenes):
        request = {"context": "ctx_none", "trajectory": json.loads((scenes / "day/left.json").read_text())}
        assert error(http.post("/v1/videos", json=request)) == (404, "context_not_found")

    def test_a_trajectory_that_is_too_short(self, http, scenes):
        document = json.loads((scenes / "day/left.json").read_text())
        document["poses"] = document["poses"][:35]
        answer = http.post("/v1/videos", json={"scene": "day", "trajectory": document, "num_frames": 20})
        assert error(answer) == (400, "invalid_trajectory")
        assert "covers" in answer.json()["error"]["message"]

    def test_other_bodies(self, http):
        kind = {"content-type": "application/json"}
        assert error(http.post("/v1/videos", content=b"{", headers=kind)) == (400, "invalid_request")
        assert error(http.post("/v1/videos", content=b"[" * 100_000, headers=kind)) == (400, "invalid_request")
        assert error(http.post("/v1/videos", content=b"\xff\xfe", headers=kind)) == (400, "invalid_request")
        assert error(http.post("/v1/videos", content=b'{"seed": 1, "seed": 2}', headers=kind)) == (
            400,
            "invalid_request",
        )
        assert error(http.post("/v1/videos", content=b"[]", headers=kind)) == (400, "invalid_request")
        assert error(http.post("/v1/videos", content=b"x")) == (415, "unsupported_media_type")

    def test_pages_of_the_list(self, server, http):
        ids = [http.post("/v1/videos", json=job(num_frames=4, seed=seed)).json()["id"] for seed in range(5)]
        first = http.get("/v1/videos", params={"limit": 2}).json()
        assert [each["id"] for each in first["data"]] == ids[:2:-1]
        assert first["has_more"]
        second = http.get("/v1/videos", params={"limit": 2, "after": first["last_id"]}).json()
        assert [each["id"] for each in second["data"]] == ids[2:0:-1]
        rising = http.get("/v1/videos", params={"order": "asc", "after": ids[2]}).json()
        assert [each["id"] for each in rising["data"]] == ids[3:]
        assert not rising["has_more"]
        assert error(http.get("/v1/videos", params={"after": "none"})) == (404, "video_not_found")
        assert error(http.get("/v1/videos", params={"limit": 0})) == (400, "invalid_request")
        for name in ids:
            server.wait_for(name)

    def test_deleted_with_its_files(self, server, http):
        made = http.post("/v1/videos", json=job()).json()["id"]
        server.wait_for(made)
        folder = server.data / "results" / made
        assert folder.is_dir()
        answer = http.delete(f"/v1/videos/{made}").json()
        assert answer == {"id": made, "object": "video.deleted", "deleted": True}
        assert not folder.exists()
        assert error(http.get(f"/v1/videos/{made}")) == (404, "video_not_found")
        assert error(http.delete(f"/v1/videos/{made}")) == (404, "video_not_found")


class TestQueue:
    @pytest.fixture
    def held(self, tiny_model, tiny_tokenizer, scenes, tmp_path):
        engine = HeldEngine(PersistenceEngine.from_pretrained(tiny_model).spec)
        changes = {"jobs": {"at_once": 1, "queue": 2, "lifetime_seconds": 0.4}, "drain_seconds": 0.5}
        with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=engine, **changes) as served:
            served.engine = engine
            yield served
            engine.release()

    def test_a_full_queue_says_so(self, held):
        with httpx.Client(base_url=held.url) as http:
            ids = [http.post("/v1/videos", json=job()).json()["id"]]
            held.wait_for(ids[0], "in_progress")
            ids += [http.post("/v1/videos", json=job()).json()["id"] for _ in range(2)]
            assert held.call(held.service.store.find(ids[1])).request["client"] == "127.0.0.1"
            answer = http.post("/v1/videos", json=job())
            assert error(answer) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) > 0
            assert error(http.get(f"/v1/videos/{ids[1]}/content")) == (409, "not_completed")
            assert http.post(f"/v1/videos/{ids[1]}/cancel").json()["status"] == "cancelled"
            assert http.post(f"/v1/videos/{ids[0]}/cancel").json()["status"] == "cancelled"
            held.wait_for(ids[2], "in_progress")
            assert http.delete(f"/v1/videos/{ids[2]}").json()["deleted"]
            assert http.get(f"/v1/videos/{ids[2]}").status_code == 404

    def test_the_job_that_waits_longest_is_next(self, held):
        with httpx.Client(base_url=held.url) as http:
            first, *others = [http.post("/v1/videos", json=job()).json()["id"] for _ in range(2)]
            held.wait_for(first, "in_progress")
            others.append(http.post("/v1/videos", json=job()).json()["id"])
            http.post(f"/v1/videos/{first}/cancel")

            def statuses() -> list[str]:
                return [http.get(f"/v1/videos/{each}").json()["status"] for each in others]

            wait_until(lambda: "in_progress" in statuses())
            assert statuses() == ["in_progress", "queued"]

    def test_a_job_that_comes_while_the_server_finds_none_is_made(self, held, monkeypatch):
        held.engine.release()
        take, late = held.service.store.take, []

        def post() -> str:
            return httpx.post(f"{held.url}/v1/videos", json=job()).json()["id"]

        async def take_late():
            taken = await take()
            if taken is None and not late:
                late.append(await asyncio.to_thread(post))
            return taken

        monkeypatch.setattr(held.service.store, "take", take_late)
        post()
        wait_until(lambda: bool(late))
        assert held.wait_for(late[0])["status"] == "completed"

    def test_finished_jobs_expire(self, held):
        held.engine.release()
        with httpx.Client(base_url=held.url) as http:
            made = http.post("/v1/videos", json=job()).json()["id"]
            held.wait_for(made)
            time.sleep(0.45)
            held.call(held.service.store.expire())
            assert http.get(f"/v1/videos/{made}").status_code == 404
            assert list((held.data / "results").iterdir()) == []


class TestContexts:
    def test_pictures_are_cropped_to_the_aspect(self, server, http):
        answer = upload(http, png(200, 100, seed=4), png(100, 200, kind="JPEG"), png(64, 48, kind="WEBP")).json()
        assert answer["id"].startswith("ctx_")
        assert answer["num_frames"] == 3
        kept = server.service.contexts.find(answer["id"])
        assert kept.pictures.shape == (3, 4 * ROWS, 4 * COLS, 3)
        assert kept.expires_at > time.time()
        assert 0 < answer["psnr"] < 100
        assert answer["warning"] is None  # the tokenizer tells no expectation

    def test_pictures_that_the_model_shows_badly(self, server, http, monkeypatch):
        monkeypatch.setattr(server.service.model.pipeline, "expected_psnr", 90.0)
        answer = upload(http, png(64, 48), png(64, 48), png(64, 48)).json()
        assert "(held-out frames: 90.0 dB)" in answer["warning"]

    @pytest.mark.parametrize("suffix", ["mp4", "gif"])
    def test_a_video_is_sampled_at_the_models_rate(self, server, http, tmp_path, suffix):
        frames = np.stack([np.full((48, 64, 3), 40 * index, np.uint8) for index in range(6)])
        write_video(frames, tmp_path / f"v.{suffix}", 20.0)
        answer = upload(http, (tmp_path / f"v.{suffix}").read_bytes()).json()
        kept = server.service.contexts.find(answer["id"])
        assert np.allclose(kept.pictures.mean(axis=(1, 2, 3)), [0, 80, 160], atol=6)

    def test_what_is_no_picture(self, http, tmp_path):
        write_video(np.zeros((2, 48, 64, 3), np.uint8), tmp_path / "short.mp4", 10.0)
        write_video(np.zeros((9, 48, 64, 3), np.uint8), tmp_path / "slow.mp4", 5.0)
        short, slow = (tmp_path / "short.mp4").read_bytes(), (tmp_path / "slow.mp4").read_bytes()
        for files in (
            [b""],
            [b"hello"],
            [png()[:100]],
            [b"\0\0\0\x18ftypmp42junk"],
            [b"GIF89a"],
            [short],
            [slow],
            [short[:-50]],
            [slow, slow],
            [png()] * 6,
            [png(4, 4)],
        ):
            assert error(upload(http, *files))[0] == 400, files[0][:20]
        assert error(http.post("/v1/contexts", files={"other": b"x"})) == (400, "no_files")
        assert error(http.post("/v1/contexts", json={})) == (415, "unsupported_media_type")

    def test_bombs_are_refused_before_they_unpack(self, http):
        file = io.BytesIO()
        Image.new("RGB", (9_000, 3_000)).save(file, "PNG", compress_level=9)
        assert len(file.getvalue()) < 200_000
        answer = upload(http, file.getvalue())
        assert error(answer) == (400, "invalid_file")
        assert "9000x3000" in answer.json()["error"]["message"]

    def test_too_large_a_body(self, http):
        assert error(upload(http, bytes(3 << 20))) == (413, "too_large")

        def chunks():
            for _ in range(30):
                yield b"x" * 100_000

        kind = {"content-type": "application/json"}
        assert error(http.post("/v1/videos", content=chunks(), headers=kind)) == (413, "too_large")

    def test_as_many_as_may_be_and_their_time(self, server, wait, monkeypatch):
        limits = server.settings.uploads
        kept = Contexts(server.service.model, limits, 3)
        for _ in range(limits.contexts):
            wait(kept.add([png()], "a"))
        with pytest.raises(Exception, match="at most") as refused:
            wait(kept.add([png()], "a"))
        assert refused.value.status == 429
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + limits.lifetime_seconds + 1)
        assert wait(kept.add([png()], "a")).pictures.shape[0] == 1


class TestSafety:
    def test_the_api_key(self, locked):
        with httpx.Client(base_url=locked.url) as http:
            assert http.get("/health").status_code == 200
            for path in ("/v1/models", "/v1/videos", "/metrics"):
                answer = http.get(path)
                assert error(answer) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                for wrong in (KEY + "x", KEY[:-1], "", "\xe9"):
                    header = f"Bearer {wrong}".strip().encode("latin-1")
                    assert http.get(path, headers=[(b"authorization", header)]).status_code == 401
                assert http.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200

    def test_a_foreign_page_is_refused(self, http, server):
        assert error(http.post("/v1/videos", json=job(), headers={"Origin": "http://evil.test"}))[0] == 403
        assert http.get("/health", headers={"Origin": "null"}).status_code == 403
        assert http.get("/health", headers={"Origin": server.url}).status_code == 200

    def test_a_foreign_name_is_refused(self, http):
        assert error(http.get("/health", headers={"Host": "evil.test:8000"})) == (421, "unknown_host")
        assert http.get("/health", headers={"Host": "localhost:1"}).status_code == 200

    def test_headers(self, http):
        headers = http.get("/health").headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


class TestClient:
    def test_jobs(self, server, tmp_path):
        with Client(server.url) as client:
            assert client.models()[0]["id"] == "terra-demo"
            assert [scene["id"] for scene in client.scenes()] == ["day", "night"]
            (tmp_path / "a.png").write_bytes(png())
            context = client.create_context(tmp_path / "a.png")
            assert context["num_frames"] == 1
            made = client.create_video(**job())
            assert client.wait(made["id"], every=0.05)["status"] == "completed"
            path = client.download(made["id"], tmp_path / "out.gif", "gif")
            assert path.read_bytes()[:4] == b"GIF8"
            assert made["id"] in [each["id"] for each in client.videos(limit=100)]
            client.delete_video(made["id"])
            with pytest.raises(ServerError, match="existing video") as refused:
                client.video(made["id"])
            assert (refused.value.code, refused.value.status) == ("video_not_found", 404)

    def test_no_server(self):
        with Client("http://127.0.0.1:9") as client, pytest.raises(ServerError, match="expected an answer"):
            client.models()


class TestStart:
    def test_connections_wait_for_no_acknowledgement(self, server):
        with bind(server.settings) as listener:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(listener.getsockname())
            listen(listener, server.settings)
            with socket.create_connection(listener.getsockname()):
                connection, _ = listener.accept()
                with connection:
                    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_a_port_that_is_taken(self, server):
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: expected an address to listen at"):
            bind(server.settings.replace(port=port))

    def test_a_port_that_another_process_takes_meanwhile(self, server):
        with bind(server.settings) as first:
            settings = server.settings.replace(port=first.getsockname()[1])
            with bind(settings) as second:
                listen(first, settings)
                with pytest.raises(ConfigError, match=f"127.0.0.1:{settings.port}: expected an address to listen at"):
                    listen(second, settings)

    def test_a_second_interrupt_ends_it_at_once_and_closes_everything(self, server, scenes, tmp_path, caplog):
        with Served(server.model, server.tokenizer, scenes, tmp_path / "own", persistence=True) as other:
            other.server.handle_exit(signal.SIGINT, None)
            other.server.handle_exit(signal.SIGINT, None)
        assert other.server.force_exit
        assert other.server.stopped_by == "Ctrl-C"
        with pytest.raises(RuntimeError, match="after shutdown"):  # of the store's thread
            other.service.store.close()
        assert "CancelledError" not in caplog.text

    def test_a_second_server_on_one_folder(self, server, scenes):
        with pytest.raises(OutputError, match="no other process"):
            Served(server.model, server.tokenizer, scenes, server.data, persistence=True).__enter__()


TEXT = st.text(max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*job(), "trajectory", "sampling", "context"]) | TEXT, JSON, max_size=6))
def test_whatever_is_asked_for_no_request_fails_the_server(http, body):
    answer = http.post("/v1/videos", content=json.dumps(job() | body), headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
