"""The settings of `terra train-estimator` and `terra train-refiner`; checked before torch is imported."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from decoder.refiner.config import RefinerConfig
from terra.config.groups import PairSettings
from terra.training.settings import LoopConfig
from tokenizer.config import Side
from tokenizer.settings import Count, Device, FilePath, Fraction, Natural, NonNegative, Seed, Settings, Text

NORM_GROUPS = 8  # of the estimators


class EstimatorSize(Settings):
    """The estimator's free sizes.

    Attributes:
        image_size: (height, width) of the network's input.
        width: channels of a frame's feature map, which has a quarter of the frame's sides; divisible by 8.
        reach: search radius in the next frame's feature map, in cells.
        features: length of the vector that describes a step (two consecutive frames).
    """

    image_size: Annotated[tuple[Side, Side], Field(strict=False)] = (72, 128)
    width: Annotated[int, Field(ge=NORM_GROUPS, le=4096, multiple_of=NORM_GROUPS)] = 32
    reach: Annotated[int, Field(ge=0, le=32)] = 4
    features: Annotated[int, Field(ge=1, le=8192)] = 128


class TrainEstimatorSettings(LoopConfig):
    """The whole of conf/train_estimator.yaml.

    Attributes:
        data: a dataset; of driving it trains the estimator of motion, of any other world that of actions.
        train_split, held_out_split: names of the two splits.
        checkpoint: folder of a tokenizer that half of the windows go through; None leaves all windows as recorded.
        corruption: largest share of random tokens in such windows.
        device: where the estimator is trained; None takes a GPU if there is one.
        workers: videos decoded at once.
        max_frames, held_out_frames: of the two splits, kept on the device.
        window: frames of a window.
        estimator: sizes of the network.
        evaluation_windows: held-out windows that the errors are measured on.
    """

    data: FilePath
    train_split: Text
    held_out_split: Text
    checkpoint: FilePath | None
    corruption: Fraction
    device: Device | None
    workers: Natural
    max_frames: Count
    held_out_frames: Count
    window: Count
    estimator: EstimatorSize
    evaluation_windows: Count


class LoopChanges(LoopConfig):
    """Settings of one of the two trainings; the folder and the seed are those of the whole run."""

    output: FilePath = Path()


class TrainRefinerSettings(PairSettings):
    """The whole of conf/train_refiner.yaml.

    Attributes:
        data: folder of recordings.
        output: folder of the results.
        seed: of both trainings and of the refiner's noise.
        workers: videos decoded at once; 0 decodes one after another.
        episodes, clips: how many training episodes are used and held-out episodes compared; None for all.
        frames: of each clip, from its start.
        num_steps: numbers of the sampler's steps, which are compared.
        refiner: the networks.
        crop: (height, width) of the frames in the training of the VAE.
        log_sigma: mean and deviation of ln(sigma) in the training of the UNet.
        autoencoder, denoiser: how the VAE and the UNet are trained.
    """

    data: FilePath
    output: FilePath
    seed: Seed
    workers: Natural
    episodes: Count | None
    clips: Count | None
    frames: Count
    num_steps: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    refiner: RefinerConfig
    crop: Annotated[tuple[Count, Count], Field(strict=False)]
    log_sigma: Annotated[tuple[float, NonNegative], Field(strict=False)]
    autoencoder: LoopChanges
    denoiser: LoopChanges
