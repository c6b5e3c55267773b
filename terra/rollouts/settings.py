"""The pydantic models of conf/rollout.yaml's settings."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from terra.config.groups import Folders, PipelineSettings, Sampling
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, FilePath, Natural, Seed, Settings, expecting

Samples = Annotated[int, Field(ge=1, le=10_000)]
AtOnce = Annotated[int, Field(ge=1, le=4096)]


def _half_of_the_cores(workers: object) -> object:
    return max(2, (os.cpu_count() or 1) // 2) if workers is None else workers


class RolloutSettings(Settings):
    """The settings of conf/rollout.yaml without tokenizer, world model, engine and decoder.

    Attributes:
        manifest: see `terra.rollouts.manifest`.
        context_root: the folder that relative paths of contexts start from; the manifest's unless given.
        output: see `terra.rollouts.folder`.
        num_frames, num_context, seed, sampling, num_samples: defaults of the lines; as in `terra generate`.
        overlap: frames read again when the window slides.
        adapters: folders of adapters by name, of which a line may name one.
        at_once: sessions open in the engine at once.
        workers: lines prepared, and rollouts written, at once; None takes half as many as there are cores.
        contexts: tokenized contexts remembered, for the lines that share them.
        retries: how often a line that failed is tried again.
        retry_seconds: how long to wait before another try.
        on_change: what to do with rollouts made with other weights or settings: refuse, redo or keep them.
        verify: hash the files of finished rollouts, too, and make those again whose content has changed.
        grid: write a video of each line's futures beside each other.
        score: "package.module:function" that says which future is the best, see `terra.rollouts.best`; None for none.
        metrics: a file of counters for Prometheus; None for none.
        limits: bounds on what is read.

    Raises:
        ConfigError: a value of another type or out of its range.
    """

    manifest: FilePath
    context_root: FilePath | None
    output: FilePath
    num_frames: Count
    num_context: Count
    seed: Seed
    sampling: Sampling
    num_samples: Samples
    overlap: Count
    adapters: Folders
    at_once: AtOnce
    workers: Annotated[AtOnce, BeforeValidator(_half_of_the_cores)]
    contexts: Count
    retries: Natural
    retry_seconds: Annotated[float, Field(ge=0, le=3600)]
    on_change: Literal["refuse", "redo", "keep"]
    verify: bool
    grid: bool
    score: Annotated[str, expecting("package.module:function")] | None
    metrics: FilePath | None
    limits: Limits = LIMITS

    @property
    def root(self) -> Path:
        """The folder that relative paths of contexts start from."""
        return self.manifest.parent if self.context_root is None else self.context_root


class BatchSettings(RolloutSettings, PipelineSettings):
    """All settings of conf/rollout.yaml.

    Attributes:
        cluster: `_target_` and arguments of the class that runs the workers: in this process, or on Ray.
    """

    cluster: dict[str, Any]
