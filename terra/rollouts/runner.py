"""The stages of a batch, which overlap: prepare, generate, decode, write; a full queue holds back the one before it."""

import asyncio
import itertools
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from decoder.video import to_uint8, write_video
from terra.errors import EngineError, OutputError, TerraError
from terra.output import package_versions
from terra.pipeline import Pipeline
from terra.rollouts.folder import RECORD, RolloutFolder
from terra.rollouts.inputs import Inputs
from terra.rollouts.locks import Claim
from terra.rollouts.manifest import Job
from terra.rollouts.settings import RolloutSettings
from terra.rollouts.source import ClaimedJobs, Tally, note_failure
from terra.windows import plan_windows
from tokenizer.checkpoint import write_tensors
from tokenizer.files import write_json

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(eq=False)
class _Work:
    """A rollout on its way through the stages."""

    job: Job
    claim: Claim
    context: Tensor | None = None
    actions: Tensor | None = None
    tokens: Tensor | None = None
    seconds: dict[str, float] = field(default_factory=dict)


_Queue = asyncio.Queue[_Work | None]


class BatchRunner:
    """Makes rollouts until none is left, and counts them in `tally`.

    What concerns one line (its files, its lengths) fails that line, after its retries; what concerns all (the engine,
    the output folder) ends the run, and its unfinished rollouts are left for the next.

    Args:
        pipeline: makes them; stays open.
        folder: opened already.
        settings: how many at once, and how often again.
        jobs: what to make.
        tally: is kept up to date.
        on_progress: called when the tally has changed, often.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: RolloutFolder,
        settings: RolloutSettings,
        jobs: ClaimedJobs,
        tally: Tally,
        on_progress: Callable[[], None],
    ) -> None:
        self._pipeline, self._folder, self._settings, self._jobs = pipeline, folder, settings, jobs
        self._tally, self._on_progress = tally, on_progress
        self._inputs = Inputs(pipeline.tokenizer, pipeline.engine.spec, settings.contexts, self._in)
        self._works: set[_Work] = set()
        self.signal: int | None = None

    def run(self) -> None:
        """Make all; after SIGTERM or SIGINT, those in the engine alone, and after a second one none (see `signal`).

        Raises:
            EngineError: the engine failed.
            OutputError: the output can't be written.
        """
        asyncio.run(self._run())

    async def _run(self) -> None:
        workers, at_once = self._settings.workers, self._settings.at_once
        names = (("manifest", 1), ("read", workers), ("tokenise", 1), ("decode", 1), ("write", workers))
        self._threads = {name: ThreadPoolExecutor(num, thread_name_prefix=f"terra-{name}") for name, num in names}
        self._reading = asyncio.Lock()
        self._ready: _Queue = asyncio.Queue(workers)
        self._made: _Queue = asyncio.Queue(workers)
        try:
            with self._signals():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._stage(workers, self._prepare_all, self._ready, at_once))
                    group.create_task(self._stage(at_once, self._generate_all, self._made, workers))
                    group.create_task(self._stage(workers, self._finish_all, None, 0))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        except asyncio.CancelledError:
            if self.signal is None:
                raise
        finally:
            # No claim is let go while a thread may still write under it.
            self._jobs.stop()
            for threads in self._threads.values():
                threads.shutdown(cancel_futures=True)
            for work in list(self._works):
                self._let_go(work)

    async def _stage(
        self,
        num: int,
        work: Callable[[], Coroutine[Any, Any, None]],
        to: _Queue | None,
        num_next: int,
    ) -> None:
        """Run a stage's workers, and tell those of the next when all have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(work())
        for _ in range(num_next):
            assert to is not None
            await to.put(None)

    async def _prepare_all(self) -> None:
        while self.signal is None:
            async with self._reading:
                work = await self._in("manifest", self._next)
            if work is None:
                return
            if await self._attempt(work, self._prepare):
                await self._ready.put(work)

    async def _generate_all(self) -> None:
        while (work := await self._ready.get()) is not None:
            if self.signal is not None:
                self._let_go(work)
            elif await self._attempt(work, self._generate):
                await self._made.put(work)

    async def _finish_all(self) -> None:
        while (work := await self._made.get()) is not None:
            if await self._attempt(work, self._finish):
                self._tally.done += 1
                log = {"id": work.job.name, "status": "done", "line": work.job.line, "seconds": _rounded(work.seconds)}
                self._folder.log(log)
                self._let_go(work)
                self._on_progress()

    def _next(self) -> _Work | None:
        taken = next(self._jobs, None)
        if taken is None:
            return None
        work = _Work(*taken)
        self._works.add(work)  # here, lest a claim be forgotten when nobody waits for this any more
        return work

    async def _attempt(self, work: _Work, step: Callable[[_Work], Awaitable[None]]) -> bool:
        """Take a step, again after a failure if there are retries; whether it went well."""
        for tried in itertools.count():
            try:
                await step(work)
            except TerraError as error:
                # Ctrl-C reaches the video encoder too: what a signal broke gets another chance.
                if tried >= max(self._settings.retries, self.signal is not None):
                    if isinstance(error, EngineError | OutputError):
                        raise
                    self._fail(work, str(error))
                    break
                logger.warning("%s: tried again: %s", work.job.name, error)
                await asyncio.sleep(self._settings.retry_seconds)
            else:
                return True
        return False

    def _fail(self, work: _Work, reason: str) -> None:
        self._folder.fail(work.job.name, work.job.line, reason)
        note_failure(self._tally, work.job.name, reason)
        self._let_go(work)
        self._on_progress()

    def _let_go(self, work: _Work) -> None:
        work.claim.release()
        self._works.discard(work)

    async def _prepare(self, work: _Work) -> None:
        started = time.perf_counter()
        job, spec = work.job, self._pipeline.engine.spec
        list(plan_windows(job.num_frames, job.num_context, spec.layout.max_frames, self._settings.overlap))
        work.actions = await self._inputs.actions(job)
        work.seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        work.context = await self._inputs.context(job)
        work.seconds["encode"] = time.perf_counter() - started

    async def _generate(self, work: _Work) -> None:
        assert work.context is not None
        assert work.actions is not None
        started, job = time.perf_counter(), work.job
        given = job.num_context - 1
        session = await self._pipeline.open(work.context, work.actions[:given], job.sampling, job.seed)
        frames = list(work.context)
        try:
            async for frame in session.run(work.actions[given:]):
                frames.append(frame)
                self._tally.frames += 1
                self._on_progress()
        finally:
            await session.close()
        work.tokens = torch.stack(frames)
        work.seconds["generate"] = time.perf_counter() - started

    async def _finish(self, work: _Work) -> None:
        started = time.perf_counter()
        assert work.tokens is not None
        tokens = work.tokens
        pixels = await self._in("decode", lambda: to_uint8(self._pipeline.decoder.decode(tokens)))
        work.seconds["decode"] = time.perf_counter() - started
        started = time.perf_counter()
        await self._in("write", lambda: self._folder.publish(work.job, lambda to: self._write(to, work, pixels)))
        work.seconds["write"] = time.perf_counter() - started

    def _write(self, folder: Path, work: _Work, pixels: Any) -> None:
        assert work.tokens is not None
        assert work.actions is not None
        job, spec = work.job, self._pipeline.engine.spec
        write_video(pixels, folder / "video.mp4", spec.fps)
        write_tensors(folder / "tokens.safetensors", {"tokens": work.tokens, "actions": work.actions})
        windows = plan_windows(job.num_frames, job.num_context, spec.layout.max_frames, self._settings.overlap)
        record = {
            "format": "terra-rollout",
            "id": job.name,
            "sample": job.sample,
            "seed": job.seed,
            "num_frames": job.num_frames,
            "num_context": job.num_context,
            "fps": spec.fps,
            "windows": [vars(window) for window in windows],
            "manifest": job.where,
            "context": list(job.contexts),
            "trajectory": None if job.trajectory is None else str(job.trajectory),
            "request": job.request,
            "made_with": self._folder.settings["made_with"],
            "versions": package_versions(),
            "seconds": _rounded(work.seconds),
        }
        write_json(folder / RECORD, record)

    async def _in(self, threads: str, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[threads], work)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """On SIGTERM and SIGINT take nothing new; on a second one stop. Only the main thread can hear them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if self.signal is not None:
                task.cancel()
                return
            self.signal = number
            self._jobs.stop()
            logger.warning("%s: ending what is begun; once more to stop at once", signal.Signals(number).name)

        def hear(number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(stop, number)

        before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
