"""The engine for one rollout at a time on a CPU: several tokens a pass, and the tokens of sequential decoding.

Each pass reads the last token and drafts for the next ones: what the pass before sampled at their positions (Jacobi
decoding, Santilli et al. 2023, https://arxiv.org/abs/2305.10427), else the previous frame's tokens. A draft is accepted
if the pass samples the same token, so the frame is the one that sequential decoding makes, whatever the drafts are.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.engine.drafts import decode_frame, draft_from_last_pass_or_previous_frame
from terra.engine.hf import HFEngine, ModelThread, SequentialWindow, Window
from terra.engine.packed import PackedDecoder, PackedReader
from terra.errors import ConfigError
from terra.prompt import Prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model.window import FramePrefix
from tokenizer.cores import on_cores


class JacobiEngine(HFEngine):
    """Runs the world model with a KV cache for each session and with drafts, one session's frame at a time.

    The number of drafts changes no token in bfloat16 and with `int8_weights`. In float32 passes of different lengths
    round differently, which matters only where the two best noisy scores differ by about 1e-5 or less.

    Args:
        checkpoint: a checkpoint folder.
        adapter: folder of a LoRA adapter to merge, or None.
        drafts: tokens a pass reads beyond the first, at most; 0 is sequential decoding. Passes are padded
            to 32 tokens, so 31 drafts cost no more than fewer.
        int8_weights: hold the layers and the lm head in 8 bits, and multiply them by activations in 8 bits (W8A8).
            This takes less time on one core with AVX-512, and gives other tokens, since weights are rounded. See
            `terra.engine.packed`.
        dtype: element type of the weights, "float32" or "bfloat16"; bfloat16 takes less time on one core with
            AVX-512 BF16, and gives other tokens. With `int8_weights` it says only how the file is read.
        device: a torch device, such as "cpu" or "cuda".

    Raises:
        ConfigError: `drafts` is negative, or there is no such dtype or device.
        CheckpointError: see `terra.world_model.load_config` and `terra.engine.layers.take_layers`.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        drafts: int,
        int8_weights: bool = False,
        adapter: Path | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        if drafts < 0:
            raise ConfigError(f"engine.drafts: expected 0 or more, got {drafts}")
        super().__init__(checkpoint, adapter=adapter, dtype=dtype, device=device)
        self._drafts = drafts
        self._decoder = on_cores(lambda: PackedDecoder(self._thread.model, int8=int8_weights)).result()

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        await super().close()
        self._decoder.free()

    def _window(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> Window:
        return _DraftedWindow(self._thread, prompt, sampling, seed, PackedReader(self._decoder), self._drafts)


class _DraftedWindow(SequentialWindow):
    """Decodes several tokens a pass."""

    def __init__(
        self,
        thread: ModelThread,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        reader: PackedReader,
        drafts: int,
    ) -> None:
        super().__init__(thread, prompt, sampling, seed, reader)
        self._drafts = drafts

    def _decode(self, prefix: FramePrefix) -> Int[Tensor, " image_tokens"]:
        start = int(prefix.positions[-1]) + 1

        def sample(logits: Float[Tensor, "1 n vocab"], positions: Sequence[int]) -> Int[Tensor, "1 n"]:
            self._thread.check_open()
            # The noise of a token is that of the position before it.
            before = torch.tensor(positions, device=logits.device) + start - 1
            return sample_tokens(logits[0], self._sampling, torch.full_like(before, self._seed), before)[None]

        drafter = draft_from_last_pass_or_previous_frame(self._frame.flatten().tolist())
        tokens, lengths = decode_frame(self._reader, prefix, sample, drafter, self._drafts)
        self._thread.count_passes(lengths)
        return tokens
