"""The tokens that a world model predicts for recorded frames, on which a decoder is trained further.

A decoder that has seen only the tokens of real frames draws those of generated frames worse. Source of the idea, there
for image generators: Qiu et al. 2025, "Image Tokenizer Needs Post-Training" (arXiv 2509.12474).
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from einops import rearrange
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from decoder.video import to_unit_range
from terra.actions import ActionSpace
from terra.dataset.tokens import token_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.pairing import check_pairing
from terra.progress import ProgressLine
from terra.prompt import pack_blocks
from terra.training.data import DrivingFrames
from terra.training.start import WorldModel, find_world_model
from terra.world_model import load_config, load_world_model
from tokenizer import LFQTokenizer
from tokenizer.settings import NonNegative, Positive, Settings, Text

NUM_GIVEN = 3
"""First frames of each window that keep their own tokens, as in a rollout."""

_ENCODED_AT_ONCE = 32


class PredictedSettings(Settings):
    """Frames that a decoder sees through the tokens that a world model predicts for them.

    Attributes:
        world_model: the world model, see `terra.training.start.find_world_model`; None: no such frames.
        share: of these frames in each batch.
        temperature: at which their tokens are sampled.
        reconstruction: factor of the pixel and gradient terms for these frames. Their tokens show something else than
            the frame here and there, and there these terms ask for the mean of all that it could be.
    """

    world_model: Text | None = None
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    temperature: Positive = 0.9
    reconstruction: NonNegative = 1.0


@dataclass(frozen=True)
class PredictedTokens:
    """The predicted tokens of an objective's frames, one grid for each frame, on the frames' device.

    Attributes:
        tokens: ids; those of each window's first frames are the frames' own.
        share, reconstruction: as in `PredictedSettings`.
    """

    tokens: Int[Tensor, "frames rows cols"]
    share: float
    reconstruction: float

    def count(self, batch_size: int) -> int:
        """How many frames of a batch are decoded from predicted tokens: at least one, and never all."""
        return min(max(round(self.share * batch_size), 1), batch_size - 1)


def find_predictor(settings: PredictedSettings, source: Path, space: ActionSpace, fps: float) -> Path | None:
    """The folder of the world model of `settings`, None without one; no weights are loaded.

    Args:
        settings: which world model.
        source: the tokenizer's folder.
        space: what the recordings' actions mean.
        fps: frames per second of the recordings.

    Raises:
        CheckpointError: no such world model, or one of another tokenizer.
        ConfigError: the world model has other actions than the recordings, or another rate.
    """
    if settings.world_model is None:
        return None
    folder = find_world_model(settings.world_model)
    spec = EngineSpec.of(load_config(folder))
    check_pairing(source, spec)
    if (spec.space, spec.fps) != (space, fps):
        raise ConfigError(
            f"predicted.world_model: expected {space.title} at {fps:g} a second, as the recordings have, "
            f"got {spec.space.title} at {spec.fps:g} of {folder}"
        )
    return folder


def predicted_tokens(
    settings: PredictedSettings, source: Path, tokenizer: LFQTokenizer, driving: DrivingFrames, seed: int
) -> PredictedTokens | None:
    """Load the world model of `settings` and predict the tokens of all frames; None without a world model.

    Args:
        settings: which world model, and how its tokens are sampled.
        source: the tokenizer's folder.
        tokenizer: that tokenizer, on the frames' device.
        driving: whole episodes.
        seed: of the sampling.

    Raises:
        CheckpointError, ConfigError: see `find_predictor`.
    """
    folder = find_predictor(settings, source, driving.space, driving.fps)
    if folder is None:
        return None
    device = driving.frames.device
    model = load_world_model(folder, device=device)
    tokens = predict(model, tokenizer, driving, settings.temperature, torch.Generator(device).manual_seed(seed))
    return PredictedTokens(tokens, settings.share, settings.reconstruction)


@torch.no_grad()
def predict(
    model: WorldModel, tokenizer: LFQTokenizer, driving: DrivingFrames, temperature: float, generator: torch.Generator
) -> Int[Tensor, "frames rows cols"]:
    """Sample each token of recorded frames given all true tokens and actions before it in its window (teacher forcing).

    Each episode is cut into windows of the model's length, whose first `NUM_GIVEN` frames keep their own tokens.

    Args:
        model: the world model, on the frames' device.
        tokenizer: the one that makes its tokens, there too.
        driving: whole episodes, with the model's actions.
        temperature: divides the logits.
        generator: on the frames' device.
    """
    device, length = driving.frames.device, model.config.num_temporal_embeddings
    found = torch.empty(
        (len(driving.frames), tokenizer.rows, tokenizer.cols), dtype=token_dtype(tokenizer.codebook_size), device=device
    )
    with (
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"),
        ProgressLine("predicting tokens", len(found)) as line,
    ):
        for first, last in pairwise(driving.episode_start.tolist()):
            for start in range(first, last, length):
                window = slice(start, min(start + length, last))
                parts = driving.frames[window].split(_ENCODED_AT_ONCE)
                tokens = torch.cat([tokenizer.encode(to_unit_range(part)) for part in parts])
                actions = driving.actions[window].to(device)[None]
                states = model.predicting_states(pack_blocks(tokens[None], actions.shape[2]), actions)[0]
                for frame in range(NUM_GIVEN, len(tokens)):  # one at a time: a window's logits can take gigabytes
                    logits = model.image_logits(states[frame]).float() / temperature
                    noise = torch.empty_like(logits).exponential_(generator=generator).log()
                    sampled = (logits - noise).argmax(dim=-1)  # the Gumbel-max trick
                    tokens[frame] = rearrange(sampled, "(rows cols) -> rows cols", rows=tokenizer.rows)
                found[window] = tokens.to(found.dtype)
                line.show(window.stop, f"{window.stop} of {len(found)} frames")
    return found
