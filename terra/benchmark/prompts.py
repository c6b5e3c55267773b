"""Prompts for the benchmark: random tokens, or excerpts of a rollout's tokens.

The time of a pass does not depend on the tokens, but the number of accepted drafts does. What random weights
accept says nothing about trained ones: they predict nearly the same tokens after any context.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.prompt import Actions, Prompt, build_prompt

MakePrompt = Callable[[int, int, int], tuple[Prompt, Actions]]
"""`(num_context, num_actions, seed) -> (prompt, actions)`: a prompt of context frames, and the actions after it."""


def prompt_maker(spec: EngineSpec, drive: Path | None) -> MakePrompt:
    """Makes random prompts for a model, or takes them from `drive`, a rollout's tokens.safetensors.

    Raises:
        ConfigError: no such file, or one that does not fit the model.
    """
    if drive is None:
        return partial(_random, spec)
    try:
        stored = load_file(drive)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"drive: expected a rollout's tokens.safetensors, got {drive}: {error}") from None
    tokens, actions = stored.get("tokens"), stored.get("actions")
    if tokens is None or actions is None or tokens.ndim != 3 or len(actions) < len(tokens) - 1:
        raise ConfigError(f"drive: expected tokens and an action for each frame but one in {drive}")
    layout = spec.layout
    if tokens[0].numel() != layout.image_tokens or int(tokens.max()) >= spec.vocab_size:
        raise ConfigError(f"drive: expected frames of {layout.image_tokens} ids below {spec.vocab_size} in {drive}")
    if len(tokens) < layout.max_frames:
        raise ConfigError(f"drive: expected {layout.max_frames} frames or more, got {len(tokens)} in {drive}")
    return partial(_piece, tokens.long(), actions)


def _random(spec: EngineSpec, num_context: int, num_actions: int, seed: int) -> tuple[Prompt, Actions]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, spec.vocab_size, (num_context, 1, spec.layout.image_tokens), generator=generator)
    actions = torch.randn(num_context - 1 + num_actions, *spec.action_shape, generator=generator)
    return build_prompt(tokens, actions[: num_context - 1]), actions[num_context - 1 :]


def _piece(tokens: Tensor, actions: Actions, num_context: int, num_actions: int, seed: int) -> tuple[Prompt, Actions]:
    """An excerpt that begins at a random frame."""
    num_starts = len(tokens) - num_context - num_actions + 1
    first = int(torch.randint(num_starts, (1,), generator=torch.Generator().manual_seed(seed)))
    led = actions[first : first + num_context - 1 + num_actions]
    return build_prompt(tokens[first : first + num_context], led[: num_context - 1]), led[num_context - 1 :]
