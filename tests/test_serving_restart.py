"""What becomes of jobs when terra-serve ends: by SIGTERM, or by a kill -9 at any moment."""

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
import torch
from forkserver import forkserver_with
from safetensors.torch import load
from tiny_serving import OVERLAP, make_pipeline, pictures, run_and_exit, scene_folder

from terra.pipeline import RolloutRequest
from terra.sampling import SamplingParams
from terra.serving.store import JobStore
from terra.trajectory import load_trajectory

pytestmark = pytest.mark.slow

NUM_JOBS = 10
NUM_FRAMES = 14


class Process:
    """`terra-serve` over the tiny model."""

    def __init__(self, model: Path, tokenizer: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            "port": port,
            "engine": "hf",
            "tokenizer.pretrained": tokenizer,
            "world_model.pretrained": model,
            "scenes": folder / "scenes",
            "data": folder / "data",
            "overlap": OVERLAP,
            "jobs.at_once": 3,
            "uploads.max_frames": 4,
            "drain_seconds": 0.05,
        }
        context = forkserver_with("terra.serving.run", "terra.engine.hf")
        overrides = [f"{key}={value}" for key, value in settings.items()]
        self.process = context.Process(target=run_and_exit, args=(overrides,))
        self.process.start()
        while True:
            try:
                httpx.get(f"{self.url}/health")
                return
            except httpx.TransportError:
                assert self.process.is_alive()
                time.sleep(0.05)

    def post(self, seed: int) -> str:
        body = {"scene": "day", "trajectory_name": "left", "num_frames": NUM_FRAMES, "seed": seed}
        return httpx.post(f"{self.url}/v1/videos", json=body, timeout=60).raise_for_status().json()["id"]

    def statuses(self) -> dict[str, str]:
        listed = httpx.get(f"{self.url}/v1/videos", params={"limit": 100}, timeout=60).json()["data"]
        return {video["id"]: video["status"] for video in listed}

    def tokens(self, name: str) -> torch.Tensor:
        answer = httpx.get(f"{self.url}/v1/videos/{name}/content", params={"variant": "tokens"}, timeout=60)
        return load(answer.raise_for_status().content)["tokens"]

    def end(self, number: int) -> int:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scenes").mkdir()
    scene_folder(tmp_path / "scenes")
    return tmp_path


def test_killed_during_ten_jobs_it_loses_none(folder, tiny_model, tiny_tokenizer):
    process = Process(tiny_model, tiny_tokenizer, folder)
    names = [process.post(seed) for seed in range(NUM_JOBS)]
    while "completed" not in process.statuses().values():
        time.sleep(0.01)
    assert "in_progress" in process.statuses().values()
    assert process.end(signal.SIGKILL) == -9
    process = Process(tiny_model, tiny_tokenizer, folder)
    assert process.statuses().keys() == set(names)
    deadline = time.monotonic() + 120
    while set(process.statuses().values()) != {"completed"}:
        assert time.monotonic() < deadline, process.statuses()
        time.sleep(0.05)
    assert process.statuses().keys() == set(names)
    results = [process.tokens(name) for name in names]
    assert process.end(signal.SIGTERM) == 0
    assert sorted(path.name for path in (folder / "data/results").iterdir()) == sorted(names)
    with make_pipeline(tiny_model, tiny_tokenizer) as pipeline:
        actions = torch.from_numpy(load_trajectory(folder / "scenes/day/left.json").actions(NUM_FRAMES - 1))
        context = pictures(folder / "scenes/day")
        requests = [RolloutRequest(context, actions, seed) for seed in (0, NUM_JOBS - 1)]
        for rollout, got in zip(
            pipeline.generate(requests, SamplingParams(temperature=0.9)), (results[0], results[-1]), strict=True
        ):
            assert torch.equal(got, rollout.tokens)


def test_the_store_after_a_kill(tmp_path, wait):
    """As the process finds it: what was in progress waits again, in its old order; what ended is left alone."""
    store = JobStore(tmp_path, 100.0)
    jobs = [wait(store.add(f"video_{index}", {"n": index}, bytes([index]), 10, 10)) for index in range(4)]
    (first, inputs), (second, _) = wait(store.take()), wait(store.take())
    assert ([first.id, second.id], inputs) == (["video_0", "video_1"], b"\0")
    assert wait(store.end(first, "completed"))
    assert not wait(store.end(first, "failed"))
    (tmp_path / "results/.video_1.abc").mkdir()
    store.close()
    store = JobStore(tmp_path, 100.0)
    assert not list((tmp_path / "results").iterdir())
    assert wait(store.requeue()) == 1
    assert wait(store.counts()) == {"queued": 3, "in_progress": 0, "completed": 1, "failed": 0, "cancelled": 0}
    assert wait(store.take())[0].id == "video_1"
    assert wait(store.add("video_5", {}, b"", 2, 10)) is None
    assert wait(store.add("video_6", {"client": "a"}, b"", 10, 1)) is not None
    assert wait(store.add("video_7", {"client": "a"}, b"", 10, 1)) is None
    assert wait(store.delete(wait(store.add("video_8", {"client": "b"}, b"", 10, 1))))
    assert wait(store.delete(wait(store.find("video_6"))))
    assert [job.id for job in wait(store.list(2, jobs[2], newest_first=True))] == ["video_1", "video_0"]
    store.close()
