"""Conversion of the tokenizers of Open-MAGVIT2 and 1X (the "B" nets) from PyTorch Lightning's checkpoints.

Their `state_dict` has the nets as `encoder.*` and `decoder.*`, like Terra's; the losses' networks as `loss.*`; and the
moving averages of all tensors as `model_ema.<the tensor's name without its dots>`, beside `model_ema.decay` and
`model_ema.num_updates`. Lookup-free quantization has no weights.

The weights do not contain the order of an id's bits, which the code decides: Open-MAGVIT2 until August 2024 and 1X take
channel 0 as the most significant bit, Open-MAGVIT2 since September 2024 as the least significant bit.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tokenizer.checkpoint import Layout, layout_difference
from tokenizer.config import EncoderDecoderConfig, LFQTokenizerConfig, QuantizerConfig
from tokenizer.errors import CheckpointError
from tokenizer.model import LFQTokenizer

_NETS = ("encoder.", "decoder.")
_AVERAGES = "model_ema."
_LEFT_OUT = ("loss.", _AVERAGES)


def read_state_dict(path: Path, key: str = "state_dict") -> dict[str, Tensor]:
    """Read the tensors under `key` of a file that `torch.save` wrote, without executing anything in it.

    Raises:
        CheckpointError: the file is missing or damaged, its pickle names anything but tensors and plain values, or it
            has no tensors under `key`.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a checkpoint file, found none")
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise CheckpointError(f"{path}: expected weights, got a Git LFS pointer")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path}: expected a whole file of torch.save (a zip archive), got another or a part of it"
        )
    try:
        # This call reads the pickle's instructions without executing them.
        if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            raise CheckpointError(
                f"{path}: expected tensors and plain values, got a pickle that names {', '.join(sorted(foreign))}: "
                "refused, nothing of it was executed"
            )
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: expected a file of torch.save, got: {reason}") from None
    state = content.get(key) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path}: expected tensors under {key!r}, found none")
    return state


def convert_state_dict(
    state: Mapping[str, Tensor],
    *,
    weights: Literal["live", "ema"],
    image_size: tuple[int, int],
    bit_order: Literal["msb_first", "lsb_first"],
) -> LFQTokenizer:
    """Build a tokenizer from a state dict; its widths and depth follow from the shapes.

    Args:
        state: the tensors that `read_state_dict` returned.
        weights: "live" takes the weights of the last step, "ema" their moving average.
        image_size: (height, width) in pixels; the nets are convolutional and work at any size.
        bit_order: order of an id's bits, see the module's docstring.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape; there are no averages; sizes do not fit.
    """
    strange = sorted(name for name in state if not name.startswith((*_NETS, *_LEFT_OUT)))
    if strange:
        raise CheckpointError(
            f"expected encoder.*, decoder.*, loss.* and model_ema.* only, got {len(strange)} others, {strange[0]} first"
        )
    live = {name: tensor for name, tensor in state.items() if name.startswith(_NETS)}
    layout = {name: tuple(tensor.shape) for name, tensor in live.items()}
    nets = _architecture(layout)
    config = LFQTokenizerConfig(
        encoder_decoder_config=nets,
        quantizer_config=QuantizerConfig(dim=nets.z_channels, codebook_size=2**nets.z_channels, bit_order=bit_order),
        image_size=image_size,
    )
    with torch.device("meta"):
        tokenizer = LFQTokenizer(config)
    expected = {name: tuple(tensor.shape) for name, tensor in tokenizer.state_dict().items()}
    chosen = live if weights == "live" else _averages(state, expected)
    found = {name: tuple(tensor.shape) for name, tensor in chosen.items()}
    if found != expected:
        raise CheckpointError(layout_difference(expected, found))
    tokenizer.load_state_dict({name: tensor.float() for name, tensor in chosen.items()}, assign=True)
    return tokenizer.eval()


def _architecture(layout: Layout) -> EncoderDecoderConfig:
    """Derive widths and depth from the shapes of the encoder; the caller compares all other shapes."""

    def children(prefix: str) -> int:
        return len({name.removeprefix(prefix).partition(".")[0] for name in layout if name.startswith(prefix)})

    try:
        ch = layout["encoder.conv_in.weight"][0]
        widths = [layout[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(children("encoder.down."))]
        z_channels = layout["encoder.conv_out.weight"][0]
    except LookupError:
        raise CheckpointError("expected the nets of Open-MAGVIT2's B tokenizer, found no such encoder") from None
    return EncoderDecoderConfig(
        ch=ch,
        z_channels=z_channels,
        num_res_blocks=children("encoder.mid_block."),
        ch_mult=tuple(width // ch for width in widths),
    )


def _averages(state: Mapping[str, Tensor], names: Layout) -> dict[str, Tensor]:
    keys = {name: _AVERAGES + name.replace(".", "") for name in names}
    missing = [key for key in keys.values() if key not in state]
    if missing:
        raise CheckpointError(
            f"expected the moving average of {len(keys)} tensors, {len(missing)} are missing, {missing[0]} first: "
            "weights=live takes those of the last step"
        )
    return {name: state[key] for name, key in keys.items()}
