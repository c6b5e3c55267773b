"""Bit vectors: while a new world model is trained, ids that have bits in common learn together (`bit_vectors=true`).

An id of the tokenizer is a code: each bit is the sign of one channel (`tokenizer.quantizer`), so the decoder sees ids
that differ in one bit as vectors that differ in one channel. The embedding table and the lm head have a row for each
id, and each row would have to find that out by itself. With bit vectors a row of such a table is trained as a sum,

    row(id) = own(id) + sum over the bits of the id: sign x vector(bit),

and each token that is seen trains the vectors of all its bits, besides its own part. Each of the two tables has own
parts and vectors of its own. When the training has ended, `merge_bit_vectors` replaces the tables by their sums, so
stored weights have the names, shapes and meaning that they have without bit vectors; only the state of an unfinished
run holds the parts.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

_OF_THE_BITS = 0.81  # of a row's variance at the start; other shares were not tried


class _BitVectors(nn.Module):
    """Adds to each row of a table the vectors of its id's bits; the rows after the `num_ids` image ids have none."""

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
        # In float32 in a training in bfloat16, too, so that what is stored is what was trained.
        with torch.autocast(own.device.type, enabled=False):
            return own + self.signs @ self.vectors


def add_bit_vectors(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
    """Give both tables of a model with random weights bit vectors, drawn from torch's global generator.

    The row of an image id has the same variance as before.
    """
    for module in _tables(model):
        table = module.weight.detach()
        vectors = _BitVectors(table, model.config.image_vocab_size)
        table.mul_(math.sqrt(1 - _OF_THE_BITS))
        parametrize.register_parametrization(module, "weight", vectors)


def merge_bit_vectors(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
    """Replace each table that has bit vectors by its sums."""
    for module in _tables(model):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _tables(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> tuple[nn.Embedding, nn.Linear]:
    return model.model.embed_tokens, model.lm_head
