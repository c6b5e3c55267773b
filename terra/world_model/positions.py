"""Learned factorized positions: one embedding for the position within a block, one for the frame within the window."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class SpatioTemporalPositions(nn.Module):
    """Adds `spatio[position % block] + temporal[position // block]`, in addition to the rotary positions.

    Positions count every image token and action slot of the window from 0. Parameter names are the published ones.
    """

    def __init__(self, num_spatio: int, num_temporal: int, hidden_size: int) -> None:
        super().__init__()
        self.spatio_embeddings = nn.Embedding(num_spatio, hidden_size)
        self.temporal_embeddings = nn.Embedding(num_temporal, hidden_size)

    def forward(self, positions: Int[Tensor, "*length"]) -> Float[Tensor, "*length hidden"]:
        """Embeddings of positions; a position past the window takes the last frame's (padding of CUDA graphs)."""
        block, frames = self.spatio_embeddings.num_embeddings, self.temporal_embeddings.num_embeddings
        frame = torch.clamp(positions // block, max=frames - 1)
        return self.spatio_embeddings(positions % block) + self.temporal_embeddings(frame)
