"""The settings of `terra train-tokenizer`; checked before torch is imported."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from terra.training.settings import LoopConfig
from tokenizer.config import LossWeights
from tokenizer.settings import Count, Device, FilePath, Fraction, Natural, NonNegative, Positive, Settings, Share, Text

NORM_GROUPS = 8  # of the discriminator


class AdversarialConfig(Settings):
    """Weights and schedule of the adversarial loss.

    Attributes:
        weight: weight of the adversarial loss in the tokenizer's loss; 0 trains without a discriminator.
        start: fraction of the run, in [0, 1], after which the adversarial loss and the discriminator's training begin.
        adaptive: whether `weight` is multiplied by the ratio of the gradients' norms (see `adaptive_weight`).
        lecam: weight of the LeCam regularization in the discriminator's loss; 0 leaves the regularization out.
        lecam_decay: decay per step of LeCam's moving averages.
        width: channels of the discriminator's first layer.
    """

    weight: NonNegative = 0.0
    start: Fraction = 0.5
    adaptive: bool = True
    lecam: NonNegative = 0.0
    lecam_decay: Fraction = 0.99
    width: Annotated[int, Field(ge=NORM_GROUPS, multiple_of=NORM_GROUPS)] = 64


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


class TokenizerSize(Settings):
    """The free choices of a tokenizer's architecture: `dim` bits a token; the others as in `EncoderDecoderConfig`."""

    ch: Count
    ch_mult: Annotated[tuple[Count, ...], Field(strict=False)]
    num_res_blocks: Count
    dim: Count


class TrainTokenizerSettings(TermSettings, LoopConfig):
    """The whole of conf/train_tokenizer.yaml.

    Attributes:
        data: folder of recordings.
        train_split, held_out_split: names of the two splits.
        max_frames: of the training split, kept by all processes together; None keeps all.
        device: where the tokenizer is trained; None takes a GPU if there is one.
        workers: videos decoded at once by each process.
        decoder_of: the tokenizer whose decoder alone is trained further, see `terra.training.start.find_tokenizer`.
        init_from: the tokenizer whose weights the training starts from, as in `decoder_of`;
            without it and `decoder_of` a new tokenizer starts from random weights.
        old_data: folder of recordings like those that `init_from` was trained on: half of each batch is drawn from
            them, and their `held_out_split` tells what is forgotten.
        tokenizer: the architecture of a new tokenizer.
        dtype: of the stored weights.
        evaluation_frames: held-out frames that the stored weights are measured on.
    """

    data: FilePath
    train_split: Text
    held_out_split: Text
    max_frames: Count | None
    device: Device | None
    workers: Natural
    decoder_of: Text | None
    init_from: Text | None
    old_data: FilePath | None
    tokenizer: TokenizerSize
    dtype: Literal["float32", "float16", "bfloat16"]
    evaluation_frames: Count

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.init_from is not None and self.decoder_of is not None:
            raise ValueError(f"init_from: expected null with decoder_of={self.decoder_of}, got {self.init_from}")
        if self.init_from is None and self.keep_tokens.weight:
            raise ValueError(f"keep_tokens.weight: expected 0 without init_from, got {self.keep_tokens.weight:g}")
        if self.init_from is None and self.old_data is not None:
            raise ValueError(f"old_data: expected null without init_from, got {self.old_data}")
        if self.old_data is not None and self.batch_size < 2:
            raise ValueError(f"batch_size: expected at least 2 with old_data, got {self.batch_size}")
        return self
