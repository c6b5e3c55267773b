"""Brings position-keyed sampling into vLLM.

vLLM 0.26's V2 model runner draws the noise of `terra.sampling` itself. Elsewhere a logits processor computes it and
leaves one token in each row, which the runner then takes greedily: for the V1 runner (the CPU) here, for newer V2
runners (which draw other noise) in `sampling_v2`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from terra.sampling import SamplingParams, sample_tokens

EXTRA_KEY = "terra"


def request_params(sampling: SamplingParams, seed: int, *, native: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for a session.

    `native` says that the runner draws position-keyed noise itself; otherwise the logits processor reads the
    parameters from `extra_args` and the runner is greedy.
    """
    if sampling.greedy:
        return {"temperature": 0.0}
    if native:
        return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "seed": seed}
    return {"temperature": 0.0, "extra_args": {EXTRA_KEY: (sampling.temperature, sampling.top_k, sampling.top_p, seed)}}


def read_params(params: VllmSamplingParams) -> tuple[SamplingParams, int] | None:
    """The parameters that `request_params` wrote for the logits processor; None for a greedy request."""
    extra = (params.extra_args or {}).get(EXTRA_KEY)
    if extra is None:
        return None
    temperature, top_k, top_p, seed = extra
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), seed


def leave_one_token(logits: Tensor, rows: Sequence[tuple[int, SamplingParams, int, int]]) -> Tensor:
    """Sample a token for some rows of `logits` (batch, vocab), in place: all other tokens of a row become -inf.

    Each of `rows` is (row, parameters, seed, position of the token fed). Equal parameters are sampled together.
    """
    groups: dict[SamplingParams, list[tuple[int, int, int]]] = {}
    for row, params, seed, position in rows:
        groups.setdefault(params, []).append((row, seed, position))
    for params, members in groups.items():
        index, seeds, positions = torch.tensor(members, device=logits.device).unbind(1)
        chosen = sample_tokens(logits[index], params, seeds, positions)
        logits[index] = -math.inf
        logits[index, chosen] = 0.0
    return logits


class PositionKeyedSampler(LogitsProcessor):
    """The logits processor for vLLM's V1 model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._layout = vllm_config.model_config.hf_config.layout
        # For each row of the batch: parameters, seed, length of the prompt, and the runner's growing list of output.
        self._rows: dict[int, tuple[SamplingParams, int, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """False, because the processor decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they enter, leave and move between rows."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self._rows.pop(row, None)
            known = read_params(params)
            if known is not None:
                self._rows[row] = (*known, len(prompt or ()), output)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Sample the token of every row that has parameters; tokens sampled at action slots are discarded later."""
        placed = (
            (row, params, seed, prompt_length + len(output) - 1)
            for row, (params, seed, prompt_length, output) in self._rows.items()
        )
        return leave_one_token(logits, [entry for entry in placed if not self._layout.is_slot(entry[3] + 1)])
