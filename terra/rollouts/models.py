"""Tokenizer, world model, engine and decoder of conf/rollout.yaml: checked where a run begins, built where it works."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from decoder import Decoder
from terra.config import build_decoder, build_engine, check_extra, check_pairing, checkpoint_folder
from terra.device import torch_device, torch_dtype
from terra.pipeline import Pipeline
from terra.windows import check_overlap
from terra.world_model import load_config
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256

# Of an engine: what decides how fast it is, and not which tokens it gives.
_SPEED = ("max_sessions", "cpu_kv_cache_gib", "gpu_memory_utilization", "tensor_parallel_size")
_GROUPS = ("tokenizer", "world_model", "engine", "decoder", "overlap", "context_root")


@dataclass(frozen=True)
class Models:
    """What makes rollouts; to be sent to another process, which builds it.

    Attributes:
        values: the settings of the four groups, `overlap` and `context_root`, resolved.
        tokenizer, world_model: checkpoint folders.
    """

    values: dict[str, Any]
    tokenizer: Path
    world_model: Path

    @classmethod
    def check(cls, config: DictConfig) -> Self:
        """Check all that can be without loading weights. Raises TerraError."""
        tokenizer, world_model = checkpoint_folder(config.tokenizer), checkpoint_folder(config.world_model)
        model = load_config(world_model)
        check_pairing(tokenizer, model)
        check_overlap(config.overlap, model.layout.max_frames)
        torch_device(config.tokenizer.device)
        for name, check in (("dtype", torch_dtype), ("device", torch_device)):
            if name in config.engine:
                check(config.engine[name])
        check_extra(config.engine)
        check_extra(config.decoder)
        values: Any = OmegaConf.to_container(config, resolve=True)
        values = {"context_root": None} | values  # terra-generate has none
        return cls({name: values[name] for name in _GROUPS}, tokenizer.absolute(), world_model.absolute())

    def build(self) -> Pipeline:
        """Load the weights, start the engine. Raises TerraError."""
        tokenizer = self._build_tokenizer()
        engine = build_engine(DictConfig(self.values["engine"]), self.world_model)
        return Pipeline(tokenizer, engine, self._build_decoder(tokenizer), overlap=self.values["overlap"])

    def build_decoder(self) -> Decoder:
        """The decoder alone. Raises TerraError."""
        return self._build_decoder(self._build_tokenizer())

    @property
    def gpus(self) -> int:
        """How many GPUs the engine is made for, where there are any."""
        return self.values["engine"].get("tensor_parallel_size", 1)

    def made_with(self) -> dict[str, Any]:
        """What all rollouts depend on, as JSON has it."""
        return {
            "tokenizer_sha256": checkpoint_sha256(self.tokenizer),
            "world_model_sha256": checkpoint_sha256(self.world_model),
            "engine": {key: value for key, value in self.values["engine"].items() if key not in _SPEED},
            "decoder": self.values["decoder"],
            "tokenizer_device": self.values["tokenizer"]["device"],
            "overlap": self.values["overlap"],
            "context_root": self.values["context_root"],
        }

    def _build_tokenizer(self) -> LFQTokenizer:
        device = torch_device(self.values["tokenizer"]["device"])
        return LFQTokenizer.from_pretrained(self.tokenizer).to(device)

    def _build_decoder(self, tokenizer: LFQTokenizer) -> Decoder:
        return build_decoder(DictConfig(self.values["decoder"]), tokenizer)
