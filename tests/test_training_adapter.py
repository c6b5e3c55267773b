"""Training that starts from a model: whole, or of a LoRA adapter; and the adapter's files, which peft reads too."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from tiny_training import CPU, TINY_SIZE, WINDOW, config, read_log, read_state, tokenized

from terra.actions import Keys
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError, ConfigError
from terra.prompt import pack_blocks
from terra.training.start import find_world_model
from terra.training.state import BestWeights
from terra.training.world_model import build_config, save_world_model, train_world_model
from terra.training.world_model_settings import WorldModelTraining
from terra.world_model import LlamaActionV2ForCausalLM, load_adapter, load_world_model
from terra.world_model.adapter import adapter_sha256
from tokenizer.checkpoint import checkpoint_sha256

pytestmark = pytest.mark.slow

KEYS = Keys(names=("left", "right"))


def keyed(lengths: tuple[int, ...] = (7, 9)):
    """Tokens whose actions are keys, of a model that knows waypoints."""
    data = tokenized(lengths)
    actions = (data.actions[:, :1, :2] > 0).float()
    return type(data)(data.tokens, actions, data.episode_start, data.fps, 16, data.tokenizer_sha256, KEYS)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaActionV2ForCausalLM(build_config(tokenized(), WINDOW, TINY_SIZE))
    folder = tmp_path_factory.mktemp("base") / "world_model"
    save_world_model(model, folder)
    return folder


def trained(output: Path, base: Path, accelerator, data=None, held_out=None, old=None, steps=3, **training):
    data, held_out = data or tokenized(), held_out or tokenized((8,), seed=1)
    values = {"window": WINDOW, "evaluation_windows": 3, "init_from": str(base), **training}
    loop = config(output, max_steps=steps, learning_rate=0.01)
    return train_world_model(data, held_out, loop, TINY_SIZE, WorldModelTraining(**values), accelerator, old)


@pytest.fixture(scope="module")
def adapted(base, accelerator, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("adapted")
    trained(output, base, accelerator, old=tokenized((8,), seed=2), adapter={"rank": 4})
    return output


def predicted(model, data=None) -> torch.Tensor:
    tokens, actions = (data or tokenized()).windows(torch.tensor([0, 7]), WINDOW)
    with torch.no_grad():
        return model(input_ids=pack_blocks(tokens, actions.shape[2]), actions=actions).logits


def test_an_adapter_is_stored_alone_and_small(adapted, base):
    folder = adapted / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (adapted / "world_model").exists()
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * TINY_SIZE.num_hidden_layers
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    state = read_state(adapted)
    assert not any("base_layer" in name or "embed_tokens" in name for name in state)
    assert len(adapter_sha256(folder)) == 64


def test_peft_reads_the_adapter_and_computes_what_the_merged_model_does(adapted, base):
    merged = load_world_model(base, adapter=adapted / "adapter")
    plain = load_world_model(base)
    reference = PeftModel.from_pretrained(load_world_model(base), str(adapted / "adapter"))
    assert not torch.allclose(predicted(merged), predicted(plain), atol=1e-3)
    torch.testing.assert_close(predicted(merged), predicted(reference.base_model.model), rtol=1e-4, atol=1e-5)


def test_the_base_model_is_as_before(adapted, base):
    before = checkpoint_sha256(base)
    load_world_model(base, adapter=adapted / "adapter")
    assert checkpoint_sha256(base) == before
    assert json.loads((adapted / "state" / "start.json").read_text()) == {"sha256": before}


def test_metrics_tell_what_is_learned_and_what_is_forgotten(adapted):
    metrics = json.loads((adapted / "metrics.json").read_text())
    assert metrics["cross_entropy"] < metrics["start"]["cross_entropy"]
    assert {"cross_entropy", "accuracy"} <= metrics["old"].keys() & metrics["start"]["old"].keys()
    assert (adapted / "learning.png").stat().st_size > 1000
    assert "old_held_out_cross_entropy" in read_log(adapted)[-1]


def test_training_starts_from_the_weights_and_keeps_their_layout(base, accelerator, tmp_path):
    trained(tmp_path, base, accelerator, steps=1)
    before, after = load_world_model(base), load_world_model(tmp_path / "world_model")
    change = max((a - b).abs().max() for a, b in zip(after.parameters(), before.parameters(), strict=True))
    assert 0 < change < 0.05
    assert after.config.to_dict() | {"dtype": None} == before.config.to_dict() | {"dtype": None}


@pytest.mark.parametrize("rank", [None, 4])
def test_new_actions_get_a_projection_of_their_own(base, accelerator, tmp_path, rank):
    trained(tmp_path, base, accelerator, keyed(), keyed((8,)), adapter={"rank": rank})
    if rank is None:
        model = load_world_model(tmp_path / "world_model")
    else:
        model = load_world_model(base, adapter=tmp_path / "adapter")
        assert load_adapter(tmp_path / "adapter", base).replaced_modules == [
            "action_projection",
            "pos_embedding_spatio_temporal",
        ]
    assert model.config.space == KEYS
    assert predicted(model, keyed()).isfinite().all()


def test_a_whole_projection_may_be_trained_besides(base, accelerator, tmp_path):
    trained(tmp_path, base, accelerator, adapter={"rank": 2, "also": ["action_projection"]})
    adapter = load_adapter(tmp_path / "adapter", base)
    assert adapter.replaced_modules == ["action_projection"]
    merged, plain = load_world_model(base, adapter=tmp_path / "adapter"), load_world_model(base)
    assert not torch.equal(merged.action_projection[0].weight, plain.action_projection[0].weight)


def test_a_model_is_found_by_name_folder_and_parent(base):
    assert find_world_model(str(base)) == find_world_model(str(base.parent)) == base
    assert find_world_model("demo").name == "world_model"
    with pytest.raises(CheckpointError, match="expected a checkpoint folder or a Hub id"):
        find_world_model("/no/such/folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": None, "adapter": {"rank": 4}}, "init_from: expected a model with adapter.rank, got null"),
        ({"adapter": {"rank": 0}}, r"adapter.rank: expected"),
        ({"adapter": {"rank": 4, "also": ["lm_head"]}}, r"adapter.also"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        WorldModelTraining(**({"init_from": "demo"} | changes))


def test_what_does_not_belong_together_is_refused(base, accelerator, tmp_path):
    other = tokenized()
    other = type(other)(other.tokens, other.actions, other.episode_start, 10.0, 16, "e" * 64, other.space)
    with pytest.raises(ConfigError, match="old_data: expected those of tokenizer ffffffffffff, got eeeeeeeeeeee"):
        trained(tmp_path, base, accelerator, old=other)
    with pytest.raises(ConfigError, match="expected tokens of the model's own tokenizer ffffffffffff, got eeee"):
        trained(tmp_path, base, accelerator, other, other)
    with pytest.raises(
        ConfigError, match="old_data: expected keys of left, right at 10 a second, as in data, got waypoints"
    ):
        trained(tmp_path, base, accelerator, keyed(), keyed(), old=tokenized())
    with pytest.raises(ConfigError, match=r"window: expected at most 4"):
        trained(tmp_path, base, accelerator, tokenized((9,)), tokenized((9,)), window=5)
    assert not any(tmp_path.iterdir())


def test_a_run_is_not_resumed_from_other_weights(base, accelerator, tmp_path):
    trained(tmp_path / "run", base, accelerator, steps=1, adapter={"rank": 2})
    trained(tmp_path / "other", base, accelerator, steps=1)
    with pytest.raises(ConfigError, match=r"init_from: expected \w{12} of .*start.json, got \w{12}"):
        trained(tmp_path / "run", tmp_path / "other" / "world_model", accelerator, steps=2, adapter={"rank": 2})


def like_the_base(lengths: tuple[int, ...] = (7, 9), like: str = "f" * 64, seed: int = 0):
    """Tokens of a tokenizer that was trained further from the base model's, nearly as they were."""
    return replace(tokenized(lengths, seed), tokenizer_sha256="e" * 64, tokens_like=like)


@pytest.mark.parametrize("rank", [None, 4])
def test_tokens_like_those_of_the_model_are_a_start(base, accelerator, tmp_path, rank, caplog):
    with caplog.at_level("INFO"):
        trained(tmp_path, base, accelerator, like_the_base(), like_the_base((8,)), adapter={"rank": rank})
    assert "new tokenizer eeeeeeeeeeee, whose tokens are nearly those of the model's ffffffffffff" in caplog.text
    if rank is None:
        model = load_world_model(tmp_path / "world_model")
    else:
        names = {path.name for path in (tmp_path / "adapter").iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors", "config.json"}
        adapter = load_adapter(tmp_path / "adapter", base)
        assert not adapter.replaced_modules
        model = load_world_model(base, adapter=tmp_path / "adapter")
        assert adapter.config.tokenizer_sha256 == "e" * 64
        assert "unknown keys" not in caplog.text
    assert EngineSpec.of(model.config).tokenizer_sha256 == "e" * 64
    assert load_world_model(base).config.tokenizer_sha256 == "f" * 64
    start = json.loads((tmp_path / "metrics.json").read_text())["start"]
    assert start["cross_entropy"] == pytest.approx(_cross_entropy_of(base, accelerator, tmp_path / "same"), rel=1e-5)


def _cross_entropy_of(base: Path, accelerator, output: Path) -> float:
    """That of the base model on the same ids, before any training."""
    trained(output, base, accelerator, tokenized(), tokenized((8,)), steps=1)
    return json.loads((output / "metrics.json").read_text())["start"]["cross_entropy"]


def test_tokens_like_those_of_another_tokenizer_are_refused(base, accelerator, tmp_path):
    stranger = like_the_base(like="d" * 64)
    with pytest.raises(ConfigError, match=r"expected tokens of the model's own tokenizer f{12}, got e{12}$"):
        trained(tmp_path, base, accelerator, stranger, stranger)


class TestDamage:
    @pytest.fixture
    def copy(self, adapted, tmp_path) -> Path:
        for path in (adapted / "adapter").iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "IA3"}, "peft_type: expected"),
            ({"r": 8}, "expected shape"),
            ({"r": True}, "r: expected"),
            ({"use_dora": True}, "use_dora"),
            ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
            ({"lora_alpha": -1}, "lora_alpha"),
        ],
    )
    def test_another_kind_of_adapter_is_refused(self, copy, base, changes, message):
        path = copy / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(CheckpointError, match=message) as caught:
            load_adapter(copy, base)
        assert "\n" not in str(caught.value)

    def test_an_adapter_of_another_model_is_refused(self, copy, accelerator, base, tmp_path_factory):
        output = tmp_path_factory.mktemp("other")
        trained(output, base, accelerator, steps=1)
        with pytest.raises(CheckpointError, match=r"expected the base model \w{12}, got \w{12} of"):
            load_adapter(copy, output / "world_model")

    def test_a_cut_file_is_refused(self, copy, base):
        path = copy / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(CheckpointError, match="adapter_model"):
            load_adapter(copy, base)

    def test_a_missing_file_is_refused(self, copy, base):
        (copy / "adapter_model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="adapter_model"):
            load_world_model(base, adapter=copy, device=CPU)


class TestBest:
    def test_the_best_save_is_stored(self, base, accelerator, tmp_path):
        """With every step saved, the stored weights are those of the lowest held-out figure in the log."""
        options = {"adapter": {"rank": 4}, "keep": "best", "evaluation_windows": 3}
        loop = config(tmp_path, max_steps=25, learning_rate=1.0, save_every_seconds=0.0)
        training = WorldModelTraining(window=WINDOW, init_from=str(base), **options)
        train_world_model(tokenized(), tokenized((8,), seed=1), loop, TINY_SIZE, training, accelerator)
        seen = [line["held_out_cross_entropy"] for line in read_log(tmp_path) if "held_out_cross_entropy" in line]
        assert min(seen) < seen[-1] - 0.002
        stored = json.loads((tmp_path / "metrics.json").read_text())["cross_entropy"]
        assert stored == pytest.approx(min(seen), abs=(seen[-1] - min(seen)) / 2)  # stored in bfloat16

    def test_a_resumed_run_remembers(self, base, accelerator, tmp_path):
        for folder, stops in (("whole", [6]), ("resumed", [3, 6])):
            for steps in stops:
                loop = config(tmp_path / folder, max_steps=steps, learning_rate=0.3, save_every_seconds=0.0)
                training = WorldModelTraining(window=WINDOW, init_from=str(base), adapter={"rank": 2}, keep="best")
                train_world_model(tokenized(), tokenized((8,), seed=1), loop, TINY_SIZE, training, accelerator)
        best = BestWeights(tmp_path / "resumed" / "state")
        seen = [line.get("held_out_cross_entropy", 9.0) for line in read_log(tmp_path / "resumed")]
        assert best.lowest == pytest.approx(min(seen))
