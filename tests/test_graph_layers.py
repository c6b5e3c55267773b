"""The graph engine's layers in 8 bits and its embeddings of actions, without its kernels."""

import copy

import pytest
import torch
from tiny import DEVICE

from terra.benchmark.model import SHAPES
from terra.engine.graph import quantization, reference
from terra.engine.graph.kv_cache import KVCache
from terra.engine.graph.transfers import fill
from terra.engine.graph.weights import DecoderWeights
from terra.world_model import ARCHITECTURES, LlamaActionConfig

LENGTH = 128


@pytest.fixture
def reached(monkeypatch) -> list[float]:
    """For each quantization of states, their amax as a share of the largest number of the format."""
    found = []
    quantize = quantization.quantize_fp8

    def noted(states, scale):
        found.append((states.float() * scale).abs().max().item() / 448)
        return quantize(states, scale)

    monkeypatch.setattr(quantization, "quantize_fp8", noted)
    monkeypatch.setattr(reference, "quantize_fp8", noted)
    return found


def tiny_world_model():
    torch.manual_seed(0)
    return ARCHITECTURES["LlamaActionForCausalLM"](LlamaActionConfig(**SHAPES["tiny"])).eval()


@torch.no_grad()
def passed(model, states, *, fp8=True):
    weights = DecoderWeights(model, LENGTH, fp8=fp8)
    layers, heads, dim = weights.kv_shape
    cache = KVCache(layers, 1, heads, LENGTH, dim, dtype=states.dtype, device=states.device)
    return weights.forward(states, cache, slice(1), torch.zeros(1, dtype=torch.int64), reference.PrefillOps())


@torch.no_grad()
def test_no_states_are_larger_than_their_weights_allow(reached):
    model = tiny_world_model()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.randn(parameter.shape).exp())
        elif name.endswith("proj.weight"):
            parameter.mul_(torch.randn(len(parameter), 1).exp())
    passed(model, torch.randn(1, 40, model.config.hidden_size).mul(3).exp())
    assert len(reached) == 4 * model.config.num_hidden_layers
    assert max(reached) < 1.0


@torch.no_grad()
def test_the_largest_states_fit(reached):
    """All of a state in one element, which is all that the rows of gate, up and values read."""
    model = tiny_world_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for linear in (layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.zero_()
            linear.weight[:, 7] = 40.0
    states = torch.zeros(1, 1, model.config.hidden_size)
    states[..., 7] = 5.0
    passed(model, states)
    assert reached == pytest.approx([1.0] * len(reached), abs=0.02)


@torch.no_grad()
@pytest.mark.parametrize("name", ["up_proj", "v_proj"])
def test_a_row_that_gives_much_more_does_not_take_the_bits_of_the_others(name):
    """Nothing reads it here, so that only the others are seen."""
    errors = []
    for factor in (1.0, 4096.0):
        model = tiny_world_model()
        for layer in model.model.layers:
            own, reads = (layer.mlp, "down_proj") if name == "up_proj" else (layer.self_attn, "o_proj")
            getattr(own, name).weight[3] *= factor
            getattr(own, reads).weight[:, 3::64] = 0
        states = torch.randn(1, 40, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
        expected = passed(copy.deepcopy(model), states, fp8=False)
        errors.append(((passed(model, states) - expected).norm() / expected.norm()).item())
    assert errors[1] < 1.2 * errors[0] < 0.1


@torch.no_grad()
def test_an_actions_embedding_is_the_same_alone_and_beside_others():
    weights = DecoderWeights(tiny_world_model().to(DEVICE), LENGTH)
    actions = torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0))
    together = weights.project_actions(actions)
    alone = torch.cat([weights.project_actions(action) for action in actions.split(1)])
    # A CPU's BLAS does not promise a row's bits.
    torch.testing.assert_close(alone, together, rtol=0, atol=0 if DEVICE == "cuda" else 1e-6)


@pytest.mark.parametrize("index", [2, torch.tensor([3, 0, 3])])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn])
def test_filling_is_assigning(index, dim, dtype):
    filled = torch.arange(20, device=DEVICE).view(4, 5)[:, :4].to(dtype)
    expected = filled.clone()
    expected[(slice(None),) * dim + (index,)] = -7
    fill(filled, dim, index.to(DEVICE) if isinstance(index, torch.Tensor) else index, -7)
    assert torch.equal(filled.float(), expected.float())
