"""The engine for one rollout at a time: Hugging Face's model, several tokens a pass, the same tokens.

Each pass reads the last token and drafts for the next ones: what the pass before picked at their places (Jacobi
decoding, Santilli et al. 2023, https://arxiv.org/abs/2305.10427), else the previous frame's tokens. A draft that equals
what the pass picks is kept, so the frame is the one that sequential decoding makes, whatever the drafts are.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.drafts import decode_frame, from_both
from terra.engine.hf import HFEngine, HFSession
from terra.errors import ConfigError
from terra.prompt import SLOT_FILLER, Action, FrameTokens, Prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model.window import Head, WindowReader


class JacobiEngine(HFEngine):
    """Runs the world model as `HFEngine` does, with drafts.

    Args:
        checkpoint, dtype, device: see `HFEngine`.
        drafts: tokens a pass reads beyond those that are certain; 0 is sequential decoding.

    Raises:
        ConfigError: fewer than 0 drafts, or as `HFEngine`.
        CheckpointError: as `HFEngine`.
    """

    def __init__(self, checkpoint: Path, *, drafts: int, dtype: str = "float32", device: str = "cpu") -> None:
        if drafts < 0:
            raise ConfigError(f"engine.drafts: expected 0 or more, got {drafts}")
        super().__init__(checkpoint, dtype=dtype, device=device)
        self.drafts = drafts

    def _session(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> "JacobiSession":
        return JacobiSession(self, prompt, sampling, seed)


class JacobiSession(HFSession):
    """One rollout with its own KV cache."""

    def __init__(self, engine: JacobiEngine, prompt: Prompt, sampling: SamplingParams, seed: int) -> None:
        super().__init__(engine, prompt, sampling, seed)
        self._drafts = engine.drafts
        self._reader = WindowReader(self._model)
        self._previous = prompt.tokens[-1].flatten().tolist()

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        await super().close()
        self._reader = WindowReader(self._model)

    def _next_frame(self, action: Action) -> FrameTokens:
        ids = self._unseen_ids + [SLOT_FILLER] * self._layout.action_slots
        positions = torch.arange(len(ids)) + self._reader.length
        head = Head(torch.tensor([ids]), positions, torch.cat([self._unseen_actions, action[None]])[None])
        frame, _ = decode_frame(self._reader, head, self._pick, from_both(self._previous), self._drafts)
        self._previous = frame.tolist()
        self._unseen_ids, self._unseen_actions = self._previous[-1:], self._unseen_actions[:0]
        self._num_frames += 1
        return rearrange(frame, "(rows cols) -> rows cols", rows=self._grid[0])

    def _pick(self, logits: Float[Tensor, "1 n vocab"], places: Sequence[int]) -> Int[Tensor, "1 n"]:
        # The noise of a token is that of the position before it.
        before = self._num_frames * self._layout.block - 1
        positions = torch.tensor(places, device=logits.device) + before
        return sample_tokens(logits[0], self._sampling, torch.full_like(positions, self._seed), positions)[None]
