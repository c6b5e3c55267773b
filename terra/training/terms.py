"""The terms of the tokenizer's loss: their weights, schedules and networks."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from terra.errors import ConfigError
from terra.metrics.networks import FeatureNetwork, load_feature_network
from terra.training.adversarial import AdversarialConfig
from tokenizer import LossWeights
from tokenizer.settings import FilePath, NonNegative, Positive, Settings, Share


class EntropyAnneal(Settings):
    """The entropy weight falls linearly from `start` times its final value to it over the first `until` of a run.

    A high weight early in the run spreads the vectors over all ids before the decoder learns to use only a few of them
    (Open-MAGVIT2 anneals it likewise).
    """

    start: NonNegative = 5.0
    until: Share = 0.2

    def factor(self, progress: float) -> float:
        """The factor on the final entropy weight at `progress` in [0, 1] of the run."""
        if progress >= self.until:
            return 1.0
        return self.start + (1.0 - self.start) * progress / self.until


class PerceptualSettings(Settings):
    """The perceptual term of conf/train_tokenizer.yaml: its weight, and which features are compared at which sizes.

    Attributes:
        weight: of the term; 0 leaves it out.
        scales: number of sizes at which pictures are compared: their own, and each half of the one before. The term is
            the mean over the sizes.
        network: see `terra.metrics.networks.load_feature_network`.
        path: safetensors file of the network's weights; None takes the installed package's.
    """

    weight: NonNegative
    scales: Annotated[int, Field(ge=1, le=4)] = 1
    network: str
    path: FilePath | None


class KeepTokensSettings(Settings):
    """The penalty on tokens that change from those of the tokenizer that the training started from.

    Attributes:
        weight: of `tokenizer.losses.kept_signs_loss`; 0 leaves it out.
        margin: a bit pays if it lies nearer to 0 than this, or has another sign than before. The shipped tokenizer's
            bits lie near -1.1 and 1.1, and 1 % of them are nearer to 0 than 0.4.
    """

    weight: NonNegative = 0.0
    margin: Positive = 0.5


class TermSettings(Settings):
    """The sections of conf/train_tokenizer.yaml that say what the loss is made of."""

    loss: LossWeights
    entropy_anneal: EntropyAnneal
    perceptual: PerceptualSettings
    adversarial: AdversarialConfig
    keep_tokens: KeepTokensSettings


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of the tokenizer's loss.

    Attributes:
        weights: weights of the terms of `tokenizer.losses.tokenizer_loss`.
        anneal: schedule of the entropy weight.
        perceptual: weight of the perceptual distance; 0 leaves it out.
        scales: number of sizes at which the perceptual distance is taken, see `PerceptualSettings`.
        network: feature network of the perceptual distance; None if `perceptual` is 0.
        adversarial: weights and schedule of the adversarial loss.
        keep_tokens: the penalty on tokens that change, in a training that starts from a tokenizer.
    """

    weights: LossWeights
    anneal: EntropyAnneal
    perceptual: float = 0.0
    scales: int = 1
    network: FeatureNetwork | None = None
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)
    keep_tokens: KeepTokensSettings = field(default_factory=KeepTokensSettings)

    def __post_init__(self) -> None:
        if not self.perceptual >= 0:
            raise ConfigError(f"perceptual.weight: expected 0 or more, got {self.perceptual}")
        if self.perceptual and self.network is None:
            raise ConfigError(f"perceptual.weight: expected 0 without a network, got {self.perceptual}")
        if self.network is not None and self.network.resizes and self.scales > 1:
            raise ConfigError(
                f"perceptual.scales: expected 1 ({self.network.name} resizes pictures), got {self.scales}"
            )

    @classmethod
    def load(cls, settings: TermSettings) -> "Terms":
        """The terms of the settings, with the perceptual network loaded if its weight is not 0.

        Raises:
            ConfigError: a perceptual network that can't be had.
            CheckpointError: its file is damaged.
        """
        perceptual = settings.perceptual
        network = load_feature_network(perceptual.path, perceptual.network) if perceptual.weight else None
        return cls(
            weights=settings.loss,
            anneal=settings.entropy_anneal,
            perceptual=perceptual.weight,
            scales=perceptual.scales,
            network=network,
            adversarial=settings.adversarial,
            keep_tokens=settings.keep_tokens,
        )
