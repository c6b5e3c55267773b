"""Projection of action vectors into the model's embedding space."""

from torch import nn


def linear_projection(action_dim: int, hidden_size: int) -> nn.Module:
    """Terra v1: one linear layer (parameters `weight`, `bias`)."""
    return nn.Linear(action_dim, hidden_size)


def mlp_projection(action_dim: int, hidden_size: int) -> nn.Module:
    """Terra v2: three linear layers with ReLU between (parameters `0.*`, `2.*`, `4.*`)."""
    return nn.Sequential(
        nn.Linear(action_dim, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
    )
