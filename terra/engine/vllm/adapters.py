"""Brings LoRA adapters into vLLM: their requests, checked against the base model, and the engine's arguments.

vLLM adds each sequence's own LoRA update to the base model's projections, so that sessions with different adapters
share the weights and a batch. Blocks of its prefix cache are keyed by the adapter's name and path as well.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from terra.engine.adapted import check_factors_alone, check_same_spec
from terra.engine.base import EngineSpec
from terra.world_model import LlamaActionConfig, load_adapter

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`, but for 1, which not every version has."""

_DEFAULT = "adapter="
"""vLLM's name of the adapter of sessions that name none; no name of `adapters` has a "="."""


_COPIED_BYTES = 2**28
"""Bytes of factors that vLLM's operators for a CPU may copy at once."""


class Adapters:
    """The adapters of one engine.

    Args:
        checkpoint: the base model's folder.
        config: the base model's configuration.
        default: folder of the adapter of sessions that name none; None for the base model itself.
        named: folders of adapters by name.

    Attributes:
        spec: the geometry and rates of the model of sessions that name no adapter; None without a default adapter.
        requests: what vLLM is told of each adapter, by name; that of None is the default's.

    Raises:
        CheckpointError: see `terra.world_model.load_adapter`.
        ConfigError: an adapter that replaces modules, or whose actions are not those of the others.
    """

    def __init__(
        self, checkpoint: Path, config: LlamaActionConfig, default: Path | None, named: Mapping[str, Path]
    ) -> None:
        folders = {**({} if default is None else {None: default}), **named}
        loaded = {name: load_adapter(folder, checkpoint) for name, folder in folders.items()}
        for name, adapter in loaded.items():
            check_factors_alone(name, adapter)
            adapter.check_updates()
        self.spec = None if default is None else EngineSpec.of(loaded[None].config)
        self._specs = {name: EngineSpec.of(loaded[name].config) for name in named}
        self._config = config
        rank = max((adapter.rank for adapter in loaded.values()), default=0)
        self._max_rank = next(each for each in _RANKS if each >= rank)
        self.requests: dict[str | None, LoRARequest] = {
            name: LoRARequest(lora_name=name or _DEFAULT, lora_int_id=number, lora_path=str(folder.absolute()))
            for number, (name, folder) in enumerate(folders.items(), start=1)
        }

    def check_specs(self, spec: EngineSpec) -> None:
        """Refuse named adapters of another spec than the engine's. Raises ConfigError."""
        for name, each in self._specs.items():
            check_same_spec(name, each, spec)

    def engine_args(self) -> dict[str, Any]:
        """The arguments of vLLM's EngineArgs that nobody else may set; none without adapters.

        One slot more than there are adapters stays empty on a CPU. vLLM's operators there (`vllm.lora.ops.torch_ops`)
        give a token without an adapter the factors of the LAST slot, by its index -1, wherever a batch has both kinds
        of tokens; those of an empty slot are zeros.
        """
        if not self.requests:
            return {}
        return {
            "enable_lora": True,
            "max_loras": len(self.requests) + current_platform.is_cpu(),
            "max_lora_rank": self._max_rank,
        }

    def batched_tokens(self, most: int, sessions: int) -> int:
        """The `max_num_batched_tokens` of an engine that would have `most` without adapters.

        vLLM's operators for a CPU copy the factors for each token of a batch, which bounds the batch.
        """
        if not self.requests or not current_platform.is_cpu():
            return most
        bytes_a_token = 4 * self._max_rank * max(self._config.hidden_size, self._config.intermediate_size)
        return min(most, max(_COPIED_BYTES // bytes_a_token, sessions, 256))
