"""Small random models for tests: the real classes with small numbers."""

import os
from pathlib import Path
from typing import Any

import torch

from terra.world_model import LlamaActionConfig, LlamaActionForCausalLM, LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizerConfig

ROWS, COLS = 3, 4

DEVICE = os.environ.get("TERRA_TEST_DEVICE", "cpu")
"""The device on which engines are tested, from TERRA_TEST_DEVICE: "cpu" or "cuda"."""

FEW_BLOCKS = {"num_gpu_blocks_override": 1024}
"""Arguments for vLLM whose KV cache suffices for tiny models; filling and freeing its usual gigabyte takes 2 s."""


def tiny_config(**changes: Any) -> LlamaActionConfig:
    settings: dict[str, Any] = {
        "vocab_size": 65,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_image_patches": ROWS * COLS,
        "num_spatio_embeddings": ROWS * COLS + 6,
        "num_temporal_embeddings": 8,
        "max_position_embeddings": 8 * (ROWS * COLS + 6),
        "dtype": "float32",
    }
    return LlamaActionConfig(**(settings | changes))


def save_tiny(
    folder: Path, architecture: type[LlamaActionForCausalLM | LlamaActionV2ForCausalLM], **changes: Any
) -> Path:
    torch.manual_seed(0)
    model = architecture(tiny_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that logits differ clearly, and greedy rollouts visit many tokens.
            parameter.normal_(0.0, 0.1) if parameter.ndim == 2 else None
    model.save_pretrained(folder)
    return folder


def tiny_tokenizer_config() -> LFQTokenizerConfig:
    return LFQTokenizerConfig.from_dict(
        {
            "model_type": "lfq_tokenizer",
            "encoder_decoder_config": {
                "ch": 32,
                "in_channels": 3,
                "out_ch": 3,
                "z_channels": 6,
                "num_res_blocks": 1,
                "ch_mult": [1, 1, 1],
            },
            "quantizer_config": {
                "dim": 6,
                "codebook_size": 64,
                "batch_maximization_weight": 1.0,
                "sample_minimization_weight": 1.0,
            },
            "image_size": [4 * ROWS, 4 * COLS],
        },
        "tiny",
    )
