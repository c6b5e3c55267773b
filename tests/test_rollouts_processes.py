"""`terra-rollout` in processes of its own: killed, or several on one folder."""

import time
from collections import Counter
from pathlib import Path

import pytest
from entry import load_script
from forkserver import forkserver_with
from tiny_rollouts import Batch, run_and_exit

pytestmark = pytest.mark.slow

NUM = 16


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = make_batch(tmp_path_factory.mktemp("undisturbed"), tiny_model, tiny_tokenizer)
    assert batch.run() == 0
    return batch


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    return make_batch(tmp_path, tiny_model, tiny_tokenizer)


def make_batch(folder: Path, model: Path, tokenizer: Path) -> Batch:
    batch = Batch(folder, model, tokenizer)
    batch.write(*(batch.line(index, num_frames=8 + index % 3) for index in range(NUM)))
    return batch


def start(batch: Batch):
    context = forkserver_with("terra.rollouts.batch", "terra.engine.hf")
    process = context.Process(target=run_and_exit, args=(batch.overrides(),))
    process.start()
    return process


def check_equal(batch: Batch, undisturbed: Batch) -> None:
    assert batch.names() == undisturbed.names() == sorted(f"r{index}" for index in range(NUM))
    for name in batch.names():
        folder = Path("rollouts", name)
        files = {path.name for path in (batch.output / folder).iterdir()}
        assert files == {"video.mp4", "tokens.safetensors", "rollout.json"}
        tokens = folder / "tokens.safetensors"
        assert (batch.output / tokens).read_bytes() == (undisturbed.output / tokens).read_bytes()
    assert [row["status"] for row in batch.index()] == ["done"] * NUM
    # Whoever is killed between a rollout and its line in the log leaves the line out; nothing is ever there twice.
    assert max(Counter(row["id"] for row in batch.log()).values()) == 1
    assert not (batch.output / "claims").exists()
    assert not (batch.output / "partial").exists()


def test_killed_again_and_again_it_ends_as_if_undisturbed(batch, undisturbed):
    rollouts = batch.output / "rollouts"
    kills = 0
    for enough in (1, 4, 7, 11):
        process = start(batch)
        while process.is_alive() and not (rollouts.exists() and len(list(rollouts.iterdir())) >= enough):
            time.sleep(0.005)
        time.sleep(0.01 * enough)
        process.kill()
        process.join()
        kills += process.exitcode == -9
        for folder in rollouts.iterdir():
            assert {path.name for path in folder.iterdir()} == {"video.mp4", "tokens.safetensors", "rollout.json"}
    assert kills >= 2
    assert batch.run() == 0
    check_equal(batch, undisturbed)


def test_two_processes_share_the_work(batch, undisturbed):
    processes = [start(batch), start(batch)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    check_equal(batch, undisturbed)
    assert len(batch.log()) == NUM


def test_the_rollouts_of_a_killed_process_are_taken_over_by_the_other(batch, undisturbed):
    first, second = start(batch), start(batch)
    rollouts = batch.output / "rollouts"
    while second.is_alive() and not (rollouts.exists() and len(list(rollouts.iterdir())) >= 3):
        time.sleep(0.005)
    first.kill()
    first.join()
    second.join()
    assert second.exitcode == 0
    check_equal(batch, undisturbed)


def test_the_benchmark_of_several_gpus_counts_a_process_from_its_first_claim(tmp_path):
    script = load_script("rollout_benchmark")
    begun = time.monotonic()
    found = script.measure_gpus(tmp_path, 2, 5, [1], ["engine=persistence"])
    assert found["frames_of_a_rollout"] == 5
    assert found["gain"] == {"1": 1.0}
    # 10 frames took less than all of it, in which two processes began.
    assert found["frames_per_second"]["1"] > 10 / (time.monotonic() - begun)
    with pytest.raises(RuntimeError, match=r"exit codes \[2\], 0 of 1 took a rollout"):
        script.run_on_gpus(tmp_path / "wrong", 1, 2, 8, ["engine=nonsense"])
