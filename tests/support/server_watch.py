"""Watches a server from a process of its own, so that what else a test does takes none of its time.

    python tests/support/server_watch.py URL PID

/health is asked, by a client that keeps no connection, and a live session is driven, until stdin ends. Then stdout gets
a JSON object: seconds of each /health (`health`) and of each frame (`steps`), bytes of the processes of the session of
process PID (`memory`), and what went wrong (`failures`).
"""

import json
import sys
import threading
import time
from collections.abc import Callable

import httpx
from attack import session_bytes

from terra.serving.client import Client

_stop = threading.Event()
_seen: dict[str, list] = {"health": [], "memory": [], "steps": [], "failures": []}


def watch(url: str, pid: int) -> None:
    """Ask /health, and measure memory."""
    while not _stop.is_set():
        begun = time.monotonic()
        answer = httpx.get(f"{url}/health", timeout=60)
        _seen["health"].append(time.monotonic() - begun)
        if answer.json()["status"] == "failed":
            _seen["failures"].append(answer.text)
        _seen["memory"].append(session_bytes(pid)[0])
        time.sleep(0.1)


def drive(url: str, pid: int) -> None:
    """Drive a live session, a frame at a time."""
    with Client(url) as client, client.open(scene="day") as session:
        print("driving", flush=True)
        expected = 3
        while not _stop.is_set():
            begun = time.monotonic()
            frame = session.step(steering=0.01, speed=5.0)
            _seen["steps"].append(time.monotonic() - begun)
            if frame.index != expected:
                _seen["failures"].append(f"frame {frame.index} in place of {expected}")
            expected += 1
            time.sleep(0.05)


def noted(work: Callable[[str, int], None]) -> None:
    """Do the work; an exception is noted."""
    try:
        work(sys.argv[1], int(sys.argv[2]))
    except Exception as error:
        _seen["failures"].append(f"{work.__name__}: {error!r}")
        print("failed", flush=True)


if __name__ == "__main__":
    threads = [threading.Thread(target=noted, args=(work,)) for work in (watch, drive)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    _stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(_seen), flush=True)
