"""`LFQTokenizer`: encodes frames to token ids, decodes ids to frames, and reads and writes its checkpoints."""

from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenizer.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    layout_difference,
    load_tensors,
    read_layout,
    resolve_checkpoint,
    verify_layout,
    write_json,
    write_tensors,
)
from tokenizer.config import LFQTokenizerConfig
from tokenizer.errors import CheckpointError
from tokenizer.lineage import tokens_sha256
from tokenizer.networks import Decoder, Encoder
from tokenizer.quantizer import signs_from_tokens, straight_through, tokens_from_signs
from tokenizer.types import Frames, TokenGrid

# Bounds the memory of the full-resolution feature maps: 75 MB a frame and map at 288x512, 128 channels, float32.
MAX_FRAMES_AT_ONCE = 16

# Resampling in floats overshoots by rounding; 8-bit values or floats in [0, 255] are far outside.
RANGE_TOLERANCE = 1e-3

_DECODER = "decoder."  # how names of the decoder's tensors begin


@final
class LFQTokenizer(nn.Module):
    """A convolutional autoencoder whose bottleneck is the signs of `dim` channels, read as one id a cell.

    The state dict is `encoder.*` and `decoder.*` only. `encode` and `decode` compute in the weights' dtype, in chunks
    of `frames_at_once` frames; `encoder` and `decoder` may be compiled in place (`encoder.compile()`) and the
    whole may be moved `to(memory_format=torch.channels_last)`.
    """

    checkpoint: Path | None
    """The folder that the weights were read from; None for a tokenizer that was not."""

    def __init__(self, config: LFQTokenizerConfig) -> None:
        super().__init__()
        self.config, self.checkpoint = config, None
        self.encoder = Encoder(config.encoder_decoder_config)
        self.decoder = Decoder(config.encoder_decoder_config)
        self.codebook_size = config.quantizer_config.codebook_size
        self.image_size = config.image_size
        self.rows = config.rows
        self.cols = config.cols

    @torch.no_grad()
    def encode(self, frames: Frames) -> TokenGrid:
        """Tokenize frames of `image_size` in [-1, 1], from any device, to ids on the tokenizer's.

        Raises ValueError on another shape, a dtype that is not floating, or values outside the range.
        """
        self._check_frames(frames)
        weight = self.encoder.conv_out.weight
        bit_order = self.config.quantizer_config.bit_order
        chunks = [
            tokens_from_signs(self.encoder(chunk.to(weight.device, weight.dtype)), bit_order)
            for chunk in frames.split(frames_at_once(weight.device))
        ]
        return torch.cat(chunks)

    @torch.no_grad()
    def decode(self, tokens: TokenGrid) -> Frames:
        """Turn ids in [0, codebook_size), from any device, into float32 frames in [-1, 1] on the tokenizer's.

        Raises ValueError on another grid than (frames, rows, cols), a dtype that is not integer, or ids out of range.
        """
        self._check_tokens(tokens)
        weight = self.decoder.conv_out.weight
        quantizer = self.config.quantizer_config
        chunks = []
        for chunk in tokens.split(frames_at_once(weight.device)):
            signs = signs_from_tokens(chunk.to(weight.device), quantizer.dim, quantizer.bit_order)
            chunks.append(self.decoder(signs.to(weight.dtype)).float().clamp(-1.0, 1.0))
        return torch.cat(chunks)

    def forward(self, frames: Frames) -> tuple[Frames, Float[Tensor, "frames dim rows cols"]]:
        """Reconstruct frames for training, with gradients straight through the signs.

        Takes frames in [-1, 1] on the tokenizer's device, of any size that divides into tokens (so also crops).
        Returns the reconstruction, not clamped, and the vectors before quantization. Raises ValueError on other sizes.
        """
        downsample = self.config.downsample
        if frames.ndim != 4 or frames.shape[2] % downsample or frames.shape[3] % downsample:
            raise ValueError(
                f"expected frames (frames, 3, height, width) with sides divisible by {downsample}, "
                f"got {tuple(frames.shape)}"
            )
        z = self.encoder(frames)
        return self.decoder(straight_through(z)), z

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        subfolder: str | None = None,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "LFQTokenizer":
        """Load a local folder or a Hub repository's folder, in evaluation mode, on the CPU, in `dtype`.

        A local folder never touches the network. Names and shapes are checked before any weight is loaded. Raises
        CheckpointError, and ValueError if `dtype` is not floating.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"expected a floating-point dtype, got {dtype = }")
        folder = resolve_checkpoint(path_or_hub_id, subfolder, revision)
        config = load_config(folder)
        with torch.device("meta"):
            tokenizer = cls(config)
        tensors = load_tensors(folder)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise CheckpointError(f"{folder}: expected {name} in a floating-point dtype, got {tensor.dtype}")
        tokenizer.checkpoint = folder
        tokenizer.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
        # Convolutions on channels_last memory are several times faster on a CPU (eight times, measured on two cores).
        return tokenizer.to(memory_format=torch.channels_last).eval()  # pyright: ignore[reportCallIssue]

    def with_decoder(self, folder: Path) -> "LFQTokenizer":
        """A tokenizer with this one's encoder, on its device, and the float32 decoder of a checkpoint folder.

        The decoder may have been trained further alone, see `check_decoder`, which the caller has asked. Raises
        CheckpointError if the weights can't be read.
        """
        config = LFQTokenizerConfig.load(folder / CONFIG_NAME)
        with torch.device("meta"):
            other = type(self)(config)
        tensors = {name: each for name, each in load_tensors(folder).items() if name.startswith(_DECODER)}
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise CheckpointError(f"{folder}: expected {name} in a floating-point dtype, got {tensor.dtype}")
        other.encoder, other.checkpoint = self.encoder, folder
        device = self.encoder.conv_out.weight.device
        state = {name.removeprefix(_DECODER): tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        other.decoder.load_state_dict(state, assign=True)
        return other.to(memory_format=torch.channels_last).eval()  # pyright: ignore[reportCallIssue]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, each whole or not at all, in the tensors' dtype, without metadata.

        Raises OutputError where the folder can't be written.
        """
        folder = Path(folder)
        write_tensors(folder / WEIGHTS_NAME, self.state_dict())
        write_json(folder / CONFIG_NAME, self.config.to_dict())

    def _check_frames(self, frames: Tensor) -> None:
        expected = (3, *self.image_size)
        if tuple(frames.shape[1:]) != expected or not frames.is_floating_point():
            raise ValueError(
                f"expected floating-point frames of shape (frames, {', '.join(map(str, expected))}), "
                f"got {frames.dtype} of shape {tuple(frames.shape)}"
            )
        if not frames.numel():
            raise ValueError("expected at least one frame, got none")
        low, high = (bound.item() for bound in frames.aminmax())
        # Written so that NaN fails too.
        if not (low >= -1.0 - RANGE_TOLERANCE and high <= 1.0 + RANGE_TOLERANCE):
            raise ValueError(f"expected frames in [-1, 1], got values from {low} to {high}")

    def _check_tokens(self, tokens: Tensor) -> None:
        is_integer = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
        if tuple(tokens.shape[1:]) != (self.rows, self.cols) or not is_integer:
            raise ValueError(
                f"expected integer tokens of shape (frames, {self.rows}, {self.cols}), "
                f"got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        if not tokens.numel():
            raise ValueError("expected the tokens of at least one frame, got none")
        low, high = (bound.item() for bound in tokens.aminmax())
        if low < 0 or high >= self.codebook_size:
            raise ValueError(f"expected token ids in [0, {self.codebook_size}), got ids from {low} to {high}")


def frames_at_once(device: torch.device) -> int:
    """The number of frames that go through the networks together.

    It is 1 on a CPU: twice as fast as 16, whose feature maps do not fit the cache, and a frame's result then does not
    depend on the other frames of the call.
    """
    return 1 if device.type == "cpu" else MAX_FRAMES_AT_ONCE


def load_config(folder: Path) -> LFQTokenizerConfig:
    """Read config.json of a checkpoint folder, and check its weights' names and shapes against it, without loading.

    Raises CheckpointError on a contradiction in config.json, or weights that do not fit it.
    """
    config = LFQTokenizerConfig.load(folder / CONFIG_NAME)
    with torch.device("meta"):
        expected = LFQTokenizer(config).state_dict()
    verify_layout(folder, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    return config


def check_decoder(folder: Path, tokenizer: Path) -> None:
    """Check that `LFQTokenizer.with_decoder(folder)` fits the tokenizer in another folder; no weight is loaded.

    The folder holds config.json, whose `same_tokens_as` names the tokenizer, and weights, of which only `decoder.*` are
    looked at: a whole tokenizer that was trained with `decoder_of`, or its decoder alone.

    Raises CheckpointError if its tokens or sizes are others, or weights are missing.
    """
    ours, config = LFQTokenizerConfig.load(tokenizer / CONFIG_NAME), LFQTokenizerConfig.load(folder / CONFIG_NAME)
    expected, got = tokens_sha256(tokenizer), config.same_tokens_as
    if got != expected:
        raise CheckpointError(
            f"{folder}: same_tokens_as: expected the tokenizer {expected[:12]}, got {got and got[:12]}"
        )
    if config.replace(same_tokens_as=None) != ours.replace(same_tokens_as=None):
        raise CheckpointError(f"{folder / CONFIG_NAME}: expected the sizes of {tokenizer}, got others")
    with torch.device("meta"):
        state = LFQTokenizer(config).state_dict()
    layouts = [
        {name: tuple(shape) for name, shape in layout.items() if name.startswith(_DECODER)}
        for layout in ({name: tensor.shape for name, tensor in state.items()}, read_layout(folder))
    ]
    if layouts[0] != layouts[1]:
        raise CheckpointError(f"{folder}: {layout_difference(*layouts)}")
