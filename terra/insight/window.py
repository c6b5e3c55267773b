"""The prediction of a window's last frame under various actions, with the frames before it computed once."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from terra.prompt import SLOT_FILLER, Action, Prompt
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

WorldModel = LlamaActionForCausalLM | LlamaActionV2ForCausalLM


def check_window(model: WorldModel, window: Prompt) -> None:
    """Raise ValueError for a window of fewer than two frames, or of more than the model's window holds."""
    if not 2 <= window.num_frames <= model.config.layout.max_frames:
        raise ValueError(f"window: expected 2 to {model.config.layout.max_frames} frames, got {window.num_frames}")


class LastFrame:
    """The last frame of a window, predicted from a KV cache of everything before its action.

    Raises:
        ValueError: see `check_window`.
    """

    @torch.no_grad()
    def __init__(self, model: WorldModel, window: Prompt) -> None:
        check_window(model, window)
        self._model = model
        past = window.num_frames - 1
        self._slots = model.config.num_action_tokens
        seen = Prompt(window.tokens[:past], window.actions[: past - 1])
        embeds = self._embed(seen.ids(self._slots).tolist(), seen.actions, 0)
        self._past = model.model(inputs_embeds=embeds, use_cache=True).past_key_values
        # The last token is left out, because it predicts no token of this frame.
        self._ids = [SLOT_FILLER] * self._slots + window.tokens[-1].flatten()[:-1].tolist()

    @torch.no_grad()
    def states(self, action: Action) -> Float[Tensor, "tokens hidden"]:
        """The last layer's states that predict the frame's tokens, each given the true tokens before it."""
        return self._read(action).last_hidden_state[0, self._slots - 1 :]

    @torch.no_grad()
    def attention(self, action: Action) -> Float[Tensor, "layers heads tokens positions"]:
        """Attention weights of the positions that `states` returns, over the window's positions; each row sums to 1."""
        kernel = self._model.config._attn_implementation or "sdpa"
        self._model.set_attn_implementation("eager")  # the fused kernels don't give the weights
        try:
            weights = self._read(action, output_attentions=True).attentions
        finally:
            self._model.set_attn_implementation(kernel)
        return torch.cat(weights)[:, :, self._slots - 1 :]

    def _read(self, action: Action, **kwargs: bool) -> Any:
        embeds = self._embed(self._ids, action[None], self._past.get_seq_length())
        output = self._model.model(inputs_embeds=embeds, past_key_values=self._past, **kwargs)
        self._past.crop(-len(self._ids))
        return output

    def _embed(self, ids: list[int], actions: Tensor, start: int) -> Float[Tensor, "1 length hidden"]:
        positions = torch.arange(start, start + len(ids))
        return self._model.embed(torch.tensor([ids], device=self._model.device), actions[None], positions)
