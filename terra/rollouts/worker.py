"""The Ray worker of a batch: owns an engine, and makes the rollouts that `RayCluster` sends."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from terra.config.spec import PipelineSpec
from terra.errors import EngineError, OutputError, TerraError
from terra.pipeline import Pipeline
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.maker import RolloutMaker, Work, rounded
from terra.rollouts.manifest import Job
from terra.rollouts.settings import RolloutSettings


@dataclass(frozen=True)
class Outcome:
    """How a rollout ended: "done", "failed" by itself, "left" because the run ends, or "broken" with the worker."""

    status: Literal["done", "failed", "left", "broken"]
    reason: str = ""
    error: TerraError | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Worker:
    """Makes many rollouts at once; `start` comes first, and its methods run in one event loop.

    Args:
        spec: the pipeline's settings; `start` builds the pipeline.
        settings: the run's settings; `at_once` rollouts are in the engine, `workers` before it and `workers` after it.
        made_with: see `RolloutFolder`.
    """

    def __init__(self, spec: PipelineSpec, settings: RolloutSettings, made_with: dict[str, Any]) -> None:
        self._spec, self._settings, self._made_with = spec, settings, made_with
        self._stopping = False

    async def start(self) -> TerraError | None:
        """Load the weights; returns the error if loading failed."""
        settings = self._settings
        try:
            self._pipeline = Pipeline.from_spec(self._spec)
            views = self._spec.spec.views
            folder = RolloutFolder(
                settings.output, self._made_with, settings.on_change, limits=settings.limits, views=views
            )
            self._maker = RolloutMaker(self._pipeline, folder, settings, lambda: None)
        except TerraError as error:
            return error
        self._before, self._after = asyncio.Semaphore(settings.workers), asyncio.Semaphore(settings.workers)
        self._engine = asyncio.Semaphore(settings.at_once)
        return None

    async def make(self, job: Job) -> Outcome:
        """Make a rollout and publish its folder; the calling process holds the claim and logs the result."""
        work, maker = Work(job), self._maker
        stages = ((self._before, maker.prepare), (self._engine, maker.generate), (self._after, maker.finish))
        for limit, step in stages:
            async with limit:
                if self._stopping and work.tokens is None:
                    return Outcome("left")
                try:
                    reason = await maker.attempt(work, step, lambda: self._stopping)
                except (EngineError, OutputError) as error:
                    return Outcome("broken", error=error)
            if reason is not None:
                return Outcome("failed", reason)
        return Outcome("done", seconds=rounded(work.seconds))

    async def drain(self) -> None:
        """Begin no further rollout; those in the engine are finished."""
        self._stopping = True

    async def close(self) -> None:
        """Free the engine."""
        self._maker.close()
        self._pipeline.close()
