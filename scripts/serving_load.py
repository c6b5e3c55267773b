"""Load a running terra-serve: many live sessions for a time, the quiet routes beside them, then opening and closing.

    terra-serve live.sessions_per_client=64 &
    python scripts/serving_load.py sessions=64 seconds=300 cycles=1000
    python scripts/serving_load.py sessions=8 seconds=20 cycles=50 pid=SERVER_PID    its memory too

Prints one JSON object. Exit code 1: a frame was lost, reordered or repeated, or a session failed.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

DEFAULTS: dict[str, Any] = {
    "url": "http://127.0.0.1:8000",
    "api_key": "",
    "scene": "day",
    "sessions": 8,
    "seconds": 20.0,
    "cycles": 50,
    "pid": 0,
}


@dataclass
class Tally:
    """What was seen by all sessions together."""

    frames: int = 0
    wrong: int = 0
    failed: int = 0
    gaps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


async def load(settings: dict[str, Any]) -> dict[str, Any]:
    """Run all parts and report."""
    tally, started = Tally(), time.monotonic()
    ends = started + settings["seconds"]
    watching = asyncio.create_task(watch(settings, tally, started))
    await asyncio.gather(*(drive(settings, tally, number, ends) for number in range(settings["sessions"])))
    seconds = time.monotonic() - started
    cycled = time.monotonic()
    await cycle(settings, tally)
    cycled = time.monotonic() - cycled
    await asyncio.sleep(1)
    watching.cancel()
    await asyncio.wait({watching})
    return report(settings, tally, seconds, cycled)


async def drive(settings: dict[str, Any], tally: Tally, number: int, ends: float) -> None:
    """One session, whose frames must come one after the other; it steers a little, another way each time."""
    try:
        async with connection(settings) as socket:
            expected = await start(socket, settings, seed=number)
            last, count = time.monotonic(), 0
            await say(socket, type="control", steering=0.05 * (number % 5 - 2), speed=5.0)
            while time.monotonic() < ends:
                message = await socket.recv()
                if isinstance(message, str):
                    tally.failed += json.loads(message)["type"] in ("error", "closed")
                    continue
                now = time.monotonic()
                header = json.loads(message[4 : 4 + int.from_bytes(message[:4], "big")])
                tally.wrong += header["index"] != expected
                expected, count = header["index"] + 1, count + 1
                await say(socket, type="ack", index=header["index"])
                if header["generated"]:
                    tally.frames += 1
                    tally.gaps.append(now - last)
                    tally.latencies.append(header["latency_ms"] / 1000)
                    last = now
                if count % 20 == 0:
                    await say(socket, type="control", steering=0.02 * (count // 20 % 5 - 2), speed=5.0)
    except (OSError, ConnectionClosed, KeyError) as error:
        tally.failed += 1
        print(f"session {number}: {error}", file=sys.stderr)


async def cycle(settings: dict[str, Any], tally: Tally) -> None:
    """Open a session, take its first frame, and close it, again and again; a third of them break off."""
    for number in range(settings["cycles"]):
        try:
            async with connection(settings) as socket:
                await start(socket, settings, seed=number)
                await socket.recv()
                if number % 3 == 0:
                    await say(socket, type="step")
                    while isinstance(await socket.recv(), bytes):
                        break
                elif number % 3 == 1:
                    socket.transport.abort()
                else:
                    await say(socket, type="close")
        except (OSError, ConnectionClosed) as error:
            if number % 3 != 1:
                tally.failed += 1
                print(f"cycle {number}: {error}", file=sys.stderr)


async def watch(settings: dict[str, Any], tally: Tally, started: float) -> None:
    """Time /health ten times a second, and the server's memory once a second."""
    page = Path(f"/proc/{settings['pid']}/status")
    async with httpx.AsyncClient(base_url=settings["url"], timeout=60) as http:
        count = 0
        while True:
            asked = time.perf_counter()
            (await http.get("/health")).raise_for_status()
            tally.health.append(time.perf_counter() - asked)
            if settings["pid"] and count % 10 == 0:
                line = next(line for line in page.read_text().splitlines() if line.startswith("VmRSS"))
                tally.memory.append((time.monotonic() - started, int(line.split()[1]) / 1024))
            count += 1
            await asyncio.sleep(0.1)


def connection(settings: dict[str, Any]) -> connect:
    """A WebSocket to the server."""
    headers = {"Authorization": f"Bearer {settings['api_key']}"} if settings["api_key"] else {}
    url = settings["url"].replace("http", "ws", 1) + "/v1/live"
    return connect(url, additional_headers=headers, compression=None, max_size=64 << 20, open_timeout=60)


async def start(socket: ClientConnection, settings: dict[str, Any], seed: int) -> int:
    """Open a session; the index of the frame that comes first."""
    await say(socket, type="open", scene=settings["scene"], seed=seed)
    opened = json.loads(await socket.recv())
    if opened["type"] != "opened":
        raise OSError(opened["message"])
    return 0


async def say(socket: ClientConnection, **message: Any) -> None:
    """Send one message."""
    await socket.send(json.dumps(message))


def report(settings: dict[str, Any], tally: Tally, seconds: float, cycled: float) -> dict[str, Any]:
    """The numbers; memory grows from the first third of the time, when all is warm, to the end."""
    result: dict[str, Any] = {
        "sessions": settings["sessions"],
        "seconds": round(seconds, 1),
        "frames": tally.frames,
        "frames_per_second": round(tally.frames / seconds, 2),
        "lost_or_reordered": tally.wrong,
        "failed": tally.failed,
        "between_frames_ms": milliseconds(tally.gaps),
        "latency_ms": milliseconds(tally.latencies),
        "health_ms": milliseconds(tally.health),
        "cycles": settings["cycles"],
        "cycles_per_second": round(settings["cycles"] / cycled, 2) if settings["cycles"] else None,
    }
    if tally.memory:
        warm = [mib for at, mib in tally.memory if at >= settings["seconds"] / 3] or [tally.memory[-1][1]]
        after = [mib for at, mib in tally.memory if at >= seconds] or [warm[-1]]
        driving = [mib for at, mib in tally.memory if settings["seconds"] / 3 <= at <= seconds] or warm
        result["memory_mib"] = {
            "warm": round(warm[0], 1),
            "growth_driving": round(driving[-1] - driving[0], 1),
            "growth_cycles": round(tally.memory[-1][1] - after[0], 1),
        }
    return result


def milliseconds(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(1000 * p50, 2), "p99": round(1000 * p99, 2), "max": round(1000 * max(values), 2)}


def read_settings(arguments: list[str]) -> dict[str, Any]:
    """key=value words over the defaults; exits with 2 for others."""
    settings = dict(DEFAULTS)
    for argument in arguments:
        name, is_pair, value = argument.partition("=")
        try:
            settings[name] = type(DEFAULTS[name])(value)
        except (KeyError, ValueError):
            names = " ".join(f"{key}={default}" for key, default in DEFAULTS.items())
            print(f"error: expected {names}, got {argument}", file=sys.stderr)
            sys.exit(2)
        if not is_pair:
            sys.exit(2)
    return settings


def main() -> None:
    """See the module's docstring."""
    result = asyncio.run(load(read_settings(sys.argv[1:])))
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["lost_or_reordered"] or result["failed"] else 0)


if __name__ == "__main__":
    main()
