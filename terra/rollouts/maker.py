"""How one rollout is made: prepare, generate and decode, write; in threads of their own beside the event loop."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from decoder import FramewiseDecoder
from decoder.thread import DecodingThread, give_up
from decoder.video import to_uint8, write_video
from terra.errors import EngineError, OutputError, TerraError
from terra.output import package_versions
from terra.pipeline import Pipeline
from terra.rollouts.best import Score
from terra.rollouts.folder import RECORD, RolloutFolder
from terra.rollouts.inputs import Inputs
from terra.rollouts.locks import Claim
from terra.rollouts.manifest import Job
from terra.rollouts.settings import RolloutSettings
from terra.windows import plan_windows
from tokenizer import Frames, TokenGrid
from tokenizer.checkpoint import write_tensors
from tokenizer.files import write_json

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Pixels = UInt8[np.ndarray, "frames height width 3"]


@dataclass(eq=False)
class Work:
    """A rollout on its way through the stages; `claim` is the right to make it, where this process has it."""

    job: Job
    claim: Claim | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    context: Tensor | None = None
    actions: Tensor | None = None
    tokens: Tensor | None = None
    pixels: list[Future[Pixels]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class RolloutMaker:
    """The stages `prepare`, `generate` and `finish`, to be called in this order; each carries many rollouts at once.

    Args:
        pipeline: makes them; stays open.
        folder: where they go.
        settings: threads, retries, what is remembered.
        on_frame: called for each frame generated.

    Raises:
        ConfigError: no such scoring function.
    """

    def __init__(
        self, pipeline: Pipeline, folder: RolloutFolder, settings: RolloutSettings, on_frame: Callable[[], None]
    ) -> None:
        self._pipeline, self._folder, self._settings, self._on_frame = pipeline, folder, settings, on_frame
        self._score = None if settings.score is None else Score(settings.score)
        # A score is of all frames, before they are rounded to 8 bits.
        self._decoding: DecodingThread | None = None
        if self._score is None and isinstance(pipeline.decoder, FramewiseDecoder):
            self._decoding = DecodingThread(pipeline.decoder)
        names = (
            ("manifest", 1),
            ("read", settings.workers),
            ("tokenize", 1),
            ("decode", 1),
            ("write", settings.workers),
        )
        self._threads = {name: ThreadPoolExecutor(num, thread_name_prefix=f"terra-{name}") for name, num in names}
        self._inputs = Inputs(pipeline.tokenizer, pipeline.engine.spec, settings.contexts, self.in_thread)

    async def attempt(
        self, work: Work, step: Callable[[Work], Awaitable[None]], is_stopping: Callable[[], bool]
    ) -> str | None:
        """Take a stage, again after a failure if there are retries; None, or why it failed in the end.

        Raises:
            EngineError: the engine failed, which concerns all rollouts.
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
        """Load the trajectory, load and tokenize the context. Raises TerraError for what is wrong with them."""
        started = time.perf_counter()
        job, spec = work.job, self._pipeline.engine.spec
        list(plan_windows(job.num_frames, job.num_context, spec.layout.max_frames, self._settings.overlap))
        work.inputs = await self.in_thread("read", lambda: self._folder.fingerprint(job))
        work.actions = await self._inputs.actions(job)
        work.seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        work.context = await self._inputs.context(job)
        work.seconds["encode"] = time.perf_counter() - started

    async def generate(self, work: Work) -> None:
        """Make the frames' tokens. Raises EngineError."""
        assert work.context is not None
        assert work.actions is not None
        started, job = time.perf_counter(), work.job
        given = job.num_context - 1
        session = await self._pipeline.open(work.context, work.actions[:given], job.sampling, job.seed)
        frames: list[Tensor] = []
        pixels: list[Future[Pixels]] = []

        def add(tokens: TokenGrid) -> None:
            frames.extend(tokens)
            if self._decoding is not None:
                pixels.append(self._decoding.decode(tokens, partial(_noted, work)))

        try:
            add(work.context)
            async for frame in session.run(work.actions[given:]):
                add(frame[None])
                self._on_frame()
        except BaseException:
            give_up(pixels)
            raise
        finally:
            await session.close()
        work.tokens, work.pixels = torch.stack(frames), pixels
        work.seconds["generate"] = time.perf_counter() - started

    async def finish(self, work: Work) -> None:
        """Decode what isn't yet, score, write. Raises OutputError, or ConfigError for a score that is none."""
        early, work.pixels = work.pixels, []  # tried again, it is decoded anew
        score = None
        if early:
            try:
                pixels = np.concatenate([await asyncio.wrap_future(piece) for piece in early])
            except BaseException:
                give_up(early)
                raise
        else:
            pixels, score = await self.in_thread("decode", lambda: self._decode_all(work))
        started = time.perf_counter()
        write = lambda to: self._write(to, work, pixels, score)  # noqa: E731
        await self.in_thread("write", lambda: self._folder.publish(work.job, write))
        work.seconds["write"] = time.perf_counter() - started

    async def in_thread(self, threads: str, work: Callable[[], _T]) -> _T:
        """Run work in the threads of that name."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[threads], work)

    def _decode_all(self, work: Work) -> tuple[Pixels, float | None]:
        assert work.tokens is not None
        assert work.actions is not None
        started = time.perf_counter()
        frames = self._pipeline.decoder.decode(work.tokens)
        pixels = _noted(work, frames, time.perf_counter() - started)
        return pixels, None if self._score is None else self._score(frames, work.tokens, work.actions)

    def _write(self, folder: Path, work: Work, pixels: Pixels, score: float | None) -> None:
        assert work.tokens is not None
        assert work.actions is not None
        job, spec = work.job, self._pipeline.engine.spec
        write_video(pixels, folder / "video.mp4", spec.fps)
        write_tensors(folder / "tokens.safetensors", {"tokens": work.tokens, "actions": work.actions})
        windows = plan_windows(job.num_frames, job.num_context, spec.layout.max_frames, self._settings.overlap)
        record: dict[str, Any] = {
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
            "inputs": work.inputs,
            "request": job.request,
            "made_with": self._folder.settings["made_with"],
            "versions": package_versions(),
            "seconds": rounded(work.seconds),
        }
        if self._score is not None:
            record["score"] = {"function": self._score.name, "value": score}
        write_json(folder / RECORD, record)

    def close(self) -> None:
        """Wait for what the threads are at, and end them."""
        if self._decoding is not None:
            self._decoding.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)


def _noted(work: Work, frames: Frames, seconds: float) -> Pixels:
    """The frames' pixels; what decoding them took is added to the rollout's."""
    work.seconds["decode"] = work.seconds.get("decode", 0.0) + seconds
    return to_uint8(frames)


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds to a tenth of a millisecond, for files."""
    return {name: round(value, 4) for name, value in seconds.items()}
