"""Analysis of the bits of tokens: flipping them, decoding without some of them, their importance and correlation."""

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from terra.metrics.frames import psnr
from tokenizer import Frames, LFQTokenizer, QuantizerConfig, TokenGrid
from tokenizer.quantizer import signs_from_tokens, tokens_from_signs


def flip_bit(tokens: TokenGrid, channel: int, quantizer: QuantizerConfig) -> TokenGrid:
    """Flip the bit of `channel` (from 0) in every token. Raises ValueError for no such channel."""
    _check_channels([channel], quantizer)
    signs = signs_from_tokens(tokens, quantizer.dim, quantizer.bit_order)
    signs[:, channel] *= -1
    return tokens_from_signs(signs, quantizer.bit_order)


@torch.no_grad()
def decode_bits(tokenizer: LFQTokenizer, tokens: TokenGrid, channels: Collection[int]) -> Frames:
    """Decode the bits of `channels` alone to frames in [-1, 1]; the other channels are 0, halfway between -1 and 1.

    Raises ValueError for no such channel.
    """
    quantizer = tokenizer.config.quantizer_config
    _check_channels(channels, quantizer)
    weight = tokenizer.decoder.conv_out.weight
    signs = signs_from_tokens(tokens.to(weight.device), quantizer.dim, quantizer.bit_order)
    for channel in set(range(quantizer.dim)) - set(channels):
        signs[:, channel] = 0.0
    return tokenizer.decoder(signs.to(weight.dtype)).float().clamp(-1.0, 1.0)


def bit_importance(tokenizer: LFQTokenizer, frames: Frames) -> Float[Tensor, " dim"]:
    """The loss of PSNR in dB (mean over frames) when a channel's bit is flipped in all tokens, for each channel."""
    tokens, quantizer = tokenizer.encode(frames), tokenizer.config.quantizer_config
    flipped = [tokenizer.decode(flip_bit(tokens, channel, quantizer)) for channel in range(quantizer.dim)]
    kept = psnr(tokenizer.decode(tokens), frames).mean()
    return kept - torch.stack([psnr(each, frames).mean() for each in flipped])


def bit_correlation(tokens: TokenGrid, quantizer: QuantizerConfig) -> Float[Tensor, "dim dim"]:
    """Pearson's correlation of each pair of channels' bits over the tokens; an ideal code has 0 off the diagonal."""
    signs = signs_from_tokens(tokens, quantizer.dim, quantizer.bit_order)
    return signs.transpose(0, 1).flatten(1).corrcoef()


def _check_channels(channels: Collection[int], quantizer: QuantizerConfig) -> None:
    wrong = [channel for channel in channels if not 0 <= channel < quantizer.dim]
    if wrong:
        raise ValueError(f"channel: expected 0 to {quantizer.dim - 1}, got {wrong[0]}")
