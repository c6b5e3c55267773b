import json
import logging
import math
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, settings, strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn

from decoder.camera import Camera
from decoder.video import write_video
from terra.device import torch_device
from terra.errors import CheckpointError, ConfigError, DatasetError, OutputError
from terra.recording.dataset import create_dataset, file_sha256, write_poses
from terra.recording.drives import Poses
from terra.training import loop as loop_module
from terra.training.data import DrivingFrames, load_driving, to_unit_range
from terra.training.loop import train
from terra.training.randomness import draw_indices, step_random
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from terra.training.tokenizer import (
    EntropyAnneal,
    TokenizerObjective,
    evaluate_tokenizer,
    evenly_spaced,
    loss_weights,
    small_config,
    stored_dtype,
    train_tokenizer,
)
from terra.training.tokens import TokenisedDriving, load_tokens, save_tokens, tokenise
from terra.training.world_model import (
    WorldModelObjective,
    WorldModelSize,
    build_config,
    evaluate_world_model,
    flops_per_window,
    pack_windows,
    train_world_model,
)
from terra.trajectory import WAYPOINT_TIMES
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model
from terra.world_model.attention import use_causal_attention
from tokenizer import LFQTokenizer, LossWeights

CONF = Path(__file__).resolve().parent.parent / "conf"
TINY_TOKENIZER = small_config(image_size=(16, 32), ch=32, ch_mult=[1, 1, 1], num_res_blocks=1, dim=6)
TINY_SIZE = WorldModelSize(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)
WINDOW = 4


def pictures(count: int) -> np.ndarray:
    """A bright bar that moves over a gradient: few, learnable pictures."""
    frames = np.zeros((count, 16, 32, 3), np.uint8)
    frames[..., 1] = np.linspace(40, 200, 32).astype(np.uint8)
    for index, frame in enumerate(frames):
        left = 2 * (index % 13)
        frame[4:12, left : left + 6] = (230, 60, 40)
    return frames


def driving(count: int = 24, episodes: int = 2) -> DrivingFrames:
    frames = torch.from_numpy(pictures(count)).permute(0, 3, 1, 2).to(memory_format=torch.channels_last)
    bounds = torch.linspace(0, count, episodes + 1).long()
    return DrivingFrames(frames, torch.zeros(count, 6, 3), bounds, 10.0, WAYPOINT_TIMES, ())


def record(
    folder: Path, split: str = "train", lengths: tuple[int, ...] = (5, 3), size: tuple[int, int] = (16, 32)
) -> None:
    """A dataset of short drives straight ahead at 1, 2, ... m/s, without any renderer."""
    create_dataset(folder, (16, 32), Camera(fov_degrees=75.0, height_metres=1.4, pitch_radians=-0.03), seed=0)
    for index, length in enumerate(lengths):
        name = f"{split}_000000_{index:02d}"
        episode = folder / "episodes" / name
        episode.mkdir()
        frames = np.broadcast_to(np.uint8(grey(index)), (length, *size, 3))
        write_video(np.ascontiguousarray(frames), episode / "video.mp4", 10.0)
        time = np.arange(length + 30) / 10
        speed = np.full_like(time, index + 1.0)
        write_poses(episode / "poses.npz", Poses(time, speed * time, 0 * time, 0 * time, speed))
        facts = {"id": name, "split": split, "town_seed": 0, "weather": "day", "num_frames": length, "fps": 10.0}
        hashes = {file: file_sha256(episode / file) for file in ("video.mp4", "poses.npz")}
        facts |= {"image_size": list(size), "events": [], "sha256": hashes}
        (episode / "episode.json").write_text(json.dumps(facts))


def grey(index: int) -> int:
    """The level of all pixels of a recorded episode."""
    return 40 + 40 * index


def tokenised(lengths: tuple[int, ...] = (7, 9), seed: int = 0) -> TokenisedDriving:
    """Each frame is the one before it with 1 added to every id: predictable."""
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    count = int(bounds[-1])
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(16, (1, 2, 4), generator=generator)
    tokens = (start + torch.arange(count)[:, None, None]) % 16
    actions = torch.randn(count, 6, 3, generator=generator)
    return TokenisedDriving(tokens.int(), actions, bounds, 10.0, 16, "f" * 64, WAYPOINT_TIMES)


def config(output: Path, **changes: object) -> LoopConfig:
    values = {"batch_size": 4, "max_steps": 6, "warmup_steps": 1, "ema_decay": 0.9, "output": output}
    return LoopConfig(**values | changes)


def tokenizer_objective() -> TokenizerObjective:
    torch.manual_seed(0)
    model = LFQTokenizer(TINY_TOKENIZER).to(memory_format=torch.channels_last)
    return TokenizerObjective(model, driving().frames, LossWeights(), EntropyAnneal())


def world_model_objective(max_corruption: float = 0.2, data: TokenisedDriving | None = None) -> WorldModelObjective:
    data = data or tokenised()
    torch.manual_seed(0)
    model = LlamaActionV2ForCausalLM(build_config(data, WINDOW, TINY_SIZE))
    use_causal_attention(model)
    return WorldModelObjective(model, data, WINDOW, max_corruption)


OBJECTIVES = {"tokenizer": tokenizer_objective, "world_model": world_model_objective}


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    name = json.loads((folder / "state" / "state.json").read_text())["tensors"]
    return load_file(folder / "state" / name)


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("name", OBJECTIVES)
def test_resumed_training_equals_uninterrupted_bit_for_bit(name, tmp_path, monkeypatch):
    whole = train(OBJECTIVES[name](), config(tmp_path / "whole"))

    first = OBJECTIVES[name]()
    draw, drawn = first.draw, []

    def stop_after_three(random, batch_size):
        drawn.append(batch_size)
        if len(drawn) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(random, batch_size)

    monkeypatch.setattr(first, "draw", stop_after_three)
    interrupted = train(first, config(tmp_path / "parts"))
    assert (interrupted.step, interrupted.stopped_by) == (3, "sigterm")
    resumed = train(OBJECTIVES[name](), config(tmp_path / "parts"))

    assert (resumed.step, resumed.stopped_by) == (whole.step, whole.stopped_by) == (6, "steps")
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert any(key.startswith("optimizer.exp_avg_sq.") for key in expected)
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert [line["step"] for line in read_log(tmp_path / "parts")] == [3, 6]
    assert len(list((tmp_path / "parts" / "state").iterdir())) == 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_falls(name, tmp_path):
    run = config(tmp_path, max_steps=40, log_every_seconds=1e-9, learning_rate=5e-3, warmup_steps=4)
    objective = world_model_objective(max_corruption=0.0) if name == "world_model" else tokenizer_objective()
    train(objective, run)
    key = "loss" if name == "world_model" else "pixel"
    losses = [line[key] for line in read_log(tmp_path)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


class Quadratic:
    """The smallest objective: a vector that is drawn towards the batch's mean."""

    samples = "numbers"
    flops_per_sample = None

    def __init__(self, scale: float = 1.0):
        self.model: nn.Module = nn.Linear(1, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        self.scale = scale

    def draw(self, random, batch_size):
        return {"x": torch.rand(batch_size, 1, generator=random.host)}

    def loss(self, batch, progress):
        return {"loss": self.scale * self.model(batch["x"]).square().mean(), "progress": torch.tensor(progress)}


def test_sigterm_handler_is_put_back_and_a_stopped_run_returns(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert train(Quadratic(), config(tmp_path)).stopped_by == "steps"
    assert signal.getsignal(signal.SIGTERM) is before


def test_finished_run_returns_at_once_and_keeps_its_weights(tmp_path):
    train(Quadratic(), config(tmp_path))
    state = read_state(tmp_path)
    again = train(Quadratic(), config(tmp_path))
    assert (again.step, again.stopped_by) == (6, "steps")
    assert all(torch.equal(value, read_state(tmp_path)[key]) for key, value in state.items())


def test_time_schedule_follows_the_clock_over_resumed_parts(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_module, "monotonic", lambda: clock[0])
    objective = Quadratic()
    draw = objective.draw

    def one_second(random, batch_size):
        clock[0] += 1.0
        if clock[0] == 4.0:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(random, batch_size)

    monkeypatch.setattr(objective, "draw", one_second)
    run = config(tmp_path, max_steps=None, max_seconds=10.0, schedule="time", warmup_steps=0, log_every_seconds=1.0)
    assert train(objective, run).stopped_by == "sigterm"
    clock[0] = 1000.0  # the time between two parts of a run does not count
    result = train(objective, run)
    assert (result.stopped_by, result.step, result.elapsed_seconds) == ("time", 10, 10.0)
    progress = [line["progress"] for line in read_log(tmp_path)]
    assert progress == pytest.approx([step / 10 for step in range(10)])
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    expected = [run.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / 10))) for step in range(1, 11)]
    assert rates == pytest.approx(expected)


def test_warmup_and_cosine_by_steps(tmp_path):
    run = config(tmp_path, max_steps=50, warmup_steps=9, log_every_seconds=1e-9)
    train(Quadratic(), run)
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    assert rates[0] == pytest.approx(run.learning_rate * 0.2, rel=0.01)
    assert max(rates) == max(rates[7:12]) <= run.learning_rate
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.05 * run.learning_rate)


def test_state_is_saved_while_training(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(loop_module, "save_state", lambda *arguments: saved.append(arguments[-1]["step"]))
    train(Quadratic(), config(tmp_path, save_every_seconds=0.0))
    assert saved == [1, 2, 3, 4, 5, 6, 6]


def test_infinite_loss_stops_and_the_last_good_state_stays(tmp_path):
    train(Quadratic(), config(tmp_path, max_steps=2))
    before = read_state(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a finite loss, got (inf|nan) before step 6.*learning_rate"):
        train(Quadratic(scale=math.inf), config(tmp_path))
    assert all(torch.equal(value, read_state(tmp_path)[key]) for key, value in before.items())


def test_damaged_and_foreign_states_are_refused(tmp_path):
    train(Quadratic(), config(tmp_path))
    with pytest.raises(ConfigError, match=r"seed: expected 0 of .*state, got 1"):
        train(Quadratic(), config(tmp_path, seed=1))
    other = Quadratic()
    other.model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"weight: expected shape \(1, 2\), got \(1, 1\)"):
        train(other, config(tmp_path))
    other.model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"4 missing .*4 unexpected"):
        train(other, config(tmp_path))
    tensors = next((tmp_path / "state").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="expected a complete safetensors file"):
        train(Quadratic(), config(tmp_path))
    (tmp_path / "state" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected the state of a training run"):
        train(Quadratic(), config(tmp_path))


def test_unwritable_output(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="state"):
        train(Quadratic(), config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "max_steps: expected a number with schedule=steps, got null"),
        ({"schedule": "time"}, "max_seconds: expected a number with schedule=time, got null"),
        ({"schedule": "epochs"}, "schedule: expected steps or time, got 'epochs'"),
        ({"batch_size": 0}, "batch_size: expected a number above 0, got 0"),
        ({"batch_size": 2.5}, "batch_size: expected a whole number, got 2.5"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, got 'fast'"),
        ({"learning_rate": None}, "learning_rate: expected a number, got None"),
        ({"learning_rate": math.nan}, "learning_rate: expected a number above 0, got nan"),
        ({"ema_decay": 1.0}, r"ema_decay: expected a fraction in \[0, 1\), got 1.0"),
        ({"seed": -1}, "expected 0 or more, got -1"),
    ],
)
def test_settings_are_checked(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_settings_are_picked_from_flat_values():
    values = {"batch_size": 2, "max_steps": 3, "output": "somewhere", "device": "cpu", "data": "elsewhere"}
    assert LoopConfig.from_values(values) == LoopConfig(output=Path("somewhere"), batch_size=2, max_steps=3)
    with pytest.raises(ConfigError, match="output: expected in the configuration, got none"):
        LoopConfig.from_values({"batch_size": 2, "max_steps": 3})


def test_devices():
    assert torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: expected cpu or cuda, got 'abacus'"):
        torch_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device is available"):
            torch_device("cuda")


def compose_values(name: str, *overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(name, [*overrides, "data=data/town", "output=outputs/run"]), resolve=True)


@pytest.mark.parametrize("recipe", ["tokenizer_smoke", "tokenizer_town"])
def test_tokenizer_configurations_build(recipe):
    values = compose_values("train_tokenizer", f"recipe={recipe}", "tokenizer.dim=10", "seed=3")
    assert LoopConfig.from_values(values).seed == 3
    model = small_config(image_size=(144, 256), **values["tokenizer"])
    assert (model.num_tokens, model.quantizer_config.codebook_size) == (144, 1024)
    assert loss_weights(values["loss"]).pixel == 1.0
    assert EntropyAnneal(**values["entropy_anneal"]).factor(1.0) == 1.0
    assert stored_dtype(values["dtype"]) is torch.float16


@pytest.mark.parametrize("recipe", ["world_model_smoke", "world_model_town"])
def test_world_model_configurations_build(recipe):
    values = compose_values("train_world_model", f"recipe={recipe}", "batch_size=7")
    assert LoopConfig.from_values(values).batch_size == 7
    architecture = build_config(tokenised(), values["window"], WorldModelSize(**values["world_model"]))
    assert architecture.max_position_embeddings == values["window"] * 14
    assert set(compose_values("dataset_tokenise", "checkpoint=outputs/tokenizer")["splits"]) == {"train", "held_out"}


def test_draws_depend_on_seed_and_step_alone():
    def draw(seed: int, step: int) -> list[int]:
        return draw_indices(step_random(seed, step, torch.device("cpu")), 10**9, 4, torch.device("cpu")).tolist()

    torch.manual_seed(1)
    first = draw(0, 5)
    torch.manual_seed(2)
    assert draw(0, 5) == first
    assert len({tuple(draw(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_ema_is_the_closed_form_average():
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, decay=0.5)
    expected = model.weight.item()
    for step, value in enumerate((3.0, -1.0, 7.0)):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update(step)
        keep = min(0.5, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * value
    ema.copy_to_model()
    assert model.weight.item() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 12), st.data())
def test_windows_never_cross_episodes(lengths, window, data):
    source = tokenised(tuple(lengths))
    if max(lengths) < window:
        with pytest.raises(DatasetError, match=f"expected an episode of at least {window} frames, got at most"):
            source.window_starts(window)
        return
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tagged = replace(source, tokens=episode[:, None, None].expand(-1, 2, 4).int())
    starts = tagged.window_starts(window)
    assert len(starts) == sum(max(0, length - window + 1) for length in lengths)
    assert len(starts.unique()) == len(starts)
    some = starts[data.draw(st.lists(st.integers(0, len(starts) - 1), min_size=1, max_size=4))]
    tokens, actions = tagged.windows(some, window)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(some), window, 2, 4)
    assert (tokens == tokens[:, :1]).all()
    assert all(torch.equal(a, source.actions[s : s + window]) for a, s in zip(actions, some.tolist(), strict=True))


def test_token_files_round_trip(tmp_path):
    source = tokenised()
    save_tokens(source, tmp_path / "train")
    loaded = load_tokens(tmp_path / "train.safetensors")
    for name, value in source.__dict__.items():
        got = getattr(loaded, name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
    assert loaded.tokens.dtype == torch.int32
    description = json.loads((tmp_path / "train.json").read_text())
    assert (description["frames"], description["episodes"]) == (16, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "train.safetensors"]


def test_damaged_token_files_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"train.json: expected tokens made by dataset_tokenise"):
        load_tokens(tmp_path / "train")
    path = tmp_path / "train"
    for changes, message in [
        ({"tokens": tokenised().tokens + 16}, r"expected ids in \[0, 16\), got 16 to 31"),
        ({"episode_start": torch.tensor([0, 9, 9, 16])}, "episode_start: expected increasing from 0 to 16"),
        ({"episode_start": torch.tensor([0, 9])}, "episode_start: expected increasing from 0 to 16"),
        ({"actions": torch.zeros(3, 6, 3)}, r"got \(16, 2, 4\) and \(3, 6, 3\)"),
    ]:
        save_tokens(replace(tokenised(), **changes), path)
        with pytest.raises(DatasetError, match=message):
            load_tokens(path)
    save_tokens(tokenised(), path)
    data = (tmp_path / "train.safetensors").read_bytes()
    (tmp_path / "train.safetensors").write_bytes(data[:-8])
    with pytest.raises(DatasetError, match="expected sha256"):
        load_tokens(path)
    (tmp_path / "train.json").write_text('{"format": "other"}')
    with pytest.raises(DatasetError, match=r'expected format terra-tokens version 1, got \["other", null\]'):
        load_tokens(path)
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(DatasetError, match="expected JSON"):
        load_tokens(path)


def test_tokenise_equals_encode():
    source = driving(10)
    model = LFQTokenizer(TINY_TOKENIZER).eval()
    result = tokenise(source, model, "0" * 64, batch_size=3)
    assert torch.equal(result.tokens.long(), model.encode(to_unit_range(source.frames)))
    assert torch.equal(result.episode_start, source.episode_start)
    other = LFQTokenizer(replace(TINY_TOKENIZER, image_size=(16, 16)))
    with pytest.raises(ConfigError, match=r"expected frames of the tokenizer's \(16, 16\).*got \(16, 32\)"):
        tokenise(source, other, "0" * 64)


def test_tokenizer_run_writes_weights_metrics_and_picture(tmp_path):
    result = train_tokenizer(
        driving(),
        driving(5),
        config(tmp_path, max_steps=2),
        TINY_TOKENIZER,
        weights=LossWeights(),
        anneal=EntropyAnneal(),
    )
    assert result.stopped_by == "steps"
    stored = load_file(tmp_path / "tokenizer" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert all(torch.equal(tensor, result.ema.weights[name].half()) for name, tensor in stored.items())
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["evaluated_frames"] == 5
    assert 0 < metrics["codebook_used"] <= 1 <= metrics["codebook_perplexity"] <= 64
    assert 0 < metrics["psnr"] < 60
    from PIL import Image

    with Image.open(tmp_path / "reconstruction.png") as picture:
        assert picture.size == (5 * 32, 2 * 16)
        top = np.asarray(picture)[:16, :32]
    np.testing.assert_array_equal(top, pictures(1)[0])


def test_stopped_tokenizer_run_writes_its_state_only(tmp_path, monkeypatch):
    monkeypatch.setattr(TokenizerObjective, "loss", _then_sigterm(TokenizerObjective.loss))
    arguments = (driving(), driving(5), config(tmp_path), TINY_TOKENIZER)
    result = train_tokenizer(*arguments, weights=LossWeights(), anneal=EntropyAnneal())
    assert (result.step, result.stopped_by) == (1, "sigterm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "state"]


def _then_sigterm(method):
    def replaced(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return method(*arguments)

    return replaced


def test_tokenizer_metrics_of_a_perfect_and_a_known_reconstruction():
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
    perfect = evaluate_tokenizer(Copy(0.0), frames)
    assert perfect["psnr"] > 100
    assert perfect["codebook_used"] == 0.75
    assert perfect["codebook_perplexity"] == pytest.approx(2**1.5)
    assert evaluate_tokenizer(Copy(5 / 127.5), frames)["psnr"] == pytest.approx(20 * math.log10(255 / 5), abs=1e-4)


def test_entropy_anneal():
    anneal = EntropyAnneal(start=5.0, until=0.2)
    assert [anneal.factor(progress) for progress in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([5.0, 3.0, 1.0, 1.0])
    assert EntropyAnneal(start=5.0, until=0.0).factor(0.0) == 1.0
    with pytest.raises(ConfigError, match="entropy_anneal"):
        EntropyAnneal(until=1.5)


def test_tokenizer_settings_are_checked():
    model = LFQTokenizer(replace(TINY_TOKENIZER, image_size=(32, 32)))
    with pytest.raises(ConfigError, match=r"image_size: expected the dataset's \(16, 32\).*got \(32, 32\)"):
        TokenizerObjective(model, driving().frames, LossWeights(), EntropyAnneal())
    with pytest.raises(ConfigError, match="loss: expected a finite pixel"):
        loss_weights({"pixel": -1.0})
    with pytest.raises(ConfigError, match="dtype: expected one of float32, float16, bfloat16, got 'int8'"):
        stored_dtype("int8")
    assert stored_dtype("bfloat16") is torch.bfloat16


def test_evenly_spaced_takes_the_first_and_the_last():
    frames = torch.arange(10)[:, None, None, None].expand(-1, 3, 1, 1).to(torch.uint8)
    assert evenly_spaced(frames, 4)[:, 0, 0, 0].tolist() == [0, 3, 6, 9]
    assert len(evenly_spaced(frames, 50)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_episodes_are_loaded_in_order_with_their_actions(workers, tmp_path):
    record(tmp_path, lengths=(5, 3))
    loaded = load_driving(tmp_path, "train", workers=workers)
    assert loaded.frames.shape == (8, 3, 16, 32)
    assert loaded.frames.dtype == torch.uint8
    assert loaded.episode_start.tolist() == [0, 5, 8]
    assert loaded.damaged == ()
    levels = torch.tensor([grey(0)] * 5 + [grey(1)] * 3).float()
    torch.testing.assert_close(loaded.frames.float().mean(dim=(1, 2, 3)), levels, atol=3.0, rtol=0)
    assert loaded.actions.dtype == torch.float32
    times = torch.tensor(WAYPOINT_TIMES)
    for index, speed in enumerate([1.0] * 5 + [2.0] * 3):
        expected = torch.stack([torch.zeros(6), speed * times, times], dim=1)
        torch.testing.assert_close(loaded.actions[index], expected, atol=1e-5, rtol=0)


def test_damaged_episodes_are_left_out_with_a_warning(tmp_path, caplog):
    record(tmp_path, lengths=(3, 4, 5, 6, 7))
    episodes = sorted((tmp_path / "episodes").iterdir())
    (episodes[0] / "poses.npz").write_bytes(b"not an archive")
    cut = (episodes[2] / "video.mp4").read_bytes()[:400]
    (episodes[2] / "video.mp4").write_bytes(cut)
    rehash(episodes[2])
    write_video(np.zeros((2, 16, 32, 3), np.uint8), episodes[3] / "video.mp4", 10.0)
    rehash(episodes[3])
    with caplog.at_level(logging.WARNING):
        loaded = load_driving(tmp_path, "train")
    assert loaded.episode_start.tolist() == [0, 4, 11]
    assert len(loaded.frames) == len(loaded.actions) == 11
    levels = torch.tensor([grey(1)] * 4 + [grey(4)] * 7).float()
    torch.testing.assert_close(loaded.frames.float().mean(dim=(1, 2, 3)), levels, atol=3.0, rtol=0)
    for name in ("train_000000_00", "train_000000_02", "train_000000_03"):
        assert sum(name in reason for reason in loaded.damaged) == 1
    assert len(loaded.damaged) == 3
    assert "3 damaged episodes of split train are left out" in caplog.text


def test_episodes_of_another_size_are_left_out(tmp_path):
    record(tmp_path, lengths=(3,))
    record(tmp_path, split="train_other", lengths=(4,), size=(32, 32))
    loaded = load_driving(tmp_path, "train")
    assert loaded.episode_start.tolist() == [0, 3]
    assert "expected (10.0, (16, 32)) (fps, image size), got (10.0, (32, 32))" in loaded.damaged[0]


def rehash(episode: Path) -> None:
    """Make the episode's own hashes agree with damaged files, so that only decoding can find the damage."""
    facts = json.loads((episode / "episode.json").read_text())
    facts["sha256"] = {name: file_sha256(episode / name) for name in facts["sha256"]}
    (episode / "episode.json").write_text(json.dumps(facts))


def test_missing_datasets_and_splits(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        load_driving(tmp_path / "nowhere", "train")
    record(tmp_path, lengths=(3,))
    with pytest.raises(DatasetError, match="expected an episode of split held_out"):
        load_driving(tmp_path, "held_out")
    (tmp_path / "episodes" / "train_000000_00" / "poses.npz").unlink()
    with pytest.raises(DatasetError, match=r"expected a readable episode of split train, got 1 damaged: .*poses.npz"):
        load_driving(tmp_path, "train")
    with pytest.raises(ConfigError, match="workers: expected 0 or more processes, got -1"):
        load_driving(tmp_path, "train", workers=-1)


def test_windows_are_packed_as_the_model_reads_them():
    tokens = torch.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    packed = pack_windows(tokens, slots=6)
    layout = build_config(tokenised(), 3, TINY_SIZE).layout
    assert packed.shape == (2, layout.max_length)
    is_slot = torch.tensor([layout.is_slot(position) for position in range(layout.max_length)])
    assert torch.equal(packed[:, ~is_slot].flatten(), tokens.flatten())


def test_batches_carry_clean_labels_and_corrupt_at_most_the_asked_fraction():
    data = tokenised((40,))
    objective = world_model_objective(max_corruption=0.4, data=data)
    batch = objective.draw(step_random(0, 0, torch.device("cpu")), 64)
    changed = batch["input_ids"] != batch["labels"]
    assert 0.05 < changed.float().mean() < 0.3  # half of 0.4, less the replacements that change nothing
    assert changed.float().mean(dim=1).std() > 0.05  # a rate of its own for each window
    assert batch["input_ids"].max() < data.codebook_size
    clean = world_model_objective(max_corruption=0.0, data=data).draw(step_random(0, 0, torch.device("cpu")), 64)
    assert torch.equal(clean["input_ids"], batch["labels"])
    assert torch.equal(clean["actions"], batch["actions"])
    for ids, actions in zip(batch["labels"], batch["actions"], strict=True):
        start = next(s for s in range(len(data.actions)) if torch.equal(data.actions[s], actions[0]))
        tokens, expected = data.windows(torch.tensor([start]), WINDOW)
        assert torch.equal(ids, pack_windows(tokens, 6)[0])
        assert torch.equal(actions, expected[0])
    with pytest.raises(ConfigError, match="max_corruption"):
        world_model_objective(max_corruption=1.0)


def test_training_attention_equals_the_model_s_own():
    objective = world_model_objective(max_corruption=0.0)
    batch = objective.draw(step_random(0, 0, torch.device("cpu")), 2)
    loss = objective.loss(batch, 0.0)["loss"]
    objective.model.set_attn_implementation("eager")
    torch.testing.assert_close(loss, objective.loss(batch, 0.0)["loss"])


def test_evaluation_agrees_with_the_training_loss():
    data = tokenised((30,))
    model = world_model_objective(data=data).model.eval()
    metrics = evaluate_world_model(model, data, WINDOW, 6)
    starts = data.window_starts(WINDOW)[torch.linspace(0, 26, 6).round().long()]
    tokens, actions = data.windows(starts, WINDOW)
    ids = pack_windows(tokens, 6)
    with torch.no_grad():
        loss = model(input_ids=ids, actions=actions, labels=ids, use_cache=False).loss.item()
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
    hidden, mlp, layers, kv, vocabulary = 32, 64, 2, 16, 17
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp + 2 * hidden
    projection = (3 * hidden + hidden) + 2 * (hidden * hidden + hidden)
    parameters = layers * layer + hidden + hidden * vocabulary + projection
    length = WINDOW * 14
    assert flops_per_window(model) == 6 * parameters * length + 6 * layers * hidden * length**2


def test_world_model_run_writes_weights_and_metrics(tmp_path):
    result = train_world_model(
        tokenised(),
        tokenised((8,), seed=1),
        config(tmp_path, max_steps=2),
        TINY_SIZE,
        window=WINDOW,
        max_corruption=0.1,
        evaluation_windows=3,
    )
    model = load_world_model(tmp_path / "world_model", dtype=torch.float32)
    assert model.config.tokenizer_sha256 == "f" * 64
    assert model.config.vocab_size == 17
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, result.ema.weights[name].bfloat16().float())
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["accuracy_by_frame"]) == WINDOW
    assert metrics["step"] == 2
    assert not list(tmp_path.glob(".world_model*"))
    # A second run over the finished one replaces the folder.
    train_world_model(tokenised(), tokenised((8,)), config(tmp_path, max_steps=2), TINY_SIZE, window=WINDOW)
    assert load_world_model(tmp_path / "world_model").config.num_temporal_embeddings == WINDOW


def test_world_model_refuses_unfit_tokens_before_training(tmp_path):
    other = replace(tokenised(), tokenizer_sha256="0" * 64)
    with pytest.raises(
        ConfigError, match="held-out tokens: expected those of tokenizer ffffffffffff, got 000000000000"
    ):
        train_world_model(tokenised(), other, config(tmp_path), TINY_SIZE, window=WINDOW)
    with pytest.raises(DatasetError, match="expected an episode of at least 12 frames, got at most 9"):
        train_world_model(tokenised((20,)), tokenised(), config(tmp_path), TINY_SIZE, window=12)
    assert not list(tmp_path.iterdir())
