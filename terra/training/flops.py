"""Floating-point operations of the world model's training, for the model FLOPs utilization (MFU).

MFU is samples/s x operations per sample / the device's peak (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix
B). Operations that activation checkpointing repeats do not count.
"""

from torch import nn

from terra.world_model import LlamaActionV2ForCausalLM


def flops_per_window(model: LlamaActionV2ForCausalLM) -> float:
    """Operations of the forward and backward pass of one full window.

    6 for each weight of a matrix and each position it is applied to (Kaplan et al. 2020, arXiv 2001.08361, section
    2.1): the layers' at every position, the action projection's at the slots, the head's (image vocabulary) where an
    image token is predicted. Attention adds 6 layers length^2 width: queries times keys and weights times values are
    4 length^2 width operations forward, of which the causal mask leaves half, and the backward pass doubles them.
    Embedding tables, norms and everything elementwise count nothing.
    """
    config = model.config
    layout = config.layout
    head_dim = config.hidden_size // config.num_attention_heads
    matrices = (
        _matrix_weights(model.model.layers) * layout.max_length
        + _matrix_weights(model.action_projection) * layout.action_slots * layout.max_frames
        + config.hidden_size * config.image_vocab_size * layout.image_tokens * layout.max_frames
    )
    attention = config.num_hidden_layers * layout.max_length**2 * config.num_attention_heads * head_dim
    return 6.0 * (matrices + attention)


def _matrix_weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
