import math
import os
import signal
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from forkserver import forkserver_with
from tiny_training import (
    CPU,
    OBJECTIVES,
    Contest,
    Numbers,
    config,
    read_log,
    read_state,
    terminate_at,
    train_as_one_of_two,
    world_model_objective,
)
from torch import nn

from terra.device import torch_device
from terra.errors import CheckpointError, ConfigError, OutputError
from terra.training import coordination as coordination_module, loop as loop_module
from terra.training.log import TrainingLog
from terra.training.loop import train
from terra.training.optimizer import Optimizers
from terra.training.processes import start_processes
from terra.training.randomness import draw_indices, step_random
from terra.training.settings import LoopConfig
from terra.training.state import Ema

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_resumed_training_equals_uninterrupted_bit_for_bit(name, accumulate, tmp_path, accelerator):
    settings = {"accumulate": accumulate, "ema_every_steps": 2}
    whole = train(OBJECTIVES[name](), config(tmp_path / "whole", **settings), accelerator)

    first = OBJECTIVES[name]()
    terminate_at(first, 3 * accumulate)
    interrupted = train(first, config(tmp_path / "parts", **settings), accelerator)
    assert (interrupted.step, interrupted.stopped_by) == (3, "sigterm")
    resumed = train(OBJECTIVES[name](), config(tmp_path / "parts", **settings), accelerator)

    assert (resumed.step, resumed.stopped_by) == (whole.step, whole.stopped_by) == (6, "steps")
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert any(key.startswith("model_optimizer.exp_avg_sq.") for key in expected)
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert [line["step"] for line in read_log(tmp_path / "parts")] == [3, 6]
    assert len(list((tmp_path / "parts" / "state").iterdir())) == 2


def test_muon_updates_the_layers_matrices_and_resumes_bit_for_bit(tmp_path, accelerator):
    whole = OBJECTIVES["world_model"]()
    before = {name: each.detach().clone() for name, each in whole.model.named_parameters()}
    train(whole, config(tmp_path / "whole", muon=3.0), accelerator)
    first = OBJECTIVES["world_model"]()
    terminate_at(first, 3)
    for _ in range(2):
        train(first, config(tmp_path / "parts", muon=3.0), accelerator)
        first = OBJECTIVES["world_model"]()
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    matrices = {name for name in before if ".layers." in name and before[name].ndim == 2}
    of_muon = {key.split(".", 2)[2] for key in expected if key.startswith("model_optimizer.momentum_buffer.")}
    of_adamw = {key.split(".", 2)[2] for key in expected if key.startswith("model_optimizer.exp_avg.")}
    assert matrices
    assert of_muon == matrices
    assert of_adamw == before.keys() - matrices


def test_muon_s_step_is_torch_s_own(tmp_path, accelerator):
    settings = config(tmp_path, muon=3.0, weight_decay=0.3, learning_rate=0.01)
    layer = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False)]), "head": torch.nn.Linear(4, 2)}
    )
    weight = layer["layers"][0].weight
    alone = torch.nn.Parameter(weight.detach().clone())
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for each in (weight, alone):
        each.grad = gradient.clone()
    optimizer = Optimizers.of(dict(layer.named_parameters()), settings)
    optimizer.set_learning_rate(0.002)
    optimizer.step()
    torch.optim.Muon([alone], lr=0.006, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(weight, alone)


def test_muon_is_refused_without_layers(tmp_path, accelerator):
    with pytest.raises(ConfigError, match=r"^muon: expected a network with transformer layers, got none$"):
        train(OBJECTIVES["numbers"](), config(tmp_path, muon=3.0), accelerator)


def test_discriminator_is_trained_saved_and_free_of_the_model_s_gradients(tmp_path, accelerator):
    objective = Contest()
    before = {name: tensor.clone() for name, tensor in objective.discriminator.state_dict().items()}
    train(objective, config(tmp_path, learning_rate=1e-2, max_steps=60), accelerator)
    assert objective.discriminator is objective.judge
    state = read_state(tmp_path)
    for name, tensor in objective.discriminator.state_dict().items():
        assert not torch.equal(tensor, before[name])
        assert torch.equal(state[f"rival.{name}"], tensor)
    (line,) = read_log(tmp_path)
    assert {"loss", "discriminator_loss", "gradient_norm", "discriminator_gradient_norm"} <= line.keys()
    made = objective.model(torch.tensor([[0.5]])).item()
    assert made > 1.6  # drawn from 1.5 towards the numbers that the judge knows


def test_accumulated_batches_equal_one_large_batch(tmp_path, accelerator):
    parts = train(Numbers(), config(tmp_path / "parts", batch_size=2, accumulate=3), accelerator)

    class Joined(Numbers):
        draws = 0

        def draw(self, random, batch_size, progress):
            drawn = [super(Joined, self).draw(step_random(0, self.draws + i, CPU), 2, progress) for i in range(3)]
            self.draws += 3
            return {"x": torch.cat([batch["x"] for batch in drawn])}

    whole = train(Joined(), config(tmp_path / "whole", batch_size=6), accelerator)
    for name, weight in whole.ema.weights.items():
        torch.testing.assert_close(parts.ema.weights[name], weight, rtol=1e-5, atol=1e-7)


class _AsTwo:
    """Draws what two processes would draw, as one batch."""

    def __init__(self, objective):
        self.objective, self.plain_draw, self.draws = objective, objective.draw, 0
        objective.draw = self.draw

    def draw(self, random, batch_size, progress):
        drawn = [self.plain_draw(step_random(0, self.draws, CPU, rank), batch_size // 2, progress) for rank in (0, 1)]
        self.draws += 1
        return {name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}


def test_two_processes_equal_one_with_twice_the_batch(tmp_path, accelerator):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = forkserver_with("terra.training.loop", "terra.training.world_model", "terra.training.tokenizer")
    processes = [context.Process(target=train_as_one_of_two, args=(rank, port, tmp_path / "two")) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    for name, make in OBJECTIVES.items():
        objective = make()
        _AsTwo(objective)
        train(objective, config(tmp_path / "one" / name, batch_size=4, accumulate=2), accelerator)
        one, two = read_state(tmp_path / "one" / name), read_state(tmp_path / "two" / name)
        assert one.keys() == two.keys()
        if name == "memory":
            continue  # each process's mean is over its own frames, which are fewer where windows hold memory frames
        if name != "contest":  # whose judge remembers each process's own half of the batch
            for key, tensor in one.items():
                torch.testing.assert_close(two[key], tensor, rtol=2e-3, atol=2e-5)
        losses = [read_log(tmp_path / part / name)[-1]["loss"] for part in ("one", "two")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(read_log(tmp_path / "two" / "stopped")) == 1
    assert (tmp_path / "two" / "stopped" / "state" / "state.json").exists()


def test_loss_falls(tmp_path, accelerator):
    run = config(tmp_path, max_steps=40, log_every_seconds=1e-9, learning_rate=5e-3, warmup_steps=4)
    train(world_model_objective(max_corruption=0.0), run, accelerator)
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_sigterm_handler_is_put_back_and_a_stopped_run_returns(tmp_path, accelerator):
    before = signal.getsignal(signal.SIGTERM)
    objective = Numbers()
    assert train(objective, config(tmp_path), accelerator).stopped_by == "steps"
    assert signal.getsignal(signal.SIGTERM) is before
    assert objective.previewed == 1


def test_finished_run_returns_at_once_and_keeps_its_weights(tmp_path, accelerator):
    train(Numbers(), config(tmp_path), accelerator)
    state = read_state(tmp_path)
    again = train(Numbers(), config(tmp_path), accelerator)
    assert (again.step, again.stopped_by) == (6, "steps")
    assert all(torch.equal(value, read_state(tmp_path)[key]) for key, value in state.items())


def test_time_schedule_follows_the_clock_over_resumed_parts(tmp_path, monkeypatch, accelerator):
    clock = [0.0]
    monkeypatch.setattr(coordination_module, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop_module, "monotonic", lambda: clock[0])
    objective = Numbers()
    draw = objective.draw

    def one_second(random, batch_size, progress):
        clock[0] += 1.0
        if clock[0] == 4.0:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(random, batch_size, progress)

    monkeypatch.setattr(objective, "draw", one_second)
    run = config(tmp_path, max_steps=None, max_seconds=10.0, schedule="time", warmup_steps=0, log_every_seconds=1.0)
    assert train(objective, run, accelerator).stopped_by == "sigterm"
    clock[0] = 1000.0  # the time between two parts of a run does not count
    result = train(objective, run, accelerator)
    assert (result.stopped_by, result.step, result.elapsed_seconds) == ("time", 10, 10.0)
    # Each part's first second, in which it might compile, does not count: there are 9 at first, then 8.
    progress = [line["progress"] for line in read_log(tmp_path)]
    expected = [0, 0, 1 / 9, 2 / 9, 3 / 9, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]
    assert progress == pytest.approx(expected)
    rates = [line["learning_rate"] for line in read_log(tmp_path)]  # of the step after
    cosines = [0.5 * (1 + math.cos(math.pi * done)) for done in [*expected[1:4], 3 / 9, *expected[5:], 1.0]]
    assert rates == pytest.approx([run.learning_rate * (0.05 + 0.95 * cosine) for cosine in cosines])
    assert read_log(tmp_path)[-1]["numbers_per_second"] == 4.0
    assert read_log(tmp_path)[-1]["tokens_per_second"] == 12.0


def test_warmup_and_cosine_by_steps(tmp_path, accelerator):
    run = config(tmp_path, max_steps=50, warmup_steps=9, log_every_seconds=1e-9)
    train(Numbers(), run, accelerator)
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    assert rates[0] == pytest.approx(run.learning_rate * 0.2, rel=0.01)
    assert max(rates) == max(rates[7:12]) <= run.learning_rate
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.05 * run.learning_rate)


def test_state_is_saved_and_previewed_while_training(tmp_path, monkeypatch, accelerator):
    saved = []
    monkeypatch.setattr(loop_module, "save_state", lambda *arguments: saved.append(arguments[-1]["step"]))
    objective = Numbers()
    train(objective, config(tmp_path, save_every_seconds=0.0), accelerator)
    assert saved == [1, 2, 3, 4, 5, 6]
    assert objective.previewed == 6


def test_previews_are_logged(tmp_path, accelerator):
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

    class Shown(Numbers):
        def previews(self, ema):
            assert not self.model.training
            with ema.averaged() as model:
                assert torch.equal(model.weight, ema.weights["weight"])
            video = torch.zeros(3, 3, 8, 16, dtype=torch.uint8)
            video[1] = 200
            return {"video": video, "picture": video[0], "number": torch.tensor(0.5)}

    objective = Shown()
    result = train(objective, config(tmp_path), accelerator)
    assert not torch.equal(objective.model.weight, result.ema.weights["weight"])
    assert read_log(tmp_path)[-1] == {"step": 6, "number": 0.5}
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={IMAGES: 0})
    board.Reload()
    assert {"loss", "number", "gradient_norm"} <= set(board.Tags()["scalars"])
    (video,) = board.Images("video")
    assert (video.width, video.height) == (16, 8)
    assert video.encoded_image_string.startswith(b"GIF89a")
    assert len(board.Images("picture")) == 1


def test_infinite_loss_stops_and_the_last_good_state_stays(tmp_path, accelerator):
    train(Numbers(), config(tmp_path, max_steps=2), accelerator)
    before = read_state(tmp_path)
    objective = Numbers(scale=math.inf)
    with pytest.raises(ConfigError, match=r"expected a finite loss, got (inf|nan) before step 6.*learning_rate"):
        train(objective, config(tmp_path), accelerator)
    assert all(torch.equal(value, read_state(tmp_path)[key]) for key, value in before.items())


def test_damaged_and_foreign_states_are_refused(tmp_path, accelerator):
    train(Numbers(), config(tmp_path), accelerator)
    with pytest.raises(ConfigError, match=r"seed: expected 0 of .*state, got 1"):
        train(Numbers(), config(tmp_path, seed=1), accelerator)
    other = Numbers()
    other.model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"weight: expected shape \(1, 2\), got \(1, 1\)"):
        train(other, config(tmp_path), accelerator)
    other.model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"4 missing .*4 unexpected"):
        train(other, config(tmp_path), accelerator)
    with pytest.raises(CheckpointError, match=r"5 missing .*rival"):
        train(Contest(), config(tmp_path), accelerator)
    tensors = next((tmp_path / "state").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="expected a complete safetensors file"):
        train(Numbers(), config(tmp_path), accelerator)
    (tmp_path / "state" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected the state of a training run"):
        train(Numbers(), config(tmp_path), accelerator)


def test_unwritable_output(tmp_path, accelerator):
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="state"):
        train(Numbers(), config(tmp_path), accelerator)
    with pytest.raises(OutputError, match="state"), TrainingLog(tmp_path / "state", 0, accelerator):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "max_steps: expected a number with schedule=steps, got null"),
        ({"schedule": "time"}, "max_seconds: expected a number with schedule=time, got null"),
        ({"schedule": "epochs"}, "schedule: expected steps or time, got 'epochs'"),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size: expected a whole number of at least 1, got 2.5"),
        ({"accumulate": 0}, "accumulate: expected a whole number of at least 1, got 0"),
        ({"ema_every_steps": -1}, "ema_every_steps: expected a whole number of at least 1, got -1"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number above 0, got 'fast'"),
        ({"learning_rate": None}, "learning_rate: expected a number above 0, got null"),
        ({"learning_rate": math.nan}, "learning_rate: expected a finite number above 0, got nan"),
        ({"ema_decay": 1.0}, "ema_decay: expected a number of at least 0 and below 1, got 1.0"),
        ({"seed": True}, "seed: expected a whole number of at least 0, got True"),
        ({"batch_size": "2"}, "batch_size: expected a whole number of at least 1, got '2'"),
        ({"max_seconds": math.inf}, "max_seconds: expected a finite number above 0 or null, got inf"),
        ({"compile_model": 1}, "compile_model: expected true or false, got 1"),
        ({"bach_size": 2}, r"bach_size: no such setting; did you mean batch_size\?"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number of at least 0, got -0.1"),
    ],
)
def test_settings_are_checked(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_settings_are_picked_from_flat_values():
    values = {"batch_size": 2, "max_steps": 3, "output": "somewhere", "device": "cpu", "data": "elsewhere"}
    assert LoopConfig.from_values(values) == LoopConfig(output=Path("somewhere"), batch_size=2, max_steps=3)
    with pytest.raises(ConfigError, match="output: expected a path, got none"):
        LoopConfig.from_values({"batch_size": 2, "max_steps": 3})


def test_devices():
    assert torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device: expected cpu or cuda, got 'abacus'"):
        start_processes("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device is available"):
            start_processes("cuda")


def test_draws_depend_on_seed_draw_and_rank_alone():
    def draw(*key: int) -> list[int]:
        seed, index, rank = key
        return draw_indices(step_random(seed, index, CPU, rank), 10**9, 4, CPU).tolist()

    torch.manual_seed(1)
    first = draw(0, 5, 1)
    torch.manual_seed(2)
    assert draw(0, 5, 1) == first
    keys = [(seed, index, rank) for seed in range(3) for index in range(3) for rank in range(3)]
    assert len({tuple(draw(*key)) for key in keys}) == 27


@pytest.mark.parametrize("every_steps", [1, 2])
def test_ema_is_the_closed_form_average(every_steps):
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.5, every_steps)
    expected = model.weight.item()
    for step, value in enumerate((3.0, -1.0, 7.0, 2.0)):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update(step)
        if (step + 1) % every_steps == 0:
            keep = min(0.5, (1 + step) / (10 + step)) ** every_steps
            expected = keep * expected + (1 - keep) * value
    with ema.averaged() as averaged:
        assert averaged.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 2.0
    ema.copy_to_model()
    assert model.weight.item() == pytest.approx(expected)
