"""A small random refiner for tests: diffusers' real networks with small numbers."""

import torch

from decoder.refiner import Refiner, RefinerConfig

SIZE = (12, 20)


def tiny_refiner_config(**changes) -> RefinerConfig:
    unet = {
        "in_channels": 8,
        "out_channels": 4,
        "block_out_channels": (32, 32),
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "num_attention_heads": (1, 2),
        "cross_attention_dim": 8,
        "layers_per_block": 1,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
    }
    vae = {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 2}
    values = {"image_size": SIZE, "unet": unet, "vae": vae | {"latent_channels": 4}, "num_frames": 5, "overlap": 2}
    return RefinerConfig(**(values | {"num_steps": 3} | changes))


def tiny_refiner(seed: int = 0, **changes) -> Refiner:
    """A refiner with random weights, so large that frames clearly influence each other."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        refiner = Refiner(tiny_refiner_config(**changes))
    return refiner.eval().requires_grad_(False)
