"""Brings position-keyed sampling into V2 model runners that take logits processors (vLLM after 0.26, on a GPU)."""

from typing import Any

from torch import Tensor
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from terra.engine.vllm.sampling import leave_one_token, read_params
from terra.sampling import SamplingParams


class PositionKeyedSampler(LogitsProcessor):
    """The logits processor for vLLM's V2 model runner, which gives each row's position."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._slots: dict[int, tuple[SamplingParams, int]] = {}

    def add_request(self, req_idx: int, sampling_params: VllmSamplingParams) -> bool:
        """Store the parameters of the request in a slot of the batch."""
        known = read_params(sampling_params)
        self._slots.pop(req_idx, None)
        if known is not None:
            self._slots[req_idx] = known
        return known is not None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Sample the token of every row that has parameters."""
        positions = ctx.pos.tolist()
        slots = ctx.expanded_idx_mapping.tolist()
        rows = [
            (row, *self._slots[slot], position)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True))
            if slot in self._slots
        ]
        return leave_one_token(logits, rows)
