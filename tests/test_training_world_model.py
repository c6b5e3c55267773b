import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny import tiny_tokenizer_config
from tiny_training import CPU, TINY_SIZE, WINDOW, config, tokenized, world_model_objective
from torch.nn import functional as F

from terra.actions import Waypoints
from terra.dataset.tokens import ShardFacts, save_shard, write_index
from terra.engine.hf import HFEngine
from terra.errors import ConfigError, DatasetError
from terra.prompt import build_prompt, pack_blocks
from terra.sampling import SamplingParams
from terra.training.bit_vectors import add_bit_vectors, merge_bit_vectors
from terra.training.flops import flops_per_window
from terra.training.prediction import evaluate_world_model
from terra.training.preview import HeldOutPreview, load_preview_tokenizer, roll_out
from terra.training.randomness import step_random
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from terra.training.world_model import build_config, run, save_world_model, train_world_model
from terra.training.world_model_settings import TrainWorldModelSettings, WorldModelSize, WorldModelTraining
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model, model as model_module
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.settings import checked

pytestmark = pytest.mark.slow

CONF = Path(__file__).resolve().parent.parent / "conf"
ROOT = CONF.parent


def train_tiny(output: Path, accelerator: Accelerator, **training: object):
    settings = WorldModelTraining(**{"window": WINDOW, "max_corruption": 0.1, "evaluation_windows": 3} | training)
    loop = config(output, max_steps=2)
    return train_world_model(tokenized(), tokenized((8,), seed=1), loop, TINY_SIZE, settings, accelerator)


def test_windows_are_packed_as_the_model_reads_them():
    tokens = torch.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    packed = pack_blocks(tokens, 6)
    layout = build_config(tokenized(), 3, TINY_SIZE).layout
    assert packed.shape == (2, layout.max_length)
    is_slot = torch.tensor([layout.is_slot(position) for position in range(layout.max_length)])
    assert torch.equal(packed[:, ~is_slot].flatten(), tokens.flatten())


def test_batches_carry_clean_labels_and_corrupt_at_most_the_asked_fraction():
    data = tokenized((40,))
    batch = world_model_objective(data, max_corruption=0.4).draw(step_random(0, 0, CPU), 64, 1.0)
    changed = batch["input_ids"] != batch["labels"]
    assert 0.05 < changed.float().mean() < 0.3  # half of 0.4, less the replacements that change nothing
    assert changed.float().mean(dim=1).std() > 0.05  # a rate of its own for each window
    assert batch["input_ids"].max() < data.codebook_size
    clean = world_model_objective(data, max_corruption=0.0).draw(step_random(0, 0, CPU), 64, 1.0)
    assert torch.equal(clean["input_ids"], batch["labels"])
    assert torch.equal(clean["actions"], batch["actions"])
    for ids, actions in zip(batch["labels"], batch["actions"], strict=True):
        start = next(s for s in range(len(data.actions)) if torch.equal(data.actions[s], actions[0]))
        tokens, expected = data.windows(torch.tensor([start]), WINDOW)
        assert torch.equal(ids, pack_blocks(tokens, 6)[0])
        assert torch.equal(actions, expected[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_corruption": 1.0}, "max_corruption: expected a number of at least 0 and below 1, got 1.0"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0, got -1.0"),
        ({"bit_vectors": True, "init_from": "demo"}, "bit_vectors: expected false with init_from=demo, got true"),
        ({"attention": "slow"}, "attention: expected fastest or flash, got 'slow'"),
        ({"evaluation_windows": 0}, "evaluation_windows: expected a whole number of at least 1, got 0"),
    ],
)
def test_training_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        WorldModelTraining(**changes)


def gradients(objective, batch) -> dict[str, torch.Tensor]:
    objective.model.train()
    objective.model.zero_grad()
    objective.loss(batch, 0.0)["loss"].backward()
    return {name: parameter.grad.clone() for name, parameter in objective.model.named_parameters()}


def test_loss_is_that_of_the_logits_at_image_tokens():
    objective = world_model_objective(z_loss=0.1)
    batch = objective.draw(step_random(0, 0, CPU), 3, 1.0)
    logits = objective.model(input_ids=batch["input_ids"], actions=batch["actions"]).logits[:, :-1, :16]
    image = torch.arange(1, logits.shape[1] + 1) % 14 < 8
    expected = F.cross_entropy(logits[:, image].flatten(0, 1), batch["labels"][:, 1:][:, image].flatten())
    expected = expected + 0.1 * logits[:, image].logsumexp(dim=-1).square().mean()
    torch.testing.assert_close(objective.loss(batch, 0.0)["loss"], expected)
    slots = torch.arange(batch["labels"].shape[1]) % 14 >= 8
    batch["labels"][:, slots] = 3
    torch.testing.assert_close(objective.loss(batch, 0.0)["loss"], expected)


def test_checkpointed_layers_and_partial_logits_change_no_gradient(monkeypatch):
    objective = world_model_objective()
    batch = objective.draw(step_random(0, 0, CPU), 2, 1.0)
    plain = gradients(objective, batch)
    checkpointed = gradients(world_model_objective(checkpoint_layers=True), batch)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    monkeypatch.setattr(model_module, "_MAX_LOGITS", 16 * 10)
    for name, gradient in gradients(objective, batch).items():
        torch.testing.assert_close(gradient, plain[name])


@pytest.mark.parametrize("bit_vectors", [False, True])
def test_training_compiles_to_one_graph(bit_vectors):
    code = (
        "import torch\n"
        "from terra.training.randomness import step_random\n"
        "from terra.world_model import model\n"
        "from tiny_training import CPU, world_model_objective\n"
        "model._MAX_LOGITS = 16 * 40\n"
        f"objective = world_model_objective(checkpoint_layers=True, bit_vectors={bit_vectors})\n"
        "objective.model = torch.compile(objective.model.train(), backend='aot_eager', fullgraph=True)\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    loss = objective.loss(objective.draw(step_random(0, 0, CPU), 2, 1.0), 0.0)['loss']\n"
        "loss.backward()\n"
        "assert all(parameter.grad is not None for parameter in objective.model.parameters())\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_evaluation_agrees_with_the_training_loss():
    data = tokenized((30,))
    objective = world_model_objective(data)
    model = objective.model.eval()
    metrics = evaluate_world_model(model, data, WINDOW, 6)
    starts = data.window_starts(WINDOW)[torch.linspace(0, 26, 6).round().long()]
    tokens, actions = data.windows(starts, WINDOW)
    ids = pack_blocks(tokens, 6)
    with torch.no_grad():
        loss = model(input_ids=ids, actions=actions, labels=ids).loss.item()
    by_frame, patches = metrics["cross_entropy_by_frame"], 8
    counts = np.array([patches - 1] + [patches] * (WINDOW - 1))
    assert np.average(by_frame, weights=counts) == pytest.approx(loss, rel=1e-5)
    assert metrics["cross_entropy"] == pytest.approx(np.mean(by_frame[1:]))
    assert metrics["copy_accuracy_by_frame"] == [0.0] * WINDOW
    assert metrics["evaluated_windows"] == 6
    still = replace(data, tokens=torch.zeros_like(data.tokens))
    assert evaluate_world_model(model, still, WINDOW, 1)["copy_accuracy"] == 1.0
    assert "other_actions_cross_entropy" not in evaluate_world_model(model, still, WINDOW, 1)


def test_flops_count_by_hand():
    model = world_model_objective().model
    hidden, mlp, layers, kv, vocabulary, slots, patches = 32, 64, 2, 16, 16, 6, 8
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp
    projection = 3 * hidden + 2 * hidden * hidden
    length = WINDOW * (patches + slots)
    matrices = layers * layer * length + projection * slots * WINDOW + hidden * vocabulary * patches * WINDOW
    # Queries times keys, weights times values: 2 x 2 x length^2 x hidden forward, half of it masked, three times that.
    attention = layers * 3 * (2 * 2 * length**2 * hidden) // 2
    assert flops_per_window(model, WINDOW) == 6 * matrices + attention


def test_previewed_rollouts_are_the_engine_s(tmp_path, tiny_model):
    model = load_world_model(tiny_model)
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(64, (2, 3, 3, 4), generator=generator)
    actions = torch.randn(2, 5, 6, 3, generator=generator)
    rolled = roll_out(model, context, actions)
    assert rolled.shape == (2, 6, 3, 4)
    assert torch.equal(rolled[:, :3], context)

    async def frames(rollout: int) -> list[torch.Tensor]:
        engine = HFEngine(tiny_model)
        prompt = build_prompt(context[rollout], actions[rollout, :2])
        session = await engine.open(prompt, SamplingParams(), rollout)
        result = [frame async for frame in session.run(actions[rollout, 2:])]
        await engine.close()
        return result

    for rollout in (0, 1):
        assert torch.equal(rolled[rollout, 3:], torch.stack(asyncio.run(frames(rollout))))


def test_previews_show_prediction_and_rollouts_beside_the_truth(tmp_path, tiny_model):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (9, 3, 4), generator=generator).to(torch.uint8)
    data = replace(tokenized((9,)), tokens=tokens, codebook_size=64, actions=torch.randn(9, 6, 3, generator=generator))
    torch.manual_seed(0)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer: expected ffffffffffff, which made the tokens, got"):
        load_preview_tokenizer(tmp_path, data, CPU)
    data = replace(data, tokenizer_sha256=checkpoint_sha256(tmp_path))
    tokenizer = load_preview_tokenizer(tmp_path, data, CPU)
    ema = Ema(load_world_model(tiny_model), 0.9)
    shown = HeldOutPreview(data, 8, 2, tokenizer).show(ema)
    assert math.isfinite(shown["held_out_cross_entropy"])
    assert 0 <= shown["held_out_accuracy"] <= 1
    video = shown["rollout"]
    assert video.shape == (5, 3, 2 * 12, 2 * 16)
    assert video.dtype == torch.uint8
    assert torch.equal(video[:3, :, :, :16], video[:3, :, :, 16:])  # the context
    assert not torch.equal(video[3:, :, :, :16], video[3:, :, :, 16:])
    assert "rollout" not in HeldOutPreview(data, 8, 2, None).show(ema)
    with pytest.raises(ConfigError, match=r"preview_frames: expected 0 to 5 .* got 6"):
        HeldOutPreview(data, 8, 6, tokenizer)


def test_run_writes_weights_and_metrics(tmp_path, accelerator):
    result = train_tiny(tmp_path, accelerator, attention="flash")
    model = load_world_model(tmp_path / "world_model", dtype=torch.float32)
    assert model.config.tokenizer_sha256 == "f" * 64
    assert model.config.vocab_size == 17
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, result.ema.weights[name].bfloat16().float())
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["accuracy_by_frame"]) == WINDOW
    assert metrics["step"] == 2
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".world_model*"))
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert set(last) == {"step", "held_out_cross_entropy", "held_out_accuracy"}
    # A second run over the finished one replaces the folder.
    train_tiny(tmp_path, accelerator)
    assert load_world_model(tmp_path / "world_model").config.num_temporal_embeddings == WINDOW


def test_bit_vectors_are_merged_into_what_is_stored(tmp_path, accelerator):
    result = train_tiny(tmp_path, accelerator, bit_vectors=True)
    stored = load_world_model(tmp_path / "world_model", dtype=torch.float32)
    signs = torch.tensor(
        [[1.0 if number >> bit & 1 else -1.0 for bit in range(4)] for number in range(16)] + [[0.0] * 4]
    )
    for name in ("model.embed_tokens", "lm_head"):
        own, vectors = (
            result.ema.weights[f"{name}.parametrizations.weight.{part}"] for part in ("original", "0.vectors")
        )
        table = stored.get_parameter(f"{name}.weight")
        assert torch.equal(table, (own + signs @ vectors).bfloat16().float())
    assert not [name for name, _ in stored.named_parameters() if "parametrizations" in name]


def test_merged_bit_vectors_compute_what_they_did():
    objective = world_model_objective(bit_vectors=True)
    batch = objective.draw(step_random(0, 0, CPU), 3, 1.0)
    before = objective.loss(batch, 0.0)["loss"]
    merge_bit_vectors(objective.model)
    assert torch.equal(objective.loss(batch, 0.0)["loss"], before)
    merge_bit_vectors(objective.model)  # again: nothing is left to merge


def test_an_id_learns_from_the_ids_that_share_its_bits():
    """The row of an id that no token has moves toward the rows that share its bits, and away from its complement."""
    objective = world_model_objective(bit_vectors=True)
    table = objective.model.model.embed_tokens
    before = table.weight.detach().clone()
    (-table.weight[3].sum()).backward()
    with torch.no_grad():
        for parameter in table.parameters():
            parameter -= parameter.grad
    moved = (table.weight.detach() - before).mean(1)
    torch.testing.assert_close(
        moved, torch.tensor([4.0 - 2 * (3 ^ i).bit_count() + (i == 3) for i in range(16)] + [0.0])
    )


def test_bit_vectors_keep_the_variance_of_a_table():
    shape = build_config(tokenized(), WINDOW, WorldModelSize(**vars(TINY_SIZE) | {"hidden_size": 512}))
    plain, shared = LlamaActionV2ForCausalLM(shape), LlamaActionV2ForCausalLM(shape)
    add_bit_vectors(shared)
    for name in ("model.embed_tokens", "lm_head"):
        rows = [model.get_submodule(name).weight[:16].std() for model in (plain, shared)]
        torch.testing.assert_close(*rows, rtol=0.15, atol=0)


def test_weights_are_stored_in_parts(tmp_path):
    save_world_model(world_model_objective().model, tmp_path / "model", "20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert load_world_model(tmp_path / "model").lm_head.weight.shape == (17, 32)


def test_unfit_tokens_are_refused_before_training(tmp_path, accelerator):
    other = replace(tokenized(), tokenizer_sha256="0" * 64)
    settings = WorldModelTraining(window=WINDOW)
    with pytest.raises(
        ConfigError, match="held-out tokens: expected those of tokenizer ffffffffffff, got 000000000000"
    ):
        train_world_model(tokenized(), other, config(tmp_path), TINY_SIZE, settings, accelerator)
    with pytest.raises(DatasetError, match="expected an episode of at least 12 frames, got at most 9"):
        train_world_model(
            tokenized((20,)), tokenized(), config(tmp_path), TINY_SIZE, settings.replace(window=12), accelerator
        )
    assert not list(tmp_path.iterdir())


def compose_values(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", [*overrides, "data=data/tokens", "output=outputs/run"])
    return OmegaConf.to_container(composed, resolve=True)


RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("world_model_*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_build(recipe):
    values = compose_values(f"recipe={recipe}", "batch_size=7")
    assert LoopConfig.from_values(values).batch_size == 7
    assert checked(TrainWorldModelSettings, values).preview_tokenizer is None
    architecture = build_config(tokenized(), values["window"], WorldModelSize(**values["world_model"]))
    assert architecture.max_position_embeddings == values["window"] * 14


@pytest.mark.parametrize(
    ("recipe", "rows", "cols", "codebook_size", "expected"),
    [
        ("world_model_town", 9, 16, 8192, 31_559_680),
        ("world_model_100m", 9, 16, 8192, 132e6),
        ("world_model_town_hd", 18, 32, 2**15, 160_030_720),
        ("world_model_terra_v2", 18, 32, 2**18, 2_052_366_336),
    ],
)
def test_sizes_of_the_recipes(recipe, rows, cols, codebook_size, expected):
    values = compose_values(f"recipe={recipe}")
    data = replace(tokenized(), tokens=torch.zeros(16, rows, cols, dtype=torch.int32), codebook_size=codebook_size)
    with torch.device("meta"):
        architecture = build_config(data, values["window"], WorldModelSize(**values["world_model"]))
        model = LlamaActionV2ForCausalLM(architecture)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == expected if isinstance(expected, int) else count == pytest.approx(expected, rel=0.01)


def test_muon_is_for_whole_matrices():
    values = compose_values("recipe=world_model_adapter", "muon=3")
    with pytest.raises(ConfigError, match=r"^muon: expected null with adapter\.rank=16, got 3"):
        checked(TrainWorldModelSettings, values)


def test_a_folder_of_tokens_trains_from_its_settings(tmp_path):
    for split, seed in (("train", 0), ("held_out", 1)):
        data = tokenized((9, 8), seed)
        facts = ShardFacts(10.0, 16, "f" * 64, Waypoints(), "0" * 64, "float32")
        save_shard(tmp_path / split / "a.safetensors", facts, data.tokens, data.actions, data.episode_start)
        write_index(tmp_path / split, ["a.safetensors"])
    values = compose_values("recipe=world_model_smoke", "schedule=steps", "max_steps=1", "window=4")
    output = tmp_path / "run"
    run(checked(TrainWorldModelSettings, values | {"data": str(tmp_path), "output": str(output)}))
    assert json.loads((output / "settings.json").read_text())["window"] == 4
    assert load_world_model(output / "world_model").config.hidden_size == 64


def test_training_and_evaluation_have_their_own_help():
    commands = ("train", "train-tokenizer", "evaluate")
    code = (
        "import sys\n"
        "from terra.cli import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['terra', command, '--help', 'all']\n"
        "    try: main()\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in commands:
        assert f"terra {command}: " in done.stdout
    assert done.stdout.count("EXIT CODE") == done.stdout.count("ALL SETTINGS") == len(commands)


def test_commands_run_without_an_installation():
    done = subprocess.run([sys.executable, "-m", "terra", "paint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: paint: no such command; did you mean train?\n"
    done = subprocess.run([sys.executable, "-m", "terra", "train"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "data" in done.stderr
