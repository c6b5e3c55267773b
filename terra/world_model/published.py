"""Facts about Terra's published checkpoints: names, counts, hashes, and each world model's tokenizer.

Keys are the subfolders of turing-motors/Terra on the Hugging Face Hub. Hashes are the SHA-256 of its LFS files. Of v2
(the weights of 2024-12-23) three hashes out of seven are known, of the averaged tokenizer none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishedTokenizer:
    """A published tokenizer.

    `plain_sha256` is the hash of its safetensors file before a metadata entry was added, which changed no weight; the
    hash of the present file is not known.
    """

    plain_sha256: str | None = None
    num_tensors: int = 175
    num_parameters: int = 65_490_709


@dataclass(frozen=True)
class PublishedWorldModel:
    """A published world model, its class by name, and the tokenizer that it was trained with."""

    architecture: str
    tokenizer: str
    num_tensors: int
    num_parameters: int
    sha256: Mapping[str, str] = field(default_factory=dict)


TOKENIZERS = {
    "lfq_tokenizer_B_256": PublishedTokenizer(
        plain_sha256="7ca41964588806643b616b7d6f62bc7d400f6b0833fff53548f4b3d82d671ddb"
    ),
    "lfq_tokenizer_B_256_ema": PublishedTokenizer(),
}

WORLD_MODELS = {
    "world_model": PublishedWorldModel(
        architecture="LlamaActionForCausalLM",
        tokenizer="lfq_tokenizer_B_256",
        num_tensors=205,
        num_parameters=2_043_973_632,
        sha256={
            "model-00001-of-00007.safetensors": "1ed913705e85eb35a3901f9f9c0e9c4cf9eb647fb8470bfc8bde288b19fa4328",
            "model-00002-of-00007.safetensors": "ef06ad46d81b8580cd47d4f3c7f057aa6864df228bec6b1fcdaec882ab635d34",
            "model-00003-of-00007.safetensors": "cbe7592f5db015bcf81c8e18758ce80f02651c460b5cbfa7f01bef01f18c5ce5",
            "model-00004-of-00007.safetensors": "6ae6ff974888422526faf5852dc3f32ea431b171878a4f4dad8706f172e10048",
            "model-00005-of-00007.safetensors": "70fe07feb2b4cf49676760217a1a118afbd6f48adeda7b5801e5d9012db1ac9e",
            "model-00006-of-00007.safetensors": "b20863ba764ba74ef3adf304bad3cd83ffd7e91d7de5159c47fba1ac384e12a2",
            "model-00007-of-00007.safetensors": "7e0365cf135dfc43c33014c5bce160c2876ece40d783a2f18b80980f516448cd",
        },
    ),
    "world_model_v2": PublishedWorldModel(
        architecture="LlamaActionV2ForCausalLM",
        tokenizer="lfq_tokenizer_B_256_ema",
        num_tensors=209,
        num_parameters=2_052_366_336,
        sha256={
            "model-00001-of-00007.safetensors": "eb72d9066fcf0e12835a4231997cb407204591f81ed6fc0a5ab04c95e18ddf5d",
            "model-00003-of-00007.safetensors": "1f2b8bdbc37cdc2b5944a9b1d2f7a15460259fa8ff3c7151d0d7abc847ccd2ae",
            "model-00006-of-00007.safetensors": "c169fed5b0d8f149ad768ffc966df26004e8a87720b4ef6861d95703855f47b0",
        },
    ),
}


LEFTOVERS = frozenset(
    {
        "activation_function",
        "do_layer_norm_before",
        "dropout",
        "enable_bias",
        "init_std",
        "layer_norm_elementwise_affine",
    }
    | {"layerdrop", "llm_model_type", "num_action_embeddings", "use_text", "word_embedding_proj_dim"}
)
"""Keys of the published world models' config.json that say nothing about them.

Most are OPT's; `num_action_embeddings` repeats `num_action_tokens`.
"""


def tokenizer_of(architecture: str) -> str | None:
    """Name of the tokenizer that the published world model of this class was trained with."""
    return next((model.tokenizer for model in WORLD_MODELS.values() if model.architecture == architecture), None)
