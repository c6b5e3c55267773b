"""The two convolutional nets, with the parameter names and shapes of the published checkpoints.

They are the "B" nets of Open-MAGVIT2's first release (June 2024): residual blocks of GroupNorm, swish and 3x3
convolutions without biases, strided convolutions down, depth-to-space up.
"""

from itertools import pairwise

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from tokenizer.config import NORM_GROUPS, EncoderDecoderConfig

# Attributes named after neither PyTorch nor this package (`nin_shortcut`, `mid_block`) are the checkpoints' names.


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS, width, eps=1e-6)


class ResBlock(nn.Module):
    """Two normalized 3x3 convolutions around a shortcut, which is 1x1 where the width changes."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_width)
        self.conv1 = nn.Conv2d(in_width, out_width, 3, padding=1, bias=False)
        self.norm2 = _norm(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1, bias=False)
        self.nin_shortcut = nn.Identity() if in_width == out_width else nn.Conv2d(in_width, out_width, 1, bias=False)

    def forward(self, x: Float[Tensor, "frames in_width rows cols"]) -> Float[Tensor, "frames out_width rows cols"]:
        """Transform a feature map at its own resolution."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return self.nin_shortcut(x) + hidden


class Upsample(nn.Module):
    """Double the resolution: a convolution to four times the width, whose groups become the four subpixels.

    The subpixel is the slow part of the channel index (ONNX's DCR order), where `nn.PixelShuffle` has it fast.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, 4 * width, 3, padding=1)

    def forward(self, x: Float[Tensor, "frames width rows cols"]) -> Float[Tensor, "frames width rows2 cols2"]:
        """Return twice as many rows and columns."""
        # Two steps keep channels last in memory, which convolutions on a GPU need. In one step the copy and its
        # gradient would have channels first, and so would all later feature maps at that resolution.
        wide = rearrange(self.conv1(x), "f wide rows cols -> f rows cols wide")
        subpixels = "f rows cols (down right width) -> f (rows down) (cols right) width"
        return rearrange(rearrange(wide, subpixels, down=2, right=2), "f rows cols width -> f width rows cols")


class DownLevel(nn.Module):
    """Residual blocks at one resolution, then (but for the last level) half of it."""

    def __init__(self, in_width: int, out_width: int, num_res_blocks: int, *, is_last: bool) -> None:
        super().__init__()
        self.block = _blocks(in_width, out_width, num_res_blocks)
        self.downsample = nn.Identity() if is_last else nn.Conv2d(out_width, out_width, 3, stride=2, padding=1)

    def forward(self, x: Float[Tensor, "frames in_width rows cols"]) -> Float[Tensor, "frames out_width rows2 cols2"]:
        """Run the blocks, then halve."""
        for block in self.block:
            x = block(x)
        return self.downsample(x)


class UpLevel(nn.Module):
    """Residual blocks at one resolution, then (but for the full one) twice of it."""

    def __init__(self, in_width: int, out_width: int, num_res_blocks: int, *, is_full: bool) -> None:
        super().__init__()
        self.block = _blocks(in_width, out_width, num_res_blocks)
        self.upsample = nn.Identity() if is_full else Upsample(out_width)

    def forward(self, x: Float[Tensor, "frames in_width rows cols"]) -> Float[Tensor, "frames out_width rows2 cols2"]:
        """Run the blocks, then double."""
        for block in self.block:
            x = block(x)
        return self.upsample(x)


class Encoder(nn.Module):
    """Maps frames to one vector of `z_channels` numbers per token, before quantization."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        widths, depth = config.widths, config.num_res_blocks
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.in_channels, config.ch, 3, padding=1, bias=False)
        self.down = nn.ModuleList(
            DownLevel(in_width, width, depth, is_last=level == last)
            for level, (in_width, width) in enumerate(zip((config.ch, *widths[:-1]), widths, strict=True))
        )
        self.mid_block = _blocks(widths[-1], widths[-1], depth)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 1)

    def forward(self, frames: Float[Tensor, "frames 3 height width"]) -> Float[Tensor, "frames dim rows cols"]:
        """Map frames in [-1, 1] to unbounded vectors, whose signs are the tokens."""
        x = self.conv_in(frames)
        for stage in (*self.down, *self.mid_block):
            x = stage(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Maps quantized vectors (signs) to frames."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        widths, depth = config.widths, config.num_res_blocks
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid_block = _blocks(widths[-1], widths[-1], depth)
        # The levels are stored from the full resolution down, like the encoder's, and run in the opposite order.
        self.up = nn.ModuleList(
            UpLevel(in_width, width, depth, is_full=level == 0)
            for level, (in_width, width) in enumerate(zip((*widths[1:], widths[-1]), widths, strict=True))
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], config.out_ch, 3, padding=1)

    def forward(self, signs: Float[Tensor, "frames dim rows cols"]) -> Float[Tensor, "frames 3 height width"]:
        """Map signs to frames; the values are near [-1, 1] but not clamped."""
        x = self.conv_in(signs)
        for stage in (*self.mid_block, *reversed(self.up)):
            x = stage(x)
        return self.conv_out(F.silu(self.norm_out(x)))


def _blocks(in_width: int, out_width: int, num_res_blocks: int) -> nn.ModuleList:
    widths = (in_width, *[out_width] * num_res_blocks)
    return nn.ModuleList(ResBlock(*pair) for pair in pairwise(widths))
