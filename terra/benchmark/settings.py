"""The settings of `terra benchmark`; checked before torch is imported."""

from typing import Annotated, Any, Literal

from pydantic import Field

from terra.config.groups import CheckpointSettings, ModelFolder, TokenizerSettings
from tokenizer.settings import Count, FilePath, Positive, Settings


class BenchmarkSettings(Settings):
    """The settings of conf/benchmark.yaml, which says what each of them means."""

    model: ModelFolder | None = None
    tokenizer: TokenizerSettings | None
    world_model: CheckpointSettings | None
    shape: str | None
    drive: FilePath | None
    output: FilePath
    device: Literal["cpu", "cuda"] | None
    dtype: Literal["float32", "bfloat16"] | None
    cases: Annotated[tuple[str, ...] | None, Field(strict=False)]
    rollouts: Annotated[tuple[Count, ...], Field(strict=False)]
    num_context: Count
    num_frames: Count
    repeats: Count
    repeats_many: Count
    baseline_tokens: Count | None
    max_seconds: Positive
    case_seconds: Positive
    bandwidth_mib: dict[str, Count]
    vllm: dict[str, Any]
