"""The optimizer of a training: AdamW, or AdamW and, for the weight matrices of a transformer's layers, Muon."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from terra.errors import ConfigError
from terra.training.settings import LoopConfig

_MATRIX = re.compile(r"\blayers\.\d+\..*weight$")  # not embeddings and the lm head


class Optimizers:
    """One or two optimizers, each of some of a network's parameters, as one.

    Attributes:
        param_groups: those of all optimizers.
        state: the optimizers' own state of each parameter, a dictionary that may be written into.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: dict[Tensor, dict[str, Any]] = {
            parameter: optimizer.state[parameter]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @classmethod
    def of(cls, parameters: dict[str, nn.Parameter], config: LoopConfig) -> "Optimizers":
        """The optimizers of a network's trained parameters, by name.

        Raises:
            ConfigError: `config.muon` for a network without transformer layers, or with a torch that has no Muon.
        """
        of_muon = {} if config.muon is None else _matrices(parameters)
        rest = [parameter for name, parameter in parameters.items() if name not in of_muon]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = rest[0].device.type == "cuda"
        adamw = AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2), fused=fused)
        if config.muon is None:
            return cls(adamw)
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"muon: expected torch 2.9 or later, got {torch.__version__}")
        # Both multiply a weight by 1 - learning rate x decay in each step: Muon's higher rate takes a lower decay.
        muon = torch.optim.Muon(
            [{"params": list(of_muon.values()), "ratio": config.muon}],
            weight_decay=config.weight_decay / config.muon,
            adjust_lr_fn="match_rms_adamw",
        )
        return cls(adamw, muon)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set AdamW's learning rate of the next update; Muon's is `muon` times as high."""
        for group in self.param_groups:
            group["lr"] = learning_rate * group.get("ratio", 1.0)

    def step(self) -> None:
        """Update the parameters."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)


def _matrices(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    found = {name: each for name, each in parameters.items() if each.ndim == 2 and _MATRIX.search(name)}
    if not found:
        raise ConfigError("muon: expected a network with transformer layers, got none")
    return found
