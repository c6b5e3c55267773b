"""The weights that ship: the engines agree on them, nothing is prefilled twice, and the car goes where it is told."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rollouts import ran, stepped

import terra
from decoder.video import to_uint8
from terra.context import load_context
from terra.prompt import Prompt, build_prompt
from terra.sampling import SamplingParams
from terra.trajectory import load_trajectory
from terra.world_model import load_config
from tokenizer import LFQTokenizer
from tokenizer.lineage import makes_tokens_of

pytestmark = pytest.mark.slow

DEMO = Path(terra.__file__).parent / "demo"
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9)
KV_BLOCK = 32


@pytest.fixture(scope="module")
def tokenizer():
    return LFQTokenizer.from_pretrained(DEMO / "tokenizer")


@pytest.fixture(scope="module")
def hf_demo(wait):
    from terra.engine.hf import HFEngine

    engine = HFEngine(DEMO / "world_model")
    yield engine
    wait(engine.close())


@pytest.fixture(scope="module")
def jacobi_demo(wait):
    from terra.engine.jacobi import JacobiEngine

    engine = JacobiEngine(DEMO / "world_model", drafts=31)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="module")
def vllm_demo(wait):
    from terra.engine.vllm.engine import VllmEngine

    engine = VllmEngine(DEMO / "world_model")
    yield engine
    wait(engine.close())


def window(tokenizer: LFQTokenizer, path: str = "left", num_frames: int = 25) -> tuple[Prompt, torch.Tensor]:
    """Three context frames of the demo's junction, and the actions up to a window of `num_frames`."""
    frames = load_context(DEMO / "contexts/day", num_frames=3, image_size=(144, 256), fps=10.0)
    actions = torch.from_numpy(load_trajectory(DEMO / f"contexts/day/{path}.json").actions(num_frames - 1))
    return build_prompt(tokenizer.encode(frames), actions[:2]), actions[2:]


def test_the_pair_belongs_together():
    config = load_config(DEMO / "world_model")
    assert makes_tokens_of(DEMO / "tokenizer", config.tokenizer_sha256 or "")
    sizes = {path: path.stat().st_size for path in DEMO.rglob("*.safetensors")}
    assert sum(size for path, size in sizes.items() if "adapters" not in path.parts) < 90e6
    assert max(sizes.values()) < 45e6
    adapters = [size for path, size in sizes.items() if path.name == "adapter_model.safetensors"]
    assert adapters
    assert max(adapters) < 2.5e6
    assert sum(path.stat().st_size for path in (DEMO / "contexts").rglob("*") if path.is_file()) < 5e6


def test_reconstruction_floor(tokenizer):
    frames = load_context(DEMO / "contexts/day", num_frames=3, image_size=(144, 256), fps=10.0)
    error = (tokenizer.decode(tokenizer.encode(frames)) - frames).square().mean() / 4
    assert -10 * error.log10() > 22.0


@pytest.fixture(scope="module")
def whole_window(tokenizer, jacobi_demo, wait) -> torch.Tensor:
    """The frames that turn left, up to the window's end."""
    return wait(stepped(jacobi_demo, *window(tokenizer), SAMPLED, 7))


def test_engines_agree_over_a_whole_window(tokenizer, whole_window, hf_demo, jacobi_demo, vllm_demo, wait):
    prompt, actions = window(tokenizer)
    greedy, sampled = wait(ran(jacobi_demo, prompt, actions[:2], GREEDY, 7)), whole_window
    assert (len(greedy), len(sampled)) == (2, 22)
    assert not torch.equal(greedy, sampled[:2])
    # The others are slower alone: the window's first frames, and its last ones behind the rest.
    late = build_prompt(torch.cat([prompt.tokens, sampled[:-2]]), torch.cat([prompt.actions, actions[:-2]]))

    async def on_vllm():
        first = ran(vllm_demo, prompt, actions[:2], GREEDY, 7), ran(vllm_demo, prompt, actions[:2], SAMPLED, 7)
        return await asyncio.gather(*first, ran(vllm_demo, late, actions[-2:], SAMPLED, 7))

    assert all(map(torch.equal, wait(on_vllm()), (greedy, sampled[:2], sampled[-2:])))
    for how, frames in ((GREEDY, greedy), (SAMPLED, sampled)):
        assert torch.equal(wait(stepped(hf_demo, prompt, actions[:1], how, 7)), frames[:1])
    assert torch.equal(wait(ran(hf_demo, late, actions[-2:-1], SAMPLED, 7)), sampled[-2:-1])


@pytest.fixture
def scheduled(vllm_demo, monkeypatch) -> list[int]:
    """Tokens that vLLM's scheduler has the model compute, a number for each step."""
    scheduler = vllm_demo._pump._core.engine_core.scheduler
    schedule = scheduler.schedule
    tokens: list[int] = []

    def noted(*arguments, **keywords):
        output = schedule(*arguments, **keywords)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    return tokens


@pytest.mark.parametrize("way", [stepped, ran])
def test_nothing_is_prefilled_twice_within_a_window(tokenizer, vllm_demo, wait, scheduled, way):
    prompt, actions = window(tokenizer, num_frames=5)
    shift = 1 if way is ran else 2  # nothing cached yet
    changed = build_prompt((prompt.tokens + shift) % tokenizer.codebook_size, prompt.actions)
    before = vllm_demo.counters.prefilled
    wait(way(vllm_demo, changed, actions, SAMPLED, 1))
    # Every position of the window once: 5 blocks, without the last token (never fed) and the last frame's slots.
    assert sum(scheduled) == 5 * 150 - 6 - 1
    assert vllm_demo.counters.prefilled - before == 3 * 150


def test_going_on_after_a_run_computes_less_than_a_kv_block_again(tokenizer, vllm_demo, wait, scheduled):
    prompt, actions = window(tokenizer, num_frames=7)
    changed = build_prompt((prompt.tokens + 3) % tokenizer.codebook_size, prompt.actions)

    async def both_ways():
        session = await vllm_demo.open(changed, SAMPLED, 1)
        frames = [frame async for frame in session.run(actions[:2])]
        frames += [await session.step(actions[2])]
        frames += [frame async for frame in session.run(actions[3:])]
        await session.close()
        return frames

    assert len(wait(both_ways())) == 4
    assert 7 * 150 - 7 <= sum(scheduled) < 7 * 150 - 7 + 2 * (KV_BLOCK + 1)


def test_rollouts_of_one_context_share_its_kv_blocks(tokenizer, vllm_demo, wait):
    prompt, actions = window(tokenizer, num_frames=4)
    changed = build_prompt((prompt.tokens + 4) % tokenizer.codebook_size, prompt.actions)
    wait(ran(vllm_demo, changed, actions, SAMPLED, 0))
    before = vllm_demo.counters

    async def together():
        await asyncio.gather(*(ran(vllm_demo, changed, actions, SAMPLED, seed) for seed in range(1, 5)))

    wait(together())
    shared = 450 // KV_BLOCK * KV_BLOCK
    assert vllm_demo.counters.cached - before.cached == 4 * shared
    assert vllm_demo.counters.prefilled - before.prefilled == 4 * (450 - shared)


def turn(frames: np.ndarray) -> float:
    """How far the upper half of the picture moved, in pixels: positive to the right, which is a turn to the left."""
    upper = frames[:, :72].mean(axis=(1, 3))
    profiles = upper - upper.mean(axis=1, keepdims=True)
    shifts = range(-12, 13)
    moved = 0
    for before, after in itertools.pairwise(profiles):
        scores = [np.corrcoef(before[20:-20], np.roll(after, -shift)[20:-20])[0, 1] for shift in shifts]
        moved += shifts[int(np.argmax(scores))]
    return moved


def test_the_trajectory_steers(tokenizer, whole_window, jacobi_demo, wait):
    async def together():
        windows = [window(tokenizer, path, 9) for path in ("straight", "right")]
        return await asyncio.gather(*(ran(jacobi_demo, prompt, actions, SAMPLED, 7) for prompt, actions in windows))

    drives = [whole_window[:6], *wait(together())]
    left, straight, right = (turn(to_uint8(tokenizer.decode(tokens))) for tokens in drives)
    assert left > straight + 10
    assert right < straight - 10
