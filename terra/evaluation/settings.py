"""What to evaluate, on how much, and how: the settings of `terra evaluate`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from terra.config.groups import PipelineSettings, Sampling
from tokenizer.config import Side
from tokenizer.settings import Count, FilePath, Natural, Positive, Seed, Text


class EvaluationSettings(PipelineSettings):
    """The whole of conf/evaluate.yaml but tokenizer, world model, engine, sampling and decoder.

    Attributes:
        data, split: the dataset and which part of it, nothing of which the models were trained on.
        estimator: folder of the estimator of motion or, for any other world than driving, of actions; without one
            action fidelity is left out.
        output: folder for what is written.
        compare: folders of models that are evaluated beside the command's own, see `terra.evaluation.candidates`.
        old_data: recordings of the domain that the models come from, of which `split` tells what is forgotten.
        num_clips, num_frames, num_context, overlap, memory: of the rollouts, as `terra generate` has them.
        seed: of the rollouts and of the bootstrap.
        at_once: rollouts generated together.
        workers: videos decoded at once.
        drift_clips, drift_frames: of the long rollouts; no clips leaves them out.
        drift_reference_frames: frames of other drives of the same places, to which the unpaired Frechet distances of
            the long rollouts are measured, at most; 0 leaves them out.
        revisit_clips, revisit_frames, revisit_data: of the returns to what was seen, by which memory is measured: of
            how many drives they are, their frames, and the recordings, of which `split` is taken (None: `data`); no
            drives leave them out.
        revisit_loops: of how many of these drives all is generated, too, and compared with what was generated there
            before.
        max_groups, group_frames, agree_within: of the counterfactual sets, see `terra.evaluation.contrasts`; no groups
            leaves them out.
        measured_size: (height, width) in pixels that videos are resized to before they are measured, so that models of
            different sizes can be compared; None measures them as they are.
        network, network_path, video_network, video_network_path: see `terra.metrics.networks` and
            `terra.metrics.video_networks`.
        resamples, frechet_resamples: of the bootstrap over places, of means and of Frechet distances.
        pictures: clips and groups that are shown.
        requirements: print those that the shipped model is held to; None prints them for that model on driving of
            `terra record` alone.
    """

    data: FilePath
    split: Text
    estimator: FilePath | None
    output: FilePath
    compare: list[Text]
    old_data: FilePath | None
    num_clips: Count
    num_frames: Count
    num_context: Count
    seed: Seed
    sampling: Sampling
    at_once: Count
    workers: Natural
    drift_clips: Natural
    drift_frames: Count
    drift_reference_frames: Natural
    revisit_clips: Natural
    revisit_loops: Natural
    revisit_frames: Count
    revisit_data: FilePath | None
    max_groups: Natural
    group_frames: Count
    agree_within: Positive
    measured_size: Annotated[tuple[Side, Side], Field(strict=False)] | None
    network: str
    network_path: FilePath | None
    video_network: str | None
    video_network_path: FilePath | None
    resamples: Count
    frechet_resamples: Count
    pictures: Natural
    requirements: bool | None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for name in ("num_frames", "drift_frames", "group_frames", "revisit_frames"):
            if getattr(self, name) < self.num_context + 2:
                raise ValueError(f"{name}: expected two more than num_context, got {getattr(self, name)}")
        if self.drift_reference_frames and not self.drift_clips:
            raise ValueError(
                f"drift_reference_frames: expected 0 without drift_clips, got {self.drift_reference_frames}"
            )
        if self.revisit_loops > self.revisit_clips:
            raise ValueError(f"revisit_loops: expected at most revisit_clips, got {self.revisit_loops}")
        if (self.video_network is None) != (self.video_network_path is None):
            raise ValueError("features: expected video_network and video_network_path together, got one of them")
        return self
