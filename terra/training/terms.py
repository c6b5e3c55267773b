"""The terms of the tokenizer's loss: their weights, schedules and networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terra.errors import ConfigError
from terra.metrics.networks import FeatureNetwork, load_feature_network
from terra.training.adversarial import AdversarialConfig
from tokenizer import LossWeights


@dataclass(frozen=True, kw_only=True)
class EntropyAnneal:
    """The entropy weight falls linearly from `start` times its final value to it over the first `until` of a run.

    A high weight early spreads the vectors over all ids before the decoder has learnt to live with few of them
    (Open-MAGVIT2 anneals it likewise).
    """

    start: float = 5.0
    until: float = 0.2

    def __post_init__(self) -> None:
        if not self.start >= 0 or not 0 <= self.until <= 1:
            raise ConfigError(
                f"entropy_anneal: expected start of 0 or more and until in [0, 1], got {self.start} and {self.until}"
            )

    def factor(self, progress: float) -> float:
        """The factor on the final entropy weight at `progress` in [0, 1] of the run."""
        if progress >= self.until:
            return 1.0
        return self.start + (1.0 - self.start) * progress / self.until


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of the tokenizer's loss.

    Attributes:
        weights: weights of the terms of `tokenizer.losses.tokenizer_loss`.
        anneal: schedule of the entropy weight.
        perceptual: weight of the perceptual distance; 0 leaves it out.
        network: feature network of the perceptual distance; None if `perceptual` is 0.
        adversarial: weights and schedule of the adversarial loss.
    """

    weights: LossWeights
    anneal: EntropyAnneal
    perceptual: float = 0.0
    network: FeatureNetwork | None = None
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)

    def __post_init__(self) -> None:
        if not self.perceptual >= 0:
            raise ConfigError(f"perceptual.weight: expected 0 or more, got {self.perceptual}")
        if self.perceptual and self.network is None:
            raise ConfigError(f"perceptual.weight: expected 0 without a network, got {self.perceptual}")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Terms":
        """Build the terms from `loss`, `entropy_anneal`, `perceptual` and `adversarial` of conf/train_tokenizer.yaml.

        Raises:
            ConfigError: a value that is not allowed, or a perceptual network whose package is not installed.
            CheckpointError: the file of the perceptual network's weights is damaged.
        """
        perceptual = values["perceptual"]
        path = None if perceptual["path"] is None else Path(perceptual["path"])
        network = load_feature_network(path, perceptual["network"]) if perceptual["weight"] else None
        return cls(
            weights=loss_weights(values["loss"]),
            anneal=EntropyAnneal(**values["entropy_anneal"]),
            perceptual=perceptual["weight"],
            network=network,
            adversarial=AdversarialConfig(**values["adversarial"]),
        )


def loss_weights(values: Mapping[str, float]) -> LossWeights:
    """Build `LossWeights`; raise ConfigError for a value that is not allowed."""
    try:
        return LossWeights(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {error}") from error
