"""Adapters that strangers send: whatever their files hold is merged as it says, or refused in one line."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny import save_tiny
from tiny_adapter import change_header, change_tensors, save_adapter

from terra.errors import CheckpointError, TerraError
from terra.world_model import LlamaActionV2ForCausalLM, load_adapter, load_world_model
from terra.world_model.adapter import adapter_sha256, decoder_of
from terra.world_model.peft_config import IGNORED, AdapterConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "model.layers.0.self_attn.q_proj"
PROJECTION = "pos_embedding_spatio_temporal"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), LlamaActionV2ForCausalLM)


@pytest.fixture(scope="module")
def made(base, tmp_path_factory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("made") / "adapter", base, seed=1, also=(PROJECTION,))


@pytest.fixture
def copy(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "adapter")
    return tmp_path / "adapter"


def refused(folder: Path, base: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_world_model(base, adapter=folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def factor(tensors: dict, letter: str) -> str:
    return next(name for name in tensors if f"{LAYER}.lora_{letter}" in name)


def put(tensors: dict, name: str, value: float) -> None:
    tensors[name] = tensors[name].float()
    tensors[name].view(-1)[3] = value


@pytest.mark.parametrize("metadata", [{"x": 5}, ["a"], "a", None, {"x": None}])
def test_metadata_is_text(copy, base, metadata):
    change_header(copy / WEIGHTS, lambda header: header.update(__metadata__=metadata))
    refused(copy, base, "__metadata__: expected texts by name, got")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_factors_are_finite(copy, base, value):
    change_tensors(copy / WEIGHTS, lambda tensors: put(tensors, factor(tensors, "B"), value))
    refused(copy, base, rf"{WEIGHTS}: {LAYER}\.weight: expected finite numbers, got")
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight: expected finite numbers"):
        load_adapter(copy, base).check_updates()


def test_tensors_that_replace_others_are_finite(copy, base):
    def spoil(tensors: dict) -> None:
        put(tensors, next(name for name in tensors if PROJECTION in name), float("nan"))

    change_tensors(copy / WEIGHTS, spoil)
    refused(copy, base, f"{WEIGHTS}: {PROJECTION}.*: expected finite numbers, got nan")


def test_sums_are_finite(copy, base):
    def spoil(tensors: dict) -> None:
        for letter in "AB":
            tensors[factor(tensors, letter)] = torch.full_like(tensors[factor(tensors, letter)], 1e38)

    change_tensors(copy / WEIGHTS, spoil)
    refused(copy, base, rf"{LAYER}\.weight: expected finite numbers, got inf to inf")


def test_scale_is_finite(copy, base):
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps({**config, "lora_alpha": 1e308}))
    refused(copy, base, "expected finite numbers")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("part", ["lora_B", PROJECTION])
def test_other_dtypes_are_refused(copy, base, dtype, part):
    def cast(tensors: dict) -> None:
        name = next(name for name in tensors if part in name)
        tensors[name] = tensors[name].to(dtype)

    change_tensors(copy / WEIGHTS, cast)
    with pytest.raises(CheckpointError, match="expected one of BF16, F16, F32, F64, got"):
        load_adapter(copy, base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floats_of_any_size_are_taken(copy, base, dtype):
    expected = load_world_model(base, adapter=copy).state_dict()

    def cast(tensors: dict) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    change_tensors(copy / WEIGHTS, cast)
    for name, tensor in load_world_model(base, adapter=copy).state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, expected[name], atol=1e-3)


def test_a_weight_is_adapted_or_replaced(copy, base):
    change_tensors(
        copy / WEIGHTS, lambda tensors: tensors.update({f"base_model.model.{LAYER}.weight": torch.zeros(128, 128)})
    )
    refused(copy, base, rf"{LAYER}\.weight: expected LoRA factors or a tensor in its place, got both")


def settle(folder: Path, **keys) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "all"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("use_rslora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("ensure_weight_tying", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", [0, 1]),
        ("alora_invocation_tokens", [1, 2]),
        ("velora_config", {"num_groups": 64}),
        ("kasa_config", {"beta": 0.1}),
        ("monteclora_config", {"num_samples": 8}),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("a_key_of_a_later_version", True),
        ("a_key_of_a_later_version", 0),
        ("a_key_of_a_later_version", "none"),
        ("a_key_of_a_later_version", {"x": None}),
    ],
)
def test_what_plain_lora_has_not_is_refused_by_name(copy, base, key, value):
    settle(copy, **{key: value})
    shown = re.escape(json.dumps(value))
    refused(copy, base, f"{CONFIG}: {key}: expected .*null.*, for a plain LoRA adapter, got {shown}$")


def test_a_key_of_several_lines_is_one_line(copy, base):
    settle(copy, **{"a\nb": 1, "long": "x" * 500})
    refused(copy, base, r'adapter_config.json: "a\\nb": expected null, false or empty')


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "newer"])
def test_factors_that_are_taken_out_of_the_base_are_refused(copy, base, value):
    settle(copy, init_lora_weights=value)
    refused(copy, base, f'init_lora_weights: expected true, false, gaussian, .*, got "{value}", which may take .* out')


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_other_initializations_are_taken(copy, base, value):
    expected = load_world_model(base, adapter=copy).state_dict()
    settle(copy, init_lora_weights=value)
    assert_equal(load_world_model(base, adapter=copy).state_dict(), expected)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_what_is_off_is_taken(copy, base, value):
    settle(copy, a_key_of_a_later_version=value, bias=value, use_dora=value, rank_pattern=value)
    load_adapter(copy, base)


def test_a_module_to_save_is_in_the_file(copy, base):
    settle(copy, modules_to_save=[PROJECTION, "lm_head"])
    refused(copy, base, f"{WEIGHTS}: expected tensors of 'lm_head', as modules_to_save of {CONFIG} says, got none")


def convert(model, folder: Path) -> None:
    """Write an adapter to `folder`/made as plain LoRA; `folder`/first holds the factors before training."""
    first = str(folder / "first")
    model.save_pretrained(folder / "made", path_initial_model_for_weight_conversion=first, save_embedding_layers=False)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
class TestPeft:
    """Adapters that PEFT itself writes, compared with PEFT's own sums."""

    @pytest.fixture
    def make(self, base, tmp_path):
        from peft import LoraConfig, get_peft_model

        def made(train: bool = True, **options):
            torch.manual_seed(0)
            targets = ["q_proj", "v_proj", "down_proj"]
            lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
            model = get_peft_model(load_world_model(base), lora)
            model.save_pretrained(tmp_path / "first", save_embedding_layers=False)
            for name, parameter in model.named_parameters():
                if train and "lora_B" in name:
                    parameter.data += 0.05 * torch.randn_like(parameter)
            return model

        return made

    def test_every_field_of_peft_is_read_ignored_or_refused_and_its_defaults_pass(self, copy, base):
        from peft import LoraConfig

        refused_fields = set(LoraConfig().to_dict()) - IGNORED.keys() - AdapterConfig.model_fields.keys()
        # A new field of PEFT must be decided: does it change what the factors mean?
        assert refused_fields == {
            *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "bias", "ensure_weight_tying"),
            *("fan_in_fan_out", "kasa_config", "layer_replication", "lora_bias", "megatron_config"),
            *("monteclora_config", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora"),
            *("use_dora", "use_qalora", "use_rslora", "velora_config"),
        }
        (copy / CONFIG).write_text(json.dumps(LoraConfig().to_dict() | {"r": 4}))
        load_adapter(copy, base)

    @pytest.mark.parametrize("kind", [True, "gaussian", "orthogonal", "mica", "eva"])
    def test_plain_lora_is_what_peft_merges(self, make, base, tmp_path, kind):
        from peft import EvaConfig

        model = make(init_lora_weights=kind, **({"eva_config": EvaConfig()} if kind == "eva" else {}))
        model.save_pretrained(tmp_path / "made", save_embedding_layers=False)
        got = load_world_model(base, adapter=tmp_path / "made").state_dict()
        for name, tensor in model.merge_and_unload().state_dict().items():
            assert torch.allclose(got[name], tensor, atol=1e-5), name

    @pytest.mark.parametrize("kind", ["pissa", "olora"])
    def test_factors_out_of_the_base_are_refused_until_peft_converts_them(self, make, base, tmp_path, kind):
        model = make(init_lora_weights=kind)
        refused(tmp_path / "first", base, f'init_lora_weights: .* got "{kind}"')
        convert(model, tmp_path)
        got = load_world_model(base, adapter=tmp_path / "made").state_dict()
        before = load_world_model(base).state_dict()
        merged = model.merge_and_unload().state_dict()
        for name, tensor in merged.items():
            assert torch.allclose(got[name], tensor, atol=1e-4), name
        assert any(not torch.equal(got[name], before[name]) for name in got)

    def test_modules_that_peft_s_conversion_drops_are_missed(self, make, base, tmp_path):
        model = make(init_lora_weights="pissa", modules_to_save=["lm_head"])
        convert(model, tmp_path)
        refused(tmp_path / "made", base, "expected tensors of 'lm_head', as modules_to_save")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("head_dim", 32),
        ("tie_word_embeddings", True),
        ("max_position_embeddings", 4096),
        ("rope_theta", 5.0),
        ("attention_dropout", 0.5),
        ("rms_norm_eps", 0.5),
        ("vocab_size", 66),
        ("num_hidden_layers", 3),
    ],
)
def test_the_network_is_the_base_models(copy, base, key, value):
    config = json.loads((base / "config.json").read_text())
    config.pop("rope_parameters") if key == "rope_theta" else None
    (copy / "config.json").write_text(json.dumps({**config, key: value}))
    refused(copy, base, f"config.json: .*expected the base model's|{key}")


@pytest.mark.parametrize("changes", [{}, {"tokenizer_sha256": "a" * 64}, {"fps": 5.0}, {"dtype": "bfloat16"}])
def test_actions_tokenizer_and_storage_may_be_others(copy, base, changes):
    config = json.loads((base / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    load_world_model(base, adapter=copy)


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling", "zero", "loop"])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "config.json", "decoder"])
def test_files_that_are_none(copy, base, kind, name):
    path = copy / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "nowhere", "zero": "/dev/zero", "loop": name}[kind])
    if name != "decoder":
        refused(copy, base, f"{name}: expected a readable file, got")
    elif kind != "folder":
        with pytest.raises(CheckpointError, match="decoder: expected a folder or none, got something else"):
            decoder_of(copy)
    with pytest.raises(CheckpointError, match=name):
        adapter_sha256(copy)


def test_the_folder_of_a_training_is_not_its_adapter_s(copy, base):
    refused(copy.rename(copy.parent / "adapter").parent, base, "the adapter's folder is .*adapter")


def test_base_weights_are_finite(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path / "base/model.safetensors", lambda tensors: put(tensors, name, float("nan")))
    with pytest.raises(CheckpointError, match=rf"base/model\.safetensors: {name}: expected finite numbers, got nan"):
        load_world_model(tmp_path / "base")


def test_base_weights_are_floats(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    change_tensors(
        tmp_path / "base/model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int32)}),
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected one of BF16, F16, F32, F64, got I32"):
        load_world_model(tmp_path / "base")


def tried(folder: Path, base: Path) -> None:
    message = ""
    try:
        load_world_model(base, adapter=folder)
        adapter_sha256(folder)
    except TerraError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2000


@pytest.mark.slow
class TestAnything:
    @MANY
    @given(data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    @pytest.mark.parametrize("name", [CONFIG, "config.json"])
    def test_any_bytes(self, copy, base, name, data):
        (copy / name).write_bytes(data)
        tried(copy, base)

    @MANY
    @given(data=st.data())
    @pytest.mark.parametrize("name", [CONFIG, "config.json"])
    def test_any_value_of_a_key(self, made, base, tmp_path, name, data):
        content = json.loads(((made if name == CONFIG else base) / name).read_text())
        shutil.copytree(made, tmp_path / "adapter", dirs_exist_ok=True)
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(JSON)
        (tmp_path / "adapter" / name).write_text(json.dumps(content))
        tried(tmp_path / "adapter", base)

    @MANY
    @given(data=st.data())
    def test_any_value_in_the_header(self, made, base, tmp_path, data):
        shutil.copytree(made, tmp_path / "adapter", dirs_exist_ok=True)

        def change(header: dict) -> None:
            entry = header[data.draw(st.sampled_from(sorted(header)))]
            holder = data.draw(st.sampled_from([header, entry]))
            key = data.draw(st.sampled_from(sorted(holder)) | st.text(max_size=8))
            holder[key] = data.draw(JSON | st.sampled_from(["F32", "I64", "F64", "U8", [4, 128], [0, 1024]]))

        change_header(tmp_path / "adapter" / WEIGHTS, change)
        tried(tmp_path / "adapter", base)

    @MANY
    @given(place=st.floats(0, 1), change=st.binary(min_size=1, max_size=4), length=st.integers(0, 20))
    def test_any_bytes_in_the_header(self, made, base, tmp_path, place, change, length):
        shutil.copytree(made, tmp_path / "adapter", dirs_exist_ok=True)
        data = (made / WEIGHTS).read_bytes()
        start = int(place * int.from_bytes(data[:8], "little"))
        (tmp_path / "adapter" / WEIGHTS).write_bytes(data[:start] + change + data[start + length :])
        tried(tmp_path / "adapter", base)
