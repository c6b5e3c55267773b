"""Makes one rollout in stages: prepare, generate and decode, write; blocking work runs in thread pools."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decoder.thread import DecodedFrames, Decoding
from decoder.video import Pixels, to_frames
from terra.errors import EngineError, OutputError, TerraError
from terra.pipeline import Pipeline
from terra.reconstruction import Reconstruction
from terra.rollout import RolloutWriter, describe_inputs, rollout_record
from terra.rollouts.best import Score
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.inputs import Inputs, SeenMap
from terra.rollouts.locks import Claim
from terra.rollouts.manifest import Job
from terra.rollouts.settings import RolloutSettings
from tokenizer import Frames

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(eq=False)
class Work:
    """A rollout on its way through the stages; `claim` is the right to make it, None in a Ray worker."""

    job: Job
    claim: Claim | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    context: Tensor | None = None
    context_pixels: Pixels | None = None
    actions: Tensor | None = None
    place: SeenMap | None = None
    tokens: Tensor | None = None
    decoding: Decoding[tuple[Pixels, Frames | None]] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class RolloutMaker:
    """The stages `prepare`, `generate` and `finish`, to be called in this order; each carries many rollouts at once.

    Args:
        pipeline: generates the rollouts; stays open.
        folder: the batch's output folder.
        settings: numbers of threads, retries and remembered contexts.
        on_frame: called for each generated frame.

    Raises:
        ConfigError: no such scoring function.
    """

    def __init__(
        self, pipeline: Pipeline, folder: RolloutFolder, settings: RolloutSettings, on_frame: Callable[[], None]
    ) -> None:
        self._pipeline, self._folder, self._settings, self._on_frame = pipeline, folder, settings, on_frame
        self._score = None if settings.score is None else Score(settings.score)
        names = (("manifest", 1), ("read", settings.workers), ("score", 1), ("write", settings.workers))
        self._threads = {
            name: ThreadPoolExecutor(num, f"terra-{name}", torch.set_num_threads, (1,)) for name, num in names
        }
        self._has_warned = False
        self._inputs = Inputs(pipeline, settings.contexts, self.in_thread, settings.limits)

    async def attempt(
        self, work: Work, step: Callable[[Work], Awaitable[None]], is_stopping: Callable[[], bool]
    ) -> str | None:
        """Run a stage, again after a failure while retries are left; None, or why the stage failed in the end.

        Raises:
            EngineError: the engine failed, which affects all rollouts.
            OutputError: the output can't be written, likewise.
        """
        for tried in itertools.count():
            try:
                await step(work)
            except TerraError as error:
                # Ctrl-C reaches the video encoder too: what a signal broke gets another chance.
                if tried >= max(self._settings.retries, is_stopping()):
                    if isinstance(error, EngineError | OutputError):
                        raise
                    return str(error)
                logger.warning("%s: tried again: %s", work.job.name, error)
                await asyncio.sleep(self._settings.retry_seconds)
            else:
                break
        return None

    async def prepare(self, work: Work) -> None:
        """Load the trajectory, load and tokenize the context and the map. Raises TerraError for bad inputs."""
        started = time.perf_counter()
        job = work.job
        self._pipeline.plan(job.num_frames, job.num_context, job.adapter, has_map=job.map is not None)
        work.inputs = await self.in_thread("read", lambda: self._folder.fingerprint(job))
        work.actions = await self._inputs.actions(job)
        work.seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        work.context, work.context_pixels = await self._inputs.context(job)
        work.place = await self._inputs.place(job)
        work.seconds["encode"] = time.perf_counter() - started

    async def generate(self, work: Work) -> None:
        """Generate the frames' tokens; decoding may begin meanwhile. Raises EngineError."""
        assert work.context is not None
        assert work.actions is not None
        started, job = time.perf_counter(), work.job
        decoding = self._pipeline.decoding.start(self._keep, job.adapter)
        on_frame = lambda _index: self._on_frame()  # noqa: E731
        seen = None if work.place is None else work.place.frames
        work.tokens = await self._pipeline.rollout_tokens(
            work.context, work.actions, job.sampling, job.seed, on_frame, decoding, job.adapter, seen
        )
        work.decoding = decoding
        work.seconds["generate"] = time.perf_counter() - started

    async def finish(self, work: Work) -> None:
        """Wait for the decoded frames, score, write. Raises OutputError; ConfigError for a score that is no number."""
        assert work.tokens is not None
        decoding, work.decoding = work.decoding, None
        if decoding is None:  # tried again: decoded anew
            decoding = self._pipeline.decoding.start(self._keep, work.job.adapter)
            decoding.add(work.tokens)
        pieces = await decoding.finish()
        work.seconds["decode"] = decoding.seconds
        score = None
        if self._score is not None:
            score = await self.in_thread("score", lambda: self._rate(work, [frames for _, frames in pieces]))
        started = time.perf_counter()
        write = lambda to: self._write(to, work, [pixels for pixels, _ in pieces], score)  # noqa: E731
        await self.in_thread("write", lambda: self._folder.publish(work.job, write))
        work.seconds["write"] = time.perf_counter() - started

    async def in_thread(self, threads: str, work: Callable[[], _T]) -> _T:
        """Run work in the thread pool of a name."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[threads], work)

    def _keep(self, decoded: DecodedFrames) -> tuple[Pixels, Frames | None]:
        """Keep decoded frames as 8-bit pixels and, for a score, also as they were before rounding."""
        return decoded.pixels(), None if self._score is None else decoded.frames.cpu()

    def _rate(self, work: Work, frames: Sequence[Frames | None]) -> dict[str, Any]:
        assert self._score is not None
        assert work.tokens is not None
        assert work.actions is not None
        whole = torch.cat([each for each in frames if each is not None])
        return {"function": self._score.name, "value": self._score(whole, work.tokens, work.actions)}

    def _write(self, folder: Path, work: Work, pixels: Sequence[Pixels], score: dict[str, Any] | None) -> None:
        assert work.tokens is not None
        assert work.actions is not None
        job, spec = work.job, self._pipeline.engine.spec
        sample_id = job.sample_id if job.several_trajectories else None
        seen, of_map = (None, None) if work.place is None else (work.place.frames, work.place.described)
        memory = self._pipeline.describe_memory(work.tokens, work.actions, job.num_context, seen, of_map, job.adapter)
        record = rollout_record(
            self._pipeline.provenance,
            spec,
            inputs=describe_inputs(job.contexts, job.trajectory, sample_id, work.inputs),
            num_frames=job.num_frames,
            num_context=job.num_context,
            seed=job.seed,
            sampling=job.sampling,
            overlap=self._settings.overlap,
            seconds=work.seconds,
            batch={
                "id": job.name,
                "sample": job.sample,
                "manifest": str(self._settings.manifest.absolute()),
                "line": job.line,
                "request": job.request,
                "made_with": self._folder.settings["made_with"],
            },
            score=score,
            reconstruction=self._reconstruction(work, pixels),
            adapter=job.adapter,
            memory=memory,
        )
        with RolloutWriter(folder, spec.fps) as writer:
            for piece in pixels:
                writer.extend(piece)
            writer.finish(work.tokens, work.actions, record)

    def _reconstruction(self, work: Work, pixels: Sequence[Pixels]) -> Reconstruction:
        """How well the context is shown; the process's first rollout that is far below what is expected is named."""
        assert work.context_pixels is not None
        truth = to_frames(work.context_pixels)
        found = self._pipeline.reconstruction(to_frames(np.concatenate(pixels)[: len(truth)]), truth)
        if found.warning is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s (said once; rollout.json tells it of each)", work.job.name, found.warning)
        return found

    def close(self) -> None:
        """Wait for the threads' current work, and end the threads."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Round seconds to a tenth of a millisecond, for files."""
    return {name: round(value, 4) for name, value in seconds.items()}
