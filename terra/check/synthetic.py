"""Checkpoints of random weights with the layout of the published repository: folders, files, shards, names and keys.

    OUTPUT/world_model/ or world_model_v2/           config.json, generation_config.json, 7 shards and their index
    OUTPUT/lfq_tokenizer_B_256/ or ..._256_ema/      config.json, model.safetensors

Use them as `model=terra_v2 model.path=OUTPUT`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terra.errors import ConfigError
from terra.world_model import ARCHITECTURES, LlamaActionConfig
from terra.world_model.published import WORLD_MODELS
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, Layout, write_tensors
from tokenizer.files import write_json

MAX_SHARD_BYTES = 500_000_000
"""Size limit of the published shards, which are filled greedily in the order of the state dict."""

_SPECIAL_TOKEN = 262144

_WORLD_MODEL_CONFIG: dict[str, Any] = {
    # These keys come from the OPT model's configuration and have no effect.
    **{"activation_function": "relu", "do_layer_norm_before": True, "dropout": 0.1, "enable_bias": True},
    **{"layer_norm_elementwise_affine": True, "layerdrop": 0.0, "word_embedding_proj_dim": 2048, "use_text": False},
    **{"action_dim": 3, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": _SPECIAL_TOKEN},
    **{"eos_token_id": _SPECIAL_TOKEN, "hidden_act": "silu", "hidden_size": 2048, "init_std": 0.02},
    **{"initializer_range": 0.02, "intermediate_size": 5632, "llm_model_type": "llama"},
    **{"max_position_embeddings": 14550, "model_type": "llama_action", "num_action_embeddings": 6},
    **{"num_action_tokens": 6, "num_attention_heads": 32, "num_hidden_layers": 22, "num_image_patches": 576},
    **{"num_key_value_heads": 4, "num_spatio_embeddings": 582, "num_temporal_embeddings": 25},
    **{"pad_token_id": _SPECIAL_TOKEN, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.39.3", "use_cache": True, "vocab_size": 262145},
}

_TOKENIZER_CONFIG: dict[str, Any] = {
    "auto_map": {
        "AutoConfig": "configuration_lfq_tokenizer.LFQTokenizerConfig",
        "AutoModel": "modeling_lfq_tokenizer.LFQTokenizer",
    },
    "encoder_decoder_config": {
        **{"ch": 128, "ch_mult": [1, 1, 2, 2, 4], "in_channels": 3},
        **{"num_res_blocks": 2, "out_ch": 3, "z_channels": 18},
    },
    "model_type": "lfq_tokenizer",
    "quantizer_config": {
        **{"batch_maximization_weight": 1.0, "codebook_size": 262144, "dim": 18, "sample_minimization_weight": 1.0},
    },
    "transformers_version": "4.39.3",
}


def world_model_config(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json of the published `world_model` or `world_model_v2`, with some keys changed.

    With another vocabulary size, the special token is its last id.
    """
    architecture = WORLD_MODELS[name].architecture
    # world_model_v2 names the repository of its remote code; the remote code is never fetched.
    home = "turing-motors/Terra--" if name == "world_model_v2" else ""
    remote = {
        "AutoConfig": f"{home}configuration_llama_action.LlamaActionConfig",
        "AutoModel": f"{home}modeling_llama_action.{architecture}",
    }
    special = changes.get("vocab_size", _SPECIAL_TOKEN + 1) - 1
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), special)
    content = _WORLD_MODEL_CONFIG | {"architectures": [architecture], "auto_map": remote} | tokens | dict(changes)
    return dict(sorted(content.items()))


def tokenizer_config(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the published tokenizers' config.json, with some keys (also nested ones) changed."""
    content = _TOKENIZER_CONFIG | dict(changes)
    for part in ("encoder_decoder_config", "quantizer_config"):
        content[part] = _TOKENIZER_CONFIG[part] | content[part]
    return content


def world_model_layout(content: Mapping[str, Any]) -> Layout:
    """Names and shapes of the tensors of a world model with this config.json, in the order of its state dict."""
    with torch.device("meta"):
        model = ARCHITECTURES[content["architectures"][0]](LlamaActionConfig.from_dict(dict(content)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def plan_shards(num_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Assign tensors to shards of at most `max_bytes`, in order; a larger tensor has a shard of its own."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in num_bytes.items():
        if not shards or filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_index(num_bytes: Mapping[str, int], max_bytes: int) -> dict[str, Any]:
    """The content of model.safetensors.index.json, as transformers writes it."""
    shards = plan_shards(num_bytes, max_bytes)
    weight_map = {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
    return {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": dict(sorted(weight_map.items()))}


def write_world_model(
    folder: Path, content: Mapping[str, Any], *, max_shard_bytes: int = MAX_SHARD_BYTES, seed: int = 0
) -> None:
    """Write a world model of random bfloat16 weights, with one shard in memory at a time.

    Raises:
        CheckpointError: `content` contradicts itself.
        OutputError: the folder can't be written.
    """
    layout = world_model_layout(content)
    num_bytes = {name: 2 * torch.Size(shape).numel() for name, shape in layout.items()}
    index = shard_index(num_bytes, max_shard_bytes)
    generator = torch.Generator().manual_seed(seed)
    for names in plan_shards(num_bytes, max_shard_bytes):
        shard = {name: _random(name, layout[name], content["initializer_range"], generator) for name in names}
        write_tensors(folder / index["weight_map"][names[0]], shard, {"format": "pt"})
    write_json(folder / INDEX_NAME, index)
    tokens = {name: content[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    version = {"transformers_version": content["transformers_version"]}
    write_json(folder / "generation_config.json", {"_from_model_config": True} | tokens | version)
    write_json(folder / CONFIG_NAME, content)


def write_tokenizer(folder: Path, content: Mapping[str, Any], *, seed: int = 0) -> None:
    """Write a tokenizer of random float32 weights.

    Raises:
        CheckpointError: `content` contradicts itself.
        OutputError: the folder can't be written.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = LFQTokenizer(LFQTokenizerConfig.from_dict(dict(content)))
    write_tensors(folder / WEIGHTS_NAME, tokenizer.state_dict(), {"format": "pt"})
    write_json(folder / CONFIG_NAME, content)


def write_repository(
    folder: Path,
    name: str,
    *,
    world_model: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    seed: int = 0,
) -> None:
    """Write the world model `name` and its tokenizer, with some keys of their config.json changed, into `folder`.

    Raises:
        ConfigError: no such world model.
        CheckpointError, OutputError: see `write_world_model`.
    """
    if name not in WORLD_MODELS:
        raise ConfigError(f"world model: expected one of {', '.join(WORLD_MODELS)}, got {name!r}")
    content = world_model_config(name, world_model)
    write_tokenizer(folder / WORLD_MODELS[name].tokenizer, tokenizer_config(tokenizer), seed=seed)
    write_world_model(folder / name, content, max_shard_bytes=max_shard_bytes, seed=seed)


def _random(name: str, shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, std, generator=generator)
