"""Estimators: small convolutional networks that recover from video what led from each frame to the next.

`MotionEstimator` recovers a car's movement. `terra.evaluation.action_estimator` has the inverse-dynamics model, which
recovers the actions of any other world with the same network.

A correlation layer (as in FlowNet: Dosovitskiy et al. 2015, arXiv 1504.06852) compares the features of each cell of a
frame with those of the cells around it in the next frame, so that the network sees motion directly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from terra.errors import CheckpointError
from terra.evaluation.training_settings import NORM_GROUPS, EstimatorSize
from terra.metrics.networks import check_weights, load_weights, read_weights
from terra.trajectory.checks import MAX_FPS, MIN_FPS
from tokenizer import Frames
from tokenizer.checkpoint import CONFIG_NAME, WEIGHTS_NAME, read_config, write_json, write_tensors
from tokenizer.settings import Settings, checked

_SettingsT = TypeVar("_SettingsT", bound=Settings)
_NetworkT = TypeVar("_NetworkT", bound=nn.Module)

# The movement that an output of 1 means: about one standard deviation at 10 frames per second in town.
_FORWARD_SCALE = 0.5  # m per step
_HEADING_SCALE = 0.02  # rad per step
_STEPS_AT_ONCE = 256


class EstimatorConfig(EstimatorSize):
    """The estimator's sizes, and `fps`, frames per second of the videos."""

    fps: Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]


class StepNetwork(nn.Module):
    """Features of frames, correlated with the next frame's, then convolutions over time to some numbers a step.

    Attributes:
        model_type: the name of the class in config.json.
    """

    model_type: ClassVar[str]

    def __init__(self, config: EstimatorSize, num_outputs: int) -> None:
        super().__init__()
        self._config = config
        width, features = config.width, config.features
        self.look = nn.Sequential(
            *(nn.Conv2d(3, width, 5, stride=2, padding=2), nn.GroupNorm(NORM_GROUPS, width), nn.SiLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(NORM_GROUPS, 2 * width), nn.SiLU()),
            nn.Conv2d(2 * width, width, 3, padding=1),
        )
        channels = (2 * config.reach + 1) ** 2 + width
        self.pairs = nn.Sequential(
            *(nn.Conv2d(channels, 3 * width, 3, stride=2, padding=1), nn.GroupNorm(NORM_GROUPS, 3 * width), nn.SiLU()),
            *(
                nn.Conv2d(3 * width, 2 * width, 3, stride=2, padding=1),
                nn.GroupNorm(NORM_GROUPS, 2 * width),
                nn.SiLU(),
            ),
        )
        rows, cols = (-(-side // 16) for side in config.image_size)
        # The features are not pooled over the picture: the location of a motion tells driving from turning.
        self.features = nn.Linear(2 * width * rows * cols, features)
        self.over_time = nn.ModuleList(nn.Conv1d(features, features, 5, padding=2) for _ in range(2))
        self.output = nn.Linear(features, num_outputs)

    def forward(self, frames: Float[Tensor, "batch frames 3 height width"]) -> Float[Tensor, "batch steps outputs"]:
        """The numbers of each step; the frames have `image_size` and are in [-1, 1]."""
        batch = frames.shape[0]
        flat = rearrange(frames, "b f c h w -> (b f) c h w")
        seen = torch.cat([F.normalize(self.look(part), dim=1) for part in flat.split(_STEPS_AT_ONCE)])
        seen = rearrange(seen, "(b f) c h w -> b f c h w", b=batch)
        now, following = (rearrange(part, "b s c h w -> (b s) c h w") for part in (seen[:, :-1], seen[:, 1:]))
        parts = zip(now.split(_STEPS_AT_ONCE), following.split(_STEPS_AT_ONCE), strict=True)
        x = torch.cat([self._compare(first, second) for first, second in parts])
        x = rearrange(x, "(b s) features -> b features s", b=batch)
        for layer in self.over_time:
            x = x + F.silu(layer(x))
        return self.output(rearrange(x, "b features s -> b s features"))

    def _compare(
        self, now: Float[Tensor, "steps width rows cols"], following: Float[Tensor, "steps width rows cols"]
    ) -> Float[Tensor, "steps features"]:
        reach = self._config.reach
        rows, cols = now.shape[2:]
        around = F.pad(following, (reach,) * 4)
        similarity = [
            (now * around[..., down : down + rows, right : right + cols]).sum(dim=1)
            for down in range(2 * reach + 1)
            for right in range(2 * reach + 1)
        ]
        x = self.pairs(torch.cat([torch.stack(similarity, dim=1), now], dim=1))
        return F.silu(self.features(x.flatten(1)))

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and model.safetensors (float16). Raises OutputError."""
        write_tensors(folder / WEIGHTS_NAME, {name: tensor.half() for name, tensor in self.state_dict().items()})
        write_json(folder / CONFIG_NAME, {"model_type": self.model_type, **self._config.model_dump(mode="json")})


class MotionEstimator(StepNetwork):
    """Movement and turning of a car between frames, in units of `step_scale`."""

    model_type = "terra_motion_estimator"

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__(config, 2)
        self.config = config

    @torch.no_grad()
    def estimate(self, frames: Frames) -> Float[Tensor, "steps 2"]:
        """Forward movement (m) and heading change (rad, counter-clockwise) between frames, float64 on the CPU.

        `frames` are two or more, in [-1, 1], of any size.
        """
        steps = self(resize(frames, self.config.image_size)[None])[0]
        return steps.double().cpu() * step_scale()

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Read what `save_pretrained` wrote, in evaluation mode, float32 on the CPU.

        Raises:
            CheckpointError: files missing, damaged or of another model.
        """
        config = read_estimator_config(folder, cls.model_type, EstimatorConfig)
        return load_estimator(lambda: cls(config), folder)


def step_scale() -> Float[Tensor, " 2"]:
    """The forward movement (m) and the heading change (rad) of a network output of 1."""
    return torch.tensor([_FORWARD_SCALE, _HEADING_SCALE], dtype=torch.float64)


def resize(frames: Frames, image_size: tuple[int, int]) -> Frames:
    """Resize frames to (height, width), with antialiasing."""
    if tuple(frames.shape[-2:]) == tuple(image_size):
        return frames
    return F.interpolate(frames, image_size, mode="bilinear", align_corners=False, antialias=True)


def estimator_type(folder: Path) -> object:
    """The `model_type` of a stored estimator. Raises CheckpointError."""
    return read_config(folder / CONFIG_NAME).get("model_type")


def read_estimator_config(folder: Path, model_type: str, settings_class: type[_SettingsT]) -> _SettingsT:
    """Read the config.json of an estimator of one type. Raises CheckpointError."""
    path = folder / CONFIG_NAME
    content: dict[str, Any] = read_config(path)
    if content.pop("model_type", None) != model_type:
        raise CheckpointError(f"{path}: expected the configuration of a {model_type}, got another")
    return checked(settings_class, content, str(path), CheckpointError)


def load_estimator(make: Callable[[], _NetworkT], folder: Path) -> _NetworkT:
    """Load stored weights into a new network on the CPU, in evaluation mode.

    The weights are compared with it first, before memory is taken for what config.json says.

    Raises:
        CheckpointError: files missing, damaged or of another network.
    """
    weights = read_weights(folder / WEIGHTS_NAME)
    with torch.device("meta"):
        check_weights(make(), weights, (), str(folder))
    network = make()
    load_weights(network, weights, (), str(folder))
    return network.eval().requires_grad_(False)
