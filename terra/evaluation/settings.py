"""What to evaluate, on how much, and how: the settings of `terra-evaluate`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terra.errors import ConfigError
from terra.training.settings import check_numbers


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The whole of conf/evaluate.yaml but tokenizer, world model, engine, sampling and decoder.

    Attributes:
        data, split: the dataset and which part of it, nothing of which the models were trained on.
        estimator: its folder; without one action fidelity is left out.
        output: folder for what is written.
        num_clips, num_frames, num_context, overlap: of the rollouts, as `terra-generate` has them.
        seed: of the rollouts and of the bootstrap.
        at_once: rollouts generated together.
        workers: videos decoded at once.
        drift_clips, drift_frames: of the long rollouts; no clips leaves them out.
        max_groups, group_frames, agree_within: of the counterfactual sets, see `terra.evaluation.contrasts`; no groups
            leaves them out.
        network, network_path, video_network, video_network_path: see `terra.metrics.networks` and
            `terra.metrics.video_networks`.
        resamples, frechet_resamples: of the bootstrap over places, of means and of Frechet distances.
        pictures: clips and groups that are shown.
    """

    data: Path
    split: str
    estimator: Path | None
    output: Path
    device: str
    num_clips: int
    num_frames: int
    num_context: int
    overlap: int
    seed: int
    at_once: int
    workers: int
    drift_clips: int
    drift_frames: int
    max_groups: int
    group_frames: int
    agree_within: float
    network: str
    network_path: Path | None
    video_network: str | None
    video_network_path: Path | None
    resamples: int
    frechet_resamples: int
    pictures: int

    def __post_init__(self) -> None:
        positive = ("num_clips", "num_context", "at_once", "agree_within", "resamples", "frechet_resamples")
        check_numbers(self, positive)
        for name in ("num_frames", "drift_frames", "group_frames"):
            if getattr(self, name) < self.num_context + 2:
                raise ConfigError(f"{name}: expected two more than num_context, got {getattr(self, name)}")
        if (self.video_network is None) != (self.video_network_path is None):
            raise ConfigError("features: expected video_network and video_network_path together, got one of them")
        if self.max_groups and self.estimator is None:
            raise ConfigError("max_groups: expected 0 without an estimator, which counterfactual sets need")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "EvaluationSettings":
        """Out of the configuration, which holds more.

        Raises:
            ConfigError: a value that is missing or not allowed.
        """
        try:
            picked = {name: values[name] for name in cls.__annotations__}
        except KeyError as error:
            raise ConfigError(f"{error.args[0]}: expected in the configuration, got none") from None
        for name in ("data", "estimator", "output", "network_path", "video_network_path"):
            picked[name] = None if picked[name] is None else Path(picked[name])
        return cls(**picked)
