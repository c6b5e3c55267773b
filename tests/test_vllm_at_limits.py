"""The shipped model on vLLM, with more sessions than sequence slots and KV blocks: all go on, with the same tokens.

Takes some minutes: `make test-hostile`.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_rollouts import PLAIN, ran

import terra
from terra.benchmark.prompts import prompt_maker

pytestmark = pytest.mark.hostile

LIVE, JOBS, COMPARED = 64, 8, 6
STEPS = 2
PATIENCE = 2400.0
"""Seconds for all next frames: with a quarter of the blocks, each session's prompt is read again for each."""


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_live_sessions_and_jobs_with_full_windows_all_go_on(share, wait):
    from terra.engine.vllm.engine import VllmEngine

    folder = Path(terra.__file__).parent / "demo" / "world_model"
    engine = VllmEngine(folder)
    if share < 1:
        blocks = int(engine._pump._num_blocks * share)
        wait(engine.close())
        engine = VllmEngine(folder, engine_args={"num_gpu_blocks_override": blocks})
    make = prompt_maker(engine.spec, None)
    num_context = engine.spec.layout.max_frames - STEPS
    rollouts = [(*make(num_context, STEPS, seed), PLAIN, seed) for seed in range(LIVE + JOBS)]

    async def together() -> list[torch.Tensor]:
        sessions = [await engine.open(prompt, sampling, seed) for prompt, _, sampling, seed in rollouts[:LIVE]]
        jobs = [asyncio.ensure_future(ran(engine, *rollout)) for rollout in rollouts[LIVE:]]
        turns = []
        for turn in range(STEPS):
            steps = [
                session.step(actions[turn]) for session, (_, actions, _, _) in zip(sessions, rollouts, strict=False)
            ]
            turns.append(await asyncio.wait_for(asyncio.gather(*steps), PATIENCE))
        made = [torch.stack(frames) for frames in zip(*turns, strict=True)]
        made += await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)
        for session in sessions:
            await session.close()
        return made

    made = wait(together())
    assert engine.failure is None
    assert len(made) == LIVE + JOBS
    for index in [*range(0, LIVE, LIVE // COMPARED), LIVE, LIVE + JOBS - 1]:
        assert torch.equal(made[index], wait(ran(engine, *rollouts[index]))), index
    wait(engine.close())
