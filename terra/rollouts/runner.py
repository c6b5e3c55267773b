"""Runs a batch in this process: overlapping stages prepare, generate, decode, write, with bounded queues between."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from terra.config.spec import PipelineSpec
from terra.errors import first_error
from terra.pipeline import Pipeline
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.maker import RolloutMaker, Work, rounded
from terra.rollouts.settings import RolloutSettings
from terra.rollouts.signals import Stopping
from terra.rollouts.source import ClaimedJobs, Tally, note_done, note_failure

_Queue = asyncio.Queue[Work | None]


class ThisProcess:
    """Runs a batch with one engine in this process; see conf/cluster/local.yaml."""

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
            CheckpointError: weights that do not fit.
            EngineError: the engine failed.
            OutputError: the output can't be written.
        """
        with Pipeline.from_spec(spec) as pipeline:
            return BatchRunner(pipeline, folder, settings, tally, on_progress).run()


class BatchRunner:
    """Makes rollouts in this process until none is left, and counts them in `tally`.

    An error of one line (its files, its lengths) fails that line, after its retries. An error that concerns all lines
    (the engine, the output folder) ends the run, and the next run makes the unfinished rollouts.

    Args:
        pipeline: generates the rollouts; stays open.
        folder: the opened output folder.
        settings: numbers of simultaneous rollouts and of retries.
        tally: updated during the run.
        on_progress: called when the tally has changed, often.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        folder: RolloutFolder,
        settings: RolloutSettings,
        tally: Tally,
        on_progress: Callable[[], None],
    ) -> None:
        self._pipeline, self._folder, self._settings = pipeline, folder, settings
        self._jobs = ClaimedJobs(settings, folder, tally)
        self._tally, self._on_progress = tally, on_progress
        self._works: set[Work] = set()
        self._stopping = Stopping(self._jobs.stop)

    def run(self) -> int | None:
        """Make all missing rollouts, and return the signal that interrupted the run, None without.

        A first SIGTERM or SIGINT lets the rollouts in the engine finish, a second one stops at once.

        Raises:
            ConfigError: no such scoring function.
            EngineError: the engine failed.
            OutputError: the output can't be written.
        """
        asyncio.run(self._run())
        return self._stopping.signal

    async def _run(self) -> None:
        workers, at_once = self._settings.workers, self._settings.at_once
        self._maker = RolloutMaker(self._pipeline, self._folder, self._settings, self._count_frame)
        self._reading = asyncio.Lock()
        self._ready: _Queue = asyncio.Queue(workers)
        self._made: _Queue = asyncio.Queue(workers)
        try:
            with self._stopping.listening():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._stage(workers, self._prepare_all, self._ready, at_once))
                    group.create_task(self._stage(at_once, self._generate_all, self._made, workers))
                    group.create_task(self._stage(workers, self._finish_all, None, 0))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            # No claim is let go while a thread may still write under it.
            self._jobs.stop()
            self._maker.close()
            for work in list(self._works):
                self._let_go(work)

    async def _stage(
        self,
        num: int,
        work: Callable[[], Coroutine[Any, Any, None]],
        to: _Queue | None,
        num_next: int,
    ) -> None:
        """Run a stage's workers, and end the next stage's queue when all of them have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(work())
        for _ in range(num_next):
            assert to is not None
            await to.put(None)

    async def _prepare_all(self) -> None:
        while not self._stopping:
            async with self._reading:
                work = await self._maker.in_thread("manifest", self._next)
            if work is None:
                return
            if await self._attempt(work, self._maker.prepare):
                await self._ready.put(work)

    async def _generate_all(self) -> None:
        while (work := await self._ready.get()) is not None:
            if self._stopping:
                self._let_go(work)
            elif await self._attempt(work, self._maker.generate):
                await self._made.put(work)

    async def _finish_all(self) -> None:
        while (work := await self._made.get()) is not None:
            if await self._attempt(work, self._maker.finish):
                note_done(self._tally, self._folder, work.job, rounded(work.seconds))
                self._let_go(work)
                self._on_progress()

    def _next(self) -> Work | None:
        taken = next(self._jobs, None)
        if taken is None:
            return None
        work = Work(*taken)
        self._works.add(work)  # before returning: the awaiting task may be canceled, and its claim must be released
        return work

    async def _attempt(self, work: Work, step: Callable[[Work], Coroutine[Any, Any, None]]) -> bool:
        """Run a stage of a rollout; returns whether it succeeded, and records a failure."""
        reason = await self._maker.attempt(work, step, lambda: bool(self._stopping))
        if reason is None:
            return True
        note_failure(self._tally, self._folder, work.job.name, work.job.line, reason)
        self._let_go(work)
        self._on_progress()
        return False

    def _let_go(self, work: Work) -> None:
        if work.claim is not None:
            work.claim.release()
        self._works.discard(work)

    def _count_frame(self) -> None:
        self._tally.frames += 1
        self._on_progress()
