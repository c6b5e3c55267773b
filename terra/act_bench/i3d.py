"""The Inception-I3D network (Carreira and Zisserman 2017, arXiv 1705.07750) up to its last mixed layer."""

from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 1024  # of the output
TIME_STRIDE = 4  # frames per time step of the output


class ConvUnit(nn.Module):
    """Convolution, normalization, ReLU; the same kernel and stride along time, rows and columns."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self._kernel, self._stride = (kernel, kernel, kernel), (stride, stride, stride)
        self.conv3d = nn.Conv3d(channels_in, channels_out, kernel, stride, bias=False)
        self.bn = nn.BatchNorm3d(channels_out, eps=1e-3, momentum=0.01)

    def forward(self, x: Float[Tensor, "batch c t h w"]) -> Float[Tensor, "batch d s j k"]:
        """Convolve, normalize and rectify; sizes are divided by the stride and rounded up."""
        return F.relu(self.bn(self.conv3d(pad_same(x, self._kernel, self._stride))))


class MaxPool(nn.Module):
    """Max pooling with a kernel and a stride along (time, rows, columns)."""

    def __init__(self, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> None:
        super().__init__()
        self._kernel, self._stride = kernel, stride

    def forward(self, x: Float[Tensor, "batch c t h w"]) -> Float[Tensor, "batch c s j k"]:
        """Pool; sizes are divided by the stride and rounded up. Padding counts as 0."""
        return F.max_pool3d(pad_same(x, self._kernel, self._stride), self._kernel, self._stride)


class Mixed(nn.Module):
    """Four parallel branches with kernels 1; 1 and 3; 1 and 3; pooling and 1. `widths` are their channels, in order."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        first, narrow, wide, narrower, wider, pooled = widths
        self.b0 = ConvUnit(channels, first, 1)
        self.b1a, self.b1b = ConvUnit(channels, narrow, 1), ConvUnit(narrow, wide, 3)
        self.b2a, self.b2b = ConvUnit(channels, narrower, 1), ConvUnit(narrower, wider, 3)
        self.b3a, self.b3b = MaxPool((3, 3, 3), (1, 1, 1)), ConvUnit(channels, pooled, 1)

    def forward(self, x: Float[Tensor, "batch c t h w"]) -> Float[Tensor, "batch d t h w"]:
        """Concatenate the branches' channels; the sizes do not change."""
        return torch.cat([self.b0(x), self.b1b(self.b1a(x)), self.b2b(self.b2a(x)), self.b3b(self.b3a(x))], dim=1)


def pad_same(
    x: Float[Tensor, "batch c t h w"], kernel: tuple[int, int, int], stride: tuple[int, int, int]
) -> Float[Tensor, "batch c r i j"]:
    """Pad with zeros as TensorFlow's SAME does, more at the end, so that size / stride, rounded up, values result."""
    padding: list[int] = []
    for size, side, step in zip(reversed(x.shape[2:]), reversed(kernel), reversed(stride), strict=True):
        total = max(side - (size % step or step), 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding)


def inception_i3d() -> nn.Sequential:
    """Build the network from frames (batch, 3, t, h, w) in [0, 1] to features (batch, 1024, t / 4, h / 32, w / 32).

    The layers' names are those of the published ACT-Estimator, the widths those of the paper.
    """
    return nn.Sequential(
        OrderedDict(
            Conv3d_1a_7x7=ConvUnit(3, 64, 7, 2),
            MaxPool3d_2a_3x3=MaxPool((1, 3, 3), (1, 2, 2)),
            Conv3d_2b_1x1=ConvUnit(64, 64, 1),
            Conv3d_2c_3x3=ConvUnit(64, 192, 3),
            MaxPool3d_3a_3x3=MaxPool((1, 3, 3), (1, 2, 2)),
            Mixed_3b=Mixed(192, (64, 96, 128, 16, 32, 32)),
            Mixed_3c=Mixed(256, (128, 128, 192, 32, 96, 64)),
            MaxPool3d_4a_3x3=MaxPool((3, 3, 3), (2, 2, 2)),
            Mixed_4b=Mixed(480, (192, 96, 208, 16, 48, 64)),
            Mixed_4c=Mixed(512, (160, 112, 224, 24, 64, 64)),
            Mixed_4d=Mixed(512, (128, 128, 256, 24, 64, 64)),
            Mixed_4e=Mixed(512, (112, 144, 288, 32, 64, 64)),
            Mixed_4f=Mixed(528, (256, 160, 320, 32, 128, 128)),
            MaxPool3d_5a_2x2=MaxPool((1, 2, 2), (1, 2, 2)),
            Mixed_5b=Mixed(832, (256, 160, 320, 32, 128, 128)),
            Mixed_5c=Mixed(832, (384, 192, 384, 48, 128, 128)),
        )
    )
