"""From configuration to objects: where `DictConfig` ends, and every setting is checked before weights load."""

import importlib
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from decoder import Decoder
from decoder.overlay import Camera
from terra.engine.base import Engine
from terra.errors import ConfigError, TerraError
from terra.extras import install_hint
from terra.sampling import SamplingParams
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import resolve_checkpoint


def checkpoint_folder(node: DictConfig) -> Path:
    """The local folder of a `tokenizer` or `world_model` setting; downloads a Hub repository's folder.

    Raises:
        CheckpointError: see `tokenizer.checkpoint.resolve_checkpoint`.
    """
    return resolve_checkpoint(node.pretrained, node.subfolder, node.revision)


def build_sampling(node: DictConfig) -> SamplingParams:
    """The sampling parameters.

    Raises:
        ConfigError: a value out of range, or of another type.
    """
    try:
        return SamplingParams(**node)  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampling: {error}") from None


def build_camera(node: DictConfig) -> Camera:
    """The camera of the overlay.

    Raises:
        ConfigError: a value out of range.
    """
    try:
        return Camera(**{key: float(value) for key, value in node.items()})  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"camera: {error}") from None


def check_extra(node: DictConfig) -> None:
    """Import what a `_target_` needs, before any weight loads.

    Raises:
        ConfigError: a package is missing; says which extra brings it.
    """
    module = node._target_
    while module:
        module, _, _ = module.rpartition(".")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                continue  # a class, or a part of the path that is none
            name = (error.name or "").partition(".")[0]
            raise ConfigError(f"{node._target_}: needs the package {name}: {install_hint(name)}") from None
        return


def build_engine(node: DictConfig, checkpoint: Path) -> Engine:
    """The engine, with its weights loaded.

    Raises:
        ConfigError: an argument that the engine does not take.
        CheckpointError: weights that do not fit.
    """
    return _build(node, "engine", checkpoint=checkpoint)


def build_decoder(node: DictConfig, tokenizer: LFQTokenizer) -> Decoder:
    """The decoder over a tokenizer that is built already.

    Raises:
        ConfigError: an argument that the decoder does not take.
    """
    return _build(node, "decoder", tokenizer=tokenizer)


def _build(node: DictConfig, what: str, **arguments: Any) -> Any:
    try:
        return instantiate(node, **arguments, _convert_="all")
    except InstantiationException as error:
        # Hydra wraps whatever a constructor raises; our own errors are what the user is to see.
        if isinstance(error.__cause__, TerraError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, TypeError):
            raise ConfigError(f"{what}: {error.__cause__}") from None
        raise
