"""The inverse-dynamics model: it recovers from video the action between each two frames, for any world but driving.

What recovers a car's movement recovers actions too (`terra.evaluation.estimator.StepNetwork`); only the numbers of a
step mean something else. Inverse dynamics from video: Baker et al. 2022 (VPT, arXiv 2206.11795).
"""

from pathlib import Path
from typing import Annotated, Any, Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from terra.actions import ActionSpace, Choice, Keys, TableSpace, Waypoints, parse_space
from terra.actions.space import Values
from terra.errors import CheckpointError
from terra.evaluation.estimator import StepNetwork, load_estimator, read_estimator_config, resize
from terra.evaluation.training_settings import EstimatorSize
from terra.trajectory.checks import MAX_FPS, MIN_FPS
from tokenizer import Frames


class ActionEstimatorConfig(EstimatorSize):
    """The network's sizes, `fps`, frames per second of the videos, and `action_space`, what is recovered."""

    fps: Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]
    action_space: dict[str, Any]


class ActionEstimator(StepNetwork):
    """Actions between frames: numbers of a vector in [-1, 1], or a logit for each key or choice.

    Raises:
        CheckpointError: the config's action space is not valid, or that of driving.
    """

    model_type = "terra_action_estimator"

    def __init__(self, config: ActionEstimatorConfig) -> None:
        space = parse_space(config.action_space, "action_space", CheckpointError)
        if isinstance(space, Waypoints):
            raise CheckpointError("action_space: expected vector, keys or choice, got waypoints")
        super().__init__(config, len(space.names))
        self.config = config
        self.space: TableSpace = space

    @torch.no_grad()
    def estimate(self, frames: Frames) -> Values:
        """The values of the action between each two frames, (steps, columns), as `terra.actions` has them.

        `frames` are two or more, in [-1, 1], of any size. Numbers of a vector are clipped to their range.
        """
        numbers = self(resize(frames, self.config.image_size)[None])[0].float().cpu()
        if isinstance(self.space, Keys):
            numbers = (numbers > 0).float()
        elif not isinstance(self.space, Choice):
            numbers = numbers.clamp(-1.0, 1.0)
        return self.space.values(numbers[:, None].numpy())

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Read what `save_pretrained` wrote, in evaluation mode, float32 on the CPU.

        Raises:
            CheckpointError: files missing, damaged or of another model.
        """
        config = read_estimator_config(folder, cls.model_type, ActionEstimatorConfig)
        return load_estimator(lambda: cls(config), folder)


def action_loss(
    outputs: Float[Tensor, "batch steps dim"], rows: Float[Tensor, "batch steps dim"], space: ActionSpace
) -> Tensor:
    """The mean loss of the steps: Huber for vectors, cross-entropy in nats for choices, binary for keys."""
    outputs = outputs.float()
    if isinstance(space, Keys):
        return F.binary_cross_entropy_with_logits(outputs, rows)
    if isinstance(space, Choice):
        return F.cross_entropy(outputs.flatten(0, 1), rows.argmax(dim=-1).flatten())
    return F.smooth_l1_loss(outputs, rows, beta=0.1)
