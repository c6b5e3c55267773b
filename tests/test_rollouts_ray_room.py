"""What `terra rollout cluster=ray` does when the cluster has no room for its workers, without a cluster."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from entry import read_settings

pytest.importorskip("ray")

from terra.errors import EngineError
from terra.rollouts import cluster
from terra.rollouts.cluster import _ask, _Run, _watch, _WorkerHandle
from terra.rollouts.source import Tally

pytestmark = pytest.mark.slow


class Room:
    """Stands in for a reservation: a cluster that has room, or none, while the test says so."""

    has_room = False

    def __init__(self, options: dict[str, float]) -> None:
        assert options == {"num_cpus": 1.0}
        self.needs = {"CPU": 1.0}

    def is_held(self) -> bool:
        return Room.has_room


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with nothing but what waiting for room takes."""
    monkeypatch.setattr(cluster, "_Reservation", Room)
    monkeypatch.setattr(cluster, "_RESERVE_SECONDS", 0.3)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(Room, "has_room", False)
    made = _Run.__new__(_Run)
    vars(made).update(_options={"num_cpus": 1.0}, _reserved=set(), _alive=set(), _places=2)
    return made


@pytest.mark.parametrize(("made", "places"), [(0, 7), (80, 7), (95, 3), (100, 1)])
def test_a_worker_has_at_once_what_keeps_its_engine_busy_and_nothing_that_another_could_begin(tmp_path, made, places):
    settings = read_settings("rollout", [f"manifest={tmp_path}/m", f"output={tmp_path}/out", "at_once=3", "workers=2"])
    folder: Any = SimpleNamespace(settings={}, count_made=lambda: made)
    spec: Any = None
    own = _Run({}, 2, 0, spec, folder, settings, Tally(total=100), lambda: None)
    assert own._places == places  # three sessions, and two rollouts each before and after them


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def test_without_room_for_any_worker_the_run_ends(run):
    with pytest.raises(
        EngineError, match=r"worker 3: expected a machine with 1 CPUs free, got none in \d+ s: no worker"
    ):
        asyncio.run(asyncio.wait_for(run._reserve(3), 60))


def test_while_another_worker_works_the_run_says_so_once_and_waits(run, caplog):
    async def wait() -> None:
        run._alive.add("another worker")
        waiting = asyncio.ensure_future(run._reserve(0))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        Room.has_room = True
        await asyncio.wait_for(waiting, 60)

    caplog.set_level(logging.WARNING)
    asyncio.run(wait())
    assert caplog.text.count("got none") == 1
    assert "the other workers go on" in caplog.text


def test_when_the_last_other_worker_has_gone_the_wait_ends_too(run):
    async def wait() -> None:
        run._alive.add("another worker")
        waiting = asyncio.ensure_future(run._reserve(0))
        await asyncio.sleep(1)
        run._alive.clear()
        await asyncio.wait_for(waiting, 60)

    with pytest.raises(EngineError, match="no worker is left"):
        asyncio.run(wait())


@pytest.mark.parametrize("has_started", [True, False])
def test_a_worker_whose_machine_has_gone_is_dead_though_no_call_to_it_ends(run, has_started):
    async def answer(*_: object) -> None:
        if not has_started:
            await never()

    async def employ() -> tuple[str, Any]:
        Room.has_room = True
        run._free = asyncio.Queue()
        actor = SimpleNamespace(start=SimpleNamespace(remote=answer), make=SimpleNamespace(remote=never))
        worker = _WorkerHandle(actor)
        employed = asyncio.ensure_future(run._employ(worker, Room(run._options), is_first=True))
        await asyncio.sleep(0.3)
        assert not employed.done()
        assert run._free.qsize() == (2 if has_started else 0)
        asked = asyncio.ensure_future(_ask(worker, None))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.1)
        Room.has_room = False
        return await asyncio.wait_for(employed, 60), await asyncio.wait_for(asked, 60)

    assert asyncio.run(employ()) == ("its machine is gone", None)


def test_a_watch_ends_with_the_machine(run):
    async def watch() -> str:
        worker = _WorkerHandle(None)
        await asyncio.wait_for(_watch(worker, Room(run._options)), 60)  # pyright: ignore[reportArgumentType]
        return worker.died.result()

    assert asyncio.run(watch()) == "its machine is gone"
