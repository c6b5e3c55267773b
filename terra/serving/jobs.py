"""Runs video jobs: takes them from the store in order, generates them with the engine, and writes their folders."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save

from decoder.thread import DecodedFrames
from decoder.video import Pixels
from terra.errors import EngineError, OutputError, TerraError
from terra.output import output_folder
from terra.place_map import Place
from terra.prompt import Actions
from terra.recall import PlaceMap
from terra.rollout import GIF, TOKENS, VIDEO, RolloutWriter, describe_inputs, rollout_record
from terra.sampling import SamplingParams
from terra.serving.errors import ApiError
from terra.serving.metrics import Metrics
from terra.serving.model import Model
from terra.serving.settings import JobSettings
from terra.serving.store import ENDED, Job, JobStore, StorageError
from tokenizer import TokenGrid

logger = logging.getLogger(__name__)

VARIANTS = {"video": (VIDEO, "video/mp4"), "gif": (GIF, "image/gif"), "tokens": (TOKENS, "application/octet-stream")}
_SWEEP_SECONDS = 30.0
_STALLED_SECONDS = 120.0
"""Seconds without a frame of a running job, or an answer of the table, after which /health tells of it."""
_PAUSES = 0.5, 15.0
"""Seconds until the first try after a failure, and at most until a later one."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class VideoRequest:
    """The inputs of a job: context tokens, an action between each two frames, sampling parameters and adapter.

    `memory` is whether earlier frames are remembered, `map_pose` where the first frame is in the axes of the server's
    map, [x, y, heading] in m and rad; None for a video that does not remember the map.
    """

    context: TokenGrid
    actions: Actions
    sampling: SamplingParams
    seed: int
    adapter: str | None = None
    memory: bool = True
    map_pose: list[float] | None = None

    @property
    def num_frames(self) -> int:
        """Frames of the video, context included."""
        return len(self.actions) + 1


@dataclass
class _Running:
    """A job that the engine is generating."""

    task: asyncio.Task[None]
    num_made: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    cancelled: bool = field(default=False)


class Jobs:
    """Queues video jobs and runs several at a time.

    Args:
        model: generates the videos.
        store: the jobs on disk.
        settings: limits of jobs.
        metrics: counts the generated frames.
        model_hash: hash of the base model's weights; a job that began with other weights does not continue.
        place: the map that a job can remember; None for none. A job that began with another map does not continue.
    """

    def __init__(
        self,
        model: Model,
        store: JobStore,
        settings: JobSettings,
        metrics: Metrics,
        model_hash: str,
        place: Place | None,
    ) -> None:
        self._model, self.store, self._settings, self._metrics = model, store, settings, metrics
        self._hash, self._place = model_hash, place
        self._running: dict[str, _Running] = {}
        self._wake = asyncio.Event()
        self._taking: list[asyncio.Task[None]] = []
        self._swept_at = time.monotonic()
        self._stopping = False
        self._trouble: str | None = None

    @property
    def problem(self) -> str | None:
        """Why jobs are not made or can't be added at present, in one line; None if all is well."""
        return self.store.problem or self._trouble or self._standstill()

    def _standstill(self) -> str | None:
        """Why jobs stand still without an error, in one line; None if they don't."""
        alive, now = sum(not task.done() for task in self._taking), time.monotonic()
        if alive < len(self._taking) and not self._stopping:
            return f"expected {len(self._taking)} tasks for jobs, got {alive}: restart the server"
        if any(now - running.moved_at > _STALLED_SECONDS for running in self._running.values()):
            return f"a job has made no frame for {_STALLED_SECONDS:g} s"
        if self._taking and now - self._swept_at > _SWEEP_SECONDS + _STALLED_SECONDS:
            return f"the table of jobs has not answered for {_STALLED_SECONDS:g} s"
        return None

    async def start(self) -> None:
        """Continue the jobs that an earlier process left, and accept new ones."""
        await self.store.expire()
        again = await self.store.requeue()
        if again:
            logger.info("%d jobs were in progress when the last server ended: queued again", again)
        self._swept_at = time.monotonic()
        self._taking = [asyncio.create_task(self._work()) for _ in range(self._settings.at_once)]
        self._taking.append(asyncio.create_task(self._sweep()))

    async def add(self, request: VideoRequest, client: str) -> Job:
        """Queue a client's job, on disk: from then on the job survives a crash of this process.

        Raises:
            ApiError: 429 when the queue, or the client's share of it, is full.
        """
        tensors = {"context": request.context, "actions": request.actions}
        said = {
            "num_frames": request.num_frames,
            "num_context": len(request.context),
            "seed": request.seed,
            "sampling": vars(request.sampling),
            "adapter": request.adapter,
            "model_hash": self._hash_with(request.adapter),
            "client": client,
            "memory": request.memory,
        }
        if self._place is not None and request.map_pose is not None:
            said["map"] = self._place.pictures.describe(request.map_pose)
        inputs = save({name: each.contiguous() for name, each in tensors.items()})
        settings = self._settings
        job = await self.store.add(
            f"video_{secrets.token_hex(16)}", said, inputs, settings.queue, settings.queue_per_client
        )
        if job is None:
            message = f"expected at most {settings.queue} jobs that wait, {settings.queue_per_client} of one client"
            raise ApiError(429, "queue_full", message, retry_seconds=10)
        self._wake.set()
        return job

    def progress(self, job: Job) -> int:
        """Percentage of a job's frames that are generated."""
        if job.status == "completed":
            return 100
        running = self._running.get(job.id)
        due = job.request["num_frames"] - job.request["num_context"]
        return 0 if running is None else min(99, 100 * running.num_made // due)

    async def cancel(self, job: Job) -> None:
        """Mark an unfinished job as cancelled, and stop it."""
        if job.status not in ENDED and await self.store.end(job, "cancelled"):
            self._metrics.job_ended("cancelled")
        await self._stop(job.id, cancelled=True)

    async def delete(self, job: Job) -> bool:
        """Remove a job in any state; returns whether the job existed."""
        await self._stop(job.id, cancelled=True)
        return await self.store.delete(job)

    async def drain(self, seconds: float, give_up: asyncio.Event) -> None:
        """Accept no more jobs, wait for the running ones (until `give_up`, or the limit), requeue the rest."""
        self._stopping = True
        self._wake.set()
        waits = [running.task for running in self._running.values()]
        if waits:
            logger.info("%d jobs are running: up to %g s for them", len(waits), seconds)
            gave_up = asyncio.create_task(give_up.wait())
            await asyncio.wait({gave_up, _all(waits)}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            gave_up.cancel()
        for job_id in list(self._running):
            await self._stop(job_id, cancelled=False)
        for task in self._taking:
            task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)

    async def _stop(self, job_id: str, *, cancelled: bool) -> None:
        running = self._running.get(job_id)
        if running is not None:
            running.cancelled = cancelled
            running.task.cancel()
            await asyncio.wait({running.task})

    async def _work(self) -> None:
        """Take and make jobs, one after the other. What fails besides a job is tried again, later and later."""
        pause = _PAUSES[0]
        while not self._stopping and self._model.failure is None:
            try:
                if not self.store.has_room():
                    raise StorageError("the disk is full: jobs wait for room")
                await self._take_and_make()
            except Exception as error:
                self._note(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
            else:
                pause, self._trouble = _PAUSES[0], None

    def _note(self, error: Exception) -> None:
        """Log what keeps the jobs from being made, once until it is over."""
        reason = str(error) or type(error).__name__
        if self._trouble != reason:
            self._trouble = reason
            logger.error("jobs wait: %s", reason, exc_info=None if isinstance(error, TerraError) else error)

    async def _take_and_make(self) -> None:
        """Make the job that waits longest, or wait for one."""
        taken = await self.store.take()
        if taken is None:
            self._wake.clear()
            # Whatever came between looking and clearing sits in the store: look once more.
            if await self.store.num_queued() == 0:
                await self._wake.wait()
            return
        job, inputs = taken
        if self._stopping:
            await self.store.requeue(job)
            return
        task = asyncio.create_task(self._make(job, inputs))
        self._running[job.id] = _Running(task)
        await asyncio.wait({task})
        del self._running[job.id]
        if task.cancelled() or (failure := task.exception()) is None:
            return
        if isinstance(failure, OutputError):  # the disk's, not the job's
            await self._written(lambda: self.store.requeue(job))
            raise failure
        logger.error("%s failed", job.id, exc_info=failure)
        await self._written(lambda: self._fail(job, "server_error", "the server failed; its log says why"))

    async def _written(self, change: Callable[[], Awaitable[_T]]) -> _T:
        """Make a change to the table of jobs, as soon as the disk has room for it."""
        pause = _PAUSES[0]
        while True:
            try:
                return await change()
            except StorageError as error:
                self._note(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _make(self, job: Job, inputs: bytes) -> None:
        try:
            await self._model.run("files", await self._generate(job, inputs))
            ended = await self._written(lambda: self.store.end(job, "completed"))
            if not ended:  # cancelled or deleted at the last moment
                await self.store.drop_files(job)
            else:
                self._metrics.job_ended("completed")
        except asyncio.CancelledError:
            if not self._running[job.id].cancelled:
                with suppress(StorageError):  # it is queued again when the next server starts
                    await self.store.requeue(job)
            raise
        except (SafetensorError, KeyError):
            await self._written(lambda: self._fail(job, "invalid_inputs", "the job was stored by another version"))
        except EngineError as error:
            reason = str(error)
            if self._model.failure is None:
                await self._written(lambda: self._fail(job, "engine_error", reason))
            else:  # no fault of the job's: the next server makes it
                await self._written(lambda: self.store.requeue(job))
        except OutputError:
            raise
        except TerraError as error:
            logger.error("%s failed: %s", job.id, error)
            await self._written(lambda: self._fail(job, "server_error", "the results could not be written"))

    async def _generate(self, job: Job, inputs: bytes) -> Callable[[], None]:
        """Generate a job's video; returns the writer of its files."""
        started, tensors, request = time.perf_counter(), load(inputs), job.request
        adapter = request["adapter"]
        if adapter is not None and adapter not in self._model.pipeline.engine.adapters:
            served = ", ".join(self._model.names)
            raise EngineError(f"the job's model is not served now: expected one of {served}, got {adapter}")
        if request["model_hash"] != self._hash_with(adapter):
            raise EngineError("the job began with other weights than those that are served now")
        seen = request.get("map")
        place = None if seen is None else await self._seen(seen)
        context, actions, sampling = tensors["context"], tensors["actions"], SamplingParams(**request["sampling"])

        def count(index: int) -> None:
            if index == len(context):
                self._metrics.first_frame(time.perf_counter() - started, "job")
            self._metrics.job_frame()
            self._running[job.id].num_made += 1
            self._running[job.id].moved_at = time.monotonic()

        pipeline = self._model.pipeline
        decoding = pipeline.decoding.start(DecodedFrames.pixels, adapter)
        remembers = request["memory"]
        tokens = await pipeline.rollout_tokens(
            context,
            actions,
            sampling,
            request["seed"],
            count,
            decoding,
            adapter,
            place,
            None if remembers else lambda _tokens, _actions: None,
        )
        generated = time.perf_counter()
        pieces = await decoding.finish()
        memory = None
        if remembers:
            describe = partial(pipeline.describe_memory, tokens, actions, len(context), place, seen, adapter)
            memory = await self._model.run("files", describe)
        record = rollout_record(
            pipeline.provenance,
            self._model.spec,
            inputs=describe_inputs(None, None, None, {}),
            num_frames=len(tokens),
            num_context=len(context),
            seed=request["seed"],
            sampling=sampling,
            overlap=pipeline.overlap,
            seconds={"generate": generated - started, "decode": decoding.seconds},
            adapter=adapter,
            memory=memory,
        )
        return partial(_write, self.store.folder(job), self._model.spec.fps, pieces, tokens, actions, record)

    async def _seen(self, described: dict[str, Any]) -> PlaceMap:
        """The map that a stored job remembers, see `MapPictures.describe`. Raises EngineError."""
        if self._place is None or self._place.pictures.sha256 != described["sha256"]:
            raise EngineError("the job began with another map than the one that is served now")
        return await self._place.seen_from(described["pose"])

    def _hash_with(self, adapter: str | None) -> str:
        """The hash of all weights that a job with an adapter depends on."""
        if adapter is None:
            return self._hash
        own = self._model.pipeline.provenance.get("adapters", {}).get(adapter, {}).get("sha256", "")
        return hashlib.sha256(f"{self._hash} {own}".encode()).hexdigest()

    async def _fail(self, job: Job, code: str, message: str) -> None:
        if await self.store.end(job, "failed", {"code": code, "message": message}):
            self._metrics.job_ended("failed")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.store.expire()
            except Exception as error:
                self._note(error)
            self._swept_at = time.monotonic()


def _all(tasks: list[asyncio.Task[None]]) -> asyncio.Task[Any]:
    async def wait() -> None:
        await asyncio.wait(tasks)

    return asyncio.create_task(wait())


def _write(
    folder: Path, fps: float, pieces: Sequence[Pixels], tokens: TokenGrid, actions: Actions, record: dict[str, Any]
) -> None:
    with output_folder(folder) as partial_folder, RolloutWriter(partial_folder, fps, gif=True) as writer:
        for piece in pieces:
            writer.extend(piece)
        writer.finish(tokens, actions, record)
