"""The pydantic models of conf/act_bench.yaml's settings."""

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from terra.config.groups import CheckpointSettings
from terra.errors import ConfigError
from terra.rollouts.settings import BatchSettings
from tokenizer.settings import Count, Dtype, FilePath

if TYPE_CHECKING:
    # Settings are checked before torch is imported.
    from terra.act_bench.estimator import ActEstimatorConfig


class EstimatorSettings(CheckpointSettings):
    """The checkpoint of the ACT-Estimator, and how the estimator computes.

    Attributes:
        device, dtype: see `terra.act_bench.estimator.ActEstimator.estimate`; None takes a GPU if there is one, and
            bfloat16 there.
        batch_size: videos in one batch of the estimator.
    """

    device: str | None
    dtype: Dtype | None
    batch_size: Count


class ActBenchSettings(BatchSettings):
    """The settings of conf/act_bench.yaml: those of conf/rollout.yaml, and how the videos are scored.

    `manifest` is the benchmark's file, and `output` this command's folder.

    Attributes:
        videos: a folder of videos to score; None to generate them.
        limit: how many samples, evenly spread over those that can be scored; None for all.
        estimator: the estimator's checkpoint, device and dtype.
        resamples: bootstrap resamples over drives.

    Raises:
        ConfigError: a value of another type or out of its range.
    """

    videos: FilePath | None
    limit: Count | None
    estimator: EstimatorSettings
    resamples: Count

    @model_validator(mode="after")
    def _one_sample(self) -> Self:
        if self.num_samples != 1:
            raise ValueError(f"num_samples: expected 1, the benchmark's, got {self.num_samples}")
        return self

    def check_length(self, estimator: "ActEstimatorConfig") -> None:
        """Refuse rollouts of which the estimator would not see exactly what was generated. Raises ConfigError."""
        expected = self.num_context + estimator.num_frames
        if self.num_frames != expected:
            made_of = f"{self.num_context} of context and {estimator.num_frames} that are scored"
            raise ConfigError(f"num_frames: expected {expected}, {made_of}, got {self.num_frames}")
