"""Finds, checks and loads the weights that a training starts from (init_from=).

Where the data have other actions than the world model, or another rate, the action inputs are made anew.
"""

import logging
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator

from terra.actions import describe_space
from terra.config.files import compose_groups, model_names
from terra.config.groups import CheckpointSettings, TokenizerSettings
from terra.dataset.tokens import TokenizedDriving
from terra.errors import CheckpointError, ConfigError
from terra.memory import MemoryRule
from terra.world_model import (
    ARCHITECTURES,
    LlamaActionConfig,
    LlamaActionForCausalLM,
    LlamaActionV2ForCausalLM,
    load_world_model,
)
from tokenizer.checkpoint import CONFIG_NAME, checkpoint_sha256, read_json, resolve_checkpoint
from tokenizer.files import write_json
from tokenizer.settings import checked

logger = logging.getLogger(__name__)

WorldModel = LlamaActionForCausalLM | LlamaActionV2ForCausalLM


def find_world_model(pretrained: str) -> Path:
    """The folder of a world model.

    Args:
        pretrained: "demo", "terra_v1" or "terra_v2"; a folder of a world model, or one that holds world_model/; or the
            Hub id (owner/name) of a repository that holds world_model/.

    Raises:
        CheckpointError: no such folder or repository.
    """
    return _find(pretrained, "world_model")


def find_tokenizer(pretrained: str) -> Path:
    """The folder of a tokenizer: as `find_world_model`, but with tokenizer/ in place of world_model/.

    Raises:
        CheckpointError: no such folder or repository.
    """
    return _find(pretrained, "tokenizer")


def _find(pretrained: str, part: Literal["tokenizer", "world_model"]) -> Path:
    if pretrained in model_names():
        values = compose_groups({"model": pretrained}, {"device": None})[part]
        kind = CheckpointSettings if part == "world_model" else TokenizerSettings
        return checked(kind, values).folder()
    if (Path(pretrained) / CONFIG_NAME).is_file():
        return resolve_checkpoint(Path(pretrained))
    return resolve_checkpoint(pretrained, part)


def record_start(state: Path, base: Path, accelerator: Accelerator) -> None:
    """Remember in `state` which weights a run started from, and refuse to resume it from others.

    Raises:
        ConfigError: the run started from other weights than those in `base`.
    """
    path, sha256 = state / "start.json", checkpoint_sha256(base)
    if path.exists():
        before = read_json(path).get("sha256")
        if before != sha256:
            raise ConfigError(f"init_from: expected {str(before)[:12]} of {path}, got {sha256[:12]} of {base}")
    elif accelerator.is_main_process:
        write_json(path, {"sha256": sha256})


def start_from(folder: Path, tokenized: TokenizedDriving, window: int, memory: MemoryRule | None = None) -> WorldModel:
    """A trained model in float32, to be trained on other tokens.

    If its actions are not those of the tokens, or come at another rate, the model gets their configuration: a new
    action projection and new positions of the slots, which the caller's random state decides; all else is kept. Its
    configuration names the tokenizer of the tokens, which may be another one than before if its tokens are nearly those
    of the one before (`tokens_like`), and the views of the tokens. `memory` is how the windows of the training
    remember.

    Raises:
        CheckpointError: see `terra.world_model.load_world_model`.
        ConfigError: the tokens mean something else than those that the model was trained with, or the window is longer
            than the model's.
    """
    model = load_world_model(folder)
    config = model.config
    _, rows, columns = tokenized.tokens.shape
    expected, got = (config.num_image_patches, config.image_vocab_size), (rows * columns, tokenized.codebook_size)
    if expected != got:
        raise ConfigError(
            f"init_from: {folder}: expected tokens of a frame and codebook as the model's {expected}, got {got}"
        )
    before, now = config.tokenizer_sha256, tokenized.tokenizer_sha256
    if before is not None and before not in (now, tokenized.tokens_like):
        raise ConfigError(
            f"init_from: {folder}: expected tokens of the model's own tokenizer {before[:12]}, got {now[:12]}"
        )
    if before is not None and before != now:
        logger.info(
            "init_from: new tokenizer %s, whose tokens are nearly those of the model's %s", now[:12], before[:12]
        )
    config.tokenizer_sha256 = now
    config.__dict__.pop("memory", None)  # a model without memory has no such key
    if memory is not None:
        config.memory = memory.model_dump()
    config.__dict__.pop("views", None)
    if tokenized.views is not None:
        config.views = tokenized.views.describe()
    if window > config.num_temporal_embeddings:
        raise ConfigError(f"window: expected at most {config.num_temporal_embeddings}, those of {folder}, got {window}")
    facts = {"fps": tokenized.fps, **describe_space(tokenized.space)}
    if all(getattr(config, name) == value for name, value in facts.items()):
        return model
    adapted = _with_actions(config, tokenized)
    logger.info("init_from: new actions: %s at %g a second", tokenized.space.title, tokenized.fps)
    return _renewed(model, adapted)


def _with_actions(config: LlamaActionConfig, tokenized: TokenizedDriving) -> LlamaActionConfig:
    _, slots, action_dim = tokenized.actions.shape
    block = config.num_image_patches + slots
    values = config.to_dict() | {"waypoint_times": None, "action_space": None} | describe_space(tokenized.space)
    values |= {
        "num_action_tokens": slots,
        "num_spatio_embeddings": block,
        "action_dim": action_dim,
        "fps": tokenized.fps,
        "max_position_embeddings": max(config.max_position_embeddings, block * config.num_temporal_embeddings),
    }
    try:
        return LlamaActionConfig.from_dict({name: value for name, value in values.items() if value is not None})
    except CheckpointError as error:
        raise ConfigError(f"init_from: {error}") from None


@torch.no_grad()
def _renewed(model: WorldModel, config: LlamaActionConfig) -> WorldModel:
    """A model of `config` with all weights of `model` but those of its actions, where these differ."""
    renewed = ARCHITECTURES[(config.architectures or [type(model).__name__])[0]](config)
    same_actions = model.config.space == config.space
    tensors = dict(model.state_dict())
    for name, target in renewed.state_dict().items():
        if name.startswith("action_projection.") and not same_actions:
            continue
        if name == "pos_embedding_spatio_temporal.spatio_embeddings.weight":
            kept = len(target) if same_actions else config.num_image_patches
            target[:kept] = tensors[name][:kept]
        else:
            target.copy_(tensors[name])
    return renewed
