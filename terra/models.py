"""Tokenizer, world model, engine and decoder of a configuration: checked where a run begins, built where it works."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from decoder import Decoder
from terra.config import build_decoder, build_engine, check_extra, checkpoint_folder
from terra.config_files import config_dir
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.pairing import check_pairing
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
        spec = EngineSpec.of(model)
        check_pairing(tokenizer, spec)
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
        overlap, provenance = self.values["overlap"], self.provenance()
        return Pipeline(tokenizer, engine, decoder, overlap=overlap, provenance=provenance)

    def build_decoder(self) -> Decoder:
        """The decoder alone. Raises TerraError."""
        return self._build_decoder(self._build_tokenizer())

    @property
    def gpus(self) -> int:
        """How many GPUs the engine is made for, where there are any."""
        return self.values["engine"].get("tensor_parallel_size", 1)

    def hashes(self) -> dict[str, str]:
        """Which weights these are, as JSON has it."""
        return dict(self._hashes)

    @functools.cached_property
    def _hashes(self) -> dict[str, str]:
        return {
            "tokenizer_sha256": checkpoint_sha256(self.tokenizer),
            "world_model_sha256": checkpoint_sha256(self.world_model),
        }

    def provenance(self) -> dict[str, Any]:
        """What a rollout's record says of the models, see `terra.rollout`; `from_provenance` takes it."""
        hashes = self.hashes()
        return {
            "checkpoints": {
                name: _checkpoint_names(self.values[name]) | {"sha256": hashes[f"{name}_sha256"]}
                for name in ("tokenizer", "world_model")
            },
            "engine": _named("engine", self.values["engine"]),
            "decoder": _named("decoder", self.values["decoder"]),
            "tokenizer_device": self.values["tokenizer"]["device"],
        }

    @classmethod
    def from_provenance(cls, record: Mapping[str, Any], device: str | None = None) -> Self:
        """The models of a rollout's record, checked as in `check`.

        Args:
            record: see `terra.rollout`; its names of engine and decoder are those of files of conf/.
            device: in place of the recorded ones.

        Raises:
            TerraError: an engine or decoder that is none of Terra's own, or a checkpoint that is not there.
        """
        checkpoints = record["checkpoints"]
        places = {name: _checkpoint_names(checkpoints[name]) for name in ("tokenizer", "world_model")}
        places["tokenizer"]["device"] = device or record["tokenizer_device"]
        engine, decoder = _settings("engine", record["engine"]), _settings("decoder", record["decoder"])
        if device is not None:
            engine |= {"device": device} if "device" in engine else {}
            decoder |= {"device": device} if "device" in decoder else {}
        return cls.check(DictConfig({**places, "engine": engine, "decoder": decoder, "overlap": record["overlap"]}))

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


def _checkpoint_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where a checkpoint is: a local folder by its whole path."""
    pretrained = values["pretrained"]
    if Path(pretrained).is_dir():
        pretrained = str(Path(pretrained).absolute())
    return {"pretrained": pretrained, "subfolder": values["subfolder"], "revision": values["revision"]}


def _targets(group: str) -> dict[str, str]:
    """The `_target_` of each choice of a configuration group, by the choice's name."""
    choices = sorted((config_dir() / group).glob("*.yaml"))
    return {path.stem: OmegaConf.to_container(OmegaConf.load(path))["_target_"] for path in choices}  # pyright: ignore


def _named(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the choice's name in place of its `_target_`, which stays as the name if it is the user's own."""
    names = {target: name for name, target in _targets(group).items()}
    settings = {key: value for key, value in values.items() if key != "_target_"}
    return {"name": names.get(values["_target_"], values["_target_"]), **settings}


def _settings(group: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `_named` made. A record is a stranger's file: what it names is not imported."""
    targets, name = _targets(group), record["name"]
    if name not in targets or "_target_" in json.dumps(record):
        raise ConfigError(f"{group}: expected one of {', '.join(targets)}, got {name!r}")
    return {"_target_": targets[name], **{key: value for key, value in record.items() if key != "name"}}
