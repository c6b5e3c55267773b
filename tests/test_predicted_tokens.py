"""A decoder that is trained on the tokens that a world model predicts: prediction, objective and command."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, strategies as st
from omegaconf import OmegaConf
from tiny_driving import FPS, record
from tiny_training import TINY_SIZE, config

from terra.actions import Waypoints
from terra.config.files import register_resolvers
from terra.dataset.tokens import TokenizedDriving
from terra.errors import CheckpointError, ConfigError
from terra.prompt import pack_blocks
from terra.training.autoencoding import DecoderObjective
from terra.training.data import DrivingFrames, kept_episodes, load_driving
from terra.training.loop import train
from terra.training.predicted import NUM_GIVEN, PredictedSettings, PredictedTokens, predict, predicted_tokens
from terra.training.randomness import step_random
from terra.training.terms import EntropyAnneal, Terms
from terra.training.tokenizer import TrainTokenizerSettings, run, small_config
from terra.training.world_model import build_config
from terra.world_model import LlamaActionV2ForCausalLM, write_weights
from tokenizer import LFQTokenizer, LossWeights
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.settings import checked

pytestmark = pytest.mark.slow

CONF = Path(__file__).resolve().parent.parent / "conf"
CPU = torch.device("cpu")
LENGTHS = (7, 11)
WINDOW = 5


@pytest.fixture
def world(tmp_path) -> SimpleNamespace:
    """A tokenizer, a world model of its tokens with a window of 5 frames, and drives of 7 and 11 frames."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = LFQTokenizer(small_config(image_size=(32, 32), ch=32, ch_mult=[1, 1, 1], num_res_blocks=1, dim=4))
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        frames = torch.randint(256, (sum(LENGTHS), 3, 32, 32), dtype=torch.uint8)
        actions = torch.randn(sum(LENGTHS), *Waypoints().shape)
        bounds = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
        tokens = torch.zeros(len(frames), tokenizer.rows, tokenizer.cols, dtype=torch.uint8)
        sha256 = checkpoint_sha256(tmp_path / "tokenizer")
        driving = TokenizedDriving(tokens, actions, bounds, FPS, 16, sha256, Waypoints())
        model = LlamaActionV2ForCausalLM(build_config(driving, WINDOW, TINY_SIZE)).eval()
        for parameter in model.parameters():
            parameter.data *= 3  # far from uniform
        write_weights(model, tmp_path / "world_model", "45MB")
    return SimpleNamespace(
        folder=tmp_path,
        tokenizer=tokenizer.eval(),
        model=model,
        driving=DrivingFrames(frames, actions, bounds, FPS, Waypoints(), ()),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own_tokens(world: SimpleNamespace) -> torch.Tensor:
    with torch.no_grad():
        return world.tokenizer.encode(world.driving.frames.float() / 127.5 - 1)


def test_nearly_greedy_predictions_are_those_of_the_forward_pass(world):
    found = predict(world.model, world.tokenizer, world.driving, 1e-4, generator())
    assert found.dtype == torch.uint8
    own = own_tokens(world)
    for start, stop in ((0, 5), (5, 7), (7, 12), (12, 17), (17, 18)):
        assert torch.equal(found[start : min(start + NUM_GIVEN, stop)], own[start : min(start + NUM_GIVEN, stop)])
        tokens, actions = own[start:stop], world.driving.actions[start:stop]
        with torch.no_grad():
            logits = world.model(pack_blocks(tokens[None], actions.shape[1]), actions[None]).logits[0]
        block = logits.shape[0] // (stop - start)
        for frame in range(NUM_GIVEN, stop - start):
            first = frame * block - 1
            best = logits[first : first + tokens[0].numel(), :16].argmax(dim=-1)
            assert torch.equal(found[start + frame].flatten().long(), best)


def test_predictions_are_sampled_by_seed_and_temperature(world):
    once, again, other = (
        predict(world.model, world.tokenizer, world.driving, 0.9, generator(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    greedy = predict(world.model, world.tokenizer, world.driving, 1e-4, generator(1))
    assert not torch.equal(once, greedy)
    hot = predict(world.model, world.tokenizer, world.driving, 1e4, generator(1))
    predicted = torch.cat([hot[3:5], hot[10:12], hot[15:17]])
    shares = predicted.flatten().long().bincount(minlength=16) / predicted.numel()
    assert shares.max() < 0.15  # nearly uniform over 16 ids


def terms() -> Terms:
    return Terms(weights=LossWeights(), anneal=EntropyAnneal())


def loss(world: SimpleNamespace, predicted: PredictedTokens | None) -> dict[str, torch.Tensor]:
    objective = DecoderObjective(world.tokenizer, world.driving.frames, terms(), None, predicted)
    return objective.loss(objective.draw(step_random(0, 0, CPU), 8, 0.0), 0.0)


def test_with_the_frames_own_tokens_the_loss_is_the_plain_one(world):
    plain = loss(world, None)
    same = loss(world, PredictedTokens(own_tokens(world), 0.5, 1.0))
    assert same["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-6)
    mean = (same["pixel"] + same["predicted_pixel"]) / 2
    assert mean.item() == pytest.approx(plain["pixel"].item(), rel=1e-6)


def test_without_the_reconstruction_terms_predicted_frames_do_not_count(world):
    found = predict(world.model, world.tokenizer, world.driving, 0.9, generator())
    parts = loss(world, PredictedTokens(found, 0.25, 0.0))
    assert parts["loss"].item() == pytest.approx(0.75 * (parts["pixel"] + parts["gradient"]).item(), rel=1e-6)
    whole = loss(world, PredictedTokens(found, 0.25, 1.0))
    theirs = (whole["predicted_pixel"] + whole["predicted_gradient"]).item()
    assert whole["loss"].item() == pytest.approx(parts["loss"].item() + 0.25 * theirs, rel=1e-6)


@given(st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(2, 64))
def test_a_batch_always_has_frames_of_both_kinds(share, batch_size):
    count = PredictedTokens(torch.zeros(1, 1, 1), share, 1.0).count(batch_size)
    assert 1 <= count <= batch_size - 1
    assert abs(count - share * batch_size) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.one_of(st.none(), st.integers(1, 200)))
def test_kept_episodes_are_distinct_in_order_and_within_the_limit(lengths, limit):
    episodes = [SimpleNamespace(num_frames=length, index=index) for index, length in enumerate(lengths)]
    kept = kept_episodes(episodes, limit)
    indices = [episode.index for episode in kept]
    assert indices == sorted(set(indices))
    if limit is None or sum(lengths) <= limit:
        assert indices == list(range(len(lengths)))
    else:
        assert len(kept) == 1 or sum(episode.num_frames for episode in kept) <= limit


def test_whole_episodes_are_loaded(tmp_path):
    record(tmp_path, shards=((5, 3), (4,), (6,)))
    loaded = load_driving(tmp_path, "train", max_frames=12, whole_episodes=True)
    assert loaded.episode_start.diff().tolist() == [5, 6]
    with pytest.raises(ConfigError, match="max_frames: expected at least 1"):
        load_driving(tmp_path, "train", max_frames=0, whole_episodes=True)


def test_a_strange_world_model_is_refused(world):
    settings = PredictedSettings(world_model=str(world.folder / "world_model"))
    assert predicted_tokens(PredictedSettings(), world.folder / "tokenizer", world.tokenizer, world.driving, 0) is None
    faster = replace(world.driving, fps=2 * FPS)
    with pytest.raises(ConfigError, match=r"predicted\.world_model: expected waypoints.* at 20 a second"):
        predicted_tokens(settings, world.folder / "tokenizer", world.tokenizer, faster, 0)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        stranger = LFQTokenizer(world.tokenizer.config)
    stranger.save_pretrained(world.folder / "stranger")
    with pytest.raises(CheckpointError, match="was trained with tokenizer"):
        predicted_tokens(settings, world.folder / "stranger", stranger, world.driving, 0)
    nowhere = PredictedSettings(world_model=str(world.folder / "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere"):
        predicted_tokens(nowhere, world.folder / "tokenizer", world.tokenizer, world.driving, 0)


def test_a_decoder_learns_to_draw_predicted_tokens(world, accelerator):
    """A world model that is wrong in all bits: the decoder that was trained on its tokens draws them better."""
    frames = torch.full((8, 3, 32, 32), 230, dtype=torch.uint8)
    truth = frames.float() / 127.5 - 1
    with torch.no_grad():
        wrong = 15 - world.tokenizer.encode(truth)
    error = {}
    for name, predicted in (("own", None), ("predicted", PredictedTokens(wrong, 0.5, 1.0))):
        tokenizer = LFQTokenizer.from_pretrained(world.folder / "tokenizer")
        objective = DecoderObjective(tokenizer, frames, terms(), None, predicted)
        train(objective, config(world.folder / name, max_steps=40, learning_rate=5e-3), accelerator)
        error[name] = (tokenizer.eval().decode(wrong) - truth).abs().mean().item()
    assert error["predicted"] < 0.8 * error["own"]


def compose_values(*overrides: str) -> dict:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("train_tokenizer", list(overrides)), resolve=True)


def decoder_settings(world: SimpleNamespace, *changes: str) -> TrainTokenizerSettings:
    values = compose_values(
        "recipe=tokenizer_town_hd_decoder",
        f"decoder_of={world.folder / 'tokenizer'}",
        f"predicted.world_model={world.folder / 'world_model'}",
        f"data={world.folder / 'data'}",
        f"output={world.folder / 'run'}",
        *("device=cpu", "perceptual.weight=0", "adversarial.width=8", "batch_size=4", "schedule=steps"),
        *("max_seconds=null", "max_steps=2", "evaluation_frames=2", "workers=0", "max_frames=12"),
        *changes,
    )
    return checked(TrainTokenizerSettings, values)


def test_the_recipe_trains_from_its_settings(world):
    record(world.folder / "data", shards=((5, 3), (4,), (6,)), size=(32, 32))
    record(world.folder / "data", split="held_out", shards=((3,),), size=(32, 32))
    run(decoder_settings(world))
    written = json.loads((world.folder / "run" / "settings.json").read_text())
    assert written["predicted"]["share"] == 0.5
    assert (world.folder / "run" / "tokenizer" / "model.safetensors").exists()
    lines = [json.loads(line) for line in (world.folder / "run" / "log.jsonl").read_text().splitlines()]
    assert all(line["predicted_pixel"] > 0 for line in lines if "loss" in line)


def test_settings_that_do_not_belong_together_are_refused_before_a_frame_is_decoded(world, monkeypatch):
    record(world.folder / "data", shards=((5, 3),), size=(32, 32))
    record(world.folder / "data", split="held_out", shards=((3,),), size=(32, 32))
    with pytest.raises(ConfigError, match=r"predicted\.world_model: expected null without decoder_of"):
        decoder_settings(world, "decoder_of=null")
    with pytest.raises(ConfigError, match=r"batch_size: expected at least 2 with predicted\.world_model, got 1"):
        decoder_settings(world, "batch_size=1")
    with pytest.raises(ConfigError, match=r"predicted\.share: expected a number above 0 and below 1, got 1"):
        decoder_settings(world, "predicted.share=1.0")
    monkeypatch.delattr("terra.training.tokenizer.load_driving")
    with pytest.raises(CheckpointError, match="nowhere"):
        run(decoder_settings(world, f"predicted.world_model={world.folder / 'nowhere'}"))
