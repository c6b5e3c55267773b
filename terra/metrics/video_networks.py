"""Feature networks over whole clips, with torchvision's weights from a file, for Frechet distances similar to FVD."""

from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from terra.errors import ConfigError
from terra.metrics.networks import load_weights, read_weights
from tokenizer import Frames

NETWORKS = ("r3d_18", "mc3_18", "r2plus1d_18")
_SIDE = 112
# Mean and standard deviation of Kinetics' videos in [0, 1], as torchvision's video models take them.
_MEAN, _STD = (0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989)


class VideoNetwork(nn.Module):
    """A frozen network over clips, in evaluation mode; `name` is torchvision's."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.name, self.model = name, model
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(_STD).view(1, 3, 1, 1), persistent=False)
        self.eval().requires_grad_(False)

    def pooled(self, frames: Frames) -> Float[Tensor, "1 features"]:
        """512 features of one clip: two or more frames in [-1, 1], which are resized to 112 x 112."""
        small = F.interpolate(frames, (_SIDE, _SIDE), mode="bilinear", align_corners=False, antialias=True)
        x = ((small + 1) / 2 - self.mean) / self.std
        return self.model(rearrange(x, "frames rgb height width -> 1 rgb frames height width")).float()


def load_video_network(name: str, path: Path) -> VideoNetwork:
    """Build one of `NETWORKS` with the weights of a safetensors file that has torchvision's names.

    Raises:
        ConfigError: no such network.
        CheckpointError: a file that is missing, damaged or of another network.
    """
    from torchvision.models import video

    if name not in NETWORKS:
        raise ConfigError(f"features.video_network: expected one of {', '.join(NETWORKS)}, got {name!r}")
    model = getattr(video, name)(weights=None)
    load_weights(model, read_weights(path), (), str(path))
    model.fc = nn.Identity()
    return VideoNetwork(name, model)
