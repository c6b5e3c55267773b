"""What to score, and how: conf/act_bench.yaml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from omegaconf import DictConfig, OmegaConf

from terra.act_bench.estimator import ActEstimatorConfig
from terra.device import torch_device, torch_dtype
from terra.errors import ConfigError
from terra.rollouts.batch import read_settings
from terra.rollouts.settings import RolloutSettings, check_whole


@dataclass(frozen=True, kw_only=True)
class ActBenchSettings:
    """The whole of conf/act_bench.yaml but the models.

    Attributes:
        rollouts: what terra-rollout takes; `manifest` is the benchmark's file, `output` this command's folder.
        videos: a folder of videos to score; None to generate them.
        limit: how many samples, evenly spread over those that can be scored; None for all.
        device, dtype: of the estimator, see `terra.act_bench.estimator.ActEstimator.estimate`.
        batch_size: videos that it looks at together.
        resamples: of the bootstrap over drives.

    Raises:
        ConfigError: a value of another type or out of its range.
    """

    rollouts: RolloutSettings
    videos: Path | None
    limit: int | None
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    resamples: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "resamples"):
            check_whole(getattr(self, name), 1, name)
        if self.limit is not None:
            check_whole(self.limit, 1, "limit")
        if self.rollouts.num_samples != 1:
            raise ConfigError(f"num_samples: expected 1, the benchmark's, got {self.rollouts.num_samples}")

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """Out of the configuration, which holds more. Raises ConfigError."""
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        estimator = values["estimator"]
        return cls(
            rollouts=read_settings(config),
            videos=None if values["videos"] is None else Path(str(values["videos"])),
            limit=values["limit"],
            device=torch_device(estimator["device"]),
            dtype=torch_dtype(estimator["dtype"]),
            batch_size=estimator["batch_size"],
            resamples=values["resamples"],
        )

    def check_length(self, estimator: ActEstimatorConfig) -> None:
        """Refuse rollouts of which the estimator would not see exactly what was generated. Raises ConfigError."""
        expected = self.rollouts.num_context + estimator.num_frames
        if self.rollouts.num_frames != expected:
            made_of = f"{self.rollouts.num_context} of context and {estimator.num_frames} that are scored"
            raise ConfigError(f"num_frames: expected {expected}, {made_of}, got {self.rollouts.num_frames}")
