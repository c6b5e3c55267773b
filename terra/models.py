"""Tokenizer, world model, engine and decoder of a configuration: checked where a run begins, built where it works."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from decoder import Decoder
from terra.config import build_decoder, build_engine, check_extra, check_pairing, checkpoint_folder
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.pipeline import Pipeline
from terra.windows import check_overlap
from terra.world_model import load_config
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256

# Of an engine: what decides how fast it is, and not which tokens it gives.
_SPEED = ("max_sessions", "cpu_kv_cache_gib", "gpu_memory_utilization", "tensor_parallel_size")
_GROUPS = ("tokenizer", "world_model", "engine", "decoder", "overlap")


@dataclass(frozen=True)
class Models:
    """What makes rollouts; may be sent to another process, which builds it.

    Attributes:
        values: the settings of the four groups and `overlap`, resolved.
        tokenizer, world_model: checkpoint folders.
        image_size: height and width of the tokenizer's frames, in pixels.
        spec: what the world model's config.json says.
    """

    values: dict[str, Any]
    tokenizer: Path
    world_model: Path
    image_size: tuple[int, int]
    spec: EngineSpec

    @classmethod
    def check(cls, config: DictConfig) -> Self:
        """Check all that can be without loading weights. Raises TerraError."""
        tokenizer, world_model = checkpoint_folder(config.tokenizer), checkpoint_folder(config.world_model)
        model = load_config(world_model)
        check_pairing(tokenizer, model)
        spec = EngineSpec.of(model)
        check_overlap(config.overlap, spec.layout.max_frames)
        torch_device(config.tokenizer.device)
        for name, check in (("dtype", torch_dtype), ("device", torch_device)):
            if name in config.engine:
                check(config.engine[name])
        check_extra(config.engine)
        check_extra(config.decoder)
        values: Any = OmegaConf.to_container(config, resolve=True)
        image_size = LFQTokenizerConfig.load(tokenizer / "config.json").image_size
        groups = {name: values[name] for name in _GROUPS}
        return cls(groups, tokenizer.absolute(), world_model.absolute(), image_size, spec)

    def build(self) -> Pipeline:
        """Load the weights, start the engine. Raises TerraError."""
        tokenizer = self._build_tokenizer()
        decoder = self._build_decoder(tokenizer)
        engine = build_engine(DictConfig(self.values["engine"]), self.world_model)
        return Pipeline(tokenizer, engine, decoder, overlap=self.values["overlap"])

    def build_decoder(self) -> Decoder:
        """The decoder alone. Raises TerraError."""
        return self._build_decoder(self._build_tokenizer())

    @property
    def gpus(self) -> int:
        """How many GPUs the engine is made for, where there are any."""
        return self.values["engine"].get("tensor_parallel_size", 1)

    def hashes(self) -> dict[str, str]:
        """Which weights these are, as JSON has it."""
        return {
            "tokenizer_sha256": checkpoint_sha256(self.tokenizer),
            "world_model_sha256": checkpoint_sha256(self.world_model),
        }

    def made_with(self) -> dict[str, Any]:
        """What all rollouts depend on, as JSON has it."""
        return {
            **self.hashes(),
            "engine": {key: value for key, value in self.values["engine"].items() if key not in _SPEED},
            "decoder": self.values["decoder"],
            "tokenizer_device": self.values["tokenizer"]["device"],
            "overlap": self.values["overlap"],
        }

    def _build_tokenizer(self) -> LFQTokenizer:
        device = torch_device(self.values["tokenizer"]["device"])
        return LFQTokenizer.from_pretrained(self.tokenizer).to(device)

    def _build_decoder(self, tokenizer: LFQTokenizer) -> Decoder:
        return build_decoder(DictConfig(self.values["decoder"]), tokenizer)
