"""`terra-rollout cluster=ray` on a cluster of this machine's CPU: the same rollouts, whatever dies meanwhile."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from entry import read_settings
from tiny_rollouts import Batch

pytest.importorskip("ray")

import ray
from ray.exceptions import RayActorError
from ray_start import start_ray

from terra.config.spec import PipelineSpec
from terra.errors import CheckpointError, ConfigError, EngineError, OutputError
from terra.rollouts import cluster
from terra.rollouts.cluster import RayCluster, _ask, _start, _WorkerHandle
from terra.rollouts.manifest import Job, parse_line, read_lines
from terra.rollouts.source import ClaimedJobs
from terra.rollouts.worker import Outcome, Worker

pytestmark = pytest.mark.slow

NUM = 9
FILES = {"video.mp4", "tokens.safetensors", "rollout.json"}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    # "local": another process of the tests may have a cluster, which Ray would join.
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    start_ray(lambda: ray.init(address="local", num_cpus=2, **quiet))
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = make_batch(tmp_path_factory.mktemp("alone"), tiny_model, tiny_tokenizer)
    assert batch.run() == 3
    return batch


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    return make_batch(tmp_path, tiny_model, tiny_tokenizer)


def make_batch(folder: Path, model: Path, tokenizer: Path) -> Batch:
    batch = Batch(folder, model, tokenizer)
    lines = [batch.line(index, num_frames=8 + index % 3) for index in range(NUM)]
    batch.write(*lines[:5], batch.line(99, context="nowhere"), *lines[5:])
    return batch


def on_ray(batch: Batch, workers: int, **changes) -> int:
    return batch.run(cluster="ray", **{"cluster.workers": workers, "cluster.cpus": 0.5, **changes})


def check_equal(batch: Batch, alone: Batch) -> None:
    assert batch.names() == alone.names()
    for name in batch.names():
        assert {path.name for path in (batch.output / "rollouts" / name).iterdir()} == FILES
        tokens = Path("rollouts", name, "tokens.safetensors")
        assert (batch.output / tokens).read_bytes() == (alone.output / tokens).read_bytes()
    rows, others = batch.index(), alone.index()
    assert [(row["id"], row["status"], row["line"]) for row in rows] == [
        (row["id"], row["status"], row["line"]) for row in others
    ]
    assert "nowhere" in rows[5]["reason"]
    # A line that fails is tried in each run. Where a worker's death ended the run, what it had just made is not logged.
    assert set(Counter(row["id"] for row in batch.log() if row["status"] == "done").values()) == {1}
    assert not (batch.output / "claims").exists()
    assert not (batch.output / "partial").exists()


def kill_a_worker_when(batch: Batch, enough: int) -> threading.Thread:
    """Once so many rollouts are there, kill -9 one of the processes of Ray that have an engine."""

    def kill() -> None:
        rollouts = batch.output / "rollouts"
        while not (rollouts.exists() and len(list(rollouts.iterdir())) >= enough):
            time.sleep(0.005)
        os.kill(worker_pids()[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def worker_pids() -> list[int]:
    """Ray's workers that this process has started; other tests may have some, too."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(b"ray::Worker") and os.getpid() in ancestors(int(process.name)):
            pids.append(int(process.name))
    return sorted(pids)


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        (pid,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
        found.add(pid)
    return found


def test_one_of_two_workers_is_killed_and_replaced_and_all_is_as_made_alone(batch, alone, tmp_path):
    killer = kill_a_worker_when(batch, 3)
    assert on_ray(batch, workers=2, metrics=tmp_path / "metrics.prom") == 3
    killer.join()
    check_equal(batch, alone)
    assert len(batch.log()) == NUM + 1
    assert "terra_worker_restarts_total 1\n" in (tmp_path / "metrics.prom").read_text()


def test_a_worker_that_dies_too_often_ends_the_run_and_the_next_goes_on(batch, alone):
    killer = kill_a_worker_when(batch, 2)
    with pytest.raises(EngineError, match=r"worker 0: died 1 times, the last time: .*died"):
        on_ray(batch, workers=1, **{"cluster.max_restarts": 0})
    killer.join()
    assert 2 <= len(batch.names()) < NUM
    assert batch.run() == 3
    check_equal(batch, alone)


def test_sigterm_drains_the_workers(batch, alone, monkeypatch):
    def stop_soon(self):
        taken.append(1)
        if len(taken) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self)

    taken, take = [], ClaimedJobs.__next__
    monkeypatch.setattr(ClaimedJobs, "__next__", stop_soon)
    assert on_ray(batch, workers=1, at_once=1) == 143
    monkeypatch.undo()
    assert len(batch.names()) < NUM
    assert {row["status"] for row in batch.index()} <= {"done", "pending", "failed"}
    assert batch.run() == 3
    check_equal(batch, alone)


def answers(error: object) -> SimpleNamespace:
    """An actor whose every method gives this answer, or raises it."""

    async def remote(*_: object) -> object:
        if isinstance(error, RayActorError):
            raise error
        return error

    return SimpleNamespace(**dict.fromkeys(("start", "make"), SimpleNamespace(remote=remote)))


def test_only_a_worker_that_replaces_another_may_fail_to_start():
    async def start(error: object, *, is_first: bool) -> str | None:
        worker = _WorkerHandle(answers(error))
        await _start(worker, is_first=is_first)
        return worker.died.result() if worker.died.done() else None

    assert asyncio.run(start(None, is_first=True)) is None
    assert asyncio.run(start(EngineError("no memory left"), is_first=False)) == "no memory left"
    assert "before finishing" in (asyncio.run(start(RayActorError(), is_first=True)) or "")
    for error, is_first in ((EngineError("no GPU"), True), (CheckpointError("no weights"), False)):
        with pytest.raises(type(error), match="no "):
            asyncio.run(start(error, is_first=is_first))


def test_a_broken_engine_is_a_death_and_a_broken_disk_ends_the_run():
    async def ask(answer: object) -> tuple[Outcome | None, bool]:
        worker = _WorkerHandle(answers(answer))
        return await _ask(worker, cast(Job, None)), worker.died.done()

    done = Outcome("done")
    assert asyncio.run(ask(done)) == (done, False)
    assert asyncio.run(ask(Outcome("broken", error=EngineError("gone")))) == (None, True)
    assert asyncio.run(ask(RayActorError())) == (None, True)
    with pytest.raises(OutputError, match="disk full"):
        asyncio.run(ask(Outcome("broken", error=OutputError("disk full"))))


def test_a_worker_tells_what_went_wrong(batch):
    settings = read_settings("rollout", batch.overrides(num_frames=4))
    models = PipelineSpec.from_settings(settings)
    gone = Worker(replace(models, world_model=batch.folder / "nowhere"), settings, {"made_with": {}})
    jobs = [job for line in read_lines(batch.manifest) for job in parse_line(line, settings)]

    async def work() -> list[Outcome]:
        worker = Worker(models, settings, {"made_with": {}})
        assert await worker.start() is None
        outcomes = [await worker.make(job) for job in (jobs[0], jobs[5])]
        (batch.output / "rollouts").rename(batch.output / "other")
        (batch.output / "rollouts").touch()
        outcomes.append(await worker.make(jobs[1]))
        await worker.drain()
        outcomes.append(await worker.make(jobs[2]))
        await worker.close()
        return outcomes

    assert isinstance(asyncio.run(gone.start()), CheckpointError)
    (batch.output / "rollouts").mkdir(parents=True)
    done, failed, broken, left = asyncio.run(work())
    assert (done.status, failed.status, broken.status, left.status) == ("done", "failed", "broken", "left")
    assert set(done.seconds) == {"load", "encode", "generate", "decode", "write"}
    assert "nowhere" in failed.reason
    assert isinstance(broken.error, OutputError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "cluster.workers: expected a whole number of at least 1 or null, got 0"),
        ({"gpus": -1}, "cluster.gpus: expected a whole number of at least 0 or null, got -1"),
        ({"cpus": "all"}, "cluster.cpus: expected a number, got 'all'"),
        ({"workers": 1, "gpus": 2}, "cluster.gpus: expected engine.tensor_parallel_size=1, got 2"),
        ({"workers": 1, "gpus": 1}, "expected 1 GPUs and 1 CPUs for 1 workers, got 0 GPUs"),
        ({"workers": 500}, "expected 0 GPUs and 500 CPUs for 500 workers, got 0 GPUs and 2 CPUs"),
    ],
)
def test_clusters_that_can_not_be_are_refused(batch, changes, message):
    with pytest.raises(ConfigError, match=message):
        batch.run(cluster="ray", **{f"cluster.{name}": value for name, value in changes.items()})


def test_a_cluster_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(cluster.ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("nobody\nthere")))
    settings = {"workers": None, "gpus": None, "cpus": 1, "max_restarts": 0}
    with pytest.raises(ConfigError, match=r"cluster\.address=1\.2\.3\.4:5: expected a Ray cluster, got: nobody$"):
        RayCluster(address="1.2.3.4:5", **settings)._connect()
