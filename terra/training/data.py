"""Recordings for training: decoded in parallel, episode by episode, or held as one uint8 tensor on a device.

Threads run ffmpeg, one process for each video, and read its frames from a pipe: an ffmpeg process starts in
milliseconds, whereas a pool of Python processes would import, pickle and copy.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from terra.actions import ActionSpace
from terra.dataset import Episode, episode_actions, read_frames, read_split
from terra.errors import ActionError, ConfigError, DatasetError, VideoError
from terra.progress import ProgressLine

logger = logging.getLogger(__name__)

_ALWAYS_DECODED = 60_000  # frames of all processes, each of which decodes some 1,000 a second


@dataclass(frozen=True)
class DrivingFrames:
    """Frames of the readable episodes of one split, one episode after another.

    Attributes:
        frames: 8-bit RGB on a device, channels_last in memory; `decoder.video.to_unit_range` makes `Frames` of a part.
        actions: float32 on the CPU, one for each frame, as the action space has them.
        episode_start: int64 on the CPU; episode i is frames episode_start[i] to episode_start[i + 1].
        fps: frames per second of the recording (of `frames` too, unless `max_frames` left some out).
        space: what the actions mean.
        damaged: for each episode that was left out, one line that says why.
    """

    frames: UInt8[Tensor, "frames 3 height width"]
    actions: Float[Tensor, "frames slots action_dim"]
    episode_start: Int[Tensor, " boundaries"]
    fps: float
    space: ActionSpace
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class DecodedEpisode:
    """All frames of one episode (8-bit RGB) and the action at each frame (float32)."""

    frames: UInt8[np.ndarray, "frames height width 3"]
    actions: Float32[np.ndarray, "frames slots action_dim"]


def decode_episodes(
    episodes: Sequence[Episode], workers: int, space: ActionSpace | None = None
) -> Iterator[DecodedEpisode | str]:
    """Decode episodes in order; a damaged episode yields one line that says why instead of its frames and actions.

    Args:
        episodes: episodes that `terra.dataset.read_split` found.
        workers: number of videos decoded at once; 0 decodes a video when the iterator reaches it. At most
            `workers` + 1 episodes are in memory.
        space: of the actions; None takes the episodes' own.

    Raises:
        ConfigError: `workers` below 0.
    """
    if workers < 0:
        raise ConfigError(f"workers: expected 0 or more, got {workers}")
    if workers == 0:
        yield from (_decode(episode, space) for episode in episodes)
        return
    waiting: deque[Future[DecodedEpisode | str]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            for episode in episodes:
                waiting.append(pool.submit(_decode, episode, space))
                # Bounded, so that decoded frames don't pile up where the device is the slower side.
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def load_driving(
    folder: Path,
    split: str,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    max_frames: int | None = None,
    max_episodes: int | None = None,
    rank: int = 0,
    num_processes: int = 1,
) -> DrivingFrames:
    """Decode a split onto `device`; each process of a run decodes every `num_processes`-th episode.

    Damaged episodes, and episodes whose frame rate or size differs from the first episode's, are left out with a
    warning each; a last warning gives their number.

    Args:
        max_frames: bound on the frames of all processes together, evenly spaced over the split; None keeps all frames.
            An episode is decoded in full even if one of its frames is kept, so of a large split episodes are left out:
            all processes together decode at most twice `max_frames`, or 60,000 frames if that is more, where episodes
            are equally long.
        max_episodes: bound on the episodes, taken from the split's start; None takes all.
        rank: index of this process, in [0, num_processes).

    Raises:
        DatasetError: no dataset or no such split in `folder`, or no episode of this process's can be read.
        ConfigError: `workers` below 0, or `max_frames` or `max_episodes` below 1.
    """
    for name, most in (("max_frames", max_frames), ("max_episodes", max_episodes)):
        if most is not None and most < 1:
            raise ConfigError(f"{name}: expected at least 1 or null, got {most}")
    found = read_split(folder, split)
    episodes, odd = same_kind(found.episodes)
    # Every process finds the damage that shows without decoding; only the first one reports it.
    damaged = [*found.damaged, *odd] if rank == 0 else []
    episodes = episodes[:max_episodes]
    if max_frames is not None:
        episodes = spread_episodes(episodes, max(2 * max_frames, _ALWAYS_DECODED))
    frames_kept = kept_frames(episodes, max_frames)
    chosen = [(episode, kept) for episode, kept in zip(episodes, frames_kept, strict=True) if len(kept)]
    if len(chosen) < num_processes:  # every process raises: if only one did, the others would wait for it forever
        raise DatasetError(
            f"{folder}: expected an episode of split {split} for each of {num_processes} processes, got {len(chosen)}"
        )
    mine = chosen[rank::num_processes]
    height, width = mine[0][0].image_size
    num_frames = sum(len(kept) for _, kept in mine)
    # One allocation, filled in place: for a large split it takes most of the device's memory.
    frames = torch.empty(
        (num_frames, 3, height, width), dtype=torch.uint8, device=device, memory_format=torch.channels_last
    )
    bounds, actions = [0], []
    decoded = decode_episodes([episode for episode, _ in mine], workers)
    with ProgressLine(f"decoding {split}", num_frames) as line:
        for (_, kept), episode in zip(mine, decoded, strict=True):
            if isinstance(episode, str):
                damaged.append(episode)
                continue
            bounds.append(bounds[-1] + len(kept))
            actions.append(torch.from_numpy(episode.actions[kept]))
            pictures = torch.from_numpy(episode.frames).to(device)
            frames[bounds[-2] : bounds[-1]] = rearrange(
                pictures if len(kept) == len(pictures) else pictures[torch.from_numpy(kept).to(device)],
                "frames height width rgb -> frames rgb height width",
            )
            line.show(bounds[-1], f"{bounds[-1]} of {num_frames} frames")
    report_damage(damaged)
    if not actions:
        raise DatasetError(
            f"{folder}: expected a readable episode of split {split}, got {len(damaged)} damaged: {damaged[0]}"
        )
    return DrivingFrames(
        frames=frames[: bounds[-1]],
        actions=torch.cat(actions),
        episode_start=torch.tensor(bounds),
        fps=mine[0][0].fps,
        space=mine[0][0].space,
        damaged=tuple(damaged),
    )


def same_kind(episodes: Sequence[Episode]) -> tuple[list[Episode], list[str]]:
    """Split episodes into those with the first episode's frame rate and size, and one line about each of the others."""
    expected = (episodes[0].fps, episodes[0].image_size) if episodes else None
    equal = [episode for episode in episodes if (episode.fps, episode.image_size) == expected]
    odd = [
        f"{episode.video}: expected {expected} (fps, image size), got {(episode.fps, episode.image_size)}"
        for episode in episodes
        if (episode.fps, episode.image_size) != expected
    ]
    return equal, odd


def spread_episodes(episodes: Sequence[Episode], max_frames: int) -> list[Episode]:
    """Choose evenly spread episodes with at most `max_frames` frames, if all are equally long, but at least one."""
    total = sum(episode.num_frames for episode in episodes)
    count = len(episodes) if total <= max_frames else max(1, len(episodes) * max_frames // total)
    chosen = np.linspace(0, len(episodes) - 1, count).round().astype(int) if episodes else []
    return [episodes[index] for index in np.unique(chosen)]


def report_damage(damaged: Sequence[str]) -> None:
    """Log why each episode was left out, and how many were."""
    for reason in damaged:
        logger.warning("left out: %s", reason)
    if damaged:
        logger.warning("%d damaged episodes are left out", len(damaged))


def _decode(episode: Episode, space: ActionSpace | None) -> DecodedEpisode | str:
    try:
        return DecodedEpisode(read_frames(episode), episode_actions(episode, space))
    except (ActionError, DatasetError, VideoError) as error:
        return str(error)


def kept_frames(episodes: Sequence[Episode], max_frames: int | None) -> list[np.ndarray]:
    """Indices of the frames to keep in each episode: at most `max_frames` in all, evenly spaced over the split."""
    bounds = np.cumsum([0, *(episode.num_frames for episode in episodes)])
    total = int(bounds[-1])
    count = total if max_frames is None else min(max_frames, total)
    chosen = np.unique(np.linspace(0, max(total - 1, 0), count).round().astype(np.int64))
    parts = np.split(chosen, np.searchsorted(chosen, bounds[1:-1]))
    return [part - start for part, start in zip(parts, bounds, strict=False)]
