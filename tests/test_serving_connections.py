"""Connections that send nothing, or little: the server closes them, and goes on answering all others."""

import gc
import logging
import socket
import time

import httpx
import pytest
from tiny_serving import Served

from terra.serving.logs import RateLimit

pytestmark = pytest.mark.slow

pytest_plugins = ["serving_fixtures"]


@pytest.fixture
def served(tiny_model, tiny_tokenizer, scenes, tmp_path):
    bounds = {"total": 24, "per_client": 16, "header_seconds": 1.0}
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, connections=bounds) as server:
        yield server


def opened(served: Served, count: int, sent: bytes = b"") -> list[socket.socket]:
    port = int(served.url.rpartition(":")[2])
    made = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for connection in made:
        connection.sendall(sent)
    return made


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_idle_connections_give_way_to_requests(served, sent):
    idle = opened(served, 100, sent)
    for _ in range(20):
        assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert all(map(is_closed, idle[:80]))
    for connection in idle:
        connection.close()


def test_a_burst_of_idle_connections_closes_none_whose_request_is_under_way(served):
    port, idle = int(served.url.rpartition(":")[2]), []
    loop = served.server.servers[0].get_loop()
    for _ in range(5):
        # While the loop stands, connections wait; then all are accepted at once, and the one in front is the oldest.
        loop.call_soon_threadsafe(time.sleep, 0.3)
        time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", port)) as asking:
            asking.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            idle += opened(served, 20)
            asking.settimeout(10)
            assert asking.recv(15) == b"HTTP/1.1 200 OK"
    time.sleep(0.5)
    assert all(map(is_closed, idle[:-16]))
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_connection_without_a_request_is_closed_in_time(served, sent):
    (connection,) = opened(served, 1, sent)
    begun = time.monotonic()
    with connection:
        assert is_closed(connection)
    assert time.monotonic() - begun > 0.5


def test_what_is_at_work_is_never_closed(served):
    with served.open() as talk:
        for _ in range(5):
            idle = opened(served, 30)
            talk.step()
            for connection in idle:
                connection.close()
        time.sleep(1.2)  # longer than a connection may take to its first request
        talk.step()
    with httpx.Client(base_url=served.url) as client:
        assert client.get("/health").status_code == 200
        time.sleep(1.2)
        assert client.get("/health").status_code == 200


def test_no_room_is_lost_when_live_sessions_end(served):
    for _ in range(40):
        with served.open() as talk:
            talk.step()
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_client_keeps_as_many_contexts_as_it_may(tiny_model, tiny_tokenizer, scenes, tmp_path):
    picture = next((scenes / "day").glob("*.png")).read_bytes()
    limits = {"contexts_per_client": 2}
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True, uploads=limits) as server:
        answers = [
            httpx.post(f"{server.url}/v1/contexts", files=[("files", ("a.png", picture))]).status_code for _ in range(3)
        ]
    assert answers == [200, 200, 429]


def test_a_flood_of_like_messages_is_cut_and_counted(monkeypatch):
    now = 0.0
    monkeypatch.setattr("terra.serving.logs.time.monotonic", lambda: now)
    limit, shown = RateLimit(), []
    for index in range(1001):
        now = index / 100
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "odd request %d", (index,), None)
        if limit.filter(record):
            shown.append(record.getMessage())
    assert shown == [*(f"odd request {index}" for index in range(10)), "odd request 1000 (990 more like it)"]
    other = logging.LogRecord("terra", logging.INFO, "", 0, "open %s", ("here",), None)
    assert limit.filter(other)


@pytest.fixture
def frozen():
    """What exists is no garbage, as `terra serve` has it, too."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.hostile
def test_two_thousand_idle_connections(tiny_model, tiny_tokenizer, scenes, tmp_path, frozen):
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True) as server, server.open() as talk:
        idle, slowest = [], 0.0
        for _ in range(20):
            idle += opened(server, 100, b"GET / HTTP/1.1\r\n")
            begun = time.monotonic()
            assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
            slowest = max(slowest, time.monotonic() - begun)
            talk.step()
        print(f"slowest /health: {slowest:.3f} s")
        assert slowest < 1
        for connection in idle:
            connection.close()
