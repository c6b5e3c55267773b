"""Results kept in files as soon as they are there, so that an interrupted evaluation goes on where it stopped."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terra.errors import CheckpointError
from terra.evaluation.clips import Clip
from terra.evaluation.scores import ClipScores
from terra.metrics.networks import read_weights
from tokenizer.checkpoint import write_tensors

logger = logging.getLogger(__name__)

_KEY, _CONTENT = "made_from", "content_sha256"


class KeptFiles:
    """Tensors as `folder`/NAME.safetensors, each with the hash of what they were made from and of their content.

    Args:
        folder: is made when the first file is written.
        made_with: what all of them depend on; what was made with something else is replaced.
    """

    def __init__(self, folder: Path, made_with: Mapping[str, Any]) -> None:
        self._folder, self._made_with = folder, json.dumps(made_with, sort_keys=True, default=str)
        self._is_told, self.num_reused = False, 0

    def key(self, facts: str, *parts: bytes) -> Tensor:
        """SHA-256 of all that a result depends on, as 32 bytes."""
        return _digest(f"{self._made_with} {facts}".encode(), *parts)

    def read(self, name: str, key: Tensor) -> dict[str, Tensor] | None:
        """The tensors of a name; None if there are none, if they were made from something else, or are damaged."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            tensors = read_weights(path)
        except CheckpointError as error:
            logger.warning("is damaged and made again: %s", error)
            return None
        made_from, content = tensors.pop(_KEY, None), tensors.pop(_CONTENT, None)
        if made_from is None or not torch.equal(made_from, key):
            if not self._is_told:
                logger.warning("%s: was made with other settings, data or weights: made anew", self._folder)
                self._is_told = True
            return None
        if content is not None and not torch.equal(content, _content(tensors)):
            logger.warning("is damaged and made again: %s: expected other content", path)
            return None
        self.num_reused += 1
        return tensors

    def write(self, name: str, key: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a name. Raises OutputError."""
        write_tensors(self._path(name), {**tensors, _KEY: key, _CONTENT: _content(tensors)})

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


def clip_facts(clip: Clip) -> tuple[str, bytes]:
    """What the results of a clip depend on: its place in a recording, and the recording's motion or actions."""
    facts = [clip.episode.video_sha256, clip.start, clip.num_frames, clip.num_context, clip.seed]
    if clip.episode.actions is not None:
        return json.dumps(facts), clip.episode.actions.tobytes()
    poses = (getattr(clip.episode.poses, each.name) for each in dataclasses.fields(clip.episode.poses))
    return json.dumps(facts), b"".join(each.tobytes() for each in poses)


def scores_to_tensors(scores: ClipScores) -> dict[str, Tensor]:
    """The scores' arrays by names of slashes, such as metrics/generated/psnr."""
    tensors = {f"features/{name}": each for name, each in scores.features.items()}
    tensors |= {f"video_features/{name}": each for name, each in scores.video_features.items()}
    tensors |= {f"steps/{name}": torch.from_numpy(each) for name, each in scores.steps.items()}
    tensors |= {f"recovered/{name}": torch.from_numpy(each) for name, each in scores.recovered.items()}
    for name, numbers in scores.metrics.items():
        tensors |= {f"metrics/{name}/{metric}": torch.from_numpy(each) for metric, each in numbers.items()}
    return tensors


def scores_from_tensors(clip: Clip, tensors: Mapping[str, Tensor]) -> ClipScores:
    """The scores that `scores_to_tensors` made; names of other kinds are left alone."""
    scores = ClipScores(clip)
    for name, tensor in tensors.items():
        match name.split("/"):
            case ["features", variant]:
                scores.features[variant] = tensor
            case ["video_features", variant]:
                scores.video_features[variant] = tensor
            case ["steps", variant]:
                scores.steps[variant] = tensor.numpy()
            case ["recovered", variant]:
                scores.recovered[variant] = tensor.numpy()
            case ["metrics", variant, metric]:
                scores.metrics.setdefault(variant, {})[metric] = tensor.numpy()
    return scores


def _content(tensors: Mapping[str, Tensor]) -> Tensor:
    parts = []
    for name, tensor in sorted(tensors.items()):
        array = tensor.detach().contiguous().cpu().numpy()
        parts += [f"{name} {array.dtype} {array.shape}".encode(), array.tobytes()]
    return _digest(*parts)


def _digest(*parts: bytes) -> Tensor:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return torch.tensor(list(total.digest()), dtype=torch.uint8)
