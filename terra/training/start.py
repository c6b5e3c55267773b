"""What a world model's training starts from: random weights, or the weights of a model that exists."""

import logging
from pathlib import Path

import torch

from terra.actions import describe_space
from terra.config.files import choices, compose_groups
from terra.config.groups import CheckpointSettings
from terra.dataset.tokens import TokenizedDriving
from terra.errors import CheckpointError, ConfigError
from terra.world_model import (
    ARCHITECTURES,
    LlamaActionConfig,
    LlamaActionForCausalLM,
    LlamaActionV2ForCausalLM,
    load_world_model,
)
from tokenizer.checkpoint import CONFIG_NAME, resolve_checkpoint
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
    if pretrained in set(choices("model")) - {"folder"}:
        values = compose_groups({"model": pretrained}, {"device": None})["world_model"]
        return checked(CheckpointSettings, values).folder()
    if (Path(pretrained) / CONFIG_NAME).is_file():
        return resolve_checkpoint(Path(pretrained))
    return resolve_checkpoint(pretrained, "world_model")


def start_from(folder: Path, tokenized: TokenizedDriving, window: int) -> WorldModel:
    """A trained model in float32, to be trained on other tokens.

    If its actions are not those of the tokens, or come at another rate, the model gets their configuration: a new
    action projection and new positions of the slots, which the caller's random state decides; all else is kept.

    Raises:
        CheckpointError: see `terra.world_model.load_world_model`.
        ConfigError: the tokens are another tokenizer's than the model was trained with, or the window is longer than
            the model's.
    """
    model = load_world_model(folder)
    config = model.config
    _, rows, columns = tokenized.tokens.shape
    expected, got = (config.num_image_patches, config.image_vocab_size), (rows * columns, tokenized.codebook_size)
    if expected != got:
        raise ConfigError(
            f"init_from: {folder}: expected tokens of a frame and codebook as the model's {expected}, got {got}"
        )
    if config.tokenizer_sha256 is not None and config.tokenizer_sha256 != tokenized.tokenizer_sha256:
        raise ConfigError(
            f"init_from: {folder}: expected tokens of the model's own tokenizer {config.tokenizer_sha256[:12]}, "
            f"got {tokenized.tokenizer_sha256[:12]}"
        )
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
