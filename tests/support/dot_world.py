"""A world without weights: a dot that its actions push around a square, as an engine, a tokenizer and a decoder."""

import torch

from terra.actions import Choice, Keys, TableSpace, Vector
from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_prompt
from terra.pipeline import Pipeline
from terra.prompt import Layout

SIDE = 16
SPACES = {
    "vector": Vector(names=("dx", "dy"), units=("px", "px"), low=(-2.0, -2.0), high=(2.0, 2.0)),
    "keys": Keys(names=("right", "left", "down", "up")),
    "choice": Choice(names=("stay", "right", "left", "down", "up")),
}


def frame_at(x: float, y: float) -> torch.Tensor:
    tokens = torch.zeros(SIDE, SIDE, dtype=torch.int64)
    tokens[round(min(max(y, 0), SIDE - 1)), round(min(max(x, 0), SIDE - 1))] = 1
    return tokens


def moves(space: TableSpace, action: torch.Tensor) -> tuple[float, float]:
    (row,) = action.tolist()
    if isinstance(space, Vector):
        return 2 * row[0], 2 * row[1]
    right, left, down, up = row if isinstance(space, Keys) else row[1:]
    return right - left, down - up


class DotTokenizer:
    """A token a pixel, 1 where it is bright."""

    rows = cols = SIDE
    codebook_size, checkpoint, image_size = 2, None, (SIDE, SIDE)

    class config:  # noqa: N801
        image_size = (SIDE, SIDE)

    def encode(self, frames):
        return (frames[:, 0] > 0).long()


class DotDecoder:
    framewise, device = True, torch.device("cpu")

    def __init__(self):
        self.decoded = []

    def decode(self, tokens):
        self.decoded.append(len(tokens))
        return (tokens[:, None].float() * 2 - 1).expand(-1, 3, -1, -1)


class DotEngine:
    failure, adapters, counters = None, (), EngineCounters()

    def __init__(self, space: TableSpace, max_frames: int = 12):
        self.spec = EngineSpec(Layout(SIDE * SIDE, 1, max_frames), 2, 10.0, space)
        self.open_now = self.most_open = 0

    async def open(self, prompt, sampling, seed, adapter=None):
        check_prompt(prompt, self.spec, seed)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return DotSession(self, prompt)

    async def close(self):
        pass


class DotSession:
    def __init__(self, engine, prompt):
        self._engine, self._closed = engine, False
        (y, x) = (prompt.tokens[-1] == 1).nonzero()[0].tolist()
        self._at = [float(x), float(y)]

    async def step(self, action):
        check_actions(action[None], 1, self._engine.spec)
        for axis, move in enumerate(moves(self._engine.spec.space, action)):
            self._at[axis] += move
        return frame_at(*self._at)

    async def run(self, actions):
        for action in actions:
            yield await self.step(action)

    async def close(self):
        self._engine.open_now -= not self._closed
        self._closed = True


def dot_pipeline(kind: str) -> Pipeline:
    return Pipeline(DotTokenizer(), DotEngine(SPACES[kind]), DotDecoder(), overlap=2)
