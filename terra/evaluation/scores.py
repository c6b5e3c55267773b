"""Scores of one clip: frame metrics, features and recovered motion of each of its variants."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from decoder import Decoder
from terra.actions.space import Values
from terra.evaluation.action_estimator import ActionEstimator
from terra.evaluation.clips import Clip
from terra.evaluation.estimator import MotionEstimator, resize
from terra.evaluation.motion import Steps
from terra.metrics.frames import psnr, psnr_by_view
from terra.metrics.networks import FeatureNetwork, Features, map_distance, pool
from terra.metrics.similarity import ssim
from terra.metrics.video_networks import VideoNetwork
from tokenizer import Frames, TokenGrid

TRUE, RE_ENCODED, GENERATED, PERSISTENCE = "true", "re-encoded", "generated", "persistence"
VARIANTS = (GENERATED, RE_ENCODED, PERSISTENCE)
"""The world model's video, the re-encoded recording (a ceiling), and the last context frame repeated (the baseline)."""

_FRAMES_AT_ONCE = 32


@dataclass
class ClipScores:
    """Scores of the frames of one clip that follow its context, by variant (and for `TRUE` where that has a meaning).

    Attributes:
        metrics: frame metrics by variant and name, one number per frame; `psnr-NAME` of each view, where several
            cameras share a picture.
        features: pooled features by variant, one row per frame, float32 on the CPU.
        video_features: features of a `VideoNetwork` by variant, one row; empty without such a network.
        steps: recovered motion of a car by variant, one step per frame; empty without an estimator.
        recovered: recovered actions of any other world by variant, (frames, columns); empty without an estimator.
    """

    clip: Clip
    metrics: dict[str, dict[str, Float[np.ndarray, " frames"]]] = field(default_factory=dict)
    features: dict[str, Float[Tensor, "frames features"]] = field(default_factory=dict)
    video_features: dict[str, Float[Tensor, "1 features"]] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)
    recovered: dict[str, Values] = field(default_factory=dict)


def decode_variants(
    truth: Frames, truth_tokens: TokenGrid, generated_tokens: TokenGrid, num_context: int, decoder: Decoder
) -> dict[str, Frames]:
    """The true clip and its variants, on the decoder's device; all variants begin with the same decoded context."""
    re_encoded = decoder.decode(truth_tokens)
    context, held = re_encoded[:num_context], re_encoded[num_context - 1]
    persistence = torch.cat([context, held.expand(len(truth) - num_context, *held.shape)])
    return {
        TRUE: truth.to(re_encoded.device),
        RE_ENCODED: re_encoded,
        GENERATED: decoder.decode(generated_tokens),
        PERSISTENCE: persistence,
    }


class Scorer:
    """Measures clips with frozen networks, all on one device.

    Args:
        network: of the perceptual and Frechet distances of frames.
        estimator: of motion or, for any other world, of actions; None reads nothing back.
        video_network: of the Frechet distance of videos; None leaves it out.
        image_size: (height, width) that frames are resized to first; None measures them as they are.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        estimator: MotionEstimator | ActionEstimator | None,
        video_network: VideoNetwork | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        self.network, self.estimator, self.video_network = network, estimator, video_network
        self._image_size = image_size

    @torch.no_grad()
    def score(self, clip: Clip, variants: Mapping[str, Frames]) -> ClipScores:
        """Measure the variants of one clip, one of which must be `TRUE`."""
        variants = {name: self._resized(frames) for name, frames in variants.items()}
        generated = {name: frames[clip.num_context :] for name, frames in variants.items()}
        scores = self.measure_frames(clip, generated)
        for name, frames in variants.items():
            if self.video_network is not None:
                scores.video_features[name] = self.video_network.pooled(generated[name]).cpu()
            if isinstance(self.estimator, MotionEstimator):
                scores.steps[name] = self.recover(clip, frames)
            elif self.estimator is not None:
                scores.recovered[name] = self.estimator.estimate(frames)[clip.num_context - 1 :]
        return scores

    @torch.no_grad()
    def measure_frames(self, clip: Clip, variants: Mapping[str, Frames]) -> ClipScores:
        """Measure frames of a clip: frame metrics and features alone.

        Args:
            clip: the clip.
            variants: equally many frames of each, which one by one belong to those of `TRUE`.
        """
        views = clip.episode.views
        features: dict[str, list[Tensor]] = {}
        metrics: dict[str, dict[str, list[Tensor]]] = {}
        for first in range(0, len(variants[TRUE]), _FRAMES_AT_ONCE):
            part = {name: self._resized(frames[first : first + _FRAMES_AT_ONCE]) for name, frames in variants.items()}
            true_maps = self.network(part[TRUE])
            for name, frames in part.items():
                maps = true_maps if name == TRUE else self.network(frames)
                features.setdefault(name, []).append(pool(maps).cpu())
                if name == TRUE:
                    continue
                numbers = {"psnr": psnr(frames, part[TRUE]), "ssim": ssim(frames, part[TRUE])}
                numbers |= {f"psnr-{view}": each for view, each in psnr_by_view(frames, part[TRUE], views).items()}
                numbers[f"perceptual-{self.network.name}"] = map_distance(maps, true_maps)
                for metric, values in numbers.items():
                    metrics.setdefault(name, {}).setdefault(metric, []).append(values.double().cpu())
        scores = ClipScores(clip)
        scores.features = {name: torch.cat(parts) for name, parts in features.items()}
        scores.metrics = {
            name: {metric: torch.cat(parts).numpy() for metric, parts in each.items()} for name, each in metrics.items()
        }
        return scores

    @torch.no_grad()
    def features(self, frames: Frames) -> Features:
        """The pooled features of frames of no clip, on any device, as those of `ClipScores`: float32 on the CPU."""
        device = self.network.mean.device
        parts = (self._resized(part.to(device)) for part in frames.split(_FRAMES_AT_ONCE))
        return torch.cat([self.network.pooled(part).cpu() for part in parts])

    def recover(self, clip: Clip, frames: Frames) -> Steps:
        """Estimate the motion in all frames, context included, and return it from the last context frame on.

        Raises:
            ValueError: there is no estimator of motion.
        """
        if not isinstance(self.estimator, MotionEstimator):
            raise ValueError("expected an estimator of motion, got none")
        return self.estimator.estimate(self._resized(frames))[clip.num_context - 1 :].numpy()

    def _resized(self, frames: Frames) -> Frames:
        return frames if self._image_size is None else resize(frames, self._image_size)
