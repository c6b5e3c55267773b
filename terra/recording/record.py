"""Records drives to disk: towns in parallel processes, episode by episode, skipping those that are complete."""

import logging
import multiprocessing
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoder.camera import Camera
from decoder.video import VideoWriter, write_png_sequence
from terra.errors import ConfigError, OutputError
from terra.recording.dataset import (
    SPLIT_SEEDS,
    count_episodes,
    create_dataset,
    file_sha256,
    is_complete,
    write_json,
    write_poses,
)
from terra.recording.drives import COUNTERFACTUAL_MANEUVERS, FPS, Drive, simulate_counterfactual, simulate_drive
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.recording.renderer import Renderer
from terra.recording.weather import WEATHER_SHARES, WEATHERS
from terra.trajectory import save_poses

logger = logging.getLogger(__name__)

CRF = 16


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """What to record, and where. `image_size` is (height, width), both even; `seed` counts from the split's first town.

    `episodes_per_town` are drives, or for counterfactuals starts with one episode for each maneuver.

    Raises:
        ConfigError: a value out of range, or an unknown split.
    """

    output: Path
    split: str
    towns: int
    episodes_per_town: int
    frames_per_episode: int
    image_size: tuple[int, int]
    camera: Camera
    workers: int
    seed: int

    def __post_init__(self) -> None:
        if self.split not in SPLIT_SEEDS:
            raise ConfigError(f"split: expected one of {sorted(SPLIT_SEEDS)}, got {self.split!r}")
        limits = {"towns": 100_000, "episodes_per_town": 100, "frames_per_episode": 100_000, "workers": 1024}
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name}: expected a whole number from 1 to {most}, got {value!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < SPLIT_SEEDS["held_out"] // 2:
            raise ConfigError(f"seed: expected a whole number from 0 to 449999, got {self.seed!r}")
        if any(side % 2 or not 16 <= side <= 4096 for side in self.image_size):
            raise ConfigError(f"image_size: expected even height and width from 16 to 4096, got {self.image_size}")


@dataclass(frozen=True)
class _Take:
    """One episode to record; `maneuver` is set for one of several futures of a start."""

    id: str
    number: int
    maneuver: str | None = None
    num_context: int = 0


def record_drives(settings: RecordSettings) -> int:
    """Record varied drives; returns how many episodes were added.

    Raises:
        ConfigError: moderngl or EGL is missing.
        DatasetError: the output holds a dataset of another kind.
        OutputError: the output can't be written.
    """
    plans = {
        town: [_Take(f"{settings.split}_{town:06d}_{k:02d}", k) for k in range(settings.episodes_per_town)]
        for town in _town_seeds(settings)
    }
    return _record(settings, plans)


def record_counterfactuals(
    settings: RecordSettings, *, num_context: int, maneuvers: Sequence[str] = COUNTERFACTUAL_MANEUVERS
) -> int:
    """Record several futures of each start, equal in their first `num_context` frames; returns the episodes added.

    Raises:
        ConfigError: an unknown maneuver, or no frame left after the context; and as `record_drives`.
    """
    unknown = [maneuver for maneuver in maneuvers if maneuver not in COUNTERFACTUAL_MANEUVERS]
    if unknown or not maneuvers:
        raise ConfigError(f"maneuvers: expected some of {COUNTERFACTUAL_MANEUVERS}, got {list(maneuvers)}")
    # The run-up to the junction must fit into the shortest approach.
    if not 1 <= num_context <= min(25, settings.frames_per_episode - 1):
        raise ConfigError(f"num_context: expected 1 to 25 and fewer than the frames, got {num_context}")
    plans = {
        town: [
            _Take(f"{settings.split}_{town:06d}_{k:02d}_{maneuver}", k, maneuver, num_context)
            for k in range(settings.episodes_per_town)
            for maneuver in maneuvers
        ]
        for town in _town_seeds(settings)
    }
    return _record(settings, plans)


def _town_seeds(settings: RecordSettings) -> range:
    first = SPLIT_SEEDS[settings.split] + settings.seed
    return range(first, first + settings.towns)


def _record(settings: RecordSettings, plans: dict[int, list[_Take]]) -> int:
    create_dataset(settings.output, settings.image_size, settings.camera, settings.seed)
    episodes = settings.output / "episodes"
    missing = {town: [take for take in takes if not is_complete(episodes / take.id)] for town, takes in plans.items()}
    missing = {town: takes for town, takes in missing.items() if takes}
    total = sum(len(takes) for takes in missing.values())
    skipped = sum(len(takes) for takes in plans.values()) - total
    logger.info("%s: %d episodes to record, %d complete already", settings.output, total, skipped)
    if not missing:
        return 0
    started = time.monotonic()
    with _progress() as progress:
        task = progress.add_task(f"{settings.split} episodes", total=total)
        for added in _record_towns(settings, missing):
            progress.advance(task, added)
    seconds = max(time.monotonic() - started, 1e-9)
    rate = total * settings.frames_per_episode / seconds
    logger.info("%s: %d episodes now, %.0f frames/s", settings.output, count_episodes(settings.output), rate)
    return total


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())


def _record_towns(settings: RecordSettings, plans: dict[int, list[_Take]]) -> Iterator[int]:
    """Record towns and yield the episodes of each when it is done."""
    if settings.workers == 1 or len(plans) < 2:
        for town, takes in plans.items():
            for _ in _record_town(settings, town, takes):
                yield 1
        return
    # spawn: an OpenGL context does not survive a fork.
    with ProcessPoolExecutor(min(settings.workers, len(plans)), multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[int]] = [pool.submit(_record_whole_town, settings, *plan) for plan in plans.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _record_whole_town(settings: RecordSettings, town_seed: int, takes: list[_Take]) -> int:
    return sum(1 for _ in _record_town(settings, town_seed, takes))


def _record_town(settings: RecordSettings, town_seed: int, takes: list[_Take]) -> Iterator[str]:
    renderer = _renderer(settings.image_size, settings.camera)
    town = plan_town(town_seed)
    graph = LaneGraph(town)
    renderer.load(town)
    for take in takes:
        _record_episode(settings, renderer, graph, take)
        yield take.id


@lru_cache(maxsize=1)
def _renderer(image_size: tuple[int, int], camera: Camera) -> Renderer:
    """One a process: contexts are costly to open."""
    return Renderer(image_size, camera)


def _record_episode(settings: RecordSettings, renderer: Renderer, graph: LaneGraph, take: _Take) -> None:
    folder = settings.output / "episodes" / take.id
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"{folder}: expected a folder that can be written: {error.strerror}") from error
    num_frames, town_seed = settings.frames_per_episode, graph.town.seed
    if take.maneuver is None:
        drive = simulate_drive(graph, take.number, num_frames)
        extra = {}
    else:
        drive = simulate_counterfactual(graph, take.number, take.maneuver, num_frames, take.num_context)
        group = take.id.removesuffix(f"_{take.maneuver}")
        extra = {"group": group, "maneuver": take.maneuver, "num_context": take.num_context}
    names, shares = list(WEATHER_SHARES), list(WEATHER_SHARES.values())
    weather = str(np.random.default_rng([town_seed, 3, take.number]).choice(names, p=shares))
    context = []
    height, width = settings.image_size
    with VideoWriter(folder / "video.mp4", fps=FPS, size=(width, height), crf=CRF) as writer:
        for index, frame in enumerate(render_drive(renderer, drive, weather)):
            writer.append(frame)
            if index < take.num_context:
                context.append(frame)
    poses = drive.poses
    if context:
        write_png_sequence(np.stack(context), folder / "context")
        positions = np.stack([poses.x, poses.y], axis=1)
        save_poses(folder / "trajectory.json", poses.time, positions, poses.heading, FPS)
    write_poses(folder / "poses.npz", poses)
    facts = {
        "id": take.id,
        "split": settings.split,
        "town_seed": town_seed,
        "weather": weather,
        "num_frames": num_frames,
        "fps": FPS,
        "image_size": list(settings.image_size),
        "events": [list(event) for event in drive.events],
        "sha256": {name: file_sha256(folder / name) for name in ("video.mp4", "poses.npz")},
    }
    write_json(folder / "episode.json", facts | extra)


def render_drive(renderer: Renderer, drive: Drive, weather: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """The frames of a drive through the town that `renderer` has loaded."""
    poses, air = drive.poses, WEATHERS[weather]
    for index, cars in enumerate(drive.cars):
        pose = (float(poses.x[index]), float(poses.y[index]), float(poses.heading[index]))
        yield renderer.render(air, pose, cars, drive.models, drive.colors)
