"""Whole passes of the graph engine by its kernels, in Triton's interpreter, against torch."""

import pytest
from company import check_company
from interpreted import run_interpreted
from tiny import DEVICE, save_tiny

from terra.world_model.model import LlamaActionV2ForCausalLM

PASSES = """
import sys
from pathlib import Path

import torch
from interpreted import round_to_8_bits_rightly

from terra.engine.graph import lanes as module
from terra.engine.graph.attention_kernel import attend_split
from terra.sampling import SamplingParams
from terra.benchmark.prompts import prompt_maker
from terra.engine.base import EngineSpec
from terra.world_model import load_world_model

# As on a GPU, but that nothing is captured.
module.captured = lambda work, changes: work
on_cpu = module.attend


def on_gpu(queries, keys, values, start, *, round_by, invariant):
    return attend_split(queries, keys, values, start, 8, round_by=round_by, invariant=invariant)


def made(count, drafts, samplings, kernels, **options):
    model = load_world_model(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
    spec = EngineSpec.of(model.config)
    lanes, make_prompt = module.Lanes(model, count, drafts, **options), prompt_maker(spec, None)
    aims = []
    for lane in range(count):
        prompt, actions = make_prompt(2, 1, lane)
        lanes.begin(lane, prompt, seed=lane)
        aims.append(module.Aim(lane, 2, actions[0], samplings[lane % len(samplings)]))
    lanes.aim(aims)
    module.attend, lanes._on_gpu = (on_gpu, True) if kernels else (on_cpu, False)
    make = lanes._pass(frozenset(samplings), lanes._bucket(count))
    for _ in range(9):
        make()
    assert all(lacking <= 9 for lacking in lanes.lacking(list(range(count))).values())
    return lanes._ids, lanes._start


plain = [SamplingParams(temperature=0.9)]
mixed = [SamplingParams(temperature=0.9, top_k=5), SamplingParams(temperature=0.8)]
round_to_8_bits_rightly()
for drafts, samplings, eight, kinds in [
    (0, plain, False, [(1, False), (1, True), (3, False), (3, True)]),
    (0, plain, True, [(1, False), (3, True)]),
    (2, plain, False, [(1, False), (3, True)]),
    (2, plain, True, [(3, True)]),
    (2, mixed, False, [(3, True)]),
]:
    options = {"fp8_weights": eight, "fp8_cache": eight}
    expected, expected_start = made(3, drafts, samplings, False, **options)
    for count, invariant in kinds:
        ids, start = made(count, drafts, samplings, True, batch_invariant=invariant, **options)
        assert torch.equal(start, expected_start[:count]), (samplings, drafts, eight, count, invariant)
        assert torch.equal(ids, expected[:count]), (samplings, drafts, eight, count, invariant)
print("all equal")
"""


COMPANY = """
from company import check_company

check_company("cpu", 16)
print("all equal")
"""


def test_attention_gives_the_same_bits_in_any_company(tmp_path):
    run_interpreted(tmp_path, COMPANY)


@pytest.mark.needs_cuda
def test_attention_gives_the_same_bits_in_any_company_on_a_gpu():
    check_company(DEVICE, 64)


def test_passes_of_kernels_make_the_same_tokens(tmp_path):
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    run_interpreted(tmp_path, PASSES, save_tiny(tmp_path / "model", LlamaActionV2ForCausalLM, **heads))
