"""`terra rollout cluster=ray` on a cluster of several machines, some of which go away."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_rollouts import Batch

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster
from ray_start import start_ray

from terra.errors import EngineError
from terra.rollouts import cluster as ray_cluster

pytestmark = pytest.mark.slow

NUM = 9


@pytest.fixture(scope="module")
def cluster():
    """A machine of one CPU, which the last test kills."""
    head = {"num_cpus": 1, "include_dashboard": False}
    made = start_ray(lambda: Cluster(initialize_head=True, head_node_args=head))
    ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = Batch(tmp_path, tiny_model, tiny_tokenizer)
    batch.write(*(batch.line(index, num_frames=12 if index < 3 else 20) for index in range(NUM)))  # the rest takes long
    return batch


def on_ray(batch: Batch, workers: int) -> int:
    return batch.run(cluster="ray", **{"cluster.workers": workers, "cluster.cpus": 1})


def when(batch: Batch, enough: int, act: Callable[[], object]) -> threading.Thread:
    """Do something once so many rollouts are there."""

    def wait() -> None:
        rollouts = batch.output / "rollouts"
        while not (rollouts.exists() and len(list(rollouts.iterdir())) >= enough):
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def kill_machine(node: Any) -> None:
    """Kill a machine's raylet and then its workers, which would live on for seconds and finish the batch."""
    (raylet,) = node.all_processes["raylet"]
    parent = raylet.process.pid
    workers = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for pid in (parent, *map(int, workers)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_one_of_two_machines_goes_and_the_other_s_worker_makes_the_rest(batch, cluster, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_RESERVE_SECONDS", 1.0)
    other = cluster.add_node(num_cpus=1)
    remover = when(batch, 2, lambda: kill_machine(other))
    assert on_ray(batch, workers=2) == 0
    remover.join()
    assert sorted(batch.names()) == sorted(f"r{index}" for index in range(NUM))
    # What is logged depends on when the machine went; the other tests here and in test_rollouts_ray_room ask for it.


def test_a_cluster_without_room_for_any_worker_ends_the_run_and_says_what_is_left(batch, cluster, monkeypatch, caplog):
    monkeypatch.setattr(ray_cluster, "_RESERVE_SECONDS", 8.0)
    caplog.set_level("INFO")
    killer = when(batch, 2, lambda: kill_machine(cluster.head_node))
    with pytest.raises(EngineError, match=r"worker 0: expected a machine with 1 CPUs free, got none in \d+ s: no "):
        on_ray(batch, workers=1)
    killer.join()
    made = len(batch.names())
    assert 2 <= made < NUM
    assert "worker 0 died and is replaced" in caplog.text
    assert f"{NUM - made} to do" in caplog.text
    assert [row["status"] for row in batch.index()].count("pending") == NUM - made
    assert not (batch.output / "claims").exists()
    assert batch.run() == 0
    assert sorted(batch.names()) == sorted(f"r{index}" for index in range(NUM))
