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
from terra.errors import CheckpointError, ConfigError, TerraError
from terra.extras import install_hint
from terra.sampling import SamplingParams
from terra.world_model.published import TOKENIZERS, tokenizer_of
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256, resolve_checkpoint
from tokenizer.lineage import makes_tokens_of


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


def check_pairing(tokenizer: Path, world_model: Any) -> None:
    """Refuse a tokenizer that the world model was not trained with.

    Args:
        tokenizer: its checkpoint folder.
        world_model: the world model's `LlamaActionConfig`.

    Raises:
        CheckpointError: another number of tokens a frame, another codebook, another encoder than recorded or, where
            nothing is recorded, the other one of the two published tokenizers, which differ in weights alone.
    """
    config = LFQTokenizerConfig.load(tokenizer / "config.json")
    got = (config.num_tokens, config.quantizer_config.codebook_size)
    expected = (world_model.num_image_patches, world_model.image_vocab_size)
    if got != expected:
        raise CheckpointError(
            f"tokenizer {tokenizer}: the world model expects {expected[0]} tokens a frame of a codebook of "
            f"{expected[1]}, got {got[0]} of {got[1]}"
        )
    recorded = world_model.tokenizer_sha256
    if recorded is None:
        _check_published_pair(tokenizer, world_model)
    elif not makes_tokens_of(tokenizer, recorded):
        raise CheckpointError(
            f"tokenizer {tokenizer}: the world model was trained with tokenizer {recorded[:12]}, "
            f"got {checkpoint_sha256(tokenizer)[:12]}"
        )


def _check_published_pair(tokenizer: Path, world_model: Any) -> None:
    architecture = (world_model.architectures or [""])[0]
    expected = tokenizer_of(architecture)
    if tokenizer.name in TOKENIZERS and tokenizer.name != expected:
        raise CheckpointError(f"tokenizer {tokenizer}: the published {architecture} was trained with {expected}")


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
