"""Makes rollouts directly with an engine, for tests that compare engines; every wait has a time limit."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
import torch
from tiny import COLS, ROWS

from terra.engine.base import Engine, run_live
from terra.errors import EngineError
from terra.prompt import Prompt, build_prompt
from terra.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
SAMPLINGS = [GREEDY, PLAIN, FILTERED]

WINDOW = 8
"""Number of frames in a window of the tiny models."""

PATIENCE = 60.0
"""Seconds after which a waiting test fails; successful waits take far less."""

_T = TypeVar("_T")


async def soon(work: Awaitable[_T]) -> _T:
    """Wait for `work`; raises TimeoutError after the time limit."""
    return await asyncio.wait_for(work, PATIENCE)


def make_prompt(seed: int, num_context: int = 3, num_actions: int = WINDOW - 3) -> tuple[Prompt, torch.Tensor]:
    """A random prompt for the tiny models, and the actions that follow it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (num_context, ROWS, COLS), generator=generator)
    actions = torch.randn(num_context - 1 + num_actions, 6, 3, generator=generator)
    return build_prompt(tokens, actions[: num_context - 1]), actions[num_context - 1 :]


async def stepped(
    engine: Engine, prompt: Prompt, actions: torch.Tensor, sampling=PLAIN, seed: int = 1, adapter: str | None = None
) -> torch.Tensor:
    """The frames of a session that takes one action at a time."""
    session = await engine.open(prompt, sampling, seed, adapter)
    frames = [await session.step(action) for action in actions]
    await session.close()
    return torch.stack(frames)


async def ran(
    engine: Engine, prompt: Prompt, actions: torch.Tensor, sampling=PLAIN, seed: int = 1, adapter: str | None = None
) -> torch.Tensor:
    """The frames of a session that is given all actions at once."""
    session = await engine.open(prompt, sampling, seed, adapter)
    frames = [frame async for frame in session.run(actions)]
    await session.close()
    return torch.stack(frames)


async def ran_live(
    engine: Engine, prompt: Prompt, actions: torch.Tensor, sampling=PLAIN, seed: int = 1, adapter: str | None = None
) -> torch.Tensor:
    """The frames of a session that asks for each action when the action's frame begins."""
    session = await engine.open(prompt, sampling, seed, adapter)
    frames = [frame async for frame in run_live(session, iter(actions))]
    await session.close()
    return torch.stack(frames)


async def check_closing(engine: Engine) -> None:
    """Check that closing an engine fails all waiting sessions at once, and all later ones."""
    prompt, actions = make_prompt(14)
    idle = await engine.open(prompt, PLAIN, 0)
    await soon(idle.step(actions[0]))
    waiting = [
        asyncio.create_task(way(engine, prompt, actions, seed=seed)) for way in (stepped, ran) for seed in range(20)
    ]
    waiting.append(asyncio.create_task(ran_live(engine, prompt, actions)))
    await asyncio.sleep(0)
    await soon(engine.close())
    errors = await soon(asyncio.gather(*waiting, return_exceptions=True))
    assert [(type(error), str(error)) for error in errors] == [(EngineError, "the engine is closed")] * 41
    for late in (idle.step(actions[1]), engine.open(prompt, PLAIN, 0)):
        with pytest.raises(EngineError, match="the engine is closed"):
            await soon(late)
    await soon(engine.close())
    assert engine.failure is None  # nobody but its user has stopped it


async def check_cancelled_closing(engine: Engine) -> None:
    """Check that an engine whose `close` is cancelled fails all waiting sessions nevertheless, and can be closed."""
    prompt, actions = make_prompt(14)
    waiting = [asyncio.create_task(ran(engine, prompt, actions, seed=seed)) for seed in range(40)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert closing.cancelled() or closing.exception() is None  # it may have been done by then
    outcomes = await soon(asyncio.gather(*waiting, return_exceptions=True))
    errors = [each for each in outcomes if not isinstance(each, torch.Tensor)]  # the first may have been done
    assert len(errors) > 20
    assert {(type(error), str(error)) for error in errors} == {(EngineError, "the engine is closed")}
    await soon(engine.close())
    with pytest.raises(EngineError, match="the engine is closed"):
        await soon(engine.open(prompt, PLAIN, 0))
    assert engine.failure is None
