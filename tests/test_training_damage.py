"""Training that is killed, runs out of disk, or meets damage: it goes on or ends with one line, and nothing is lost."""

import errno
import math
import signal
from pathlib import Path

import pytest
import torch
from forkserver import forkserver_with
from tiny_training import KILLS, Numbers, config, read_log, read_state, terminate_at, train_until_killed

import tokenizer.checkpoint
from terra.errors import CheckpointError, ConfigError, OutputError
from terra.training.curves import read_log as read_curve
from terra.training.loop import train
from terra.training.state import STATE_FILE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_while_it_saves_goes_on_to_the_same_weights(tmp_path, accelerator, moment):
    whole = train(Numbers(), config(tmp_path / "whole"), accelerator)
    context = forkserver_with("terra.training.loop", "terra.training.world_model", "terra.training.tokenizer")
    process = context.Process(target=train_until_killed, args=(tmp_path / "killed", moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_step(tmp_path / "killed") == (3 if moment == KILLS[3] else 2)
    resumed = train(Numbers(), config(tmp_path / "killed"), accelerator)
    assert resumed.step == whole.step
    expected, got = read_state(tmp_path / "whole"), read_state(tmp_path / "killed")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert sorted(path.name for path in (tmp_path / "killed" / "state").iterdir()) == [
        "state-00000006.safetensors",
        STATE_FILE,
    ]


def read_step(folder: Path) -> int:
    return tokenizer.checkpoint.read_json(folder / "state" / STATE_FILE)["step"]


class FullDisk:
    """A disk on which nothing more can be written."""

    def __call__(self, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
@pytest.mark.parametrize("place", ["tensors", "state.json", "log", "tensorboard"])
def test_a_full_disk_is_one_line_and_the_state_before_stays(tmp_path, accelerator, monkeypatch, place):
    whole = train(Numbers(), config(tmp_path / "whole"), accelerator)
    output = tmp_path / "full"
    stopped = Numbers()
    terminate_at(stopped, 3)
    assert train(stopped, config(output), accelerator).step == 3
    before, files = read_state(output), sorted((output / "state").iterdir())
    with monkeypatch.context() as patch:
        if place == "tensors":
            patch.setattr("safetensors.torch.save_file", FullDisk())
        elif place == "state.json":
            patch.setattr(Path, "write_text", FullDisk())
        elif place == "log":
            opened = Path.open
            full = FullDisk()
            patch.setattr(Path, "open", lambda self, mode="r", **k: full() if mode == "a" else opened(self, mode, **k))
        else:
            patch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", FullDisk())
        with pytest.raises(OutputError, match="No space left on device") as caught:
            train(Numbers(), config(output), accelerator)
        assert "\n" not in str(caught.value)
    if place in ("tensors", "state.json"):
        assert all(torch.equal(value, read_state(output)[name]) for name, value in before.items())
        assert files[-1].exists()
    resumed = train(Numbers(), config(output), accelerator)
    assert resumed.step == whole.step
    expected, got = read_state(tmp_path / "whole"), read_state(output)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


class Overflow(Numbers):
    """A loss that stays finite while its gradient, in a given step, does not."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.steps, self.at = iter(range(1, 1000)), step

    def loss(self, batch: dict, progress: float) -> dict:
        loss = super().loss(batch, progress)["loss"]
        # The derivative of the root at 0 is infinite, and infinity times 0 is no number.
        return {"loss": loss + (0 * self.model(batch["x"])).sum().sqrt() if next(self.steps) == self.at else loss}


@pytest.mark.parametrize("step", [1, 2, 4])
def test_weights_that_a_gradient_has_broken_are_never_saved(tmp_path, accelerator, step):
    stopped = Numbers()
    terminate_at(stopped, 2)
    train(stopped, config(tmp_path), accelerator)
    before = read_state(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a finite gradient norm, got nan before step \d.*learning_rate"):
        train(Overflow(step), config(tmp_path, max_steps=2 + step), accelerator)
    assert read_step(tmp_path) == 2
    assert all(torch.equal(value, read_state(tmp_path)[name]) for name, value in before.items())
    assert all(math.isfinite(value) for line in read_log(tmp_path) for value in line.values())
    train(Numbers(), config(tmp_path), accelerator)
    assert read_step(tmp_path) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": "../state-00000006.safetensors"}, "tensors: expected the name of a state's file"),
        ({"tensors": 5}, "tensors: expected the name of a state's file, got 5"),
        ({"step": "six"}, "step: expected a whole number of at least 0, got 'six'"),
        ({"elapsed_seconds": None}, "elapsed_seconds: expected a number of at least 0, got null"),
    ],
)
def test_a_damaged_state_is_one_line(tmp_path, accelerator, change, message):
    train(Numbers(), config(tmp_path), accelerator)
    path = tmp_path / "state" / STATE_FILE
    tokenizer.checkpoint.write_json(path, tokenizer.checkpoint.read_json(path) | change)
    with pytest.raises(CheckpointError, match=message):
        train(Numbers(), config(tmp_path), accelerator)


def test_a_log_cut_in_the_middle_of_a_line_is_gone_on_with(tmp_path, accelerator):
    stopped = Numbers()
    terminate_at(stopped, 3)
    train(stopped, config(tmp_path), accelerator)
    log = tmp_path / "log.jsonl"
    with log.open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_curve(tmp_path, "loss")[0] == [3]
    train(Numbers(), config(tmp_path), accelerator)
    assert [line["step"] for line in read_log(tmp_path)] == [3, 6]
