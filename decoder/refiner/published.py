"""Conversion of the published refiner (turing-motors/Terra, video_refiner/refiner_model.pt) to diffusers' names.

The file is a state dict with the names of Stability AI's generative-models, which DeepSpeed saved under "module". The
published code (turingmotors/ACT-Bench, Terra/video_refiner) uses these tensors:

    model.diffusion_model.*                       -> unet.*, Stable Video Diffusion's network
    conditioner.embedders.3.encoder.encoder.*     -> vae.encoder.*, with .quant_conv.*: encodes the frames to be refined
    first_stage_model.decoder.*                   -> vae.decoder.*, the temporal decoder

Frames do not depend on the other tensors, which are left out: first_stage_model.encoder.* (used in training), the
conditioner's decoder, the time embedding of clean anchor frames (there are none), and token_decoder.* (the tokenizer;
the world model's own tokenizer replaces it). The network attends to a vector of 0, and its time ids are [0, 9, 127].

The published guidance from 1.5 to 3 has no effect: the code computes the unconditional prediction from the same
condition (`force_uc_zero_embeddings=[]`), so both predictions are equal; `guidance` is therefore 1, at half the work.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from decoder.refiner.config import RefinerConfig
from decoder.refiner.model import Refiner
from tokenizer.checkpoint import layout_difference
from tokenizer.errors import CheckpointError

PUBLISHED = RefinerConfig(
    image_size=(384, 640),
    unet={},
    vae={
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "layers_per_block": 2,
    },
)

_PREFIX = "_forward_module."  # DeepSpeed's prefix; the published code ignores tensors without it
_UNET = "model.diffusion_model."
_ENCODER = "conditioner.embedders.3.encoder."
_DECODER = "first_stage_model.decoder."
_LEFT_OUT = (
    *(f"{_UNET}cond_time_stack_embed.", f"{_ENCODER}decoder.", f"{_ENCODER}post_quant_conv."),
    *("first_stage_model.encoder.", "token_decoder."),
)

_UNET_ENDS = {
    "time_embed.0.": "time_embedding.linear_1.",
    "time_embed.2.": "time_embedding.linear_2.",
    "label_emb.0.0.": "add_embedding.linear_1.",
    "label_emb.0.2.": "add_embedding.linear_2.",
    "input_blocks.0.0.": "conv_in.",
    "out.0.": "conv_norm_out.",
    "out.2.": "conv_out.",
}
# Parts of the UNet's residual blocks (spatial and temporal), and of the VAE's temporal residual blocks.
_RESIDUAL = {
    "in_layers.0.": "norm1.",
    "in_layers.2.": "conv1.",
    "emb_layers.1.": "time_emb_proj.",
    "out_layers.0.": "norm2.",
    "out_layers.3.": "conv2.",
    "skip_connection.": "conv_shortcut.",
}
_ATTENTION = {
    "time_stack.": "temporal_transformer_blocks.",
    "time_pos_embed.0.": "time_pos_embed.linear_1.",
    "time_pos_embed.2.": "time_pos_embed.linear_2.",
}
_VAE_ENDS = {"norm_out.": "conv_norm_out.", "conv_out.time_mix_conv.": "time_conv_out."}
_VAE_ATTENTION = {"norm.": "group_norm.", "q.": "to_q.", "k.": "to_k.", "v.": "to_v.", "proj_out.": "to_out.0."}


def strip_prefix(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Remove DeepSpeed's prefix from names; also return the names without it, which do not belong to the model.

    A state dict in which no name has the prefix is returned unchanged.
    """
    if not any(_PREFIX in name for name in state):
        return dict(state), []
    others = [name for name in state if _PREFIX not in name]
    return {name.replace(_PREFIX, ""): tensor for name, tensor in state.items() if _PREFIX in name}, others


def convert_state_dict(state: Mapping[str, Tensor], config: RefinerConfig) -> tuple[Refiner, list[str]]:
    """Build the refiner, with tensors of their stored types; also return the names of tensors that it doesn't need.

    Args:
        state: see `strip_prefix`.
        config: `PUBLISHED`, or the same architecture with other numbers.

    Raises:
        CheckpointError: a name that the published code doesn't have, or a tensor missing or of another shape.
    """
    with torch.device("meta"):
        refiner = Refiner(config)
    expected = {name: tuple(tensor.shape) for name, tensor in refiner.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    left_out, strange = [], []
    for name, tensor in state.items():
        ours = None if name.startswith(_LEFT_OUT) else _rename(name, config)
        if name.startswith(_LEFT_OUT):
            left_out.append(name)
        elif ours is None:
            strange.append(name)
        else:
            # The published VAE's attention uses 1x1 convolutions in place of linear layers.
            linear = len(expected.get(ours, ())) == 2 and tensor.ndim == 4
            tensors[ours] = tensor[:, :, 0, 0] if linear else tensor
    if strange:
        raise CheckpointError(f"expected the names of a video refiner, got {len(strange)} others, {strange[0]} first")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise CheckpointError(layout_difference(expected, found))
    refiner.load_state_dict(tensors, assign=True)
    return refiner.eval().requires_grad_(False), left_out


def _rename(name: str, config: RefinerConfig) -> str | None:
    """Diffusers' name for a published name, or None if it has no known form; wrong indices show up in the layout."""
    if name.startswith(_UNET):
        renamed = _rename_unet(name.removeprefix(_UNET), config.unet.get("layers_per_block", 2))
        return renamed and f"unet.{renamed}"
    if name.startswith(_DECODER):
        levels = len(config.vae["block_out_channels"])
        return f"vae.decoder.{_rename_vae(name.removeprefix(_DECODER), levels, temporal=True)}"
    if name.startswith(f"{_ENCODER}encoder."):
        return f"vae.encoder.{_rename_vae(name.removeprefix(f'{_ENCODER}encoder.'), 0, temporal=False)}"
    if name.startswith(f"{_ENCODER}quant_conv."):
        return f"vae.{name.removeprefix(_ENCODER)}"
    return None


def _rename_unet(name: str, layers: int) -> str | None:
    for theirs, ours in _UNET_ENDS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    match = re.fullmatch(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(.+)", name)
    if match is None:
        return None
    side, number, rest = match[1], int(match[2]), match[3]
    if side == "middle_block" and number == 1:
        return f"mid_block.attentions.0.{_replace_start(rest, _ATTENTION)}"
    if side == "middle_block":
        return f"mid_block.{_residual(number // 2, rest)}"
    # An input level has its layers and then a block with the downsampler; an output level has one layer more.
    level, layer = divmod(number - 1 if side == "input_blocks" else number, layers + 1)
    block = f"{'down' if side == 'input_blocks' else 'up'}_blocks.{level}"
    part, _, rest = rest.partition(".")
    if rest.startswith("op."):
        return f"{block}.downsamplers.0.conv.{rest.removeprefix('op.')}"
    if rest.startswith("conv."):
        return f"{block}.upsamplers.0.{rest}"
    if part == "0":
        return f"{block}.{_residual(layer, rest)}"
    return f"{block}.attentions.{layer}.{_replace_start(rest, _ATTENTION)}"


def _residual(number: int, rest: str) -> str:
    """Rename a part of a double residual block: the spatial block, the temporal one (`time_stack`), their mixing."""
    block = f"resnets.{number}"
    if rest.startswith("time_mixer."):
        return f"{block}.{rest}"
    kind = "temporal" if rest.startswith("time_stack.") else "spatial"
    return f"{block}.{kind}_res_block.{_replace_start(rest.removeprefix('time_stack.'), _RESIDUAL)}"


def _rename_vae(name: str, levels: int, *, temporal: bool) -> str:
    """Rename a part of the VAE's encoder or temporal decoder; diffusers counts levels from the smallest picture."""
    if match := re.fullmatch(r"mid\.attn_1\.(.+)", name):
        return f"mid_block.attentions.0.{_replace_start(match[1], _VAE_ATTENTION)}"
    if match := re.fullmatch(r"mid\.block_([12])\.(.+)", name):
        return f"mid_block.resnets.{int(match[1]) - 1}.{_vae_residual(match[2], temporal=temporal)}"
    if match := re.fullmatch(r"(down|up)\.(\d+)\.(.+)", name):
        level = int(match[2]) if match[1] == "down" else levels - 1 - int(match[2])
        block, rest = f"{match[1]}_blocks.{level}", match[3]
        if sampler := re.fullmatch(r"(down|up)sample\.(.+)", rest):
            return f"{block}.{sampler[1]}samplers.0.{sampler[2]}"
        if inner := re.fullmatch(r"block\.(\d+)\.(.+)", rest):
            return f"{block}.resnets.{inner[1]}.{_vae_residual(inner[2], temporal=temporal)}"
    return _replace_start(name, _VAE_ENDS)


def _vae_residual(rest: str, *, temporal: bool) -> str:
    rest = rest.replace("nin_shortcut.", "conv_shortcut.")
    if not temporal:
        return rest
    if rest == "mix_factor":
        return "time_mixer.mix_factor"
    if rest.startswith("time_stack."):
        return f"temporal_res_block.{_replace_start(rest.removeprefix('time_stack.'), _RESIDUAL)}"
    return f"spatial_res_block.{rest}"


def _replace_start(name: str, replacements: Mapping[str, str]) -> str:
    for theirs, ours in replacements.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
