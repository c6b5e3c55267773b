"""The full check of a dataset, which decodes every video."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terra.dataset.format import SHARD_FILE, SPLITS, list_shards, read_dataset
from terra.dataset.reading import check_hash, read_frames, read_shard, trajectory_of
from terra.dataset.workers import run_jobs
from terra.errors import DatasetError, TerraError
from terra.progress import ProgressLine
from tokenizer.files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shard:
    dataset: Path
    folder: Path


def verify_dataset(folder: Path, *, workers: int = 0) -> tuple[str, ...]:
    """Read a whole dataset and return one line for each damage.

    In each shard it checks the hashes, counts, sizes and times, decodes every video, and of driving derives every
    frame's future path from the poses (which refuses jumps). It also checks that the splits have no place and no name
    in common.

    Args:
        folder: folder of the dataset.
        workers: number of worker processes; 0 reads in this process.

    Raises:
        DatasetError: there is no dataset in `folder`.
    """
    read_dataset(folder)
    shards = [_Shard(folder, shard) for split in SPLITS for shard in list_shards(folder, split)]
    if not shards:
        raise DatasetError(f"{folder}: expected a dataset with episodes, got none")
    seen: dict[str, Path] = {}
    damaged: list[str] = []
    for shard in shards:
        if shard.folder.name in seen:
            damaged.append(f"{shard.folder}: expected each place in one split, got {shard.folder.name} in two")
        seen[shard.folder.name] = shard.folder
    with ProgressLine("verifying", len(shards)) as line:
        outcome = run_jobs(
            shards,
            verify_shard,
            workers=workers,
            show=lambda frames, done: line.show(done, f"{done} of {len(shards)} shards, {frames} frames"),
            describe=lambda shard: str(shard.folder),
        )
    return tuple(damaged + [part for reasons in outcome.failed for part in reasons.split("\n")])


def verify_shard(shard: _Shard, worker: int, advance: Callable[[int], None]) -> None:
    """Read a whole shard. Raises DatasetError with one line for each damage."""
    episodes, damaged = read_shard(shard.folder, read_dataset(shard.dataset))
    if episodes:
        damaged += _check_files(shard.folder)
    for episode in episodes:
        try:
            advance(len(read_frames(episode)))
            if episode.motion is not None:
                paths = trajectory_of(episode).num_frames
                if paths < episode.num_frames:
                    damaged.append(f"{episode.video}: expected {episode.num_frames} frames with a path, got {paths}")
            if not episode.id.startswith(shard.folder.name):
                damaged.append(f"{episode.video}: expected a name that begins with {shard.folder.name}")
            if any(not 0 <= frame < episode.num_frames for frame, _ in episode.events):
                damaged.append(f"{episode.video}: expected events within {episode.num_frames} frames")
        except TerraError as error:
            damaged.append(str(error))
    if damaged:
        raise DatasetError("\n".join(damaged))


def _check_files(folder: Path) -> list[str]:
    """Check the files of a shard that reading its episodes does not open; return one line for each damage."""
    facts = read_json(folder / SHARD_FILE, DatasetError)
    found = []
    for name, expected in facts["sha256"].items():
        try:
            check_hash(folder / name, expected)
        except DatasetError as error:
            found.append(str(error))
    listed = {entry.get("id") for entry in facts["episodes"] if isinstance(entry, dict)}
    strays = sorted(path for path in folder.glob("*.mp4") if path.stem not in listed)
    return found + [f"{path}: expected the videos of {SHARD_FILE} only, got another" for path in strays]
