"""The world model for vLLM: Llama with spatio-temporal positions inside the compiled forward, head cut to the images.

Slots are known by their ranges (one multimodal item a frame), positions come from the runner's `positions`, and
nothing depends on token ids; so CUDA graphs, prefix caching and tensor parallelism work as for any Llama.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import (
    MultiModalEmbeddings,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from terra.engine.vllm.processing import MODALITY, ActionDummyInputs, ActionProcessingInfo, ActionProcessor
from terra.world_model.actions import linear_projection, mlp_projection
from terra.world_model.positions import SpatioTemporalPositions
from tokenizer.checkpoint import check_finite

_POSITIONS = "pos_embedding_spatio_temporal."
_HEAD = "lm_head.weight"


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class LlamaActionModel(LlamaModel):
    """Adds the learned positions to the input embeddings.

    The addition is part of the compiled forward, so that piecewise and full CUDA graphs read only the runner's
    persistent buffers.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.spatio_temporal = (
            SpatioTemporalPositions(config.num_spatio_embeddings, config.num_temporal_embeddings, config.hidden_size)
            if get_pp_group().is_first_rank
            else PPMissingLayer()
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
        **extra_layer_kwargs: object,
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Llama's forward on embeddings with their positions added."""
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            inputs_embeds = inputs_embeds + self.spatio_temporal(positions)
        return super().forward(None, positions, intermediate_tensors, inputs_embeds, **extra_layer_kwargs)


class _LlamaAction(nn.Module, SupportsMultiModal, SupportsPP, SupportsLoRA):
    """The common base of Terra v1 and v2, which differ in the action projection."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={_POSITIONS: "model.spatio_temporal."})
    packed_modules_mapping = {  # noqa: RUF012 - vLLM's interface
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # No adapters of the lm head: vLLM takes up to 258,048 rows there, and the published models have 262,144.
    embedding_modules = {}  # noqa: RUF012 - vLLM's interface
    # The V2 model runner puts multimodal embeddings at decode positions for "realtime" models only; actions that are
    # registered beyond the prompt need it.
    supports_realtime = True

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str, make_projection: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, self._folder = config, vllm_config.model_config.model
        with self._mark_language_model(vllm_config):
            self.model = LlamaActionModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        with self._mark_tower_model(vllm_config, MODALITY):
            self.action_projection = make_projection(config.action_dim, config.hidden_size)
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.image_vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
            self.logits_processor = LogitsProcessor(config.image_vocab_size)
        else:
            self.lm_head = PPMissingLayer()
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """No text stands for an action."""
        return None

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Project the actions of a batch, (items, slots, action_dim): a (slots, hidden) tensor for each."""
        actions = kwargs[MODALITY]
        if isinstance(actions, list | tuple):
            actions = torch.stack(list(actions))
        assert isinstance(actions, Tensor)
        weight = next(self.action_projection.parameters())
        return list(self.action_projection(actions.to(weight.device, weight.dtype)))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **_: object,
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Hidden states at all positions of the batch."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits over the image tokens alone, because no other token may be sampled."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint without the lm head's rows after the image tokens.

        Raises:
            CheckpointError: a tensor holds NaN or infinity.
        """
        images = self.config.image_vocab_size

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                check_finite(Path(self._folder), name, tensor)
                yield name, tensor[:images] if name == _HEAD else tensor

        cut = checked()
        return AutoWeightsLoader(self).load_weights(cut, mapper=self.hf_to_vllm_mapper)


_register = MULTIMODAL_REGISTRY.register_processor(
    ActionProcessor, info=ActionProcessingInfo, dummy_inputs=ActionDummyInputs
)


@_register
class LlamaActionForCausalLM(_LlamaAction):
    """Terra v1: actions enter through one linear layer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, make_projection=linear_projection)


@_register
class LlamaActionV2ForCausalLM(_LlamaAction):
    """Terra v2: actions enter through a three-layer MLP."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, make_projection=mlp_projection)
