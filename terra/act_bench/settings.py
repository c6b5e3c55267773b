"""What to score, and how: conf/act_bench.yaml."""

from typing import Any, Literal, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import model_validator

from terra.act_bench.estimator import ActEstimatorConfig
from terra.errors import ConfigError
from terra.rollouts.batch import read_settings
from terra.rollouts.settings import RolloutSettings
from tokenizer.settings import Count, FilePath, Settings, Text


class EstimatorSettings(Settings):
    """The group `estimator` of conf/act_bench.yaml.

    Attributes:
        pretrained, subfolder, revision: the checkpoint, as a tokenizer's.
        device, dtype: see `terra.act_bench.estimator.ActEstimator.estimate`; None takes a GPU if there is one, and
            bfloat16 there.
        batch_size: videos that it looks at together.
    """

    pretrained: Text
    subfolder: str | None
    revision: str | None
    device: str | None
    dtype: Literal["float32", "bfloat16", "float16"] | None
    batch_size: Count


class ActBenchSettings(Settings):
    """The whole of conf/act_bench.yaml but the models.

    Attributes:
        rollouts: what terra-rollout takes; `manifest` is the benchmark's file, `output` this command's folder.
        videos: a folder of videos to score; None to generate them.
        limit: how many samples, evenly spread over those that can be scored; None for all.
        estimator: the checkpoint, and where it works.
        resamples: of the bootstrap over drives.

    Raises:
        ConfigError: a value of another type or out of its range.
    """

    rollouts: RolloutSettings
    videos: FilePath | None
    limit: Count | None
    estimator: EstimatorSettings
    resamples: Count

    @model_validator(mode="after")
    def _one_sample(self) -> Self:
        if self.rollouts.num_samples != 1:
            raise ValueError(f"num_samples: expected 1, the benchmark's, got {self.rollouts.num_samples}")
        return self

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """Out of the configuration, which holds more. Raises ConfigError."""
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return cls.from_values({**values, "rollouts": read_settings(config)})

    def check_length(self, estimator: ActEstimatorConfig) -> None:
        """Refuse rollouts of which the estimator would not see exactly what was generated. Raises ConfigError."""
        expected = self.rollouts.num_context + estimator.num_frames
        if self.rollouts.num_frames != expected:
            made_of = f"{self.rollouts.num_context} of context and {estimator.num_frames} that are scored"
            raise ConfigError(f"num_frames: expected {expected}, {made_of}, got {self.rollouts.num_frames}")
