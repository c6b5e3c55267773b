"""Registers "actions" as a modality of vLLM: one item a frame, a float32 tensor (slots, action_dim).

Requests reach the engine already rendered (`render`), so `ActionProcessor` serves start-up alone: vLLM requests dummy
items from it when vLLM measures memory.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from transformers import BatchFeature
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
)

from terra.prompt import SLOT_FILLER, Actions

MODALITY = "actions"


def render(token_ids: list[int], actions: Actions, offsets: Sequence[int]) -> MultiModalInput:
    """Render a request for vLLM's engine: token ids, and each action at the offset of its slots.

    Offsets count from the first of `token_ids` and may lie beyond the last: the model runner then puts the action in
    when decoding gets there. Items are hashed by content, so that equal prefixes share their KV blocks.
    """
    field = MultiModalBatchedField()
    rows = [action.contiguous() for action in actions]
    items = [MultiModalKwargsItem({MODALITY: MultiModalFieldElem(data=row, field=field)}) for row in rows]
    return mm_input(
        token_ids,
        MultiModalKwargsItems({MODALITY: items}),
        {MODALITY: [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest() for row in rows]},
        {MODALITY: [PlaceholderRange(offset=at, length=len(row)) for at, row in zip(offsets, rows, strict=True)]},
    )


class ActionItems(ProcessorBatchItems[torch.Tensor]):
    """The actions of one request."""

    def __init__(self, data: Sequence[torch.Tensor]) -> None:
        super().__init__(data, MODALITY)

    def get_processor_data(self) -> Mapping[str, object]:
        """No data, because there is no Hugging Face processor."""
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        """All actions, unchanged."""
        return {MODALITY: self.get_all()}


class ActionParser(MultiModalDataParser):
    """Reads `multi_modal_data={"actions": [tensor, ...]}`."""

    def _get_subparsers(self):
        return {MODALITY: lambda data: ActionItems([torch.as_tensor(item, dtype=torch.float32) for item in data])}


class ActionProcessingInfo(BaseProcessingInfo):
    """Limits of the modality."""

    def get_data_parser(self) -> MultiModalDataParser:
        """The `ActionParser`."""
        return ActionParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No limit but the length of the window."""
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """The number of a frame's action slots, which one item fills."""
        return {MODALITY: self.get_hf_config().num_action_tokens}


class ActionDummyInputs(BaseDummyInputsBuilder[ActionProcessingInfo]):
    """Makes zero actions for vLLM's memory profiling."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """An empty text."""
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: object = None, **_: object):
        """Zero actions in the requested number."""
        config = self.info.get_hf_config()
        zero = torch.zeros(config.num_action_tokens, config.action_dim)
        return {MODALITY: [zero] * mm_counts.get(MODALITY, 0)}

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: object = None, **_: object
    ) -> ProcessorInputs:
        """Dummy actions without text; vLLM 0.26 calls this method, and would need a tokenizer otherwise."""
        data = self.get_dummy_mm_data(seq_len, mm_counts)
        slots = self.info.get_hf_config().num_action_tokens * len(data[MODALITY])
        return ProcessorInputs(
            prompt=[SLOT_FILLER] * slots, mm_data_items=self.info.parse_mm_data(data, validate=False)
        )


class ActionProcessor(BaseMultiModalProcessor[ActionProcessingInfo]):
    """Lays actions one after another from the start of the prompt, which is all that profiling needs."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        return {MODALITY: MultiModalFieldConfig.batched(MODALITY)}

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        return []

    def apply(self, inputs: ProcessorInputs, *_: object, **__: object) -> MultiModalInput:
        """Render dummy items.

        Raises:
            ValueError: called with a real prompt, which must be rendered by `render`.
        """
        items = inputs.mm_data_items
        actions = list(items[MODALITY].get_all()) if MODALITY in items else []
        slots = self.info.get_hf_config().num_action_tokens
        ids = list(inputs.prompt) or [SLOT_FILLER] * (slots * len(actions))
        if any(token != SLOT_FILLER for token in ids):
            raise ValueError("actions: expected a request made by terra.engine.vllm.processing.render, got raw data")
        features = BatchFeature({MODALITY: actions})
        rendered = render(ids, actions, range(0, slots * len(actions), slots))  # pyright: ignore[reportArgumentType]
        rendered["mm_kwargs"] = MultiModalKwargsItems.from_hf_inputs(features, self._get_mm_fields_config(features, {}))
        return rendered
