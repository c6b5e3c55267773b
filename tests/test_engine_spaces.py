"""Every engine takes the rows of every action space, and makes the same tokens of them.

The same on a GPU: `TERRA_TEST_DEVICE=cuda pytest tests/test_engine_spaces.py -k "not vllm"`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rollouts import SAMPLINGS, WINDOW, ran, stepped
from tiny import COLS, DEVICE, FEW_BLOCKS, ROWS, save_tiny

from terra.actions import Choice, Keys, Vector
from terra.actions.space import TableSpace
from terra.engine.base import Engine
from terra.engine.graph.engine import GraphEngine
from terra.engine.hf import HFEngine
from terra.engine.jacobi import JacobiEngine
from terra.errors import EngineError
from terra.prompt import Prompt, build_prompt
from terra.world_model import LlamaActionV2ForCausalLM

NUM_CONTEXT = 3

SPACES = {
    "12 numbers": Vector(
        names=tuple(f"joint_{index}" for index in range(12)), units=("rad",) * 12, low=(-3.0,) * 12, high=(3.0,) * 12
    ),
    "1 number": Vector(names=("steering",), units=("",), low=(-1.0,), high=(1.0,)),
    "5 keys": Keys(names=("forward", "back", "left", "right", "fire")),
    "18 choices": Choice(names=tuple(f"stick_{index}" for index in range(18))),
}


def vllm_engine(checkpoint: Path) -> Engine:
    from terra.engine.vllm.engine import VllmEngine  # vllm need not be installed where a GPU tests the other engines

    return VllmEngine(checkpoint, max_sessions=4, engine_args=FEW_BLOCKS)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "jacobi": lambda checkpoint: JacobiEngine(checkpoint, drafts=4, device=DEVICE),
    "graph": lambda checkpoint: GraphEngine(checkpoint, drafts=4, max_sessions=3, dtype="float32", device=DEVICE),
    "vllm": vllm_engine,
}


@pytest.fixture(scope="module", params=SPACES)
def space(request: pytest.FixtureRequest) -> TableSpace:
    return SPACES[request.param]


@pytest.fixture(scope="module")
def checkpoint(space: TableSpace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    slots, action_dim = space.shape
    block = ROWS * COLS + slots
    return save_tiny(
        tmp_path_factory.mktemp("models") / "model",
        LlamaActionV2ForCausalLM,
        num_action_tokens=slots,
        action_dim=action_dim,
        num_spatio_embeddings=block,
        max_position_embeddings=WINDOW * block,
        waypoint_times=None,
        action_space=space.model_dump(mode="json"),
    )


def make_rollout(space: TableSpace, seed: int) -> tuple[Prompt, torch.Tensor]:
    """A random prompt, and the actions that follow it."""
    random = np.random.default_rng(seed)
    count = WINDOW - 1
    if isinstance(space, Vector):
        values = random.uniform(space.low, space.high, (count, len(space.names)))
    elif isinstance(space, Keys):
        values = random.integers(0, 2, (count, len(space.names))).astype(float)
    else:
        values = random.integers(0, len(space.names), (count, 1)).astype(float)
    tokens = torch.from_numpy(random.integers(0, 64, (NUM_CONTEXT, ROWS, COLS)))
    actions = torch.from_numpy(space.rows(values))
    return build_prompt(tokens, actions[: NUM_CONTEXT - 1]), actions[NUM_CONTEXT - 1 :]


def test_an_action_of_another_space_is_told_what_is_expected(checkpoint: Path, space: TableSpace, wait):
    engine = ENGINES["jacobi"](checkpoint)
    slots, action_dim = space.shape
    prompt, _ = make_rollout(space, 0)
    path = torch.zeros(NUM_CONTEXT - 1, 6, 3)
    expected = f"expected an action of shape {(slots, action_dim)}, {space.title}, got (6, 3)"
    try:
        with pytest.raises(ValueError, match=re.escape(f"prompt: {expected}")):
            wait(engine.open(build_prompt(prompt.tokens, path), SAMPLINGS[0], 0))
        session = wait(engine.open(prompt, SAMPLINGS[0], 0))
        with pytest.raises(EngineError, match=re.escape(f"action: {expected}")):
            wait(session.step(path[0]))
        wait(session.close())
    finally:
        wait(engine.close())


@pytest.mark.parametrize("name", ["jacobi", "graph", pytest.param("vllm", marks=pytest.mark.slow)])
def test_engines_agree(checkpoint: Path, space: TableSpace, wait, name: str):
    reference, engine = HFEngine(checkpoint, device=DEVICE), ENGINES[name](checkpoint)
    try:
        assert engine.spec.space == space
        heard = False
        for seed, sampling in enumerate(SAMPLINGS):
            prompt, actions = make_rollout(space, seed)
            expected = wait(stepped(reference, prompt, actions, sampling, seed))
            assert torch.equal(wait(ran(engine, prompt, actions, sampling, seed)), expected)
            assert torch.equal(wait(stepped(engine, prompt, actions, sampling, seed)), expected)
            heard |= not torch.equal(wait(ran(engine, prompt, actions.flip(0), sampling, seed)), expected)
        assert heard
    finally:
        wait(engine.close())
        wait(reference.close())
