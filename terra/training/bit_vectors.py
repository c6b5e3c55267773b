"""Bit vectors: in training, ids with the same bits learn from each other.

An id of the tokenizer is a code, each bit the sign of a channel (`tokenizer.quantizer`), so ids that differ in one bit
decode to nearly the same picture. A table with a row of its own for each id knows nothing of that: what it learns of an
id holds for that id alone. With bit vectors a row is

    row(id) = own(id) + sum over the bits of the id: sign x vector(bit)

in both the embedding table and the lm head, and each token that is seen trains the vectors of all its bits. The sums
replace the tables before the weights are stored, so a checkpoint is the same with and without bit vectors.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

_OF_THE_BITS = 0.81  # of a row's variance at the start


class _BitVectors(nn.Module):
    """Adds to each row of a table the vectors of its id's bits; rows behind the `num_ids` image ids have none."""

    signs: Float[Tensor, "rows bits"]

    def __init__(self, table: Float[Tensor, "rows width"], num_ids: int) -> None:
        super().__init__()
        bits, std = (num_ids - 1).bit_length(), table.std().item()
        ids = torch.arange(num_ids)[:, None]
        signs = torch.zeros(len(table), bits)
        signs[:num_ids] = 2.0 * (ids >> torch.arange(bits) & 1) - 1.0
        self.register_buffer("signs", signs, persistent=False)
        self.vectors = nn.Parameter(std * math.sqrt(_OF_THE_BITS / bits) * torch.randn(bits, table.shape[1]))

    def forward(self, own: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        return own + self.signs @ self.vectors


def add_bit_vectors(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
    """Give the embedding table and the lm head of a model with random weights bit vectors, from torch's generator.

    A row has the same variance as before.
    """
    for module in _tables(model):
        table = module.weight.detach()
        vectors = _BitVectors(table, model.config.image_vocab_size)
        table.mul_(math.sqrt(1 - _OF_THE_BITS))
        parametrize.register_parametrization(module, "weight", vectors)


def merge_bit_vectors(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
    """Replace each table by its sums, if it has bit vectors."""
    for module in _tables(model):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _tables(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> tuple[nn.Embedding, nn.Linear]:
    return model.model.embed_tokens, model.lm_head
