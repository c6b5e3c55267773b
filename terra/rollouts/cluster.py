"""Runs a batch on Ray: one process reads the manifest and records results, workers with an engine each do the work.

Data parallelism is one worker a GPU, not vLLM's own: its replicas sit behind one front end for the sake of models whose
experts are spread over them, and one dead replica ends them all. Ours share nothing, so a dead one is replaced while
the others go on. Tensor parallelism is vLLM's: a worker with `engine.tensor_parallel_size` GPUs of one machine.

Claims are held by this process alone, so that no lock must work across machines; the workers write into the output
folder, which they see under the same path.
"""

import asyncio
import itertools
import logging
import math
import os
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

# Before Ray is imported: no report of use, and no devices taken away from workers that ask for none.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# isort: split
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from terra.config.spec import PipelineSpec
from terra.errors import ConfigError, EngineError, OutputError, first_error
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.locks import Claim
from terra.rollouts.manifest import Job
from terra.rollouts.settings import RolloutSettings
from terra.rollouts.signals import Stopping
from terra.rollouts.source import ClaimedJobs, Tally, note_done, note_failure
from terra.rollouts.worker import Outcome, Worker
from tokenizer.settings import Count, Natural, NonNegative, Settings, checked

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0
_RESERVE_SECONDS = 40.0  # after which the run ends if the cluster has room for no worker
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 5.0
_SPARE_FILES = 256


class _Numbers(Settings):
    workers: Count | None
    gpus: Natural | None
    cpus: NonNegative
    max_restarts: Natural


class RayCluster:
    """Runs a batch's workers on a Ray cluster; see conf/cluster/ray.yaml.

    Raises:
        ConfigError: a number of workers, GPUs, CPUs or restarts that is out of range.
    """

    def __init__(
        self, *, address: str | None, workers: int | None, gpus: int | None, cpus: float, max_restarts: int
    ) -> None:
        numbers = {"workers": workers, "gpus": gpus, "cpus": cpus, "max_restarts": max_restarts}
        checked(_Numbers, numbers, "cluster.")
        self._address, self._workers, self._gpus, self._cpus = address, workers, gpus, cpus
        self._max_restarts = max_restarts

    def make_rollouts(
        self,
        spec: PipelineSpec,
        folder: RolloutFolder,
        settings: RolloutSettings,
        tally: Tally,
        on_progress: Callable[[], None],
    ) -> int | None:
        """Make the missing rollouts of an open folder; returns the signal that interrupted the run, if one did.

        Raises:
            ConfigError: no such cluster, or too small a one.
            EngineError: a worker could not start or died too often, or the cluster has room for none.
            OutputError: the output can't be written.
        """
        is_ours = not ray.is_initialized()
        if is_ours:
            self._connect()
        try:
            num_workers, gpus = self._size(spec)
            options = {"num_cpus": self._cpus, "num_gpus": gpus}
            run = _Run(options, num_workers, self._max_restarts, spec, folder, settings, tally, on_progress)
            asyncio.run(run.run())
            return run.signal
        finally:
            if is_ours:
                ray.shutdown()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        try:
            if self._address is None:
                ray.init(include_dashboard=False, **quiet)
            else:
                ray.init(address=self._address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cluster.address={self._address}: expected a Ray cluster, got: {reason}") from None

    def _size(self, spec: PipelineSpec) -> tuple[int, int]:
        """Numbers of workers and of GPUs for each worker. Raises ConfigError."""
        there = ray.cluster_resources()
        have_gpus, have_cpus = int(there.get("GPU", 0)), there.get("CPU", 0.0)
        gpus = self._gpus if self._gpus is not None else spec.gpus if have_gpus else 0
        if gpus and gpus != spec.gpus:
            raise ConfigError(f"cluster.gpus: expected engine.tensor_parallel_size={spec.gpus}, got {gpus}")
        machines = sum(node["Alive"] for node in ray.nodes())
        workers = self._workers or (max(1, have_gpus // gpus) if gpus else machines)
        if workers * gpus > have_gpus or workers * self._cpus > have_cpus:
            need = f"{workers * gpus} GPUs and {workers * self._cpus:g} CPUs"
            raise ConfigError(
                f"cluster: expected {need} for {workers} workers, got {have_gpus} GPUs and {have_cpus:g} CPUs"
            )
        return workers, gpus


class _Reservation:
    """Room for one worker on a machine of the cluster. Its methods ask the cluster, which may take seconds.

    Without a reservation nobody can tell a worker that starts slowly from one that no machine has room for.

    Args:
        options: `num_cpus` and `num_gpus` of the worker.
    """

    def __init__(self, options: dict[str, float]) -> None:
        named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
        self.needs = {name: count for name, count in named.items() if count}
        # A worker that needs nothing has room wherever there is a machine.
        self._group: Any = placement_group([self.needs]) if self.needs else None

    def is_held(self) -> bool:
        """Whether a living machine holds the room now."""
        try:
            if self._group is None:
                return any(node["Alive"] for node in ray.nodes())
            return placement_group_table(self._group).get("state") == "CREATED"
        except RayError:  # nobody answers
            return False

    def options(self) -> dict[str, Any]:
        """What an actor's `options` take."""
        return {} if self._group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, 0)}

    def release(self) -> None:
        """Give the room back; a worker that is still in it ends."""
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)


class _WorkerHandle:
    """A living worker process. `died` is resolved with the reason when the process has died."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.has_started = actor, False
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)


class _Run:
    """One run over the manifest. The queue `_free` holds a worker's handle once for each rollout it has room for."""

    def __init__(
        self,
        options: dict[str, float],
        num_workers: int,
        max_restarts: int,
        spec: PipelineSpec,
        folder: RolloutFolder,
        settings: RolloutSettings,
        tally: Tally,
        on_progress: Callable[[], None],
    ) -> None:
        paths = {name: getattr(settings, name).absolute() for name in ("manifest", "output")}
        root = None if settings.context_root is None else settings.context_root.absolute()
        adapters = {name: folder.absolute() for name, folder in settings.adapters.items()}
        own = vars(settings) | paths | {"context_root": root, "adapters": adapters}
        settings = RolloutSettings.from_values(own)  # absolute paths, since workers run elsewhere
        self._arguments = (spec, settings, folder.settings)
        self._options, self._num_workers, self._max_restarts = options, num_workers, max_restarts
        self._folder, self._tally, self._on_progress = folder, tally, on_progress
        left = max(1, tally.total - folder.count_made())
        # Rollouts wait in a worker, so that its engine never idles, but none that another worker could begin at once.
        most = settings.at_once + 2 * settings.workers
        self._places = min(most, math.ceil(left / num_workers))
        self._jobs = ClaimedJobs(settings, folder, tally)
        self._stopping = Stopping(self._drain)
        self._alive: set[_WorkerHandle] = set()
        self._reserved: set[_Reservation] = set()
        self._claims: set[Claim] = set()

    @property
    def signal(self) -> int | None:
        """The signal that interrupted the run."""
        return self._stopping.signal

    async def run(self) -> None:
        """Make all missing rollouts, as `BatchRunner.run` does."""
        _allow_open_files(self._num_workers * self._places + _SPARE_FILES)
        self._free: asyncio.Queue[_WorkerHandle | None] = asyncio.Queue()
        reader = ThreadPoolExecutor(1, thread_name_prefix="terra-manifest")
        try:
            with self._stopping.listening():
                async with asyncio.TaskGroup() as group:
                    keepers = [group.create_task(self._keep(index)) for index in range(self._num_workers)]
                    await self._make_all(reader)
                    for keeper in keepers:
                        keeper.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._jobs.stop()
            await self._close()
            reader.shutdown()
            for claim in self._claims:
                claim.release()

    async def _make_all(self, reader: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while (worker := await self._free_worker()) is not None:
                taken = await loop.run_in_executor(reader, self._next)
                if taken is None:
                    return
                group.create_task(self._make(worker, *taken))

    def _next(self) -> tuple[Job, Claim] | None:
        taken = next(self._jobs, None)
        if taken is not None:
            self._claims.add(taken[1])  # registered in this thread: the awaiting task may be cancelled
        return taken

    async def _free_worker(self) -> _WorkerHandle | None:
        """A living worker that can take a rollout; None when the run is to end."""
        while True:
            worker = await self._free.get()
            if worker is None:
                self._free.put_nowait(None)  # for the next caller
                return None
            if not worker.died.done():
                return worker

    async def _make(self, worker: _WorkerHandle, job: Job, claim: Claim) -> None:
        """Have a rollout made, by another worker if the first one dies."""
        try:
            while True:
                outcome = await _ask(worker, job)
                if outcome is not None:
                    self._free.put_nowait(worker)
                    break
                if self._folder.is_done(job):  # the worker died after it published the rollout
                    outcome = Outcome("done")
                    break
                other = await self._free_worker()
                if other is None:
                    return
                worker = other
            self._note(job, outcome)
        finally:
            claim.release()
            self._claims.discard(claim)

    def _note(self, job: Job, outcome: Outcome) -> None:
        if outcome.status == "done":
            self._tally.frames += job.num_frames - job.num_context
            note_done(self._tally, self._folder, job, outcome.seconds)
        elif outcome.status == "failed":
            note_failure(self._tally, self._folder, job.name, job.line, outcome.reason)
        self._on_progress()

    async def _keep(self, index: int) -> None:
        """Start a worker, and replace the worker whenever it dies."""
        make_actor: Any = ray.remote(Worker)
        for deaths in itertools.count():
            reservation = await self._reserve(index)
            options = {**self._options, **reservation.options(), "max_concurrency": self._places + 4}
            worker = _WorkerHandle(make_actor.options(**options).remote(*self._arguments))
            self._alive.add(worker)
            reason = await self._employ(worker, reservation, is_first=deaths == 0)
            self._alive.discard(worker)
            ray.kill(worker.actor)
            await self._release(reservation)
            if deaths == self._max_restarts:
                raise EngineError(f"worker {index}: died {deaths + 1} times, the last time: {reason}")
            self._tally.restarts += 1
            logger.warning("worker %d died and is replaced: %s", index, reason)

    async def _reserve(self, index: int) -> _Reservation:
        """Wait for room for a worker, as long as there are others. Raises EngineError if nobody is there to work."""
        reservation = await asyncio.to_thread(_Reservation, self._options)
        self._reserved.add(reservation)
        is_said, clock = False, asyncio.get_running_loop().time
        begun = clock()
        while not await asyncio.to_thread(reservation.is_held):
            waited = clock() - begun
            if waited >= _RESERVE_SECONDS and not (is_said and self._alive):
                need = " and ".join(f"{count:g} {name}s" for name, count in reservation.needs.items()) or "any"
                text = f"worker {index}: expected a machine with {need} free, got none in {waited:.0f} s"
                if not self._alive:
                    raise EngineError(f"{text}: no worker is left; the same command goes on with the rollouts to do")
                logger.warning("%s; the other workers go on", text)
                is_said = True
            await asyncio.sleep(_POLL_SECONDS)
        return reservation

    async def _employ(self, worker: _WorkerHandle, reservation: _Reservation, *, is_first: bool) -> str:
        """Start a worker and let it take rollouts until it dies; returns the reason of its death."""
        start = asyncio.ensure_future(_start(worker, is_first=is_first))
        watch = asyncio.ensure_future(_watch(worker, reservation))
        try:
            await asyncio.wait((start, worker.died), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
            if not worker.died.done():
                worker.has_started = True
                for _ in range(self._places):
                    self._free.put_nowait(worker)
            return await worker.died
        finally:
            start.cancel()
            watch.cancel()

    async def _release(self, reservation: _Reservation) -> None:
        self._reserved.discard(reservation)
        await asyncio.to_thread(reservation.release)

    def _drain(self) -> None:
        self._jobs.stop()
        self._free.put_nowait(None)
        for worker in self._alive:
            worker.actor.drain.remote()

    async def _close(self) -> None:
        # Only started workers: the cluster may never have resources for the others.
        closing = [worker.actor.close.remote() for worker in self._alive if worker.has_started]
        with suppress(RayActorError, TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing), _CLOSE_SECONDS if not self._stopping else 1.0)
        for worker in self._alive:
            ray.kill(worker.actor)
        for reservation in list(self._reserved):
            await self._release(reservation)


async def _watch(worker: _WorkerHandle, reservation: _Reservation) -> None:
    """Give a worker up when its machine is gone: a call to it may then wait for ever."""
    while await asyncio.to_thread(reservation.is_held):
        await asyncio.sleep(_WATCH_SECONDS)
    worker.give_up("its machine is gone")


async def _start(worker: _WorkerHandle, *, is_first: bool) -> None:
    try:
        error = await worker.actor.start.remote()
    except RayActorError as died:
        worker.give_up(_first_line(died))
        return
    if error is not None and (is_first or not isinstance(error, EngineError)):
        raise error
    if error is not None:  # such as a GPU whose memory the dead worker has not freed yet
        worker.give_up(str(error))


async def _ask(worker: _WorkerHandle, job: Job) -> Outcome | None:
    """Have a worker make a rollout; returns the outcome, None if the worker died meanwhile. Raises OutputError."""
    asked = asyncio.ensure_future(_awaited(worker.actor.make.remote(job)))
    try:
        await asyncio.wait((asked, worker.died), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return None
        outcome = asked.result()
    except RayActorError as died:
        worker.give_up(_first_line(died))
        return None
    finally:
        asked.cancel()
    if outcome.status != "broken":
        return outcome
    if isinstance(outcome.error, OutputError):
        raise outcome.error
    worker.give_up(str(outcome.error))
    return None


async def _awaited(answer: Awaitable[Outcome]) -> Outcome:
    return await answer


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _allow_open_files(wanted: int) -> None:
    """Raise the process's limit of open files to `wanted`, because each claim is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
