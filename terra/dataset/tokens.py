"""Recordings as token ids: one file per shard of the dataset; a split is loaded whole and read in windows.

    DIR/<split>/<shard>.safetensors    tokens (frames, rows, cols), the smallest of uint8, int16 and int32 that holds
                                       the codebook; actions (frames, slots, action_dim) float32; episode_start
                                       (episodes + 1) int64; of driving also poses (frames, 3) float64 and place
                                       (episodes) int64; `ShardFacts` in the header
    DIR/<split>/tokens.json            written last: the facts that all files share, their names, frames and SHA-256

`terra.training.tokenize` writes them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from terra.actions import ActionSpace, describe_space, read_space
from terra.dataset.format import DATASET_FILE
from terra.errors import CheckpointError, ConfigError, DatasetError
from terra.views import Views
from tokenizer.checkpoint import read_header, write_tensors
from tokenizer.files import file_sha256, read_json, write_json

logger = logging.getLogger(__name__)

FORMAT, VERSION = "terra-tokens", 2
INDEX = "tokens.json"
_PLACES = ("poses", "place")  # the tensors that not every file has


@dataclass(frozen=True)
class TokenizedDriving:
    """The episodes of one split, one after another.

    Attributes:
        tokens: ids in [0, codebook_size), as the smallest of uint8, int16 and int32 that holds them.
        actions: float32 rows of the action space, one action for each frame; the last one of an episode leads nowhere.
        episode_start: int64 on the CPU; episode i is frames episode_start[i] to episode_start[i + 1].
        fps: frames per second.
        codebook_size: number of ids of the tokenizer.
        tokenizer_sha256: `tokenizer.lineage.tokens_sha256` of the tokenizer that made the tokens.
        space: what the actions mean.
        tokens_like: that of the tokenizer whose tokens these are nearly equal to (`LFQTokenizerConfig.tokens_like`);
            None if there is none.
        poses: float64 on the CPU: x, y (m) and heading (rad, counter-clockwise from +x, never wrapped) at each frame,
            in the frame of the episode's place; None where a file has none (it is no driving, or it is old).
        place: int64 on the CPU: a number for each episode, equal where episodes were recorded in one place and their
            poses can be compared; None as for `poses`.
        views: the cameras whose pictures share each frame; None for one camera.
    """

    tokens: Int[Tensor, "frames rows cols"]
    actions: Float[Tensor, "frames slots action_dim"]
    episode_start: Int[Tensor, " boundaries"]
    fps: float
    codebook_size: int
    tokenizer_sha256: str
    space: ActionSpace
    tokens_like: str | None = None
    poses: Float64[Tensor, "frames 3"] | None = None
    place: Int[Tensor, " episodes"] | None = None
    views: Views | None = None

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

    def first(self, num_frames: int) -> "TokenizedDriving":
        """Return the first `num_frames` frames, or all if there are not so many; the last episode may be cut."""
        bounds = self.episode_start[self.episode_start < num_frames].tolist()
        count = min(num_frames, len(self.tokens))
        bounds = torch.tensor([*bounds, count] if bounds[-1] < count else bounds)
        return replace(
            self,
            tokens=self.tokens[:count],
            actions=self.actions[:count],
            episode_start=bounds,
            poses=None if self.poses is None else self.poses[:count],
            place=None if self.place is None else self.place[: len(bounds) - 1],
        )

    def to(self, device: torch.device) -> "TokenizedDriving":
        """Return a copy with tokens and actions on `device`."""
        return replace(self, tokens=self.tokens.to(device), actions=self.actions.to(device))


@dataclass(frozen=True)
class ShardFacts:
    """The origin of one file's tokens, and the facts needed to read them.

    Attributes:
        fps, codebook_size, tokenizer_sha256, space, tokens_like, views: as in `TokenizedDriving`.
        source_sha256: SHA-256 of the ids, lengths and video hashes of the shard's episodes; tells if the file is stale.
        precision: data type in which the tokenizer computed.
    """

    fps: float
    codebook_size: int
    tokenizer_sha256: str
    space: ActionSpace
    source_sha256: str
    precision: str
    tokens_like: str | None = None
    views: Views | None = None

    def header(self) -> dict[str, str]:
        """The header of a safetensors file, as one string, because safetensors writes several in no fixed order."""
        return {FORMAT: json.dumps({"version": VERSION, **self._plain})}

    @property
    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("tokens_like", "views") and value is None:
                continue
            if each.name == "space":
                plain |= describe_space(value)
            else:
                plain[each.name] = value.describe() if isinstance(value, Views) else value
        return plain

    @property
    def shared(self) -> dict[str, Any]:
        """The facts that must be equal in all files of a split."""
        return {name: value for name, value in self._plain.items() if name != "source_sha256"}


def token_dtype(codebook_size: int) -> torch.dtype:
    """The smallest of uint8, int16 and int32 that holds ids in [0, codebook_size)."""
    if codebook_size <= 2**8:
        return torch.uint8
    return torch.int16 if codebook_size <= 2**15 else torch.int32


def save_shard(
    path: Path,
    facts: ShardFacts,
    tokens: Int[Tensor, "frames rows cols"],
    actions: Float[Tensor, "frames slots action_dim"],
    episode_start: Int[Tensor, " boundaries"],
    poses: Float64[Tensor, "frames 3"] | None = None,
    place: Int[Tensor, " episodes"] | None = None,
) -> None:
    """Write one file, whole or not at all; see `TokenizedDriving` for the tensors.

    Raises:
        OutputError: the folder can't be written.
    """
    dtype = token_dtype(facts.codebook_size)
    tensors = {"tokens": tokens.to("cpu", dtype), "actions": actions.cpu().float(), "episode_start": episode_start}
    if poses is not None and place is not None:
        tensors |= {"poses": poses.double(), "place": place.long()}
    write_tensors(path, tensors, facts.header())


def read_shard_facts(path: Path) -> ShardFacts:
    """Read the header of a file written by `save_shard`.

    Raises:
        DatasetError: the file is missing, damaged or of another format.
    """
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(FORMAT)
        values: dict[str, Any] = json.loads(header) if header is not None else {}
        if (version := values.pop("version", None)) != VERSION:
            kind = None if header is None else FORMAT
            raise DatasetError(f"{path}: expected {FORMAT} version {VERSION}, got {kind} version {version}")
        space = read_space(values, str(path), DatasetError)
        views = Views.read(values, str(path), DatasetError)
        for name in ("waypoint_times", "action_space", "views"):
            values.pop(name, None)
        return ShardFacts(**values, space=space, views=views)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}: expected tokens as terra tokenize writes them, got {error!r}") from error


def has_poses(path: Path) -> bool:
    """Whether a file that `read_shard_facts` reads has poses."""
    with safe_open(path, "pt") as file:
        return set(_PLACES) <= set(file.keys())


def shard_damage(path: Path, sha256: str | None) -> str | None:
    """What is wrong with the bytes of a file, in one line; None if nothing is.

    Args:
        path: the file.
        sha256: its hash, or None if that is not known: then what the file's header shows is all.
    """
    try:
        read_header(path)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}: ")
    if sha256 is not None and sha256 != (got := file_sha256(path, DatasetError)):
        return f"expected sha256 {sha256[:12]} of {INDEX}, got {got[:12]}"
    return None


def indexed_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file that a split's index names; nothing if there is no index, or a damaged one."""
    try:
        files = _read_index(folder)["files"]
        return {name: str(described["sha256"]) for name, described in files.items()}
    except (DatasetError, AttributeError, KeyError, TypeError):
        return {}


def write_index(folder: Path, names: Sequence[str]) -> None:
    """Write tokens.json over the files `names` of a split, which must come from one tokenizer.

    Raises:
        DatasetError: a file is missing or damaged, or two files differ in `ShardFacts.shared`.
        OutputError: the folder can't be written.
    """
    shared: dict[str, Any] | None = None
    files = {}
    for name in names:
        path = folder / name
        facts = read_shard_facts(path)
        shared = shared or facts.shared
        if facts.shared != shared:
            differing = [key for key, value in shared.items() if facts.shared.get(key) != value]
            raise DatasetError(f"{path}: expected the {', '.join(differing)} of {folder / names[0]}, got others")
        with safe_open(path, "pt") as file:
            frames, episodes = file.get_slice("tokens").get_shape()[0], file.get_slice("episode_start").get_shape()[0]
        files[name] = {"frames": frames, "episodes": episodes - 1, "sha256": file_sha256(path, DatasetError)}
    totals = {key: sum(file[key] for file in files.values()) for key in ("frames", "episodes")}
    write_json(folder / INDEX, {"format": FORMAT, "version": VERSION, **(shared or {}), **totals, "files": files})


def load_tokens(folder: Path, device: torch.device | str = "cpu") -> TokenizedDriving:
    """Read all files of a split as one, onto `device`; each is checked against its SHA-256.

    Raises:
        DatasetError: the folder is not complete, or a file is missing, damaged, of another format or not the one that
            tokens.json describes.
    """
    index = _read_index(folder)
    try:
        rows = int(index["frames"])
        facts = {name: index[name] for name in ("fps", "codebook_size", "tokenizer_sha256")}
        facts["tokens_like"] = index.get("tokens_like")
        space = read_space(index, str(folder / INDEX), DatasetError)
        views = Views.read(index, str(folder / INDEX), DatasetError)
        files: Mapping[str, Mapping[str, Any]] = dict(index["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{folder / INDEX}: expected an index of token files, got {error!r}") from error
    # The tensors are filled in place, because a list of parts and their concatenation would take twice the memory.
    whole: dict[str, Tensor] = {}
    bounds, done = [0], 0
    places: list[Mapping[str, Tensor]] = []
    for name, described in files.items():
        part = _read_shard(folder / name, described)
        for key in ("tokens", "actions"):
            if key not in whole:
                whole[key] = torch.empty((rows, *part[key].shape[1:]), dtype=part[key].dtype)
            if part[key].shape[1:] != whole[key].shape[1:] or part[key].dtype != whole[key].dtype:
                got, expected = tuple(part[key].shape[1:]), tuple(whole[key].shape[1:])
                raise DatasetError(f"{folder / name}: expected {key} of shape {expected}, got {got}")
            whole[key][done : done + len(part[key])] = part[key]
        bounds += [done + int(bound) for bound in part["episode_start"][1:]]
        done += len(part["tokens"])
        places.append({name: part[name] for name in _PLACES if name in part})
    if not files or done != rows:
        raise DatasetError(f"{folder / INDEX}: expected {rows} frames in its files, got {done}")
    if all(places):
        whole |= {name: torch.cat([each[name] for each in places]) for name in _PLACES}
    tokenized = TokenizedDriving(**whole, episode_start=torch.tensor(bounds), **facts, space=space, views=views)
    low, high = (int(bound) for bound in tokenized.tokens.aminmax())
    if low < 0 or high >= tokenized.codebook_size:
        raise DatasetError(f"{folder}: expected ids in [0, {tokenized.codebook_size}), got {low} to {high}")
    return tokenized.to(torch.device(device))


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        count = sum(1 for _ in folder.glob("*.safetensors"))
        raise DatasetError(
            f"{path}: expected tokens made to the end by terra tokenize, found no such file and {count} parts"
            + (": these are recordings, run terra tokenize first" if (folder.parent / DATASET_FILE).is_file() else "")
        )
    index = read_json(path, DatasetError)
    kind = (index.get("format"), index.get("version"))
    if kind != (FORMAT, VERSION):
        raise DatasetError(f"{path}: expected format {FORMAT} version {VERSION}, got {json.dumps(kind)}")
    return index


def _read_shard(path: Path, described: Mapping[str, Any]) -> dict[str, Tensor]:
    if not path.is_file():
        raise DatasetError(f"{path}: expected the token file that {INDEX} names, found none")
    if described.get("sha256") != (got := file_sha256(path, DatasetError)):
        raise DatasetError(f"{path}: expected sha256 {described.get('sha256')} of {INDEX}, got {got}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in ("tokens", "actions", "episode_start")}
            if set(_PLACES) <= set(file.keys()):
                tensors |= {key: file.get_tensor(key) for key in _PLACES}
    except (OSError, SafetensorError) as error:
        raise DatasetError(f"{path}: expected tokens as terra tokenize writes them, got {error!r}") from error
    tokens, actions, bounds = (tensors[key] for key in ("tokens", "actions", "episode_start"))
    if tokens.ndim != 3 or actions.ndim != 3 or len(actions) != len(tokens):
        raise DatasetError(
            f"{path}: expected tokens (frames, rows, cols) and actions (frames, slots, action_dim), "
            f"got {tuple(tokens.shape)} and {tuple(actions.shape)}"
        )
    ends = (int(bounds[0]), int(bounds[-1])) if len(bounds) else None
    if ends != (0, len(tokens)) or (bounds.diff() <= 0).any():
        raise DatasetError(
            f"{path}: episode_start: expected increasing from 0 to {len(tokens)}, got {bounds.tolist()[:8]}"
        )
    if "poses" in tensors:
        shapes = {name: tuple(tensors[name].shape) for name in _PLACES}
        if shapes != (expected := {"poses": (len(tokens), 3), "place": (len(bounds) - 1,)}):
            raise DatasetError(f"{path}: expected poses and place of shapes {expected}, got {shapes}")
        if not tensors["poses"].isfinite().all():
            raise DatasetError(f"{path}: poses: expected finite numbers")
    return tensors
