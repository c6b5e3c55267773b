"""A tokenizer that is trained further on a new domain, with and without a penalty on tokens that change."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_tokenizer_training import ADVERSARIAL, TINY, compose_values, config, driving, stored_tokenizer, terms
from tiny import tiny_config
from tiny_driving import record
from tiny_training import read_log, read_state

from terra.dataset import read_split
from terra.dataset.tokens import load_tokens
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError, ConfigError
from terra.pairing import check_pairing
from terra.training.autoencoding import FurtherTraining, OldDomain
from terra.training.data import DrivingFrames
from terra.training.processes import start_processes
from terra.training.randomness import step_random
from terra.training.reconstruction import evaluate_tokenizer, shares_kept, tokens_kept
from terra.training.start import find_tokenizer
from terra.training.tokenize import FrameEncoder, finish_split, tokenize_split
from terra.training.tokenizer import run, train_further, train_tokenizer
from terra.training.tokenizer_settings import KeepTokensSettings, TrainTokenizerSettings
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.config import LFQTokenizerConfig
from tokenizer.lineage import tokens_sha256
from tokenizer.losses import kept_signs_loss
from tokenizer.settings import checked

pytestmark = pytest.mark.slow


def new_domain(count: int = 24) -> DrivingFrames:
    """The frames of `driving`, upside down and with inverted colors."""
    old = driving(count)
    frames = (255 - old.frames.flip(2)).contiguous(memory_format=torch.channels_last)
    return DrivingFrames(frames, old.actions, old.episode_start, old.fps, old.space, ())


def keeping(weight: float = 10.0) -> KeepTokensSettings:
    return KeepTokensSettings(weight=weight)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tokenizer of the old domain."""
    output = tmp_path_factory.mktemp("source")
    loop = config(output, max_steps=60, learning_rate=3e-3, warmup_steps=4)
    train_tokenizer(driving(), None, loop, TINY, terms(), start_processes("cpu"))
    return output / "tokenizer"


def further(output: Path, source: Path, accelerator, *, weight: float = 0.0, old: bool = True, **changes):
    loop = config(output, **{"max_steps": 25, "learning_rate": 2e-3, "warmup_steps": 4, **changes})
    domain = OldDomain(driving().frames, driving(7).frames) if old else None
    return train_further(
        new_domain(), new_domain(5), loop, source, terms(keep_tokens=keeping(weight)), accelerator, old=domain
    )


def read_metrics(output: Path) -> dict:
    return json.loads((output / "metrics.json").read_text())


@pytest.fixture(scope="module")
def kept(source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("kept")
    further(output, source, start_processes("cpu"), weight=10.0, log_every_seconds=1e-9)
    return output


@pytest.fixture(scope="module")
def free(source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("free")
    further(output, source, start_processes("cpu"))
    return output


def test_the_penalty_by_hand():
    before = torch.tensor([2.0, -0.1, 0.0, -3.0]).view(1, 4, 1, 1)
    z = torch.tensor([0.5, -0.2, 0.3, -1.0], requires_grad=True)
    loss = kept_signs_loss(z.view(1, 4, 1, 1), before, 0.5)
    # The second bit lies 0.3 inside the margin; the third was 0, which is negative, and is 0.8 away.
    assert loss.item() == pytest.approx((0.3**2 + 0.8**2) / 4)
    loss.backward()
    assert z.grad.tolist() == pytest.approx([0.0, 0.15, 0.4, 0.0])


def test_the_shares_by_hand():
    before = torch.tensor([[[0b000, 0b101], [0b111, 0b010]]])
    tokens = torch.tensor([[[0b000, 0b100], [0b000, 0b010]]])
    shares = {name: share.item() for name, share in shares_kept(tokens, before, 3).items()}
    assert shares == {"tokens_kept": 0.5, "bits_kept": pytest.approx(1 - 4 / 12)}


def test_training_starts_from_the_weights(source, tmp_path, accelerator, monkeypatch):
    class ReachedError(Exception):
        pass

    def look(objective, *_):
        expected = load_file(source / "model.safetensors")
        state = objective.model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name].float()) for name, tensor in state.items())
        raise ReachedError

    monkeypatch.setattr("terra.training.tokenizer._train", look)
    with pytest.raises(ReachedError):
        further(tmp_path, source, accelerator)


def test_without_a_penalty_the_result_is_a_tokenizer_of_its_own(source, free):
    config = LFQTokenizerConfig.load(free / "tokenizer" / "config.json")
    assert config == LFQTokenizer.from_pretrained(source).config
    assert tokens_sha256(free / "tokenizer") == checkpoint_sha256(free / "tokenizer") != checkpoint_sha256(source)
    assert "keep_tokens" not in read_log(free)[-1]


def test_the_penalty_keeps_tokens_that_change_without_it(kept, free):
    with_it, without = read_metrics(kept), read_metrics(free)
    for one, other in ((with_it, without), (with_it["old"], without["old"])):
        assert one["tokens_kept"] > other["tokens_kept"] + 0.05
        assert one["bits_kept"] > other["bits_kept"]
    assert with_it["start"] == without["start"]
    for metrics in (with_it, without):
        assert metrics["psnr"] > metrics["start"]["psnr"]


def test_metrics_are_those_of_the_stored_weights(source, kept):
    before, after = LFQTokenizer.from_pretrained(source), LFQTokenizer.from_pretrained(kept / "tokenizer")
    metrics = read_metrics(kept)
    for count, domain, found, start in (
        (5, new_domain, metrics, metrics["start"]),
        (7, driving, metrics["old"], metrics["start"]["old"]),
    ):
        frames = domain(count).frames
        expected = evaluate_tokenizer(after, frames, None) | tokens_kept(after, before, frames)
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        expected = evaluate_tokenizer(before, frames, None)
        assert {name: start[name] for name in expected} == pytest.approx(expected)


def test_the_log_and_the_picture_show_both_tokenizers(kept):
    lines = read_log(kept)
    assert {"keep_tokens", "tokens_kept", "bits_kept"} <= lines[0].keys()
    names = {f"{prefix}held_out_{name}" for prefix in ("", "old_") for name in ("psnr", "tokens_kept", "bits_kept")}
    assert names <= lines[-1].keys()
    with Image.open(kept / "reconstruction.png") as picture:
        assert picture.size == (5 * 32, 3 * 32)


def test_half_of_each_batch_is_of_the_old_domain(source):
    before = LFQTokenizer.from_pretrained(source)
    frames, old = torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    trained = FurtherTraining(LFQTokenizer(TINY), before, frames, terms(), old=old)
    drawn = trained.draw(step_random(0, 0, torch.device("cpu")), 5, 1.0)["frames"]
    assert drawn[:, 0, 0, 0].tolist() == [-1.0, -1.0, -1.0, 1.0, 1.0]
    assert not any(parameter.requires_grad for parameter in before.parameters())


def test_resumed_training_equals_uninterrupted_bit_for_bit(source, tmp_path, monkeypatch, accelerator):
    settings = terms(keep_tokens=keeping(), adversarial=ADVERSARIAL)
    old = OldDomain(driving().frames, None)

    def trained(output: Path):
        return train_further(new_domain(), None, config(output), source, settings, accelerator, old=old)

    trained(tmp_path / "whole")
    draw, drawn = FurtherTraining.draw, []

    def stop_after_four(self, random, batch_size, progress):
        drawn.append(batch_size)
        if len(drawn) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self, random, batch_size, progress)

    monkeypatch.setattr(FurtherTraining, "draw", stop_after_four)
    interrupted = trained(tmp_path / "parts")
    assert (interrupted.step, interrupted.stopped_by) == (4, "sigterm")
    assert not (tmp_path / "parts" / "tokenizer").exists()
    assert trained(tmp_path / "parts").step == 6
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    one, other = (checkpoint_sha256(tmp_path / name / "tokenizer") for name in ("whole", "parts"))
    assert one == other


def test_a_run_is_not_resumed_from_another_tokenizer(source, tmp_path, accelerator):
    further(tmp_path / "run", source, accelerator, max_steps=1)
    other = stored_tokenizer(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"init_from: expected \w{12} of .*start.json, got \w{12} of .*other"):
        further(tmp_path / "run", other, accelerator, max_steps=2)


def test_a_tokenizer_is_found_by_name_folder_and_parent(source):
    assert find_tokenizer(str(source)) == find_tokenizer(str(source.parent)) == source
    assert find_tokenizer("demo").name == "tokenizer"
    with pytest.raises(CheckpointError, match="expected a checkpoint folder or a Hub id"):
        find_tokenizer("/no/such/folder")


def test_generation_demands_the_tokenizer_itself_and_says_what_to_do(source, kept, free):
    def check(folder: Path, trained_with: Path) -> None:
        check_pairing(
            folder,
            EngineSpec.of(
                tiny_config(
                    num_image_patches=64,
                    num_spatio_embeddings=70,
                    max_position_embeddings=8 * 70,
                    tokenizer_sha256=tokens_sha256(trained_with),
                )
            ),
        )

    kept, free = kept / "tokenizer", free / "tokenizer"
    assert LFQTokenizerConfig.load(kept / "config.json").tokens_like == tokens_sha256(source)
    check(kept, kept)
    with pytest.raises(CheckpointError, match=r"got \w{12}, whose tokens are nearly the same: train the world model"):
        check(kept, source)
    for folder, trained_with in ((free, source), (source, kept)):
        with pytest.raises(CheckpointError, match=r"was trained with tokenizer \w{12}, got \w{12}$"):
            check(folder, trained_with)


def test_tokens_name_what_they_are_like(source, kept, tmp_path):
    record(tmp_path / "data", size=(32, 32))
    found = read_split(tmp_path / "data", "train")
    for folder, like in ((kept / "tokenizer", tokens_sha256(source)), (source, None)):
        encoder = FrameEncoder(LFQTokenizer.from_pretrained(folder), torch.device("cpu"), batch_size=4)
        output = tmp_path / folder.parent.name
        for _ in range(2):  # a second time nothing is left to do
            tokenize_split(found, output, encoder, tokens_sha256(folder))
            finish_split(found, output)
        tokens = load_tokens(output)
        assert (tokens.tokenizer_sha256, tokens.tokens_like) == (tokens_sha256(folder), like)
        assert ("tokens_like" in json.loads((output / "tokens.json").read_text())) == (like is not None)


def settings_of(tmp_path: Path, source: Path, *changes: str) -> dict:
    fast = ("device=cpu", "compile_model=false", "workers=0", "batch_size=4", "max_steps=2", "schedule=steps")
    values = compose_values("recipe=tokenizer_domain", *fast, "perceptual.weight=0", *changes)
    data = {"data": str(tmp_path / "data"), "old_data": str(tmp_path / "old"), "output": str(tmp_path / "run")}
    return values | data | {"init_from": str(source)}


def test_recordings_train_a_tokenizer_further_from_settings(source, tmp_path, monkeypatch):
    for folder in ("data", "old"):
        record(tmp_path / folder, shards=((5, 3), (4,)), size=(32, 32))
        record(tmp_path / folder, split="held_out", shards=((3,),), size=(32, 32))
    values = settings_of(tmp_path, source)
    run(checked(TrainTokenizerSettings, values))
    metrics = read_metrics(tmp_path / "run")
    assert metrics["evaluated_frames"] == metrics["old"]["evaluated_frames"] == 3
    assert 0 <= metrics["old"]["tokens_kept"] <= metrics["old"]["bits_kept"] <= 1
    assert LFQTokenizerConfig.load(tmp_path / "run" / "tokenizer" / "config.json").tokens_like == tokens_sha256(source)

    monkeypatch.delattr("terra.training.tokenizer.load_driving")
    wide = stored_tokenizer(tmp_path / "wide", image_size=(32, 64))
    with pytest.raises(ConfigError, match=r"^data: expected frames of \(32, 64\) .* as .*wide, got \(32, 32\)$"):
        run(checked(TrainTokenizerSettings, values | {"init_from": str(wide)}))
    record(tmp_path / "small", shards=((3,),), size=(16, 32))
    record(tmp_path / "small", split="held_out", shards=((3,),), size=(16, 32))
    with pytest.raises(ConfigError, match=r"^old_data: expected frames of \(32, 32\) .*, got \(16, 32\)$"):
        run(checked(TrainTokenizerSettings, values | {"old_data": str(tmp_path / "small")}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_of": "here"}, r"init_from: expected null with decoder_of=here, got demo$"),
        ({"init_from": None, "old_data": None}, r"keep_tokens\.weight: expected 0 without init_from, got 1$"),
        (
            {"init_from": None, "keep_tokens": {"weight": 0.0, "margin": 0.5}},
            r"old_data: expected null without init_from, got old$",
        ),
        ({"batch_size": 1}, r"batch_size: expected at least 2 with old_data, got 1$"),
        ({"keep_tokens": {"weight": -1.0, "margin": 0.5}}, r"keep_tokens\.weight: expected a number of at least 0"),
        ({"keep_tokens": {"weight": 1.0, "margin": 0.0}}, r"keep_tokens\.margin: expected a number"),
    ],
)
def test_settings_that_exclude_one_another_are_refused(changes, message):
    values = compose_values("recipe=tokenizer_domain", "keep_tokens.weight=1") | {"old_data": "old"}
    with pytest.raises(ConfigError, match=message) as caught:
        checked(TrainTokenizerSettings, values | changes)
    assert "\n" not in str(caught.value)
