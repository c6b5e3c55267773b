"""Measures what live driving adds to a frame: the same engine and actions over a WebSocket and as a bare session.

    python scripts/serving_overhead.py                                              the model that ships
    python scripts/serving_overhead.py --rounds 3 --frames 24 engine=hf

Further arguments are those of `terra serve`. The script measures a frame's median time in three ways:

    live    from one frame's arrival at a client, which acknowledges it, to the next one's
    bare    a `session.step`: an action in, tokens out
    shown   a `session.step` while the frame before is decoded and encoded in the server's threads

The difference of live and shown is the server's own: orders, actions, headers, network, the other process. Its limit is
15 ms; the difference of live and bare is printed, too. Decoding does not slow the next frame if a core is free.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from websockets.sync.client import connect

from terra.cli import command
from terra.serving.messages import read_frame

BAR_SECONDS = 0.015


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, after one that warms up")
    parser.add_argument("--frames", type=int, default=20, help="of a turn")
    parser.add_argument("--scene", default="day")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments, overrides = parser.parse_known_args()
    sys.argv = [sys.argv[0], "port=0", *overrides]
    reports: list[dict[str, Any]] = []

    def job(config: DictConfig) -> None:
        reports.append(measure(config, arguments.scene, arguments.rounds, arguments.frames))

    command("serve", job)
    (report,) = reports
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    says = "{live_ms:.1f} ms a frame, {added_ms:+.1f} to frames shown, {added_to_bare_ms:+.1f} to bare tokens"
    print(f"{'ok  ' if report['ok'] else 'MISS'} overhead {says.format(**report)}")
    sys.exit(0 if report["ok"] else 1)


def measure(config: DictConfig, scene: str, rounds: int, frames: int) -> dict[str, Any]:
    """Serve and measure in one process; the client is another."""
    from terra.config.files import plain
    from terra.serving.run import Server, bind, check, load
    from terra.serving.settings import ServeSettings
    from tokenizer.settings import checked

    settings = checked(ServeSettings, plain(config))
    service = load(check(settings))

    async def turns() -> dict[str, Any]:
        server = Server(service, settings)
        with bind(settings) as listener, ProcessPoolExecutor(1, get_context("spawn")) as other:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            url = "ws://{}:{}/v1/live".format(*listener.getsockname()[:2])
            seconds: dict[str, list[float]] = {"live": [], "bare": [], "shown": []}
            for turn in range(rounds + 1):
                arrivals, actions = await asyncio.get_running_loop().run_in_executor(other, drive, url, scene, frames)
                bare = await step(service, scene, actions, ignore)
                shown = await step(service, scene, actions, partial(service.model.picture, kind="jpeg", quality=85))
                if turn:  # the first one warms up
                    seconds["live"] += list(np.diff(arrivals))
                    seconds["bare"] += bare[1:]  # as many as there are intervals
                    seconds["shown"] += shown[1:]
            server.should_exit = True
            await serving
        return report(seconds)

    return asyncio.run(turns())


async def ignore(_: np.ndarray) -> None:
    """Show no frame."""


def drive(url: str, scene: str, frames: int) -> tuple[list[float], list[list[list[float]]]]:
    """The arrival time of each generated frame, and the action that led to it; runs in a process of its own."""
    arrivals, actions = [], []
    with connect(url, compression=None) as session:
        session.send(json.dumps({"type": "open", "scene": scene}))
        session.send(json.dumps({"type": "control", "steering": 0.05, "speed": 6.0}))
        while len(arrivals) < frames:
            message = session.recv()
            if isinstance(message, str):
                continue
            header, _ = read_frame(message)
            session.send(json.dumps({"type": "ack", "index": header["index"]}))
            if header["generated"]:
                arrivals.append(time.perf_counter())
                actions.append(header["action"])
    return arrivals, actions


async def step(
    service: Any, scene: str, actions: list[list[list[float]]], show: Callable[[np.ndarray], Awaitable[Any]]
) -> list[float]:
    """Seconds for each frame of a bare session; `show` gets the frame's tokens, and is awaited at the end."""
    import torch

    from terra.serving.messages import Open

    _, start = await service.open(Open(type="open", scene=scene), "bare", None)
    context = torch.from_numpy(np.stack([moment.tokens for moment in start.moments]).astype(np.int64))
    led = torch.from_numpy(np.stack([moment.action for moment in start.moments[1:]]))
    session = await service.model.pipeline.open(context, led, start.sampling, start.seed)
    seconds, showing = [], []
    for action in torch.tensor(actions):
        started = time.perf_counter()
        tokens = await session.step(action)
        showing.append(asyncio.ensure_future(show(tokens.numpy())))
        seconds.append(time.perf_counter() - started)
    await asyncio.gather(*showing)
    await session.close()
    return seconds


def report(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and the verdict."""
    medians = {f"{way}_ms": 1000 * float(np.median(each)) for way, each in seconds.items()}
    added = medians["live_ms"] - medians["shown_ms"]
    return {
        "ok": added < 1000 * BAR_SECONDS,
        "added_ms": added,
        "added_to_bare_ms": medians["live_ms"] - medians["bare_ms"],
        **medians,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
