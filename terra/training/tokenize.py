"""Tokenize recordings shard by shard: decode the videos, encode the frames, write the tokens.

Only a few episodes are in memory at a time, so a dataset may be larger than memory. A shard's token file appears whole
or not at all, and a file that is up to date is kept, so that the same command resumes where it was stopped.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from decoder.video import to_unit_range
from terra.dataset import Episode, Split, read_split
from terra.dataset.tokens import (
    ShardFacts,
    has_poses,
    indexed_hashes,
    read_shard_facts,
    save_shard,
    shard_damage,
    write_index,
)
from terra.device import torch_dtype
from terra.errors import ConfigError, DatasetError
from terra.progress import ProgressLine
from terra.training.data import DecodedEpisode, decode_episodes, report_damage, same_kind
from terra.training.processes import start_processes
from terra.training.settings import TokenizeSettings
from terra.training.start import find_tokenizer
from tokenizer import LFQTokenizer
from tokenizer.config import BitOrder
from tokenizer.lineage import tokens_sha256
from tokenizer.quantizer import tokens_from_signs

logger = logging.getLogger(__name__)


def run(settings: TokenizeSettings) -> None:
    """Tokenize the splits that conf/tokenize.yaml names, shard by shard, then write the index of each.

    Each process of a run takes its share of the shards.

    Raises:
        ConfigError, CheckpointError, DatasetError, OutputError: see `tokenize_split` and `finish_split`.
    """
    output = settings.output
    processes = start_processes(settings.device)
    splits = {split: read_split(settings.data, split) for split in settings.splits}
    checkpoint = find_tokenizer(settings.checkpoint)
    tokenizer, sha256 = LFQTokenizer.from_pretrained(checkpoint), tokens_sha256(checkpoint)
    dtype, size = torch_dtype(settings.dtype), settings.batch_size
    encoder = FrameEncoder(tokenizer, processes.device, dtype, size, compiled=settings.compile_model)
    for split, found in splits.items():
        tokenize_split(
            found,
            output / split,
            encoder,
            sha256,
            workers=settings.workers,
            rank=processes.process_index,
            num_processes=processes.num_processes,
        )
    # Once for all splits: a process that is done early would otherwise wait at every one.
    processes.wait_for_everyone()
    if processes.is_main_process:
        for split, found in splits.items():
            finish_split(found, output / split)


class FrameEncoder:
    """Encodes 8-bit frames with a tokenizer in batches of one fixed size.

    The last batch of a shard is padded to that size, so that a compiled network sees one shape, and a shard's tokens
    depend on the shard alone.

    Args:
        tokenizer: the tokenizer; the constructor moves it to `device` and `dtype`, in channels_last memory.
        dtype: data type of the encoder. bfloat16 changes 0.2 % of the shipped tokenizer's tokens, all of them where a
            channel lies on the sign's threshold; float16 changes none.
        batch_size: frames of a batch.
        compiled: whether to torch.compile the encoder, which takes about a minute once.
    """

    def __init__(
        self,
        tokenizer: LFQTokenizer,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 128,
        compiled: bool = False,
    ):
        if batch_size < 1:
            raise ConfigError(f"batch_size: expected at least 1, got {batch_size}")
        tokenizer = tokenizer.to(device=device, dtype=dtype, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self._encoder = tokenizer.encoder.eval()
        if compiled:
            self._encoder.compile()
        self._device, self._dtype, self.batch_size = device, dtype, batch_size
        self._bit_order: BitOrder = tokenizer.config.quantizer_config.bit_order
        self.config, self.image_size = tokenizer.config, tuple(tokenizer.image_size)
        self.precision = str(dtype).removeprefix("torch.")

    @torch.no_grad()
    def __call__(self, frames: UInt8[Tensor, "frames height width 3"]) -> Int[Tensor, "frames rows cols"]:
        """Encode frames of `image_size` on the CPU to ids (int64) on the CPU."""
        grids = []
        for chunk in frames.split(self.batch_size):
            filling = self.batch_size - len(chunk)
            pictures = rearrange(chunk.to(self._device), "frames height width rgb -> frames rgb height width")
            batch = F.pad(to_unit_range(pictures), (0, 0) * 3 + (0, filling)).to(self._dtype)
            signs = self._encoder(batch.contiguous(memory_format=torch.channels_last))
            grids.append(tokens_from_signs(signs, self._bit_order)[: len(chunk)])
        return torch.cat(grids).cpu()


def tokenize_split(
    found: Split,
    output: Path,
    encoder: FrameEncoder,
    tokenizer_sha256: str,
    *,
    workers: int = 0,
    rank: int = 0,
    num_processes: int = 1,
) -> None:
    """Write this process's token files of a split into `output`; each process takes every `num_processes`-th shard.

    An existing file of the same episodes is kept, unless it is damaged. When all processes are done, `finish_split`
    completes the split.

    Raises:
        DatasetError: a file in `output` comes from another tokenizer.
        ConfigError: the tokenizer takes frames of another size, or `workers` below 0.
        OutputError: the output can't be written.
    """
    episodes, odd = same_kind(found.episodes)
    size = tuple(episodes[0].image_size)
    if size != encoder.image_size:
        raise ConfigError(f"expected frames of the tokenizer's {encoder.image_size} (height, width), got {size}")
    pending, hashes = [], indexed_hashes(output)
    for name, members in shards_of(episodes)[rank::num_processes]:
        facts = ShardFacts(
            fps=members[0].fps,
            codebook_size=encoder.config.quantizer_config.codebook_size,
            tokenizer_sha256=tokenizer_sha256,
            space=members[0].space,
            source_sha256=_source_sha256(members),
            precision=encoder.precision,
            tokens_like=encoder.config.tokens_like,
            views=members[0].views,
        )
        driven = all(member.motion is not None for member in members)
        if not _is_done(output / name, facts, hashes.get(name), driven):
            pending.append((output / name, members, facts))
    damaged = [*found.damaged, *odd] if rank == 0 else []
    decoded = decode_episodes([episode for _, members, _ in pending for episode in members], workers)
    num_frames = sum(episode.num_frames for _, members, _ in pending for episode in members)
    done = 0
    with ProgressLine(f"tokenizing {episodes[0].split}", num_frames) as line:
        for path, members, facts in pending:
            damaged += _write_shard(path, facts, encoder, ((member, next(decoded)) for member in members))
            done += sum(episode.num_frames for episode in members)
            line.show(done, f"{done} of {num_frames} frames")
    report_damage(damaged)


def finish_split(found: Split, output: Path) -> None:
    """Write the index over all token files of a split, once every process has written its own.

    Raises:
        DatasetError: no readable episode of the split has been tokenized.
        OutputError: the output can't be written.
    """
    episodes, _ = same_kind(found.episodes)
    # A shard whose every video is damaged has no file.
    names = [name for name, _ in shards_of(episodes) if (output / name).is_file()]
    if not names:
        raise DatasetError(f"{output}: expected tokens of a readable episode of split {episodes[0].split}, got none")
    write_index(output, names)


def shards_of(episodes: Iterable[Episode]) -> list[tuple[str, list[Episode]]]:
    """Group episodes by their folder (a shard): (name of the shard's token file, its episodes), sorted by name."""
    ordered = sorted(episodes, key=lambda episode: episode.video.parent.name)
    grouped = groupby(ordered, key=lambda episode: episode.video.parent.name)
    return [(f"{name}.safetensors", list(members)) for name, members in grouped]


def _write_shard(
    path: Path, facts: ShardFacts, encoder: FrameEncoder, decoded: Iterable[tuple[Episode, DecodedEpisode | str]]
) -> list[str]:
    """Encode one shard and write its file, unless every episode is damaged; return why episodes were left out."""
    damaged: list[str] = []
    actions: list[np.ndarray] = []
    grids: list[Tensor] = []
    bounds = [0]
    rest: np.ndarray | None = None
    kept: list[Episode] = []
    for member, episode in decoded:
        if isinstance(episode, str):
            damaged.append(episode)
            continue
        kept.append(member)
        actions.append(episode.actions)
        bounds.append(bounds[-1] + len(episode.frames))
        # Whole batches are encoded now; the remaining frames wait for the next episode.
        frames = episode.frames if rest is None else np.concatenate([rest, episode.frames])
        full = len(frames) - len(frames) % encoder.batch_size
        if full:
            grids.append(encoder(torch.from_numpy(frames[:full])))
        rest = frames[full:] if full < len(frames) else None
    if rest is not None:
        grids.append(encoder(torch.from_numpy(rest)))
    if grids:
        tensors = (torch.cat(grids), torch.from_numpy(np.concatenate(actions)), torch.tensor(bounds))
        save_shard(path, facts, *tensors, *_poses_and_places(kept))
    return damaged


def _poses_and_places(episodes: Sequence[Episode]) -> tuple[Tensor | None, Tensor | None]:
    """`TokenizedDriving.poses` and `.place` of episodes; None for both where one of them is no driving."""
    motions = [each.motion for each in episodes]
    driven = [
        np.stack([motion.x, motion.y, motion.heading], axis=1)[: each.num_frames]
        for each, motion in zip(episodes, motions, strict=True)
        if motion is not None
    ]
    if len(driven) < len(episodes):
        return None, None
    # Numbers that follow from the place alone, because every shard is written without knowing the others.
    names = [f"{each.source}_{each.place}".encode() for each in episodes]
    numbers = [int.from_bytes(hashlib.sha256(name).digest()[:7]) for name in names]
    return torch.from_numpy(np.concatenate(driven)), torch.tensor(numbers)


def _is_done(path: Path, facts: ShardFacts, sha256: str | None, driven: bool) -> bool:
    """Whether `path` holds the tokens of these episodes; raise DatasetError if its tokenizer or precision differs.

    `sha256` is the file's hash in the index, if the split had been finished. `driven` tells whether there are poses.
    """
    if not path.is_file():
        return False
    damage = shard_damage(path, sha256)
    if damage is not None:
        logger.warning("%s: is damaged and made again: %s", path, damage)
        return False
    present = read_shard_facts(path)
    if present.shared != facts.shared:
        differing = [name for name, value in facts.shared.items() if present.shared.get(name) != value]
        raise DatasetError(
            f"{path}: expected tokens of the same {', '.join(differing)}: choose another output, or delete the folder"
        )
    if present.source_sha256 != facts.source_sha256:
        logger.info("%s: made again, its recording has changed", path)
        return False
    if driven and not has_poses(path):
        logger.info("%s: made again, with poses", path)
        return False
    return True


def _source_sha256(episodes: Sequence[Episode]) -> str:
    facts = [f"{episode.id} {episode.num_frames} {episode.video_sha256}" for episode in episodes]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()
