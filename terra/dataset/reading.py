"""Reading a dataset from disk: the episodes of a split, and an episode's frames, path and actions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from decoder.camera import Camera
from decoder.video import read_video
from terra.dataset.episode import Episode, Split
from terra.dataset.format import (
    CAMERA_FILE,
    POSES_FILE,
    SHARD_FILE,
    SHARD_FORMAT,
    SPLITS,
    VERSION,
    check_name,
    list_shards,
    num_future_poses,
    read_dataset,
)
from terra.dataset.poses import Poses
from terra.dataset.tables import check_spacing, read_camera, read_poses
from terra.errors import DatasetError
from terra.trajectory import WAYPOINT_TIMES, Trajectory
from tokenizer.files import file_sha256, read_json

_Types = dict[str, type | tuple[type, ...]]
_SHARD_FACTS: _Types = {"split": str, "source": str, "place": str, "sha256": dict, "episodes": list}
_EPISODE_FACTS: _Types = {
    "id": str,
    "weather": str,
    "num_frames": int,
    "events": list,
    "group": (str, type(None)),
    "maneuver": (str, type(None)),
    "num_context": int,
    "sha256": str,
}


def read_split(folder: Path | str, split: str) -> Split:
    """Read the facts and poses of a split's episodes and check the hashes of those files; videos are not read.

    A damaged shard or episode is left out, and `Split.damaged` says why.

    Raises:
        DatasetError: no dataset in `folder`, a dataset of another version, no such split, or no readable episode in it.
    """
    folder = Path(folder)
    facts = read_dataset(folder)
    if split not in SPLITS or not list_shards(folder, split):
        have = [name for name in SPLITS if list_shards(folder, name)]
        raise DatasetError(f"{folder}: expected an episode of split {split}, got splits {have or 'without any'}")
    found = _read_shards(folder, split, facts)
    if not found.episodes:
        raise DatasetError(
            f"{folder}: expected a readable episode of split {split}, got {len(found.damaged)} damaged: "
            f"{found.damaged[0]}"
        )
    return found


def read_splits(folder: Path) -> dict[str, Split]:
    """Read all splits of a dataset; a split may be damaged as a whole.

    Raises:
        DatasetError: no dataset in `folder`, a dataset of another version, or no readable episode in any split.
    """
    facts = read_dataset(folder)
    splits = {split: _read_shards(folder, split, facts) for split in SPLITS if list_shards(folder, split)}
    if not any(split.episodes for split in splits.values()):
        damaged = [line for split in splits.values() for line in split.damaged]
        got = f"{len(damaged)} damaged: {damaged[0]}" if damaged else "none"
        raise DatasetError(f"{folder}: expected a dataset with readable episodes, got {got}")
    return splits


def _read_shards(folder: Path, split: str, dataset: dict[str, Any]) -> Split:
    episodes: list[Episode] = []
    damaged: list[str] = []
    for shard in list_shards(folder, split):
        found, reasons = read_shard(shard, dataset)
        episodes += found
        damaged += reasons
    return Split(tuple(episodes), tuple(damaged))


def read_shard(folder: Path, dataset: dict[str, Any]) -> tuple[list[Episode], list[str]]:
    """Read one shard's episodes, and one line for each damaged episode; `dataset` is the content of dataset.json."""
    try:
        facts = _read_facts(folder, dataset)
        poses = read_poses(check_hash(folder / POSES_FILE, facts["sha256"].get(POSES_FILE)))
        camera = read_camera(check_hash(folder / CAMERA_FILE, facts["sha256"].get(CAMERA_FILE)))
    except DatasetError as error:
        return [], [str(error)]
    if not facts["episodes"]:
        return [], [f"{folder / SHARD_FILE}: episodes: expected at least one, got none"]
    episodes: list[Episode] = []
    damaged: list[str] = []
    for index, entry in enumerate(facts["episodes"]):
        try:
            episodes.append(_make_episode(folder, index, entry, facts, poses, camera))
        except DatasetError as error:
            damaged.append(str(error))
    return episodes, damaged


def read_episode(video: Path | str) -> Episode:
    """Read the episode of one MP4 of a dataset. Raises DatasetError if the file is no such MP4, or damaged."""
    video = Path(video)
    episodes, damaged = read_shard(video.parent, read_dataset(video.parent.parent.parent))
    for episode in episodes:
        if episode.video.name == video.name:
            return episode
    reason = damaged[0] if damaged else f"got {', '.join(episode.video.name for episode in episodes[:5])}"
    raise DatasetError(f"{video}: expected an episode of its shard, {reason}")


def read_frames(episode: Episode) -> UInt8[np.ndarray, "frames height width 3"]:
    """Decode an episode's video to RGB in [0, 255].

    Raises:
        DatasetError: the file is missing, its hash is wrong, or its frames have another number or size.
        VideoError: the video can't be decoded.
    """
    check_hash(episode.video, episode.video_sha256)
    # One thread, because several episodes are read in parallel.
    frames = read_video(episode.video, threads=1)
    expected = (episode.num_frames, *episode.image_size, 3)
    if frames.shape != expected:
        raise DatasetError(f"{episode.video}: expected frames of shape {expected}, got {frames.shape}")
    return frames


def trajectory_of(episode: Episode) -> Trajectory:
    """The future path at each frame of an episode. Raises TrajectoryError if the poses are not a car's motion."""
    poses = episode.poses
    positions = np.column_stack([poses.x, poses.y])
    where = f"{episode.video.parent / POSES_FILE}: {episode.id}"
    return Trajectory.from_poses(poses.time, positions, poses.heading, fps=episode.fps, source=where)


def episode_actions(
    episode: Episode, waypoint_times: Sequence[float] = WAYPOINT_TIMES
) -> Float32[np.ndarray, "frames slots 3"]:
    """The action at each frame: rows of [lateral y (left positive), forward x, time t] in meters and seconds.

    Raises:
        TrajectoryError: the poses are not a car's motion.
        ConfigError: waypoint times that don't increase.
    """
    return trajectory_of(episode).actions(episode.num_frames, waypoint_times)


def _read_facts(folder: Path, dataset: dict[str, Any]) -> dict[str, Any]:
    path = folder / SHARD_FILE
    facts = read_json(path, DatasetError, "a shard of driving")
    if (facts.get("format"), facts.get("version")) != (SHARD_FORMAT, VERSION):
        got = f"{facts.get('format')} {facts.get('version')}"
        raise DatasetError(f"{path}: expected {SHARD_FORMAT} version {VERSION}, got {got}")
    _check_types(facts, _SHARD_FACTS, str(path))
    for name in ("fps", "image_size"):
        if facts.get(name) != dataset.get(name):
            raise DatasetError(f"{path}: {name}: expected {dataset.get(name)} as in the dataset, got {facts.get(name)}")
    if facts["split"] != folder.parent.name:
        raise DatasetError(f"{path}: split: expected {folder.parent.name}, got {facts['split']}")
    return facts


def _make_episode(
    folder: Path, index: int, entry: Any, shard: dict[str, Any], poses: dict[str, Poses], camera: Camera | None
) -> Episode:
    where = f"{folder / SHARD_FILE}: episodes[{index}]"
    if not isinstance(entry, dict):
        raise DatasetError(f"{where}: expected an object, got {entry!r}")
    _check_types(entry, _EPISODE_FACTS, where)
    name, num_frames, fps = check_name(entry["id"], where), entry["num_frames"], float(shard["fps"])
    if num_frames < 1:
        raise DatasetError(f"{where}: num_frames: expected 1 or more, got {num_frames}")
    if name not in poses:
        raise DatasetError(f"{folder / POSES_FILE}: expected poses of {name}, got none")
    check_spacing(poses[name], num_frames + num_future_poses(fps), fps, f"{folder / POSES_FILE}: {name}")
    video = folder / f"{name}.mp4"
    if not video.is_file():
        raise DatasetError(f"{video}: expected a video, got no file")
    try:
        events = tuple((int(frame), str(what)) for frame, what in entry["events"])
    except (TypeError, ValueError):
        raise DatasetError(f"{where}: events: expected pairs of frame and word, got {entry['events']!r}") from None
    return Episode(
        **{key: shard[key] for key in ("split", "source", "place")},
        **{key: entry[key] for key in ("id", "weather", "num_frames", "group", "maneuver", "num_context")},
        fps=fps,
        image_size=(int(shard["image_size"][0]), int(shard["image_size"][1])),
        events=events,
        poses=poses[name],
        video=video,
        video_sha256=entry["sha256"],
        camera=camera,
    )


def _check_types(facts: dict[str, Any], types: _Types, where: str) -> None:
    for name, kind in types.items():
        if name not in facts or not isinstance(facts[name], kind):
            names = kind.__name__ if isinstance(kind, type) else " or ".join(part.__name__ for part in kind)
            raise DatasetError(f"{where}: {name}: expected {names}, got {facts.get(name, 'nothing')!r}")


def check_hash(path: Path, expected: object) -> Path:
    """Return `path` if its SHA-256 is the `expected` one; raise DatasetError otherwise."""
    actual = file_sha256(path, DatasetError)
    if actual != expected:
        raise DatasetError(f"{path}: expected the file with SHA-256 {expected}, got {actual}: damaged")
    return path
