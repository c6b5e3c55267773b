"""`terra rollout` killed at random moments, and its results damaged in every way: in the end nothing differs."""

import os
import random
import time
from pathlib import Path

import pytest
from forkserver import forkserver_with
from rollout_damage import DAMAGE
from tiny_rollouts import Batch, run_and_exit

pytestmark = [pytest.mark.slow, pytest.mark.hostile]

NUM = 12
RUNS = int(os.environ.get("TERRA_HOSTILE_RUNS", "20"))
KILLS = 3


def make_batch(folder: Path, model: Path, tokenizer: Path) -> Batch:
    folder.mkdir(exist_ok=True)
    batch = Batch(folder, model, tokenizer)
    batch.write(*(batch.line(index, num_frames=10 + index % 3) for index in range(NUM)))
    return batch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = make_batch(tmp_path_factory.mktemp("undisturbed"), tiny_model, tiny_tokenizer)
    assert batch.run() == 0
    return batch


def check_equal(batch: Batch, undisturbed: Batch) -> None:
    assert batch.names() == undisturbed.names()
    for name in batch.names():
        for file in ("video.mp4", "tokens.safetensors"):
            path = Path("rollouts", name, file)
            assert (batch.output / path).read_bytes() == (undisturbed.output / path).read_bytes()
    assert [row["status"] for row in batch.index()] == ["done"] * NUM
    left = {path.name for path in batch.output.iterdir()} - {path.name for path in undisturbed.output.iterdir()}
    assert not left


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_kills_and_random_damage_change_nothing(tmp_path, tiny_model, tiny_tokenizer, undisturbed, seed):
    moments = random.Random(seed)
    batch = make_batch(tmp_path / "killed", tiny_model, tiny_tokenizer)
    rollouts = batch.output / "rollouts"
    context = forkserver_with("terra.rollouts.batch", "terra.engine.hf")
    kills = 0
    for mark in sorted(moments.sample(range(NUM - 3), KILLS)):
        process = context.Process(target=run_and_exit, args=(batch.overrides(),))
        process.start()
        while process.is_alive() and not (rollouts.exists() and len(list(rollouts.iterdir())) >= mark):
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.join()
        kills += process.exitcode == -9
    assert kills == KILLS
    assert batch.run() == 0
    check_equal(batch, undisturbed)
    for name, (file, _, damage) in zip(batch.names(), moments.sample(DAMAGE, 10), strict=False):
        damage(rollouts / name / file)
    assert batch.run() == 0
    check_equal(batch, undisturbed)
