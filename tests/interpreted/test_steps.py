"""Whole decode steps by the Triton kernels, in Triton's interpreter, against torch."""

import pytest
import torch
from tiny import save_tiny

from terra.benchmark.prompts import prompt_maker
from terra.engine.base import EngineSpec
from terra.engine.graph.kernels.backend import TritonBackend
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.slots import NO_TOKEN, FrameRequest, Slots
from terra.engine.graph.step import DecodeSteps, TorchBackend
from terra.sampling import SamplingParams
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model

# numpy computes both sides of a `tl.where`.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

PLAIN = [SamplingParams(temperature=0.9)]
MIXED = [SamplingParams(temperature=0.9, top_k=5), SamplingParams(temperature=0.8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return save_tiny(tmp_path_factory.mktemp("steps") / "model", LlamaActionV2ForCausalLM, **heads)


def decoded(checkpoint, backend, count, drafts, samplings, **options):
    """Tokens and progress of so many slots after 4 steps of their third frames."""
    model = load_world_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    slots, make_prompt = Slots(model, count, drafts, **options), prompt_maker(EngineSpec.of(model.config), None)
    requests = []
    for slot in range(count):
        prompt, actions = make_prompt(2, 1, slot)
        slots.prefill(slot, prompt, seed=slot)
        requests.append(FrameRequest(slot, 2, actions[0], samplings[slot % len(samplings)]))
    slots.begin_frames(requests)
    steps, all_slots = DecodeSteps(slots, backend), range(count)
    steps.run(all_slots, frozenset(samplings), 4)
    assert all(slots.last_of(2) - start <= 14 for start in slots.ask_start()())
    assert (slots.best == NO_TOKEN).all()
    return slots.ids, slots.start


@pytest.mark.parametrize(
    ("drafts", "samplings", "fp8", "count"),
    [(0, PLAIN, False, 1), (0, PLAIN, False, 3), (0, PLAIN, True, 3), (2, PLAIN, True, 3), (2, MIXED, False, 3)],
    ids=["one_slot", "slots", "slots_fp8", "drafts_fp8", "drafts_filtered"],
)  # fmt: skip
def test_steps_make_the_same_tokens(checkpoint, drafts, samplings, fp8, count):
    options = {"fp8_weights": fp8, "fp8_cache": fp8}
    expected, expected_start = decoded(checkpoint, TorchBackend(), 3, drafts, samplings, **options)
    kernels = TritonBackend(
        DeviceLimits(num_sms=8, shared_memory=1 << 30, pdl=False, tma=True), capture=lambda work, _: work
    )
    ids, start = decoded(checkpoint, kernels, count, drafts, samplings, **options)
    assert torch.equal(start, expected_start[:count])
    assert torch.equal(ids, expected[:count])
