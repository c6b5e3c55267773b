"""A server of its own process under attack: it answers, drives, keeps its memory and its log, and finishes its jobs.

The attacks are the corpus's trajectories, pictures and videos, sent as video jobs and uploads, and idle connections.
What is shown, and bounded by: /health (s), the server's memory, the log's bytes a minute, frames of a live session.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import Case, Place, corpus, poses_document
from tiny_serving import scene_folder

from terra.serving.client import Client

pytestmark = pytest.mark.hostile

HEALTH_SECONDS, MOST_BYTES, LOG_BYTES_A_MINUTE = 1.0, 2 * 10**9, 10**6
MOST_SENT = 64 << 20  # larger files of the corpus would take longer to send than to refuse
AT_ONCE = 4


@dataclass
class Attacked:
    """A server under attack."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    common: Path


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    common, log = tmp_path / "common", tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "support")}
    subprocess.run([sys.executable, "-c", MAKE, str(common)], env=environment, check=True)  # which starts threads
    scene_folder(_made(tmp_path / "scenes"))
    settings = {
        "tokenizer.pretrained": common / "tokenizer", "world_model.pretrained": common / "world_model",
        "scenes": tmp_path / "scenes", "data": tmp_path / "data", "engine": "persistence", "port": 0,
        "uploads.max_frames": 4, "uploads.contexts": 256, "uploads.contexts_per_client": 256,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    with log.open("w") as errors:
        command = [sys.executable, "-m", "terra", "serve", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        found = (re.search(r"open (http://\S+)", line) for line in process.stdout)
        url = next((each[1] for each in found if each), "")
        assert url, log.read_text()
        yield Attacked(url, process, log, common)
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(60) == 0


MAKE = "import sys; from pathlib import Path; from corpus import make_common; make_common(Path(sys.argv[1]))"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def under(attacked: Attacked, attack: Callable[[], object]) -> None:
    """Attack, watch, and judge; jobs that were accepted are made in the end."""
    script = Path(__file__).parent / "support/server_watch.py"
    command = [sys.executable, str(script), attacked.url, str(attacked.process.pid)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "driving\n"
    begun = time.monotonic()
    try:
        attack()
    finally:
        minutes = (time.monotonic() - begun) / 60
        output, _ = watcher.communicate()
    seen = json.loads(output.splitlines()[-1])
    ends = time.monotonic() + 300
    with Client(attacked.url) as client:
        while waiting := [job for job in client.videos(limit=100) if job["status"] in ("queued", "in_progress")]:
            assert time.monotonic() < ends, waiting
            time.sleep(0.5)
        assert client.create_video(scene="day", trajectory_name="left", num_frames=6)["id"]
    logged = attacked.log.stat().st_size
    print(
        f"{minutes * 60:.0f} s; slowest /health {max(seen['health']):.2f} s of {len(seen['health'])}, "
        f"{max(seen['memory']) / 1e6:.0f} MB, {logged / max(minutes, 1):.0f} bytes a minute logged, "
        f"{len(seen['steps'])} live frames, the slowest after {max(seen['steps']):.2f} s"
    )
    assert not seen["failures"]
    assert max(seen["health"]) < HEALTH_SECONDS
    assert max(seen["memory"]) < MOST_BYTES
    assert logged < LOG_BYTES_A_MINUTE * max(minutes, 1)
    assert len(seen["steps"]) > 10
    assert "Traceback" not in attacked.log.read_text()


def send_all(attacked: Attacked, groups: str, send: Callable[[Client, Path, int], int], folder: Path) -> Counter[int]:
    """Send the files of the corpus's classes, some at once; counts the answers by status."""

    def one(numbered: tuple[int, Case]) -> int:
        number, case = numbered
        place = Place(folder / f"{number}/inputs", folder / f"{number}/work", attacked.common)
        for path in (place.inputs, place.work):
            path.mkdir(parents=True)
        given = case.make(place)
        path = next(iter(given.values())) if isinstance(given, dict) else None
        if isinstance(path, Path) and path.is_dir():
            path = next((each for each in sorted(path.iterdir()) if each.is_file()), None)
        if not isinstance(path, Path) or not path.is_file() or path.stat().st_size > MOST_SENT:
            return 0
        with Client(attacked.url) as client:
            return send(client, path, number)

    cases = [case for case in corpus(0) if re.fullmatch(groups, case.group)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = Counter(pool.map(one, enumerate(cases)))
    print(dict(answers))
    assert sum(answers.values()) - answers[0] > len(cases) / 2
    assert set(answers) <= {0, 200, 201, 202, 400, 404, 408, 413, 415, 422, 429, 503}
    return answers


def post(url: str, content: bytes | None = None, **arguments: Any) -> int:
    headers = {} if content is None else {"Content-Type": "application/json"}
    return httpx.post(url, content=content, headers=headers, timeout=120, **arguments).status_code


def test_trajectories_that_grow(attacked: Attacked, tmp_path: Path) -> None:
    def send(client: Client, path: Path, number: int) -> int:
        text = path.read_bytes()
        if number % 2:
            form = {"num_frames": "6"}
            picture = attacked.common / "context/0.png"
            files = [("input_reference", ("0.png", picture.read_bytes(), "image/png"))]
            files.append(("trajectory", (path.name, text, "application/json")))
            return post(f"{attacked.url}/v1/videos", data=form, files=files)
        body = b'{"scene": "day", "num_frames": 6, "trajectory": ' + text + b"}"
        return post(f"{attacked.url}/v1/videos", content=body)

    under(attacked, lambda: send_all(attacked, "trajectory JSON", send, tmp_path / "sent"))


def test_pictures_and_videos_that_unpack(attacked: Attacked, tmp_path: Path) -> None:
    def send(client: Client, path: Path, number: int) -> int:
        name = path.name.encode(errors="replace").decode()
        return post(f"{attacked.url}/v1/contexts", files=[("files", (name, path.read_bytes()))])

    under(attacked, lambda: send_all(attacked, "pictures|videos", send, tmp_path / "sent"))


def test_idle_connections(attacked: Attacked) -> None:
    address = ("127.0.0.1", int(attacked.url.rpartition(":")[2]))

    def hold() -> None:
        idle: list[socket.socket] = []
        ends = time.monotonic() + 60
        for _ in range(2000):
            idle.append(socket.create_connection(address))
            idle[-1].sendall(b"GET / HTTP/1.1\r\n")
        while time.monotonic() < ends:
            time.sleep(0.5)
        for connection in idle:
            connection.close()

    under(attacked, hold)


def test_a_flood_of_jobs_and_garbage(attacked: Attacked) -> None:
    def flood(number: int) -> list[int]:
        ends, statuses = time.monotonic() + 60, []
        bodies: Sequence[bytes] = (
            json.dumps({"scene": "day", "trajectory_name": "left", "num_frames": 20}).encode(),
            json.dumps({"scene": "day", "trajectory": poses_document(), "num_frames": 10**9}).encode(),
            b"[" * 100_000,
            os.urandom(1000),
        )
        while time.monotonic() < ends:
            body = bodies[(len(statuses) + number) % len(bodies)]
            statuses.append(post(f"{attacked.url}/v1/videos", content=body))
        return statuses

    def attack() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = Counter(status for statuses in pool.map(flood, range(AT_ONCE)) for status in statuses)
        print(dict(answers))
        assert set(answers) <= {200, 201, 202, 400, 413, 422, 429, 503}

    under(attacked, attack)
