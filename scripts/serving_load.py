"""Load-tests `terra serve` against its limits: prints a line for each, and writes OUTPUT/serving_load.json.

    python scripts/serving_load.py --output outputs/load                                   64 sessions for 5 minutes
    python scripts/serving_load.py --output outputs/load --sessions 16 --seconds 20 --cycles 60 engine=hf

The script starts a server of its own over a tiny model of random weights; further arguments are those of `terra serve`.
With --url it loads a running server, whose settings must allow it (live.sessions, live.sessions_per_client).

    frames    all sessions drive at once: no frame is lost, repeated or out of order, none fails
    others    one client uploads contexts, makes videos of them, drives, rewinds and forks meanwhile: all of it works
    memory    the server's memory meanwhile: flat after the first third
    routes    99 % of the answers of routes that generate nothing come within 100 ms meanwhile
    slow      frames come as often while one client in 16 acknowledges frames without reading them
    cycles    sessions are opened and closed, some broken off: neither memory nor sessions, tasks, files are left

Exit code 1: a limit is missed.

    python scripts/serving_load.py --output outputs/live --drivers 1,4,16 --seconds 60 model=folder model.path=DIR

With --drivers the server is one over the given model, and the drives alone are measured, for each number of drivers:
frames a second, milliseconds from a key to the picture that it steers, the engine's passes and the server's processor
time a frame, and how idle the GPU is by nvidia-smi.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from terra.benchmark.model import make_random_model
from terra.serving.client import Client
from terra.serving.live_client import ServerError
from terra.serving.messages import read_frame
from terra.trajectory import save_poses
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.config import EncoderDecoderConfig, QuantizerConfig

HEIGHT, WIDTH = 12, 16  # pixels, of 12 tokens
ROUTES = ("/health", "/v1/models", "/v1/scenes", "/v1/scenes/{scene}/image", "/v1/videos", "/metrics", "/")
ROUTE_SECONDS = 0.1  # bar for 99 % of the answers
PROBE_EVERY = 0.05
FLAT_MIB_A_MINUTE = 1.0
FILES_MORE = 2  # pipes that a first job's worker keeps
SLOW_RATIO = 1.1  # of the time between two frames, with slow readers and without
CYCLE_MIB = 8.0  # that may be left after the last nine tenths of the cycles: allocators keep some
WARM_SECONDS = 15.0  # of each number of drivers, before drives are measured: contexts are encoded, windows slide
GONE_SECONDS = 10.0  # in which what was closed must be gone


@dataclass
class Tally:
    """Counts and times (s) of all clients.

    `gaps` are the times between two generated frames of a session, `latencies` those from a frame's action to its
    picture in the server, `keys` those from a key to its picture at the client; `rates` has each session's frames a
    second.
    """

    frames: int = 0
    disorder: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    keys: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The server under load, and the scene to drive in."""

    url: str
    api_key: str
    scene: str

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header, if the target has a key."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def connect(self, **arguments: Any) -> connect:
        """Open a WebSocket to the server."""
        url = self.url.replace("http", "ws", 1) + "/v1/live"
        common: dict[str, Any] = {"additional_headers": self.headers, "compression": None, "open_timeout": 60}
        return connect(url, **common, **arguments)


def main() -> None:
    """Parse the command line, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the report and the server's files")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="of driving")
    parser.add_argument("--cycles", type=int, default=1000, help="sessions opened and closed")
    parser.add_argument("--url", help="a server that runs; without it one is started")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--scene", default="day")
    parser.add_argument("--drivers", type=counts, metavar="N,N", help="measure drives of so many at once, no limits")
    arguments, overrides = parser.parse_known_args()
    if arguments.url and overrides:
        parser.error(f"expected no settings of a server that runs, got {overrides}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    work = drives if arguments.drivers else load
    if arguments.url:
        report = asyncio.run(work(Target(arguments.url, arguments.api_key, arguments.scene), arguments))
    else:
        if arguments.drivers:
            settings = drives_settings(arguments.output, max(arguments.drivers))
        else:
            settings = tiny_settings(arguments.output, arguments.sessions, overrides)
        with own_server(settings, overrides) as url:
            report = asyncio.run(work(Target(url, "", arguments.scene), arguments))
    (arguments.output / "serving_load.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, bar in report.items():
        print(f"{'ok  ' if bar['ok'] else 'MISS'} {name:11}{bar['says']}")
    sys.exit(0 if all(bar["ok"] for bar in report.values()) else 1)


def counts(text: str) -> list[int]:
    """Parse numbers such as "1,4,16"."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


async def drives(target: Target, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Drive by each number of drivers at once; returns each one's numbers."""
    for number in arguments.drivers:  # contexts are encoded, windows have slid
        await drive_all(target, number, WARM_SECONDS)
    report = {}
    for number in arguments.drivers:
        with httpx.Client(base_url=target.url, headers=target.headers, timeout=60) as http:
            before, busy = read_metrics(http), GpuBusy()
            tally = await drive_all(target, number, arguments.seconds)
            shares, after = busy.stop(), read_metrics(http)
        cpu_seconds, passes = (after[name] - before[name] for name in ("cpu_seconds", "passes"))
        report[f"drivers {number}"] = drives_row(tally, cpu_seconds=cpu_seconds, passes=passes, busy=shares)
    return report


def drives_row(tally: Tally, *, cpu_seconds: float, passes: float, busy: Sequence[float]) -> dict[str, Any]:
    """The numbers of some drives at once; `busy` are samples of the GPU's busy share in percent, if there is one.

    `passes` are the engine's, counted in each session, 0 for an engine that counts none; those of frames that no client
    waits for any more are among them.
    """
    rates, keys, gaps = sorted(tally.rates), milliseconds(tally.keys), milliseconds(tally.gaps)
    frames = max(tally.frames, 1)
    cpu_ms, passes_a_frame = 1000 * cpu_seconds / frames, round(passes / frames, 1) or None
    idle = None if not busy else round(100 - float(np.mean(busy)), 1)
    says = (
        f"{min(rates, default=0):.1f} to {max(rates, default=0):.1f} frames/s each, {sum(rates):.1f} total; "
        f"key to picture {keys.get('p50', 0):.0f} ms (p99 {keys.get('p99', 0):.0f}); between frames "
        f"{gaps.get('p50', 0):.1f} ms (p99 {gaps.get('p99', 0):.1f}); "
        f"{passes_a_frame or 'not known how many'} passes a frame; "
        f"{cpu_ms:.1f} ms of processors a frame; GPU idle "
        f"{'not known' if idle is None else f'{idle:.0f} %'}; {tally.disorder} lost, {tally.failures.total()} failed"
    )
    return {
        "ok": tally.frames > 0 and tally.disorder == 0 and not tally.failures,
        "says": says,
        "frames": tally.frames,
        "frames_per_second": [round(rate, 2) for rate in rates],
        "key_to_picture_ms": {"count": len(tally.keys), **keys},
        "between_frames_ms": gaps,
        "latency_ms": milliseconds(tally.latencies),
        "passes_a_frame": passes_a_frame,
        "cpu_ms_a_frame": round(cpu_ms, 2),
        "gpu_idle_percent": idle,
        "failures": tally.failures,
    }


class GpuBusy:
    """Samples of nvidia-smi: how much of the time before, in percent, a kernel was at work; none without a GPU."""

    def __init__(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={visible.split(',')[0]}")
        self._process = None
        with suppress(FileNotFoundError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def stop(self) -> list[float]:
        """End sampling, and return the samples but for the first second's."""
        if self._process is None:
            return []
        self._process.terminate()
        lines, _ = self._process.communicate()
        return [float(line) for line in lines.splitlines()[5:] if line.strip().isdigit()]


async def load(target: Target, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run all parts, one after another; returns each limit's verdict and numbers."""
    sessions, seconds = arguments.sessions, arguments.seconds
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(processes, probe, target, 0.0) for _ in range(2)))  # both start
        before = await settled(target)
        probing = loop.run_in_executor(processes, probe, target, seconds)
        others = loop.run_in_executor(processes, use_all, target, seconds, arguments.output / "others")
        driven = await drive_all(target, sessions, seconds)
        samples, answers = await probing
        done = await others
    after = await settled(target)
    report = {
        "frames": frames_bar(driven, sessions, seconds),
        "others": others_bar(done),
        "memory": memory_bar(samples, seconds, before, after),
        "routes": routes_bar(answers),
        "slow": await slow_part(target, sessions, seconds / 10),
        "cycles": await cycles_part(target, arguments.cycles),
    }
    return report


def probe(target: Target, seconds: float) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Sample the server's metrics every second, and each route's response time; runs in a process of its own."""
    samples: list[dict[str, float]] = []
    answers: dict[str, list[float]] = {route: [] for route in ROUTES}
    with httpx.Client(base_url=target.url, headers=target.headers, timeout=60) as http:
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds:
            if not samples or now - samples[-1]["at"] >= 1:
                samples.append({"at": now, **read_metrics(http)})
            for route in ROUTES:
                asked = time.perf_counter()
                http.get(route.format(scene=target.scene)).raise_for_status()
                answers[route].append(time.perf_counter() - asked)
                time.sleep(PROBE_EVERY)
    return samples, answers


def use_all(target: Target, seconds: float, folder: Path) -> Counter[str]:
    """Use what is no plain drive, one after another, in a process of its own; counts what was done, and failures.

    A round: pictures are uploaded; a video of them is queued, and deleted once it is there; a session from them
    is driven, rewound and forked; its fork is driven.
    """
    counts: Counter[str] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"{index}.png" for index in range(3)]
    save_noise(pictures, seed=1)
    with Client(target.url, target.api_key or None) as client:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                context = client.create_context(*pictures)["id"]
                jobs = [client.create_video(context=context, trajectory=drive_document(), num_frames=6)]
                jobs.append(client.create_video(scene=target.scene, trajectory_name="straight", num_frames=6))
                with client.open(context=context, seed=counts["rounds"]) as live:
                    frames = [live.step(steering=0.01, speed=5.0).index for _ in range(5)]
                    live.rewind(frames[1])
                    frames.append(live.step(steering=0.0, speed=5.0).index)
                    fork = live.fork(frames[1])
                with client.open(fork=fork) as live:
                    frames.append(live.step(steering=0.0, speed=5.0).index)
                counts["wrong frames"] += frames != [3, 4, 5, 6, 7, 5, 5]
                for job in jobs:
                    client.wait(job["id"], timeout=600)
                    client.download(job["id"], folder / "video.mp4")
                    client.delete_video(job["id"])
                counts["rounds"] += 1
            except ServerError as error:
                counts[f"failed: {error}"] += 1
    return counts


def drive_document() -> dict[str, Any]:
    """A straight drive at 5 m/s for 6 s, as a trajectory document."""
    return {
        "format": "terra-trajectory",
        "frame": "world",
        "axes": "x_y_heading_ccw",
        "units": {"position": "m", "angle": "rad", "time": "s"},
        "fps": 10.0,
        "poses": [[index / 10, index / 2, 0.0, 0.0] for index in range(60)],
    }


def others_bar(counts: Counter[str]) -> dict[str, Any]:
    """Check that all requests beside the drives were served."""
    failed = sum(count for name, count in counts.items() if name != "rounds")
    return {
        "ok": counts["rounds"] > 0 and failed == 0,
        "says": f"{counts['rounds']} rounds of an upload, two videos, a drive, a rewind and a fork; {failed} failed",
        "counts": counts,
    }


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Memory (MiB), processor time (s), open files, tasks, live sessions and the engine's passes of the server."""
    text = http.get("/metrics").raise_for_status().text
    found = dict(re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE))
    return {
        "memory_mib": float(found["process_resident_memory_bytes"]) / 2**20,
        "cpu_seconds": float(found["process_cpu_seconds_total"]),
        "files": float(found["process_open_fds"]),
        "tasks": float(found["terra_event_loop_tasks"]),
        "sessions": float(found["terra_live_sessions"]),
        "passes": float(found["terra_engine_pass_tokens_count"]),
    }


async def drive_all(target: Target, sessions: int, seconds: float) -> Tally:
    """Drive several sessions at once."""
    tally, ends = Tally(), time.monotonic() + seconds
    await asyncio.gather(*(noted(drive(target, tally, number, ends), tally) for number in range(sessions)))
    return tally


async def noted(work: Awaitable[None], tally: Tally) -> None:
    """Await a session, and count its failure, if any."""
    try:
        await work
    except (OSError, ConnectionClosed) as error:
        tally.failures[str(error)] += 1


async def drive(target: Target, tally: Tally, number: int, ends: float) -> None:
    """Drive one session, to the left and to the right in turns, and check that its frames arrive in order."""
    async with target.connect() as session:
        await start(session, target, seed=number)
        expected, turns, arrivals, is_left = 0, asyncio.Queue[float](), list[float](), False
        pressing = asyncio.create_task(press(session, turns, tally, number))
        try:
            while time.monotonic() < ends:
                message = await session.recv()
                if isinstance(message, str):
                    continue
                now = time.monotonic()
                header, _ = read_frame(message)
                index = header["index"]
                tally.disorder += index != expected
                expected = index + 1
                await say(session, type="ack", index=index)
                if not header["generated"]:
                    continue
                tally.frames += 1
                tally.latencies.append(header["latency_ms"] / 1000)
                arrivals.append(now)
                if (header["action"][-1][0] > 0) != is_left:
                    is_left = not is_left
                    turns.put_nowait(now)
        finally:
            pressing.cancel()
            await asyncio.gather(pressing, return_exceptions=True)
        tally.gaps += list(np.diff(arrivals))
        if len(arrivals) > 1:
            tally.rates.append((len(arrivals) - 1) / (arrivals[-1] - arrivals[0]))


async def press(session: ClientConnection, turns: "asyncio.Queue[float]", tally: Tally, number: int) -> None:
    """Steer to the other side at any moment between two frames, again and again, and note how long that takes.

    `turns` gets the arrival of each frame that is steered to another side than the one before.
    """
    rng = np.random.default_rng(number)
    for turn, side in enumerate(itertools.cycle((1, -1))):
        pressed = time.monotonic()
        await say(session, type="control", steering=0.02 * side, speed=5.0)
        arrived = await turns.get()
        if turn:  # before the first frame the engine has yet to read the context
            tally.keys.append(arrived - pressed)
        await asyncio.sleep(rng.uniform(0.1, 0.3))


async def start(session: ClientConnection, target: Target, seed: int) -> None:
    """Open a live session. Raises OSError with the server's reason if it refuses."""
    await say(session, type="open", scene=target.scene, seed=seed)
    opened = json.loads(await session.recv())
    if opened["type"] != "opened":
        raise OSError(opened["message"])


async def say(session: ClientConnection, **message: Any) -> None:
    """Send one message."""
    await session.send(json.dumps(message))


async def dawdle(target: Target, ends: float) -> None:
    """Acknowledge frames without reading them; the server may end such a session, and then another one begins."""
    while time.monotonic() < ends:
        with suppress(ConnectionClosed):
            await dawdle_once(target, ends)


async def dawdle_once(target: Target, ends: float) -> None:
    """Let the server generate and hold frames for one session."""
    address = urlsplit(target.url)
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    small.connect((address.hostname, address.port or 80))
    # No pings of its own: it reads no answer to them.
    async with target.connect(sock=small, max_queue=1, close_timeout=1, ping_interval=None) as session:
        await say(session, type="open", scene=target.scene)
        await say(session, type="control", steering=0.0, speed=5.0)
        index = 2
        while time.monotonic() < ends:
            await say(session, type="ack", index=index)
            index += 1
            await asyncio.sleep(0.05)


async def slow_part(target: Target, sessions: int, seconds: float) -> dict[str, Any]:
    """Drive without slow readers and with them, in turns."""
    num_slow = max(1, sessions // 16)
    tallies = {False: Tally(), True: Tally()}
    for is_slow in (False, True, False, True):
        ends = time.monotonic() + seconds
        tally = tallies[is_slow]
        slow = [dawdle(target, ends) for _ in range(num_slow * is_slow)]
        readers = [drive(target, tally, number, ends) for number in range(sessions - num_slow)]
        await asyncio.gather(*(noted(work, tally) for work in [*slow, *readers]))
    without, beside = (1000 * float(np.median(tallies[key].gaps)) for key in (False, True))
    failures = tallies[False].failures + tallies[True].failures
    disorder = tallies[False].disorder + tallies[True].disorder
    return {
        "ok": beside <= SLOW_RATIO * without and not failures and not disorder,
        "says": f"{beside:.1f} ms between frames beside {num_slow} slow readers, {without:.1f} ms without",
        "without": milliseconds(tallies[False].gaps),
        "beside": milliseconds(tallies[True].gaps),
        "failures": failures,
    }


async def cycles_part(target: Target, cycles: int) -> dict[str, Any]:
    """Measure what opened and closed sessions leave behind, after a tenth of them as warm-up."""
    tally, started = Tally(), time.monotonic()
    warm = cycles // 10
    await cycle(target, tally, range(warm))
    before = await settled(target)
    await cycle(target, tally, range(warm, cycles))
    after = await settled(target)
    left = {name: after[name] - before[name] for name in before}
    is_clean = left["sessions"] == left["tasks"] == 0 and left["files"] <= 0
    return {
        "ok": is_clean and left["memory_mib"] <= CYCLE_MIB and not tally.failures,
        "says": f"{cycles} opened and closed; left: {left['sessions']:g} sessions, {left['tasks']:g} tasks, "
        f"{left['files']:g} files, {left['memory_mib']:.1f} MiB; {tally.failures.total()} failed",
        "seconds": round(time.monotonic() - started, 1),
        "before": before,
        "after": after,
        "failures": tally.failures,
    }


async def cycle(target: Target, tally: Tally, numbers: range) -> None:
    """Open a session, take some of its frames, and close it in one of three ways, again and again."""

    async def one(number: int) -> None:
        async with target.connect() as session:
            await start(session, target, seed=number)
            await session.recv()
            if number % 3 == 0:
                await say(session, type="step")
                while not (isinstance(message := await session.recv(), bytes) and read_frame(message)[0]["generated"]):
                    pass
            elif number % 3 == 1:
                session.transport.abort()
            else:
                await say(session, type="close")

    for number in numbers:
        await noted(one(number), tally)


async def settled(target: Target) -> dict[str, float]:
    """The server's metrics once no session is left, or after a time limit."""
    ends = time.monotonic() + GONE_SECONDS
    with httpx.Client(base_url=target.url, headers=target.headers, timeout=60) as http:
        while read_metrics(http)["sessions"] and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        return read_metrics(http)


def frames_bar(tally: Tally, sessions: int, seconds: float) -> dict[str, Any]:
    """Check that every frame came, in order."""
    return {
        "ok": tally.frames > 0 and tally.disorder == 0 and not tally.failures,
        "says": f"{tally.frames} of {sessions} sessions in {seconds:g} s ({tally.frames / seconds:.1f}/s), "
        f"{tally.disorder} lost or out of order, {tally.failures.total()} sessions failed",
        "between_frames_ms": milliseconds(tally.gaps),
        "latency_ms": milliseconds(tally.latencies),
        "failures": tally.failures,
    }


def memory_bar(
    samples: Sequence[dict[str, float]], seconds: float, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """Check the slope of a line through the memory samples after the first third, and that no file stays open."""
    warm = [sample for sample in samples if sample["at"] >= seconds / 3]
    minutes, memory = [sample["at"] / 60 for sample in warm], [sample["memory_mib"] for sample in warm]
    slope = float(np.polyfit(minutes, memory, 1)[0])
    left = after["files"] - before["files"]
    return {
        "ok": slope <= FLAT_MIB_A_MINUTE and left <= FILES_MORE,
        "says": f"{slope:+.2f} MiB a minute, from {memory[0]:.0f} to {memory[-1]:.0f} MiB after the first third; "
        f"{before['files']:g} open files before, {after['files']:g} after",
        "before": before,
        "after": after,
        "samples": samples,
    }


def routes_bar(answers: dict[str, list[float]]) -> dict[str, Any]:
    """Check the 99th percentile of the slowest route's response times."""
    tails = {route: float(np.percentile(seconds, 99)) for route, seconds in answers.items()}
    worst = max(tails, key=lambda route: tails[route])
    return {
        "ok": tails[worst] < ROUTE_SECONDS,
        "says": f"p99 {1000 * tails['/health']:.1f} ms (/health), {1000 * tails[worst]:.1f} ms ({worst})",
        "routes_ms": {route: milliseconds(seconds) for route, seconds in answers.items()},
    }


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of seconds, in milliseconds."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(1000 * p50, 2), "p99": round(1000 * p99, 2), "max": round(1000 * max(values), 2)}


def tiny_settings(folder: Path, sessions: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of a server over random weights with room for the sessions; its caches are full early."""
    uses_vllm = not any(word.startswith("engine=") and word != "engine=vllm" for word in overrides)
    blocks = {"+engine.engine_args.num_gpu_blocks_override": 1024}  # of the KV cache, 32 MB
    return {
        "tokenizer.pretrained": make_tokenizer(folder / "tokenizer"),
        "world_model.pretrained": make_random_model("tiny", folder, torch.float32, "cpu"),
        "scenes": make_scene(folder / "scenes"),
        "data": folder / "data",
        "uploads.max_frames": 4,  # the tiny model's window holds 8
        "uploads.lifetime_seconds": 20,
        "uploads.contexts_per_client": 64,
        "live.sessions": sessions + 2,  # and those of `use_all`
        "live.sessions_per_client": sessions + 2,
        "live.history": 100,
        **(blocks if uses_vllm else {}),
    }


def drives_settings(folder: Path, drivers: int) -> dict[str, Any]:
    """Settings of a server with room for the drivers, over the model that the command line names."""
    sessions = {"live.sessions": drivers, "live.sessions_per_client": drivers}
    return {"data": folder / "data", "adapters": "{}", "worlds": "{}", "jobs.at_once": 1, **sessions}


@contextmanager
def own_server(settings: dict[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Run a `terra serve` with the given settings within the block; gives its address."""
    # oneDNN keeps code for each of up to 1024 shapes of batches that it has seen, some 100 MiB: fewer are full sooner.
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", **os.environ}
    words = ["port=0", *(f"{key}={value}" for key, value in settings.items()), *overrides]
    command = [sys.executable, "-m", "terra", "serve", *words]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"open (http://\S+)", line):
                yield found.group(1)
                return
        sys.exit("error: the server did not start")
    finally:
        server.terminate()
        server.communicate()


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of random weights for the tiny model."""
    if not folder.is_dir():
        shape = EncoderDecoderConfig(ch=32, z_channels=6, num_res_blocks=1, ch_mult=(1, 1, 1))
        config = LFQTokenizerConfig(
            encoder_decoder_config=shape,
            quantizer_config=QuantizerConfig(dim=6, codebook_size=64),
            image_size=(HEIGHT, WIDTH),
        )
        LFQTokenizer(config).save_pretrained(folder)
    return folder


def save_noise(paths: Sequence[Path], seed: int) -> None:
    """Write pictures of noise."""
    shape = (len(paths), HEIGHT, WIDTH, 3)
    for path, pixels in zip(paths, np.random.default_rng(seed).integers(0, 256, shape, np.uint8), strict=True):
        Image.fromarray(pixels).save(path)


def make_scene(folder: Path) -> Path:
    """Write the scene "day": noise pictures and a straight trajectory."""
    day = folder / "day"
    day.mkdir(parents=True, exist_ok=True)
    save_noise([day / f"{index}.png" for index in range(3)], seed=0)
    times = np.arange(0, 6, 0.1)
    save_poses(day / "straight.json", times, np.stack([5 * times, 0 * times], 1), 0 * times, 10.0)
    return folder


if __name__ == "__main__":
    main()
