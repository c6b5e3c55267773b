"""Reads LoRA adapters of a world model, in PEFT's file format, and merges them into the base model's weights.

An adapter is a folder:

    adapter_config.json         PEFT's: rank, alpha and the names of the adapted projections
    adapter_model.safetensors   the two factors of each adapted weight, and tensors that replace the base model's
    config.json                 only if the adapted model has other actions, memory, or the tokens of another tokenizer:
                                its whole configuration
    decoder/                    only if its frames need another decoder: a tokenizer that was trained further with
                                `terra train-tokenizer decoder_of=`, or that tokenizer without its encoder

`terra train adapter.rank=16` writes one, and so does PEFT. LoRA adds alpha / rank * B @ A to a weight (Hu et al. 2021,
"LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1).
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from terra.errors import CheckpointError
from terra.world_model.config import LlamaActionConfig
from terra.world_model.peft_config import read_adapter_config
from terra.world_model.values import WorldModelValues
from tokenizer.checkpoint import (
    CONFIG_NAME,
    FLOATS,
    Layout,
    check_finite,
    checkpoint_sha256,
    read_config,
    read_header,
)
from tokenizer.files import file_sha256

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DECODER_FOLDER = "decoder"
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
"""What PEFT puts before the base model's names."""
BASE_SHA256 = "terra_base_sha256"
"""Key of the safetensors metadata: the `checkpoint_sha256` of the base model."""
ACTION_MODULES = ("action_projection", "pos_embedding_spatio_temporal")
"""Modules whose shapes depend on the action space."""

_OWN_KEYS = frozenset(
    {"num_action_tokens", "num_spatio_embeddings", "action_dim", "waypoint_times", "action_space", "fps"}
    | {"tokenizer_sha256", "memory", "views", "dtype", "torch_dtype"}
)
"""Keys of an adapter's config.json that may differ from the base model's: of actions, pictures, memory and storage."""

_FACTOR = re.compile(
    r"(?P<weight>model\.layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj)\.lora_(?P<factor>[AB])\.weight"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter whose names and shapes fit its base model; no weight is loaded yet.

    Attributes:
        folder: the adapter's folder.
        config: the configuration of the adapted model: the base model's, or with other actions or another tokenizer.
        rank, scale: of the factors; `scale` is alpha / rank.
        factors: for each adapted weight, by the base model's name of it, the names of A and B in the file.
        replaced: for each tensor that stands in place of the base model's, its name in the file.
    """

    folder: Path
    config: LlamaActionConfig
    rank: int
    scale: float
    factors: Mapping[str, tuple[str, str]]
    replaced: Mapping[str, str]

    @classmethod
    def read(
        cls, folder: Path, base: Path, base_config: LlamaActionConfig, layout_of: Callable[[LlamaActionConfig], Layout]
    ) -> "Adapter":
        """Check an adapter's files against its base model.

        Args:
            folder: the adapter's folder.
            base: the base model's folder; its weights are hashed if the adapter tells the hash of its own.
            base_config: the base model's configuration.
            layout_of: gives the names and shapes of a model's tensors by its configuration.

        Raises:
            CheckpointError: a file is missing or damaged; another kind of adapter than plain LoRA (see
                `read_adapter_config`); a rank, name, shape or dtype that does not fit; a tensor of the new actions or
                of modules_to_save that is missing; or an adapter of another base model.
        """
        where = folder / ADAPTER_CONFIG
        if not where.exists() and (own := folder / "adapter" / ADAPTER_CONFIG).exists():
            raise CheckpointError(f"{where}: expected a readable file, got none: the adapter's folder is {own.parent}")
        settings = read_adapter_config(where)
        config = _adapted_config(folder, base_config)
        path = folder / ADAPTER_WEIGHTS
        layout = read_header(path, FLOATS)
        factors, replaced = _names(path, layout)
        for module in settings.modules_to_save or ():
            if not any(f".{module}." in f".{name}" for name in replaced):
                raise CheckpointError(
                    f"{path}: expected tensors of {module!r:.80}, as modules_to_save of {ADAPTER_CONFIG} says, got none"
                )
        adapted = layout_of(config)
        expected: dict[str, tuple[int, ...]] = {}
        for name, (first, second) in factors.items():
            if name not in adapted:
                raise CheckpointError(f"{path}: {first}: expected a layer of the base model, which has no {name}")
            rows, columns = adapted[name]
            expected |= {first: (settings.r, columns), second: (rows, settings.r)}
        for name, tensor in replaced.items():
            if name not in adapted:
                raise CheckpointError(f"{path}: {tensor}: expected a LoRA factor or a tensor of the base model")
            expected[tensor] = adapted[name]
        for tensor, shape in expected.items():
            if layout[tensor] != shape:
                raise CheckpointError(f"{path}: {tensor}: expected shape {shape}, got {layout[tensor]}")
        if config is not base_config:
            before = layout_of(base_config)
            missing = [name for name in adapted if adapted[name] != before[name] and name not in replaced]
            if missing:
                raise CheckpointError(f"{path}: expected {missing[0]}, as config.json has other actions, got none")
        _check_base(path, base)
        return cls(folder, config, settings.r, settings.lora_alpha / settings.r, factors, replaced)

    def merge(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapted model's tensors, from the base model's by name. Sums are computed and returned in float32.

        Raises:
            CheckpointError: the file can't be read, or a sum is not finite.
        """
        merged = dict(tensors)
        path = self.folder / ADAPTER_WEIGHTS
        with _opened(path) as file:
            for name in self.factors:
                merged[name] = tensors[name].float() + self._update(file, name)
                check_finite(path, name, merged[name])
            for name, tensor in self.replaced.items():
                merged[name] = file.get_tensor(tensor).clone()
                check_finite(path, name, merged[name])
        return merged

    def check_updates(self) -> None:
        """Refuse factors whose updates are not finite, for an engine that loads the factors itself.

        Raises:
            CheckpointError: names the weight and the file.
        """
        path = self.folder / ADAPTER_WEIGHTS
        with _opened(path) as file:
            for name in self.factors:
                check_finite(path, name, self._update(file, name))

    def _update(self, file: Any, name: str) -> Tensor:
        """What LoRA adds to a weight, in float32."""
        first, second = self.factors[name]
        return self.scale * (file.get_tensor(second).float() @ file.get_tensor(first).float())

    @property
    def replaced_modules(self) -> list[str]:
        """Names of the modules that the adapter replaces whole, such as "action_projection"."""
        return sorted({name.partition(".")[0] for name in self.replaced})


def adapter_sha256(folder: Path) -> str:
    """Hash an adapter's files: SHA-256, in hexadecimal, of their names and SHA-256s. Raises CheckpointError."""
    total = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_NAME):
        if name != CONFIG_NAME or os.path.lexists(folder / name):
            total.update(f"{file_sha256(folder / name, CheckpointError)}  {name}\n".encode())
    if (decoder := decoder_of(folder)) is not None:
        total.update(f"{checkpoint_sha256(decoder)}  {DECODER_FOLDER}\n".encode())
    return total.hexdigest()


def decoder_of(folder: Path) -> Path | None:
    """The folder of an adapter's own decoder; None if its frames are decoded as the base model's are.

    Raises CheckpointError if there is something of its name that is no folder.
    """
    decoder = folder / DECODER_FOLDER
    if not os.path.lexists(decoder):
        return None
    if not decoder.is_dir():
        raise CheckpointError(f"{decoder}: expected a folder or none, got something else")
    return decoder


def _adapted_config(folder: Path, base: LlamaActionConfig) -> LlamaActionConfig:
    """The base model's configuration, or the adapter's config.json, which may differ in `_OWN_KEYS`."""
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):
        return base
    try:
        config = LlamaActionConfig.from_dict(read_config(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    own = _OWN_KEYS if config.layout == base.layout else {*_OWN_KEYS, "max_position_embeddings"}
    for name in (name for name in WorldModelValues.model_fields if name not in own):
        value, got = (getattr(each, name, None) for each in (base, config))
        if got != value:
            raise CheckpointError(f"{path}: {name}: expected the base model's {value!r:.80}, got {got!r:.80}")
    return config


def _names(path: Path, layout: Layout) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """The adapted weights with the names of their factors, and the replaced tensors."""
    pairs: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for tensor in layout:
        if not tensor.startswith(PREFIX):
            raise CheckpointError(f"{path}: expected names that begin with {PREFIX}, got {tensor:.80}")
        name = tensor.removeprefix(PREFIX)
        if found := _FACTOR.fullmatch(name):
            pairs.setdefault(f"{found['weight']}.weight", {})[found["factor"]] = tensor
        elif ".lora_" in name:
            raise CheckpointError(
                f"{path}: expected LoRA on {', '.join((*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS))}, got {tensor:.120}"
            )
        else:
            replaced[name] = tensor
    lonely = next((pair for pair in pairs.values() if len(pair) < 2), None)
    if lonely is not None:
        raise CheckpointError(
            f"{path}: expected lora_A and lora_B of each weight, got {next(iter(lonely.values()))} alone"
        )
    twice = next((name for name in pairs if name in replaced), None)
    if twice is not None:
        raise CheckpointError(f"{path}: {twice}: expected LoRA factors or a tensor in its place, got both")
    if not pairs and not replaced:
        raise CheckpointError(f"{path}: expected LoRA factors, got no tensor")
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}, replaced


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises CheckpointError if it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, got: {str(error)[:200]}") from None


def _check_base(path: Path, base: Path) -> None:
    with _opened(path) as file:
        expected = (file.metadata() or {}).get(BASE_SHA256)
    if expected is None:
        return
    files = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in base.iterdir())
    if expected != (got := _base_sha256(base.absolute(), tuple(files))):
        raise CheckpointError(f"{path}: expected the base model {expected[:12]}, got {got[:12]} of {base}")


@lru_cache(maxsize=8)
def _base_sha256(base: Path, _files: tuple[tuple[str, int, int], ...]) -> str:
    """The base model's hash, computed once for all its adapters while sizes and times of its files stay the same."""
    return checkpoint_sha256(base)
