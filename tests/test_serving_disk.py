"""A server whose disk is full for a while: it says so, goes on driving, and makes every accepted job in the end."""

import shutil
import sqlite3
import time
from collections import namedtuple

import httpx
import pytest
from tiny_serving import HeldEngine, Served, wait_until

import terra.serving.jobs
from terra.engine.persistence import PersistenceEngine
from terra.errors import OutputError
from terra.serving.store import JobStore

pytestmark = pytest.mark.slow

pytest_plugins = ["serving_fixtures"]

JOB = {"scene": "day", "trajectory_name": "left", "num_frames": 6}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def served(tiny_model, tiny_tokenizer, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(terra.serving.jobs, "_PAUSES", (0.02, 0.1))
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, persistence=True) as server:
        yield server


def health(served: Served) -> dict:
    answer = httpx.get(f"{served.url}/health")
    assert answer.status_code == 200
    return answer.json()


def wait_until_ok(served: Served) -> None:
    deadline = time.monotonic() + 30
    while health(served) != {"status": "ok"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def on_the_tables_thread(served: Served, query: str) -> None:
    store = served.service.store
    store._thread.submit(lambda: store._database.execute(query).fetchall()).result()


def test_a_table_without_room_refuses_new_jobs_until_there_is_room(served):
    accepted = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
    assert served.wait_for(accepted)["status"] == "completed"
    on_the_tables_thread(served, "PRAGMA max_page_count = 1")  # as many pages as there are now
    codes = set()
    for _ in range(20):  # the last page has room for some
        answer = httpx.post(f"{served.url}/v1/videos", json=JOB)
        codes.add(answer.status_code)
        if answer.status_code == 503:
            break
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_failed"
    assert "database or disk is full" in answer.json()["error"]["message"]
    assert int(answer.headers["Retry-After"]) > 0
    with served.open() as talk:  # live sessions need no table
        talk.step()
    on_the_tables_thread(served, "PRAGMA max_page_count = 1000000")
    again = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
    assert served.wait_for(again)["status"] == "completed"
    wait_until_ok(served)


def test_accepted_jobs_are_made_once_the_disk_has_room_again(served, monkeypatch):
    full = {"table": True, "results": True}
    write, made = JobStore._write, terra.serving.jobs._write

    def write_table(work, *arguments):
        def fails(database):
            if full["table"]:
                raise sqlite3.OperationalError("database or disk is full")
            return work(database)

        return write(served.service.store, fails)

    def write_results(*arguments):
        if full["results"]:
            raise OutputError("output=results: the disk is full")
        made(*arguments)

    names = [httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"] for _ in range(3)]
    monkeypatch.setattr(served.service.store, "_write", write_table)
    monkeypatch.setattr(terra.serving.jobs, "_write", write_results)
    deadline = time.monotonic() + 30
    while (found := health(served))["status"] != "degraded":
        assert time.monotonic() < deadline
        time.sleep(0.02)
        httpx.post(f"{served.url}/v1/videos", json=JOB)  # refused, which tells of the disk
    assert "disk is full" in found["reason"]
    full["table"] = False
    time.sleep(0.3)  # jobs are taken, and their results can't be written
    full["results"] = False
    for name in names:
        assert served.wait_for(name)["status"] == "completed"
        assert httpx.get(f"{served.url}/v1/videos/{name}/content").status_code == 200
    wait_until_ok(served)


def test_jobs_wait_for_room_before_they_are_made(served, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    name = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
    second = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
    deadline = time.monotonic() + 30
    while health(served)["status"] != "degraded":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert health(served)["reason"] == "the disk is full: jobs wait for room"
    monkeypatch.undo()
    assert [served.wait_for(each)["status"] for each in (name, second)] == ["completed"] * 2


def test_no_failure_ends_a_worker(served, monkeypatch):
    """Every call of the table fails once, by an error that nobody expected."""
    take, failed = JobStore.take, []

    async def fails_first(store):
        if len(failed) < 20:
            failed.append(1)
            raise KeyError("unexpected")
        return await take(store)

    monkeypatch.setattr(JobStore, "take", fails_first)
    names = [httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"] for _ in range(4)]
    assert [served.wait_for(name)["status"] for name in names] == ["completed"] * 4
    assert len(failed) == 20
    assert len([task for task in served.service.jobs._taking if task.done()]) == 0
    wait_until_ok(served)


@pytest.mark.parametrize("index", [0, -1], ids=["worker", "sweep"])
def test_health_tells_of_a_task_that_has_ended(served, index):
    tasks = served.service.jobs._taking
    served.loop.call_soon_threadsafe(tasks[index].cancel)
    wait_until(tasks[index].done)
    assert health(served)["status"] == "degraded"
    assert health(served)["reason"] == f"expected {len(tasks)} tasks for jobs, got {len(tasks) - 1}: restart the server"
    job = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
    assert served.wait_for(job)["status"] == "completed"


def test_health_tells_of_a_job_that_stands_still(tiny_model, tiny_tokenizer, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(terra.serving.jobs, "_STALLED_SECONDS", 0.5)
    engine = HeldEngine(PersistenceEngine.from_pretrained(tiny_model).spec)
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path, engine=engine) as served:
        assert health(served) == {"status": "ok"}
        job = httpx.post(f"{served.url}/v1/videos", json=JOB).json()["id"]
        wait_until(lambda: health(served) == {"status": "degraded", "reason": "a job has made no frame for 0.5 s"})
        engine.release()
        assert served.wait_for(job)["status"] == "completed"
        wait_until_ok(served)


def test_health_tells_of_a_table_that_does_not_answer(served, monkeypatch):
    monkeypatch.setattr(terra.serving.jobs, "_STALLED_SECONDS", -terra.serving.jobs._SWEEP_SECONDS)
    assert health(served)["reason"].startswith("the table of jobs has not answered")
