"""Serves a world without weights, for tests of the page: mosaics that turn with the actions, at little cost.

`python tests/support/serving_fake.py PORT` runs the server.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from einops import reduce, repeat
from entry import compose
from omegaconf import OmegaConf

from terra.actions import Waypoints
from terra.config.files import register_resolvers
from terra.engine.base import EngineCounters, EngineSpec
from terra.pipeline import Pipeline
from terra.prompt import Action, Actions, FrameTokens, Layout, Prompt
from terra.sampling import SamplingParams
from terra.serving.scenes import load_scenes
from terra.serving.service import Service
from terra.serving.settings import ServeSettings
from tokenizer import Frames, LFQTokenizer, TokenGrid
from tokenizer.settings import checked

_CELL, _LEVELS = 4, 16  # pixels a side; values of a color, so 4096 tokens
_CELLS_A_RADIAN = 167 / _CELL  # the demo's camera: 256 pixels are 75 degrees
_WAYPOINT_TIMES = (0.45, 0.95, 1.45, 1.95, 2.45, 2.95)  # seconds, as the published model's


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
    """An engine that repeats the last frame, moved to the side by as much as the action turns the car."""

    failure = None
    counters = EngineCounters()

    def __init__(self, seconds: float) -> None:
        layout = Layout(image_tokens=MosaicTokenizer.rows * MosaicTokenizer.cols, action_slots=6, max_frames=25)
        self.spec = EngineSpec(layout, MosaicTokenizer.codebook_size, 10.0, Waypoints(times=_WAYPOINT_TIMES))
        self.seconds = seconds

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> "TurningSession":
        return TurningSession(self, prompt)

    async def close(self) -> None:
        pass


class TurningSession:
    def __init__(self, engine: TurningEngine, prompt: Prompt) -> None:
        self._engine, self._frame, self._rest = engine, prompt.tokens[-1], 0.0

    async def step(self, action: Action) -> FrameTokens:
        await asyncio.sleep(self._engine.seconds)
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


def build_service(data: Path, seconds_a_frame: float = 0.05, **live: Any) -> tuple[Service, ServeSettings]:
    """A service that keeps its jobs in `data`; `live` changes limits of live sessions."""
    register_resolvers()
    config = compose("serve", [f"data={data}", *(f"live.{name}={value}" for name, value in live.items())])
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    settings = checked(ServeSettings, values)
    tokenizer, engine = MosaicTokenizer(), TurningEngine(seconds_a_frame)
    pipeline = Pipeline(cast(LFQTokenizer, tokenizer), engine, tokenizer, overlap=3)
    num_context, size = settings.num_context, tokenizer.image_size
    scenes = load_scenes(settings.scenes, num_context=num_context, image_size=size, spec=engine.spec)
    return Service(pipeline, settings, scenes, "0" * 64), settings


if __name__ == "__main__":
    import uvicorn

    from terra.serving.app import create_app

    with tempfile.TemporaryDirectory() as folder:
        service, _ = build_service(Path(folder))
        uvicorn.run(create_app(service), port=int(sys.argv[1]), log_level="warning", ws="websockets-sansio")
