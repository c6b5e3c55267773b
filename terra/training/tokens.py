"""Recorded driving as token ids: made once with a trained tokenizer, stored as one file a split, read in windows."""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.errors import CheckpointError, ConfigError, DatasetError
from terra.training.data import DrivingFrames, to_unit_range
from terra.training.progress import ProgressLine
from terra.training.state import read_tensors
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import read_json, write_json, write_tensors

logger = logging.getLogger(__name__)

FORMAT, VERSION = "terra-tokens", 1


@dataclass(frozen=True)
class TokenisedDriving:
    """The episodes of one split, one after another.

    Attributes:
        tokens: ids in [0, codebook_size), int32 on disk and on the device (half of int64's memory).
        actions: float32 rows of [lateral y (left positive), forward x, time t], metres and seconds.
        episode_start: int64 on the CPU; episode i is frames episode_start[i] to episode_start[i + 1].
        fps: frames a second.
        codebook_size: of the tokenizer.
        tokenizer_sha256: `tokenizer.checkpoint.checkpoint_sha256` of the tokenizer that made the tokens.
        waypoint_times: seconds ahead of an action's rows.
    """

    tokens: Int[Tensor, "frames rows cols"]
    actions: Float[Tensor, "frames slots action_dim"]
    episode_start: Int[Tensor, " boundaries"]
    fps: float
    codebook_size: int
    tokenizer_sha256: str
    waypoint_times: tuple[float, ...]

    def window_starts(self, window: int) -> Int[Tensor, " windows"]:
        """First frames of all windows of `window` frames that lie inside one episode, int64 on the CPU.

        Raises:
            ConfigError: `window` below 1.
            DatasetError: no episode is that long.
        """
        if window < 1:
            raise ConfigError(f"window: expected at least 1 frame, got {window}")
        bounds = self.episode_start.tolist()
        ranges = [torch.arange(a, b - window + 1) for a, b in pairwise(bounds) if b - a >= window]
        if not ranges:
            longest = int(self.episode_start.diff().max()) if len(bounds) > 1 else 0
            raise DatasetError(f"expected an episode of at least {window} frames, got at most {longest}")
        return torch.cat(ranges)

    def windows(
        self, starts: Int[Tensor, " batch"], window: int
    ) -> tuple[Int[Tensor, "batch window rows cols"], Float[Tensor, "batch window slots action_dim"]]:
        """Tokens (int64) and actions of the windows that begin at `starts`, which lie on the tokens' device."""
        frames = starts[:, None] + torch.arange(window, device=starts.device)
        return self.tokens[frames].long(), self.actions[frames]

    def to(self, device: torch.device) -> "TokenisedDriving":
        """The same with tokens and actions on `device`."""
        return replace(self, tokens=self.tokens.to(device), actions=self.actions.to(device))


@torch.no_grad()
def tokenise(
    driving: DrivingFrames, tokenizer: LFQTokenizer, tokenizer_sha256: str, *, batch_size: int = 256
) -> TokenisedDriving:
    """Encode every frame, on the device and in the precision of the tokenizer's weights.

    Raises:
        ConfigError: the tokenizer takes frames of another size.
    """
    size = tuple(driving.frames.shape[2:])
    if size != tuple(tokenizer.image_size):
        raise ConfigError(
            f"expected frames of the tokenizer's {tuple(tokenizer.image_size)} (height, width), got {size}"
        )
    chunks = driving.frames.split(batch_size)
    grids: list[Tensor] = []
    with ProgressLine("tokenising", len(driving.frames)) as line:
        for index, chunk in enumerate(chunks):
            grids.append(tokenizer.encode(to_unit_range(chunk)).to("cpu", torch.int32))
            line.show(min((index + 1) * batch_size, len(driving.frames)), f"{len(driving.frames)} frames")
    return TokenisedDriving(
        tokens=torch.cat(grids),
        actions=driving.actions,
        episode_start=driving.episode_start,
        fps=driving.fps,
        codebook_size=tokenizer.codebook_size,
        tokenizer_sha256=tokenizer_sha256,
        waypoint_times=driving.waypoint_times,
    )


def save_tokens(tokenised: TokenisedDriving, path: Path) -> None:
    """Write PATH.safetensors, then PATH.json beside it, which describes it; `path` is either, or has no suffix.

    Raises:
        OutputError: the folder can't be written.
    """
    tensor_path = path.with_suffix(".safetensors")
    tensors = {
        "tokens": tokenised.tokens.to("cpu", torch.int32),
        "actions": tokenised.actions.cpu().float(),
        "episode_start": tokenised.episode_start,
    }
    write_tensors(tensor_path, tensors)
    write_json(
        path.with_suffix(".json"),
        {
            "format": FORMAT,
            "version": VERSION,
            "fps": tokenised.fps,
            "codebook_size": tokenised.codebook_size,
            "tokenizer_sha256": tokenised.tokenizer_sha256,
            "waypoint_times": list(tokenised.waypoint_times),
            "frames": len(tokenised.tokens),
            "episodes": len(tokenised.episode_start) - 1,
            "sha256": _sha256(tensor_path),
        },
    )


def load_tokens(path: Path, device: torch.device | str = "cpu") -> TokenisedDriving:
    """Read what `save_tokens` wrote, onto `device`.

    Raises:
        DatasetError: a file is missing, damaged, of another format, or not the one that the JSON describes.
    """
    tensor_path, json_path = path.with_suffix(".safetensors"), path.with_suffix(".json")
    description = _read_description(json_path, tensor_path)
    try:
        tensors = read_tensors(tensor_path)
        tokenised = TokenisedDriving(
            tokens=tensors["tokens"],
            actions=tensors["actions"],
            episode_start=tensors["episode_start"],
            fps=float(description["fps"]),
            codebook_size=int(description["codebook_size"]),
            tokenizer_sha256=str(description["tokenizer_sha256"]),
            waypoint_times=tuple(float(time) for time in description["waypoint_times"]),
        )
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"{tensor_path}: expected tokens as dataset_tokenise.py writes them, got {error!r}"
        ) from error
    _check(tokenised, tensor_path)
    return tokenised.to(torch.device(device))


def _read_description(json_path: Path, tensor_path: Path) -> dict[str, Any]:
    for needed in (json_path, tensor_path):
        if not needed.is_file():
            raise DatasetError(f"{needed}: expected tokens made by dataset_tokenise.py, found no such file")
    try:
        description = read_json(json_path)
    except CheckpointError as error:
        raise DatasetError(str(error)) from error
    kind = (description.get("format"), description.get("version"))
    if kind != (FORMAT, VERSION):
        raise DatasetError(f"{json_path}: expected format {FORMAT} version {VERSION}, got {json.dumps(kind)}")
    if description.get("sha256") != (got := _sha256(tensor_path)):
        raise DatasetError(f"{tensor_path}: expected sha256 {description.get('sha256')} of {json_path.name}, got {got}")
    return description


def _check(tokenised: TokenisedDriving, where: Path) -> None:
    tokens, actions, bounds = tokenised.tokens, tokenised.actions, tokenised.episode_start
    if tokens.ndim != 3 or actions.ndim != 3 or len(actions) != len(tokens):
        raise DatasetError(
            f"{where}: expected tokens (frames, rows, cols) and actions (frames, slots, 3), "
            f"got {tuple(tokens.shape)} and {tuple(actions.shape)}"
        )
    starts_and_ends = (int(bounds[0]), int(bounds[-1])) if len(bounds) else None
    if starts_and_ends != (0, len(tokens)) or (bounds.diff() <= 0).any():
        raise DatasetError(
            f"{where}: episode_start: expected increasing from 0 to {len(tokens)}, got {bounds.tolist()[:8]}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenised.codebook_size:
        raise DatasetError(f"{where}: expected ids in [0, {tokenised.codebook_size}), got {low} to {high}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
