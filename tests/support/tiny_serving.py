"""Runs a real server in a thread over a tiny model, with settings that a test can change."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from entry import compose, read_settings
from omegaconf import OmegaConf
from PIL import Image
from tiny import COLS, ROWS
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from decoder import FramewiseDecoder
from terra.config.files import register_resolvers
from terra.context import load_context
from terra.engine.base import Engine
from terra.engine.hf import HFEngine
from terra.engine.persistence import PersistenceEngine
from terra.errors import EngineError
from terra.pipeline import Pipeline
from terra.place_map import load_map
from terra.sampling import SamplingParams
from terra.serving.messages import read_frame
from terra.serving.run import Server, bind, check, load
from terra.serving.scenes import load_scenes
from terra.serving.service import Service
from terra.serving.settings import ServeSettings
from terra.trajectory import save_poses
from tokenizer import Frames, LFQTokenizer
from tokenizer.settings import checked

KEY = "a-secret"
OVERLAP = 2


def scene_folder(folder: Path) -> Path:
    """Write the scenes day and night, with random pictures and trajectories of 6 s."""
    for number, name in enumerate(("day", "night")):
        (folder / name).mkdir()
        random = np.random.default_rng(number)
        for index in range(3):
            pixels = random.integers(0, 256, (4 * ROWS, 4 * COLS, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
        times = np.arange(0, 9, 0.1)
        turn = 0.05 * times
        save_poses(folder / name / "straight.json", times, np.stack([5 * times, 0 * times], 1), 0 * times, 10.0)
        curve = np.stack([100 * np.sin(turn), 100 * (1 - np.cos(turn))], 1)
        save_poses(folder / name / "left.json", times, curve, turn, 10.0)
    return folder


def pictures(folder: Path) -> Frames:
    return load_context(folder, num_frames=3, image_size=(4 * ROWS, 4 * COLS), fps=10.0)


def make_pipeline(model: Path, tokenizer: Path, engine: Engine | None = None) -> Pipeline:
    loaded, engine = LFQTokenizer.from_pretrained(tokenizer), engine or HFEngine(model)
    return Pipeline(loaded, engine, FramewiseDecoder(loaded), overlap=OVERLAP, memory=engine.spec.memory)


def serve_settings(scenes: Path, data: Path, changes: Mapping[str, Any], engine: str = "auto") -> ServeSettings:
    """The settings of conf/serve.yaml with small limits and `changes`."""
    register_resolvers()
    config = compose("serve", [f"engine={engine}", "adapters={}", "worlds={}"])
    values: Any = OmegaConf.to_container(config, resolve=True)
    small = {
        "overlap": OVERLAP,
        "scenes": str(scenes),
        "data": str(data),
        "jobs": {"max_frames": 40, "default_frames": 6},
        "live": {"sessions_per_client": 64, "idle_seconds": 20.0},
        "uploads": {"max_bytes": 2 << 20, "max_json_bytes": 1 << 20, "max_frames": 4, "contexts": 12},
    }
    for update in (small, changes):
        for key, value in update.items():
            values[key] = {**values[key], **value} if isinstance(value, Mapping) else value
    return checked(ServeSettings, values | {"sampling": SamplingParams(temperature=1.0)})


class Served:
    """A server that runs within its `with` block; with `adapters` it loads its engine as the command does."""

    def __init__(
        self,
        model: Path,
        tokenizer: Path,
        scenes: Path,
        data: Path,
        *,
        engine: Engine | None = None,
        persistence: bool = False,
        send_buffer: int | None = None,
        adapters: Mapping[str, Path] | None = None,
        **changes: Any,
    ) -> None:
        self.model, self.tokenizer, self.data = model, tokenizer, data
        self._send_buffer = send_buffer
        self._engine = PersistenceEngine.from_pretrained(model) if persistence else engine
        self._has_adapters = adapters is not None
        if adapters is not None:
            changes |= {"tokenizer": {"pretrained": str(tokenizer)}, "world_model": {"pretrained": str(model)}}
            changes |= {"device": "cpu", "adapters": {name: str(folder) for name, folder in adapters.items()}}
        self.settings = serve_settings(scenes, data, {"port": 0} | changes, "hf" if self._has_adapters else "auto")

    def __enter__(self) -> "Served":
        self._socket = bind(self.settings)
        if self._send_buffer is not None:  # connections inherit it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._error: BaseException | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), daemon=True)
        self._thread.start()
        started.wait()
        if self._error is not None:
            self._thread.join()
            self._socket.close()
            raise self._error
        while not self.server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join()
        self._socket.close()
        if self._error is not None:
            raise self._error

    def _main(self, started: threading.Event) -> None:
        async def serve() -> None:
            if self._has_adapters:
                self.service = load(check(self.settings))
            else:
                self.service = await self._service()
            self.server = Server(self.service, self.settings)
            self.loop = asyncio.get_running_loop()
            started.set()
            await self.server.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._error = error
        finally:
            started.set()

    async def _service(self) -> Service:
        """A service over the given engine, whose spec no checkpoint tells."""
        pipeline = make_pipeline(self.model, self.tokenizer, self._engine)
        size, path = pipeline.tokenizer.image_size, self.settings.map
        try:
            place = None if path is None else load_map(path, size, pipeline.engine.spec.fps)
            scenes = load_scenes(
                self.settings.scenes,
                num_context=self.settings.num_context,
                image_size=size,
                spec=pipeline.engine.spec,
            )
            return Service(pipeline, self.settings, scenes, "weights", place)
        except BaseException:
            await asyncio.to_thread(pipeline.close)
            raise

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def wait_for(self, video_id: str, *statuses: str) -> dict[str, Any]:
        statuses = statuses or ("completed", "failed", "cancelled")
        deadline = time.monotonic() + 60
        while True:
            video = httpx.get(f"{self.url}/v1/videos/{video_id}").json()
            if video["status"] in statuses:
                return video
            assert time.monotonic() < deadline, video
            time.sleep(0.01)

    def connect(self, receive_buffer: int | None = None, **arguments: Any) -> "Talk":
        if receive_buffer is not None:
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            own.connect(self._socket.getsockname())
            arguments["sock"] = own
        return Talk(connect(self.url.replace("http", "ws") + "/v1/live", compression=None, **arguments).__enter__())

    def open(self, **message: Any) -> "Talk":
        """Open a live session on scene "day" whose context frames have been received."""
        talk = self.connect()
        talk.say(type="open", **({"scene": "day"} | message))
        talk.opened = talk.hear("opened")
        talk.context = [talk.frame() for _ in range(talk.opened["num_context"])]
        return talk


class Talk:
    """A client of a live session that sees every message."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def listen(self, timeout: float = 30) -> dict[str, Any]:
        """The next message; for a frame its header, with the picture's bytes."""
        content = self.socket.recv(timeout)
        if isinstance(content, str):
            return json.loads(content)
        header, picture = read_frame(content)
        return header | {"picture": picture}

    def hear(self, kind: str) -> dict[str, Any]:
        message = self.listen()
        assert message["type"] == kind, message
        return message

    def frame(self) -> dict[str, Any]:
        return self.hear("frame")

    def acknowledge(self, frame: dict[str, Any]) -> None:
        """Acknowledge a frame; the server may have closed the session after its last frame."""
        with contextlib.suppress(ConnectionClosed):
            self.say(type="ack", index=frame["index"])

    def skip_to(self, kind: str) -> dict[str, Any]:
        """The next message of a type; frames before it are acknowledged."""
        while (message := self.listen())["type"] != kind:
            if message["type"] == "frame":
                self.acknowledge(message)
        return message

    def drive(self, count: int) -> list[dict[str, Any]]:
        """Receive and acknowledge a number of frames; other messages are skipped."""
        frames = []
        while len(frames) < count:
            message = self.listen()
            if message["type"] == "frame":
                self.acknowledge(message)
                frames.append(message)
            else:
                assert message["type"] in ("resumed", "paused"), message
        return frames

    def rest(self, seconds: float) -> list[dict[str, Any]]:
        """All messages until none has come for a time, or the connection is closed."""
        messages = []
        while True:
            try:
                messages.append(self.listen(seconds))
            except (TimeoutError, ConnectionClosed):
                return messages

    def step(self, **step: Any) -> dict[str, Any]:
        self.say(type="step", **step)
        return self.drive(1)[0]

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldEngine(PersistenceEngine):
    """An engine that gives no frame until it is released."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    async def open(self, prompt: Any, sampling: Any, seed: int, adapter: str | None = None) -> Any:
        session = await super().open(prompt, sampling, seed, adapter)
        step = session.step

        async def held(action: Any) -> Any:
            while not self._released.is_set():
                await asyncio.sleep(0.01)
            return await step(action)

        session.step = held  # pyright: ignore[reportAttributeAccessIssue]
        return session


class FailingEngine(HeldEngine):
    """An engine that gives no frame, and fails on demand."""

    failure: str | None = None

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.release()

    async def open(self, prompt: Any, sampling: Any, seed: int, adapter: str | None = None) -> Any:
        session = await super().open(prompt, sampling, seed, adapter)
        step = session.step

        async def failing(action: Any) -> Any:
            await step(action)
            raise EngineError(self.failure)

        session.step = failing
        return session


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def run_and_exit(overrides: list[str], said: Path | None = None) -> None:
    """`terra-serve` in a process of its own, which writes what it says to the file `said`."""
    from terra.serving.run import run

    if said is not None:
        sys.stderr = said.open("w", buffering=1)
        logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
    register_resolvers()
    run(read_settings("serve", overrides))
