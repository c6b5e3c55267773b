"""Recorded driving in memory: all frames of a split as one uint8 tensor on the training device, with their actions."""

import logging
import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from decoder.video import read_video
from terra.errors import ConfigError, DatasetError, TrajectoryError, VideoError
from terra.recording.dataset import list_episodes, load_episode
from terra.training.progress import ProgressLine
from terra.trajectory import WAYPOINT_TIMES, Trajectory
from tokenizer import Frames

logger = logging.getLogger(__name__)

_DAMAGE = (DatasetError, VideoError, TrajectoryError)


@dataclass(frozen=True)
class DrivingFrames:
    """The readable episodes of one split, one after another.

    Attributes:
        frames: 8-bit RGB on the training device, channels_last in memory; `to_unit_range` makes `Frames` of a part.
        actions: float32 on the CPU, one for each frame: rows of [lateral y (left positive), forward x, time t].
        episode_start: int64 on the CPU; episode i is frames episode_start[i] to episode_start[i + 1].
        fps: frames a second.
        waypoint_times: seconds ahead of an action's rows.
        damaged: why an episode was left out, one line each.
    """

    frames: UInt8[Tensor, "frames 3 height width"]
    actions: Float[Tensor, "frames slots action_dim"]
    episode_start: Int[Tensor, " boundaries"]
    fps: float
    waypoint_times: tuple[float, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """One episode to decode, as plain data for another process."""

    video: Path
    num_frames: int
    fps: float
    image_size: tuple[int, int]
    actions: Float32[np.ndarray, "frames slots action_dim"]


def to_unit_range(frames: UInt8[Tensor, "frames 3 height width"]) -> Frames:
    """8-bit frames as float32 in [-1, 1]: x / 127.5 - 1, on their device."""
    return frames.float() / 127.5 - 1.0


def load_driving(
    folder: Path,
    split: str,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    waypoint_times: Sequence[float] = WAYPOINT_TIMES,
) -> DrivingFrames:
    """Decode all episodes of a split in `workers` processes (0: in this one), in the order of their names.

    Damaged episodes, and those whose frame rate or size is not the first one's, are left out: each is logged as a
    warning, and at the end their number.

    Raises:
        DatasetError: no dataset or no such split in `folder`, or no episode of it can be read.
        ConfigError: `workers` below 0.
    """
    if workers < 0:
        raise ConfigError(f"workers: expected 0 or more processes, got {workers}")
    jobs, damaged = _read_poses(list_episodes(folder, split), waypoint_times)
    if not jobs:
        raise _nothing_readable(folder, split, damaged)
    # One allocation, filled in place: for a large split it takes most of the device's memory.
    height, width = jobs[0].image_size
    num_frames = sum(job.num_frames for job in jobs)
    frames = torch.empty(
        (num_frames, 3, height, width), dtype=torch.uint8, device=device, memory_format=torch.channels_last
    )
    bounds, actions = [0], []
    with ProgressLine(f"decoding {split}", num_frames) as line:
        for job, result in _decode_all(jobs, workers):
            if isinstance(result, str):
                damaged.append(result)
                continue
            bounds.append(bounds[-1] + job.num_frames)
            actions.append(torch.from_numpy(job.actions))
            pictures = rearrange(torch.from_numpy(result), "frames height width rgb -> frames rgb height width")
            frames[bounds[-2] : bounds[-1]] = pictures.to(device)
            line.show(bounds[-1], f"{bounds[-1]} of {num_frames} frames")
    for reason in damaged:
        logger.warning("left out: %s", reason)
    if damaged:
        logger.warning("%s: %d damaged episodes of split %s are left out", folder, len(damaged), split)
    if not actions:
        raise _nothing_readable(folder, split, damaged)
    return DrivingFrames(
        frames=frames[: bounds[-1]],
        actions=torch.cat(actions),
        episode_start=torch.tensor(bounds),
        fps=jobs[0].fps,
        waypoint_times=tuple(waypoint_times),
        damaged=tuple(damaged),
    )


def _nothing_readable(folder: Path, split: str, damaged: Sequence[str]) -> DatasetError:
    first = damaged[0] if damaged else "no episode"
    return DatasetError(f"{folder}: expected a readable episode of split {split}, got {len(damaged)} damaged: {first}")


def _read_poses(folders: Sequence[Path], waypoint_times: Sequence[float]) -> tuple[list[_Job], list[str]]:
    """What to decode, with the actions, and why an episode is left out."""
    jobs: list[_Job] = []
    damaged: list[str] = []
    for folder in folders:
        try:
            job = _read_episode(folder, waypoint_times)
        except _DAMAGE as error:
            damaged.append(str(error))
            continue
        expected = (jobs[0].fps, jobs[0].image_size) if jobs else (job.fps, job.image_size)
        if (job.fps, job.image_size) == expected:
            jobs.append(job)
        else:
            damaged.append(f"{folder}: expected {expected} (fps, image size), got {(job.fps, job.image_size)}")
    return jobs, damaged


def _read_episode(folder: Path, waypoint_times: Sequence[float]) -> _Job:
    episode = load_episode(folder)
    poses = episode.poses
    trajectory = Trajectory.from_poses(
        poses.time,
        np.column_stack([poses.x, poses.y]),
        poses.heading,
        fps=episode.fps,
        source=str(folder / "poses.npz"),
    )
    actions = trajectory.actions(episode.num_frames, waypoint_times)
    return _Job(episode.video, episode.num_frames, episode.fps, episode.image_size, actions)


def _decode_all(
    jobs: Sequence[_Job], workers: int
) -> Iterator[tuple[_Job, UInt8[np.ndarray, "frames height width 3"] | str]]:
    """Each job, in order, with its frames or why they can't be had."""
    if workers == 0:
        yield from ((job, _decode(job)) for job in jobs)
        return
    # spawn: forking a process that holds a CUDA context and running threads breaks both.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: deque[tuple[_Job, Future]] = deque()
        for job in jobs:
            waiting.append((job, pool.submit(_decode, job)))
            # Bounded, so that decoded frames don't pile up here when the device is the slower side.
            if len(waiting) >= 2 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _decode(job: _Job) -> UInt8[np.ndarray, "frames height width 3"] | str:
    try:
        frames = read_video(job.video)
    except VideoError as error:
        return str(error)
    expected = (job.num_frames, *job.image_size, 3)
    return frames if frames.shape == expected else f"{job.video}: expected frames {expected}, got {frames.shape}"
