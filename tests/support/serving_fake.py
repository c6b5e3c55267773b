"""Serves a world without weights, for tests of the page: mosaics that turn with the actions, at little cost.

`python tests/support/serving_fake.py PORT [keys | vector | choice | plane]` runs the server; without a kind one drives.
"""

import asyncio
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from einops import reduce, repeat
from entry import compose
from omegaconf import OmegaConf
from tiny_serving import Talk, wait_until
from websockets.sync.client import connect

import terra
from terra.actions import ActionSpace, Choice, Keys, TableSpace, Vector, Waypoints, save_actions
from terra.config.files import register_resolvers
from terra.engine.base import EngineCounters, EngineSpec
from terra.pipeline import Pipeline
from terra.prompt import Action, Actions, FrameTokens, Layout, Prompt
from terra.sampling import SamplingParams
from terra.serving.about import About
from terra.serving.run import Server
from terra.serving.scenes import load_scenes
from terra.serving.service import Service
from terra.serving.settings import ServeSettings
from terra.views import Views
from tokenizer import Frames, LFQTokenizer, TokenGrid
from tokenizer.settings import checked

_CELL, _LEVELS = 4, 16  # pixels a side; values of a color, so 4096 tokens
_CELLS_A_RADIAN = 167 / _CELL  # the demo's camera: 256 pixels are 75 degrees
DRIVING = Waypoints(times=(0.45, 0.95, 1.45, 1.95, 2.45, 2.95))  # seconds, as the published model's
KEYS = Keys(names=["forward", "back", "left", "right", "fire"])
VECTOR = Vector(names=["pan", "lift", "grip"], units=["rad", "m", ""], low=[-1.5, 0, 0], high=[1.5, 2, 1])
CHOICE = Choice(names=["noop", "up", "right", "left", "down", "up_right", "up_left", "fire"])
PLANE = Vector(names=["dx", "dy"], units=["", ""], low=[-1, -1], high=[1, 1])
SPACES = {"keys": KEYS, "vector": VECTOR, "choice": CHOICE, "plane": PLANE}
_SHIFTS = {"left": (0, 3), "right": (0, -3), "forward": (3, 0), "up": (3, 0), "back": (-3, 0), "down": (-3, 0)}


class MosaicTokenizer:
    """A tokenizer whose token is the mean color of a cell of 4 x 4 pixels, four bits a channel."""

    image_size = (144, 256)
    rows, cols, codebook_size = 36, 64, _LEVELS**3
    checkpoint, framewise, device = None, True, torch.device("cpu")

    def encode(self, frames: Frames) -> TokenGrid:
        cells = reduce(frames, "t c (rows h) (cols w) -> t c rows cols", "mean", h=_CELL, w=_CELL)
        red, green, blue = ((cells + 1) / 2 * (_LEVELS - 1)).round().long().unbind(1)
        return (red * _LEVELS + green) * _LEVELS + blue

    def decode(self, tokens: TokenGrid) -> Frames:
        levels = torch.stack([tokens // _LEVELS**2, tokens // _LEVELS % _LEVELS, tokens % _LEVELS], 1)
        cells = levels / (_LEVELS - 1) * 2 - 1
        return repeat(cells, "t c rows cols -> t c (rows h) (cols w)", h=_CELL, w=_CELL)


class TurningEngine:
    """An engine that repeats the last frame, moved to the side by as much as the action turns the car.

    In worlds that are not driven keys and choices move the frame the way they are called, and a vector's first number
    moves it to the side.
    """

    failure = None
    counters = EngineCounters()

    def __init__(
        self,
        seconds: float,
        space: ActionSpace = DRIVING,
        adapters: tuple[str, ...] = (),
        views: Views | None = None,
    ) -> None:
        self.adapters = adapters
        self.opened: list[str | None] = []  # the adapters of its sessions, which all do the same
        tokens = MosaicTokenizer.rows * MosaicTokenizer.cols
        layout = Layout(image_tokens=tokens, action_slots=space.shape[0], max_frames=25)
        self.spec = EngineSpec(layout, MosaicTokenizer.codebook_size, 10.0, space, views=views)
        self.seconds = seconds

    async def open(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None
    ) -> "TurningSession":
        self.opened.append(adapter)
        return TurningSession(self, prompt)

    async def close(self) -> None:
        pass


class TurningSession:
    def __init__(self, engine: TurningEngine, prompt: Prompt) -> None:
        self._engine, self._frame, self._rest = engine, prompt.tokens[-1], 0.0

    async def step(self, action: Action) -> FrameTokens:
        await asyncio.sleep(self._engine.seconds)
        space = self._engine.spec.space
        if not isinstance(space, Waypoints):
            self._frame = self._frame.roll(_shift(space, action), dims=(-2, -1))
            return self._frame.clone()
        left, ahead, seconds = (float(value) for value in action[0])
        # The chord to a point of an arc makes half the arc's angle with the heading.
        turn = 2 * np.arctan2(left, max(ahead, 0.01)) / seconds / self._engine.spec.fps
        self._rest += turn * _CELLS_A_RADIAN
        cells = round(self._rest)
        self._rest -= cells
        self._frame = self._frame.roll(cells, dims=-1)
        return self._frame.clone()

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        for action in actions:
            yield await self.step(action)

    async def close(self) -> None:
        pass


def _shift(space: TableSpace, action: Action) -> tuple[int, int]:
    """Cells down and to the right."""
    values = space.values(action.numpy()[None])[0]
    if isinstance(space, Vector):
        return 0, -round(4 * values[0])
    words = space.text(values).replace("_", " ").split()
    down, right = np.sum([_SHIFTS.get(word, (0, 0)) for word in words], axis=0)
    return int(down), int(right)


def scene_folder(folder: Path, space: TableSpace) -> Path:
    """Write the scenes room and yard: the demo's pictures, and actions of 6 s."""
    demo = Path(terra.__file__).parent / "demo" / "contexts"
    values = np.tile(space.neutral, (60, 1))
    if isinstance(space, Vector):
        values[:, 0] = np.linspace(0, 1, 60)
    for name, pictures in {"room": "city", "yard": "day"}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for path in (demo / pictures).glob("*.png"):
            shutil.copy(path, folder / name)
        save_actions(folder / name / "look.json", space, 10.0, values)
    return folder


def build_service(
    data: Path,
    seconds_a_frame: float = 0.05,
    space: ActionSpace = DRIVING,
    others: Mapping[str, ActionSpace] | None = None,
    about: About | None = None,
    views: Views | None = None,
    **changes: Any,
) -> tuple[Service, ServeSettings]:
    """A service that keeps its jobs in `data`, with `others` as further worlds; `changes` are of settings.

    `about` is what the world says of itself on the page, `views` are the cameras that share a picture.
    """
    register_resolvers()
    if not isinstance(space, Waypoints):
        changes = {"scenes": scene_folder(data / "scenes", space), **changes}
    given = {"data": data, "adapters": "{}", "worlds": "{}", **changes}
    config = compose("serve", [f"{name}={value}" for name, value in given.items()])
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    settings = checked(ServeSettings, values)
    tokenizer, engine = MosaicTokenizer(), TurningEngine(seconds_a_frame, space, tuple(settings.adapters), views)
    pipeline = Pipeline(cast(LFQTokenizer, tokenizer), engine, tokenizer, overlap=3)
    facts = {"num_context": settings.num_context, "image_size": tokenizer.image_size, "spec": engine.spec}
    scenes = load_scenes(settings.scenes, **facts, adapters=settings.adapters)
    worlds = {
        name: build_service(data / name, seconds_a_frame, each, **changes | {"model_name": name})[0]
        for name, each in (others or {}).items()
    }
    return Service(pipeline, settings, scenes, "0" * 64, worlds=worlds, about=about), settings


class Serving:
    """A server in a thread, on a port that it keeps over restarts."""

    def __init__(self, build: Callable[[], tuple[Service, ServeSettings]]) -> None:
        self._build = build
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self.port))
        self.service, settings = self._build()
        self._server = Server(self.service, settings)
        self._thread = threading.Thread(target=self._server.run, args=[[self._listener]], daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._listener.close()

    def open(self, **message: Any) -> Talk:
        """Open a live session whose context frames have been received."""
        talk = Talk(connect(f"ws://127.0.0.1:{self.port}/v1/live", compression=None).__enter__())
        talk.say(type="open", **message)
        talk.opened = talk.hear("opened")
        talk.context = [talk.frame() for _ in range(talk.opened["num_context"])]
        return talk


def fake(
    data: Path,
    space: ActionSpace = DRIVING,
    seconds_a_frame: float = 0.05,
    others: Mapping[str, ActionSpace] | None = None,
    about: About | None = None,
    views: Views | None = None,
    **changes: Any,
) -> Serving:
    """The server of a world without weights, and of `others`."""
    return Serving(lambda: build_service(data, seconds_a_frame, space, others, about, views, **changes))


if __name__ == "__main__":
    import uvicorn

    from terra.serving.app import create_app

    with tempfile.TemporaryDirectory() as folder:
        service, _ = build_service(Path(folder), space=SPACES[sys.argv[2]] if sys.argv[2:] else DRIVING)
        uvicorn.run(create_app(service), port=int(sys.argv[1]), log_level="warning", ws="websockets-sansio")
