"""Rollouts straight from an engine, for tests that compare engines; every wait has an end."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import torch
from tiny import COLS, ROWS

from terra.engine.base import Engine
from terra.prompt import Prompt, build_prompt
from terra.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
SAMPLINGS = [GREEDY, PLAIN, FILTERED]

WINDOW = 8
"""Frames of a window of the tiny models."""

PATIENCE = 60.0
"""Seconds after which a test fails instead of waiting on; what is waited for takes far less."""

_T = TypeVar("_T")


async def soon(work: Awaitable[_T]) -> _T:
    """Wait for `work`, and fail with TimeoutError if nothing comes."""
    return await asyncio.wait_for(work, PATIENCE)


def make_prompt(seed: int, num_context: int = 3, num_actions: int = WINDOW - 3) -> tuple[Prompt, torch.Tensor]:
    """A random prompt for the tiny models, and the actions that follow it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (num_context, ROWS, COLS), generator=generator)
    actions = torch.randn(num_context - 1 + num_actions, 6, 3, generator=generator)
    return build_prompt(tokens, actions[: num_context - 1]), actions[num_context - 1 :]


async def stepped(engine: Engine, prompt: Prompt, actions: torch.Tensor, sampling=PLAIN, seed: int = 1) -> torch.Tensor:
    """The frames of a session that takes one action at a time."""
    session = await engine.open(prompt, sampling, seed)
    frames = [await session.step(action) for action in actions]
    await session.close()
    return torch.stack(frames)


async def ran(engine: Engine, prompt: Prompt, actions: torch.Tensor, sampling=PLAIN, seed: int = 1) -> torch.Tensor:
    """The frames of a session that is given all actions at once."""
    session = await engine.open(prompt, sampling, seed)
    frames = [frame async for frame in session.run(actions)]
    await session.close()
    return torch.stack(frames)
