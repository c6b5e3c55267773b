"""A server of its own process under attack: it answers, drives, keeps its memory and its log, and finishes its jobs.

The attacks are the corpus's trajectories, pictures and videos, sent as video jobs and uploads, and idle connections. To
a server with the shipped model and default settings: large pictures, half-sent bodies, long trajectories, a full disk.
What is shown, and bounded: /health (s), the server's memory, the log's bytes a minute, frames of a live session.
"""

import io
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import Case, Place, corpus, poses_document
from PIL import Image
from tiny_serving import scene_folder

from terra.serving.client import Client

pytestmark = pytest.mark.hostile

HEALTH_SECONDS, MOST_BYTES, LOG_BYTES_A_MINUTE = 1.0, 2 * 10**9, 10**6
MOST_SENT = 64 << 20  # larger files of the corpus would take longer to send than to refuse
AT_ONCE = 4


@dataclass
class Attacked:
    """A server under attack; `common` has the corpus's models."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    common: Path


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    """A server of the corpus's models."""
    common = tmp_path / "common"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "support")}
    subprocess.run([sys.executable, "-c", MAKE, str(common)], env=environment, check=True)  # which starts threads
    scene_folder(_made(tmp_path / "scenes"))
    settings = {
        "tokenizer.pretrained": common / "tokenizer", "world_model.pretrained": common / "world_model",
        "scenes": tmp_path / "scenes", "data": tmp_path / "data", "engine": "persistence", "port": 0,
        "uploads.max_frames": 4, "uploads.contexts": 256, "uploads.contexts_per_client": 256,
    }  # fmt: skip
    with serving(tmp_path, **settings) as server:
        yield server


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Attacked]:
    """A server of the shipped model with default settings, but for the engine, which copies frames."""
    with serving(tmp_path, data=tmp_path / "data", engine="persistence", port=0) as server:
        yield server


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Attacked]:
    log = folder / "log"
    words = [f"{key}={value}" for key, value in settings.items()]
    with log.open("w") as errors:
        command = [sys.executable, "-m", "terra", "serve", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        found = (re.search(r"open (http://\S+)", line) for line in process.stdout)
        url = next((each[1] for each in found if each), "")
        assert url, log.read_text()
        yield Attacked(url, process, log, folder / "common")
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
        f"{len(seen['steps'])} live frames, the slowest after {max(seen['steps']):.2f} s; "
        f"the machine's load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
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


@pytest.mark.parametrize("size", [(8192, 4096), (4096, 3500)], ids=["beyond the bound", "at the bound"])
def test_seven_large_pictures(shipped: Attacked, size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(file, "png")
    files = [("files", (f"{number}.png", file.getvalue())) for number in range(7)]

    def send(_: int) -> list[int]:
        ends, statuses = time.monotonic() + 20, []
        while time.monotonic() < ends:
            statuses.append(post(f"{shipped.url}/v1/contexts", files=files))
        return statuses

    def attack() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = Counter(status for statuses in pool.map(send, range(AT_ONCE)) for status in statuses)
        print(dict(answers))
        assert set(answers) <= ({400} if size == (8192, 4096) else {200, 429})

    under(shipped, attack)


def test_half_sent_bodies(shipped: Attacked) -> None:
    size = 4 << 20
    head = "POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 100)
    address = ("127.0.0.1", int(shipped.url.rpartition(":")[2]))

    def half_send(number: int) -> socket.socket:
        connection = socket.create_connection(address, source_address=(f"127.0.0.{1 + number % 3}", 0))
        connection.settimeout(30)
        with suppress(OSError):
            connection.sendall(sent)
        return connection

    def attack() -> None:
        with ThreadPoolExecutor(16) as pool, ExitStack() as held:
            for connection in pool.map(half_send, range(600)):
                held.enter_context(connection)
            job = json.dumps({"scene": "day", "trajectory_name": "left", "num_frames": 6}).encode()
            assert post(f"{shipped.url}/v1/videos", content=job) == 200  # a small body needs no room
            time.sleep(20)

    under(shipped, attack)


def test_eight_long_trajectories(shipped: Attacked) -> None:
    poses = [[row / 50, row / 10, 0.0, 0.0] for row in range(145_000)]
    body = json.dumps({"scene": "day", "trajectory": poses_document(poses=poses), "num_frames": 20}).encode()
    assert 3_900_000 < len(body) < 4 << 20

    def attack() -> None:
        begun = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = Counter(pool.map(lambda _: post(f"{shipped.url}/v1/videos", content=body), range(8)))
        print(dict(answers), f"after {time.monotonic() - begun:.1f} s")
        assert answers == {200: 8}

    under(shipped, attack)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MB."""
    folder = _made(tmp_path / "disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    accepted: list[str] = []
    with (
        serving(tmp_path, data=small_disk / "data", engine="persistence", port=0) as server,
        Client(server.url) as asks,
    ):

        def ask(count: int) -> Counter[int]:
            answers: Counter[int] = Counter()
            for _ in range(count):
                job = {"scene": "day", "trajectory_name": "left", "num_frames": 20}
                answer = httpx.post(f"{server.url}/v1/videos", json=job, timeout=60)
                answers[answer.status_code] += 1
                if answer.status_code == 200:
                    accepted.append(answer.json()["id"])
            return answers

        def attack() -> None:
            answers = ask(12)
            filler = small_disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
            reasons = set()
            ends = time.monotonic() + 60
            while time.monotonic() < ends:
                answers += ask(1)
                status = httpx.get(f"{server.url}/health").json()
                reasons.add(status.get("reason"))
                time.sleep(0.5)
            print(dict(answers), reasons)
            assert any(each is not None and "disk is full" in each for each in reasons)
            assert set(answers) <= {200, 429, 503}
            filler.unlink()

        under(server, attack)
        assert accepted
        assert {asks.video(each)["status"] for each in accepted} == {"completed"}
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
