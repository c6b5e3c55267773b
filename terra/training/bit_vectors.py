"""Bit vectors: a reparameterization of the token embeddings and the lm head in training (`bit_vectors=true`).

An id of the tokenizer is a code: each bit is the sign of one channel (`tokenizer.quantizer`), so the decoder sees ids
that differ in one bit as vectors that differ in one channel. An embedding table and a lm head of a row for each id
treat all ids as unrelated. With bit vectors each row is the sum of a part of its own and a factorized part that ids
share, a low-rank term with one vector for each bit:

    row(id) = own(id) + sum over the bits of the id: sign x vector(bit)

So each token that is seen trains the vectors of all its bits, besides its own part. The two tables share nothing with
each other. When the training of a new world model has ended, `merge_bit_vectors` replaces the tables by their sums, so
stored weights have the names, shapes and meaning that they have without bit vectors; only the state of an unfinished
run holds the parts.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM
from tokenizer.quantizer import signs_from_tokens

_BIT_VECTORS_VARIANCE = 0.81  # share of a row's initial variance; other shares were not tried


class _BitVectors(nn.Module):
    """Adds to each row of a table the vectors of its id's bits; the rows after the `num_ids` image ids have none."""

    signs: Float[Tensor, "rows bits"]

    def __init__(self, table: Float[Tensor, "rows width"], num_ids: int) -> None:
        super().__init__()
        bits, std = (num_ids - 1).bit_length(), table.std().item()
        signs = torch.zeros(len(table), bits)
        ids = torch.arange(num_ids)[:, None, None]
        signs[:num_ids] = signs_from_tokens(ids, bits, "lsb_first").flatten(1)  # the order of bits does not matter
        self.register_buffer("signs", signs, persistent=False)
        self.vectors = nn.Parameter(std * math.sqrt(_BIT_VECTORS_VARIANCE / bits) * torch.randn(bits, table.shape[1]))

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
        table.mul_(math.sqrt(1 - _BIT_VECTORS_VARIANCE))
        parametrize.register_parametrization(module, "weight", vectors)


def merge_bit_vectors(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> None:
    """Replace each table that has bit vectors by its sums."""
    for module in _tables(model):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _tables(model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM) -> tuple[nn.Embedding, nn.Linear]:
    return model.model.embed_tokens, model.lm_head
