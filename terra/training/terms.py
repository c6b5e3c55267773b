"""The terms of the tokenizer's loss: their weights, schedules and networks."""

from dataclasses import dataclass, field

from terra.errors import ConfigError
from terra.metrics.networks import FeatureNetwork, load_feature_network
from terra.training.tokenizer_settings import AdversarialConfig, EntropyAnneal, KeepTokensSettings, TermSettings
from tokenizer import LossWeights


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
