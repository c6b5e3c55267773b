"""Floating-point operations of the world model's training, for the model FLOPs utilization (MFU).

MFU is samples/s x operations per sample / the device's peak (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix
B). Operations that activation checkpointing repeats do not count.
"""

from torch import Tensor, nn

from terra.training.start import WorldModel


def flops_per_window(model: WorldModel, window: int) -> float:
    """Operations of the forward and backward pass of one window of `window` frames.

    6 for each weight of a matrix and each position it is applied to (Kaplan et al. 2020, arXiv 2001.08361, section
    2.1): the layers' at every position, the action projection's at the slots, the head's (image vocabulary) where an
    image token is predicted. Attention adds 6 layers length^2 width: queries times keys and weights times values are
    4 length^2 width operations forward, of which the causal mask leaves half, and the backward pass doubles them.
    Embedding tables, norms and everything elementwise count nothing. A frozen matrix counts 4, as nothing is multiplied
    for its own gradient.
    """
    config = model.config
    layout = config.layout
    head_dim = config.hidden_size // config.num_attention_heads
    length, images = window * layout.block, window * layout.image_tokens
    matrices = (
        _matrix_operations(model.model.layers) * length
        + _matrix_operations(model.action_projection) * layout.action_slots * window
        + _operations(model.lm_head.weight) * images * config.image_vocab_size / config.vocab_size
    )
    attention = 6.0 * config.num_hidden_layers * length**2 * config.num_attention_heads * head_dim
    return matrices + attention


def _matrix_operations(module: nn.Module) -> float:
    return sum(_operations(part.weight) for part in module.modules() if isinstance(part, nn.Linear))


def _operations(weight: Tensor) -> float:
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()
