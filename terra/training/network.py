"""A network under training: the plain module, the wrapper that an objective calls, and the optimizer."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from terra.training.optimizer import Optimizers
from terra.training.settings import LoopConfig
from terra.training.state import trained_parameters


@dataclass(frozen=True)
class Network:
    """`raw` is the plain module on its device; `wrapped` is `raw` or, in a run of several processes, DDP around it."""

    raw: nn.Module
    wrapped: nn.Module
    optimizer: Optimizers

    @classmethod
    def prepare(cls, module: nn.Module, config: LoopConfig, accelerator: Accelerator) -> "Network":
        """Put a module on its device, wrap it, and build its optimizer."""
        module = module.to(accelerator.device)
        # The optimizer keeps the plain module's parameters; accelerate's wrapper of it would add nothing here.
        return cls(module, accelerator.prepare_model(module), Optimizers.of(trained_parameters(module), config))

    def compile(self) -> None:
        """Compile the forward pass, as one graph whose gradients are exchanged at its end.

        DDP would split the graph to overlap the exchange, and such a graph can't hold activation checkpoints.
        """
        torch._dynamo.config.optimize_ddp = False
        self.raw.compile()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next update."""
        self.optimizer.set_learning_rate(learning_rate)

    def update(self, accelerator: Accelerator, clip_norm: float) -> Tensor:
        """Clip the gradients, step the optimizer and clear the gradients; return their norm before clipping."""
        norm = accelerator.clip_grad_norm_(self.raw.parameters(), clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm  # pyright: ignore[reportReturnType]
