import json

import pytest
import torch
from hypothesis import given, strategies as st
from tiny import COLS, ROWS, save_tiny, tiny_config
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from terra.errors import CheckpointError
from terra.prompt import Layout, build_prompt, pack_blocks
from terra.world_model import (
    LlamaActionConfig,
    LlamaActionForCausalLM,
    LlamaActionV2ForCausalLM,
    load_config,
    load_world_model,
    write_weights,
)

BLOCK = ROWS * COLS + 6

PUBLISHED_CONFIG = {
    "architectures": ["LlamaActionForCausalLM"],
    "auto_map": {"AutoModel": "modeling_llama_action.LlamaActionForCausalLM"},
    "model_type": "llama_action", "llm_model_type": "llama", "vocab_size": 262145, "bos_token_id": 262144,
    "eos_token_id": 262144, "pad_token_id": 262144, "max_position_embeddings": 14550, "num_spatio_embeddings": 582,
    "num_temporal_embeddings": 25, "num_image_patches": 576, "num_action_tokens": 6, "num_action_embeddings": 6,
    "action_dim": 3, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True,
    "activation_function": "relu", "do_layer_norm_before": True, "dropout": 0.1, "word_embed_proj_dim": 2048,
    "transformers_version": "4.39.3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "tensors", "parameters"),
    [(LlamaActionForCausalLM, 205, 2_043_973_632), (LlamaActionV2ForCausalLM, 209, 2_052_366_336)],
)
def test_published_counts(architecture, tensors, parameters):
    with torch.device("meta"):
        model = architecture(LlamaActionConfig.from_dict(PUBLISHED_CONFIG))
    state = model.state_dict()
    assert len(state) == tensors
    assert sum(tensor.numel() for tensor in state.values()) == parameters
    assert state["lm_head.weight"].shape == (262145, 2048)
    assert state["model.layers.21.self_attn.k_proj.weight"].shape == (256, 2048)
    assert state["pos_embedding_spatio_temporal.spatio_embeddings.weight"].shape == (582, 2048)
    assert state["pos_embedding_spatio_temporal.temporal_embeddings.weight"].shape == (25, 2048)


def test_published_action_projections():
    with torch.device("meta"):
        first = LlamaActionForCausalLM(LlamaActionConfig()).state_dict()
        second = LlamaActionV2ForCausalLM(LlamaActionConfig()).state_dict()
    assert {name: tuple(t.shape) for name, t in first.items() if "action" in name} == {
        "action_projection.weight": (2048, 3),
        "action_projection.bias": (2048,),
    }
    assert {name: tuple(t.shape) for name, t in second.items() if "action" in name} == {
        "action_projection.0.weight": (2048, 3),
        "action_projection.0.bias": (2048,),
        "action_projection.2.weight": (2048, 2048),
        "action_projection.2.bias": (2048,),
        "action_projection.4.weight": (2048, 2048),
        "action_projection.4.bias": (2048,),
    }


def test_config_round_trip(tmp_path):
    config = LlamaActionConfig.from_dict(PUBLISHED_CONFIG)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_action_tokens"] == written["num_action_embeddings"] == 6
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LlamaActionConfig
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert again.image_vocab_size == 262144
    assert again.layout == Layout(576, 6, 25)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("architecture", [LlamaActionForCausalLM, LlamaActionV2ForCausalLM])
def test_auto_classes_choose_by_architecture(tmp_path, auto, architecture):
    save_tiny(tmp_path, architecture)
    assert type(auto.from_pretrained(tmp_path)) is architecture


@pytest.fixture(params=[LlamaActionForCausalLM, LlamaActionV2ForCausalLM])
def model(request):
    torch.manual_seed(0)
    return request.param(tiny_config()).eval()


def random_batch(frames: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 64, (batch, frames * BLOCK), generator=generator)
    return ids, torch.randn(batch, frames, 6, 3, generator=generator)


@torch.no_grad()
def test_cached_equals_uncached(model):
    ids, actions = random_batch(4)
    whole = model(input_ids=ids, actions=actions).logits
    cache = DynamicCache(config=model.config)
    pieces = [
        model(input_ids=ids[:, :BLOCK], actions=actions[:, :1], past_key_values=cache, use_cache=True).logits,
        model(input_ids=ids[:, BLOCK : 3 * BLOCK - 6], actions=actions[:, 1:2], past_key_values=cache).logits,
        model(input_ids=ids[:, 3 * BLOCK - 6 : 3 * BLOCK], actions=actions[:, 2:3], past_key_values=cache).logits,
        *(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(3 * BLOCK, 4 * BLOCK - 6)),
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole[:, : 4 * BLOCK - 6], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_ids_in_slots_are_ignored(model):
    ids, actions = random_batch(3)
    other = ids.clone()
    slots = torch.arange(ids.shape[1]) % BLOCK >= ROWS * COLS
    other[:, slots] = 17
    assert torch.equal(model(input_ids=ids, actions=actions).logits, model(input_ids=other, actions=actions).logits)


@torch.no_grad()
def test_token_zero_has_its_embedding(model):
    ids, actions = random_batch(1)
    embedded = model.embed(torch.zeros_like(ids), actions, torch.arange(ids.shape[1]))
    positions = model.pos_embedding_spatio_temporal(torch.arange(ids.shape[1]))
    expected = model.model.embed_tokens.weight[0] + positions[0]
    torch.testing.assert_close(embedded[0, 0], expected)


def test_loss_is_on_image_tokens_only(model):
    ids, actions = random_batch(3)
    loss = model(input_ids=ids, actions=actions, labels=ids).loss
    logits = model(input_ids=ids, actions=actions).logits[:, :-1, :64].flatten(0, 1)
    image = (torch.arange(1, ids.shape[1]) % BLOCK < ROWS * COLS).repeat(2)
    torch.testing.assert_close(loss, F.cross_entropy(logits[image], ids[:, 1:].flatten()[image]))
    changed = ids.clone()
    changed[:, torch.arange(ids.shape[1]) % BLOCK >= ROWS * COLS] = 1
    assert torch.equal(model(input_ids=ids, actions=actions, labels=changed).loss, loss)


@torch.no_grad()
def test_predicting_states_are_those_before_the_tokens(model):
    ids, actions = random_batch(3)
    logits = model(input_ids=ids, actions=actions).logits[..., :64]
    states = model.predicting_states(ids, actions)
    assert states.shape == (2, 3, ROWS * COLS, 128)
    assert not states[:, 0, 0].any()
    for frame, token in ((0, 1), (1, 0), (2, 5)):
        predicted = model.image_logits(states[:, frame, token])
        torch.testing.assert_close(predicted, logits[:, frame * BLOCK + token - 1])


def test_training_needs_whole_blocks_actions_and_an_attention_that_knows_what_is_causal(model):
    ids, actions = random_batch(2)
    with pytest.raises(ValueError, match="input_ids: expected whole blocks of 18, got a length of 35"):
        model(input_ids=ids[:, :-1], actions=actions, labels=ids[:, :-1])
    with pytest.raises(ValueError, match="actions: expected those of all slots with labels, got none"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match=r"actions: expected \(2, 6\) steps and slots, got \(1, 6\)"):
        model(input_ids=ids, actions=actions[:, :1], labels=ids)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attention: expected sdpa for training, got 'eager'"):
        model(input_ids=ids, actions=actions, labels=ids)


def test_gradients_reach_every_parameter(model):
    ids, actions = random_batch(8)
    model.train()
    model(input_ids=ids, actions=actions, labels=ids).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_slots_must_be_filled(model, steps):
    ids, actions = random_batch(2)
    given = actions.repeat(1, 2, 1, 1)[:, :steps]
    message = rf"expected 12 rows for the slots, got {6 * steps} \(36 positions from 0 on\)"
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, actions=given)


@given(position=st.integers(0, 500), image_tokens=st.integers(1, 30), slots=st.integers(1, 8))
def test_layout_knows_its_slots(position, image_tokens, slots):
    layout = Layout(image_tokens, slots, 25)
    frame = position // layout.block
    assert layout.is_slot(position) == (position in range(layout.slot_start(frame), layout.slot_start(frame) + slots))
    assert layout.is_slot(layout.slot_start(3))
    assert not layout.is_slot(layout.slot_start(3) - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"num_spatio_embeddings": 5}, r"num_spatio_embeddings: expected .* = 18, got 5"),
        ({"max_position_embeddings": 10}, "max_position_embeddings: expected at least 144"),
        ({"waypoint_times": [0.5]}, "waypoint_times: expected one for each of 6"),
        ({"hidden_size": 127}, "hidden_size: expected a multiple"),
    ],
)
def test_bad_configs_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        tiny_config(**changes)


def test_missing_kv_heads_in_a_file_are_refused(tmp_path):
    save_tiny(tmp_path, LlamaActionForCausalLM)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: num_key_value_heads is missing"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "llama", "model_type: expected 'llama_action', got 'llama'"),
        ("architectures", ["LlamaForCausalLM"], "architectures: expected one of"),
        ("hidden_size", 64, "expected"),
    ],
)
def test_mismatched_checkpoints_are_refused(tmp_path, field, value, message):
    save_tiny(tmp_path, LlamaActionForCausalLM)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {field: value}))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


def test_load_restores_the_model(tmp_path):
    model = load_world_model(save_tiny(tmp_path / "first", LlamaActionV2ForCausalLM))
    write_weights(model, tmp_path / "again", "50KB")
    again = load_world_model(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    modes = {path.stat().st_mode for path in (tmp_path / "again").iterdir()}
    assert len(modes) == 1  # whoever may read config.json may read the weights
    assert type(model) is LlamaActionV2ForCausalLM
    assert not model.training
    torch.manual_seed(0)
    assert load_world_model(tmp_path / "first", dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_prompts_actions_are_finite(value):
    actions = torch.zeros(1, 6, 3)
    actions[0, 5, 2] = value
    with pytest.raises(ValueError, match="actions: expected finite numbers, got NaN or infinity"):
        build_prompt(torch.zeros(2, ROWS, COLS, dtype=torch.int64), actions)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_prompt_has_an_action_between_two_frames(steps):
    with pytest.raises(ValueError, match=f"expected 1 .one between two frames., got {steps}"):
        build_prompt(torch.zeros(2, ROWS, COLS, dtype=torch.int64), torch.zeros(steps, 6, 3))


def test_frames_are_packed_row_by_row_with_their_slots_after_them():
    tokens = torch.arange(1, 13).reshape(2, 2, 3)
    assert pack_blocks(tokens, 2).tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0]
