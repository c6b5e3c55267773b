"""Bodies of requests, large and many: how much is held, what reads them, and how many uploads are at work."""

import io
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image
from tiny import COLS, ROWS
from tiny_serving import Served, wait_until

from terra.serving.contexts import Contexts

pytestmark = pytest.mark.slow

pytest_plugins = ["serving_fixtures"]

JOB = {"scene": "day", "num_frames": 6, "seed": 3}
LARGE = 100 << 10


@pytest.fixture
def served(tiny_model, tiny_tokenizer, scenes, tmp_path, request):
    limits = getattr(request, "param", {})
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, uploads=limits) as server:
        yield server


def long_body(scenes, **changes) -> bytes:
    trajectory = json.loads((scenes / "day/left.json").read_text())
    return json.dumps(JOB | {"trajectory": trajectory} | changes).encode().ljust(LARGE)


def post(served: Served, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{served.url}/v1/videos", content=content, headers=headers, timeout=60)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def half_sent(served: Served, length: int, sent: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    head = "POST /v1/videos HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + b" " * sent)
    return connection


def held(served: Served) -> int:
    (guard,) = (each for each in layers(served.server.config.loaded_app) if type(each).__name__ == "Guard")
    return guard._bodies.by_client.total()


def layers(app):
    while app is not None:
        yield app
        app = getattr(app, "middleware_stack", None) or getattr(app, "app", None) or getattr(app, "_app", None)


def test_a_large_body_is_read_as_a_small_one(served, scenes):
    small = post(served, long_body(scenes).strip())
    large = post(served, long_body(scenes))
    form = {"scene": "day", "num_frames": "6", "seed": "3"}
    files = {"trajectory": ("left.json", (scenes / "day/left.json").read_bytes().ljust(LARGE))}
    sent = httpx.post(f"{served.url}/v1/videos", data=form, files=files)
    tokens = []
    for answer in (small, large, sent):
        assert answer.status_code == 200, answer.text
        name = answer.json()["id"]
        assert served.wait_for(name)["status"] == "completed"
        made = httpx.get(f"{served.url}/v1/videos/{name}/content?variant=tokens").content
        tokens.append(made)
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("pad", [0, LARGE], ids=["small", "large"])
def test_refusals_are_the_same(served, scenes, pad):
    bad = {"format": "terra-trajectory", "frame": "moon"}
    assert refusal(post(served, json.dumps(JOB | {"trajectory": bad}).encode().ljust(pad))) == (
        400, "invalid_trajectory",
    )  # fmt: skip
    assert refusal(post(served, b'{"scene": '.ljust(pad))) == (400, "invalid_request")
    both = JOB | {"trajectory": {}, "trajectory_name": "left"}
    assert refusal(post(served, json.dumps(both).encode().ljust(pad))) == (400, "invalid_request")
    assert refusal(post(served, json.dumps(JOB | {"actions": {}}).encode().ljust(pad))) == (400, "invalid_actions")
    assert refusal(post(served, long_body(scenes, scene="x" * LARGE))) == (400, "invalid_request")


def test_a_reader_that_ends_is_replaced(served, scenes):
    reader = served.service._reader
    wait_until(lambda: reader._process is not None, 60)
    first = reader._process.pid
    assert post(served, long_body(scenes)).status_code == 200
    os.kill(first, signal.SIGKILL)
    assert refusal(post(served, long_body(scenes))) == (413, "too_large")
    assert post(served, long_body(scenes)).status_code == 200
    assert reader._process.pid != first


@pytest.mark.parametrize("served", [{"read_seconds": 0.5}], indirect=True)
def test_a_body_that_takes_too_long_is_refused(served, scenes):
    reader = served.service._reader
    assert post(served, long_body(scenes)).status_code == 200
    os.kill(reader._process.pid, signal.SIGSTOP)
    answer = post(served, long_body(scenes))
    assert refusal(answer) == (413, "too_large")
    assert "0.5 s" in answer.json()["error"]["message"]
    assert post(served, long_body(scenes)).status_code == 200


@pytest.mark.parametrize("served", [{"read_bytes": 128 << 20, "max_json_bytes": 4 << 20}], indirect=True)
def test_a_body_that_takes_too_much_memory_is_refused(served, scenes):
    bomb = b'{"trajectory": {"a": [' + b"[]," * 1_300_000 + b"[]]}}"
    assert refusal(post(served, bomb)) == (413, "too_large")
    assert post(served, long_body(scenes)).status_code == 200


def test_a_file_in_a_field_is_bounded_as_json_is(served):
    files = {"trajectory": ("left.json", b" " * (served.settings.uploads.max_json_bytes + 1))}
    answer = httpx.post(f"{served.url}/v1/videos", data={"scene": "day"}, files=files)
    assert refusal(answer) == (413, "too_large")


@pytest.mark.parametrize(
    ("served", "refused"),
    [
        ({"body_bytes_per_client": 1_000_000}, (429, "too_many_bytes")),
        ({"body_bytes": 1_000_000}, (503, "server_full")),
    ],
    indirect=["served"],
)
def test_bytes_on_their_way_are_bounded(served, scenes, refused):
    waiting = [half_sent(served, 900_000, 400_000) for _ in range(4)]  # of which some 330 kB count
    wait_until(lambda: held(served) > 600_000)
    answer = post(served, b" " * 900_000)
    assert refusal(answer) == refused
    assert int(answer.headers["Retry-After"]) > 0
    assert post(served, long_body(scenes).strip()).status_code == 200  # small bodies find room
    for connection in waiting:
        connection.close()
    wait_until(lambda: held(served) == 0)
    assert post(served, long_body(scenes)).status_code == 200
    wait_until(lambda: held(served) == 0)  # a body is given up after its answer is sent


@pytest.mark.parametrize("served", [{"max_pixels_in_all": 3 * 4 * COLS * 4 * ROWS}], indirect=True)
def test_the_pixels_of_a_request_are_bounded(served):
    file = io.BytesIO()
    Image.new("RGB", (4 * COLS, 4 * ROWS)).save(file, "png")
    upload = [("files", ("a.png", file.getvalue()))]
    assert httpx.post(f"{served.url}/v1/contexts", files=upload * 3).status_code == 200
    answer = httpx.post(f"{served.url}/v1/contexts", files=upload * 4)
    assert refusal(answer) == (400, "invalid_file")
    assert f"at most {3 * 4 * COLS * 4 * ROWS} pixels together" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("served", "refused"),
    [({"queue_per_client": 2}, (429, "too_many_uploads")), ({"queue": 2}, (503, "server_full"))],
    indirect=["served"],
)
def test_uploads_at_work_are_bounded(served, monkeypatch, refused):
    released, read = threading.Event(), Contexts._read

    def slow(contexts, files):
        assert released.wait(30)
        return read(contexts, files)

    monkeypatch.setattr(Contexts, "_read", slow)
    file = io.BytesIO()
    Image.new("RGB", (4 * COLS, 4 * ROWS)).save(file, "png")
    upload = [("files", ("a.png", file.getvalue()))]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx.post, f"{served.url}/v1/contexts", files=upload, timeout=60) for _ in range(2)]
        wait_until(lambda: served.service.contexts._reading.total() == 2)
        answer = httpx.post(f"{served.url}/v1/contexts", files=upload)
        assert refusal(answer) == refused
        assert int(answer.headers["Retry-After"]) > 0
        released.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
    assert httpx.post(f"{served.url}/v1/contexts", files=upload).status_code == 200


def test_the_reader_ends_with_the_server(tiny_model, tiny_tokenizer, scenes, tmp_path):
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True) as server:
        assert post(server, long_body(scenes)).status_code == 200
        process = server.service._reader._process
        assert process is not None
        pid = process.pid
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}"):  # noqa: PTH110
        assert time.monotonic() < deadline
        time.sleep(0.05)
