"""Reading a dataset from disk: the episodes of a split, and an episode's frames, path and actions."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from decoder.camera import Camera
from decoder.video import read_video
from terra.actions import ActionSpace, Waypoints
from terra.actions.space import Values
from terra.dataset.episode import Episode, Split
from terra.dataset.format import (
    ACTIONS_FILE,
    CAMERA_FILE,
    DATASET_FILE,
    POSES_FILE,
    SHARD_FILE,
    SPLITS,
    STATE_FILE,
    check_name,
    dataset_space,
    dataset_views,
    list_shards,
    num_future_poses,
    read_dataset,
    shard_format_of,
)
from terra.dataset.poses import Poses
from terra.dataset.tables import State, check_spacing, read_actions, read_camera, read_poses, read_state
from terra.errors import DatasetError
from terra.trajectory import Trajectory
from terra.views import Views
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
        space = dataset_space(dataset, folder.parent.parent / DATASET_FILE)
        views = dataset_views(dataset, folder.parent.parent / DATASET_FILE)
        facts = _read_facts(folder, dataset, space)
        tracks = _read_tracks(folder, facts, space)
        camera = read_camera(check_hash(folder / CAMERA_FILE, facts["sha256"].get(CAMERA_FILE)))
    except DatasetError as error:
        return [], [str(error)]
    if not facts["episodes"]:
        return [], [f"{folder / SHARD_FILE}: episodes: expected at least one, got none"]
    episodes: list[Episode] = []
    damaged: list[str] = []
    for index, entry in enumerate(facts["episodes"]):
        try:
            episodes.append(_make_episode(folder, index, entry, facts, space, tracks, camera, views))
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
    episode: Episode, space: ActionSpace | None = None
) -> Float32[np.ndarray, "frames slots action_dim"]:
    """The action at each frame, as rows of a space: None for the episode's own, or waypoints at other times.

    Raises:
        TrajectoryError: the poses are not a car's motion.
        DatasetError: the episode has actions of another space.
    """
    space = space or episode.space
    if isinstance(space, Waypoints) and episode.motion is not None:
        return trajectory_of(episode).actions(episode.num_frames, space.times)
    if isinstance(space, Waypoints) or episode.actions is None or space != episode.space:
        raise DatasetError(f"{episode.video}: expected actions of {space.title}, got those of {episode.space.title}")
    return space.rows(episode.actions)


def episode_state(episode: Episode) -> State:
    """What the source told of its state at each frame, by name; see `terra.dataset.format` for the names.

    Raises:
        DatasetError: the source told none, or the table is damaged.
    """
    shard = episode.video.parent
    path = shard / STATE_FILE
    if not path.is_file():
        raise DatasetError(f"{path}: expected the state of {episode.id}, got no file: its source tells none")
    hashes = read_json(shard / SHARD_FILE, DatasetError, "a shard of a dataset").get("sha256")
    states = read_state(check_hash(path, hashes.get(STATE_FILE) if isinstance(hashes, dict) else None))
    if episode.id not in states:
        raise DatasetError(f"{path}: expected the state of {episode.id}, got none")
    return states[episode.id]


def _read_tracks(folder: Path, facts: dict[str, Any], space: ActionSpace) -> dict[str, Poses] | dict[str, Values]:
    """The poses of driving, or the actions of another world, by episode."""
    name = POSES_FILE if isinstance(space, Waypoints) else ACTIONS_FILE
    path = check_hash(folder / name, facts["sha256"].get(name))
    return read_poses(path) if isinstance(space, Waypoints) else read_actions(path, space)


def _read_facts(folder: Path, dataset: dict[str, Any], space: ActionSpace) -> dict[str, Any]:
    path = folder / SHARD_FILE
    facts = read_json(path, DatasetError, "a shard of a dataset")
    name, version = shard_format_of(space)
    if (facts.get("format"), facts.get("version")) != (name, version):
        got = f"{facts.get('format')} {facts.get('version')}"
        raise DatasetError(f"{path}: expected {name} version {version}, got {got}")
    _check_types(facts, _SHARD_FACTS, str(path))
    for name in ("fps", "image_size", "views"):
        if facts.get(name) != dataset.get(name):
            raise DatasetError(f"{path}: {name}: expected {dataset.get(name)} as in the dataset, got {facts.get(name)}")
    if facts["split"] != folder.parent.name:
        raise DatasetError(f"{path}: split: expected {folder.parent.name}, got {facts['split']}")
    return facts


def _make_episode(
    folder: Path,
    index: int,
    entry: Any,
    shard: dict[str, Any],
    space: ActionSpace,
    tracks: dict[str, Poses] | dict[str, Values],
    camera: Camera | None,
    views: Views | None,
) -> Episode:
    where = f"{folder / SHARD_FILE}: episodes[{index}]"
    if not isinstance(entry, dict):
        raise DatasetError(f"{where}: expected an object, got {entry!r}")
    _check_types(entry, _EPISODE_FACTS, where)
    name, num_frames, fps = check_name(entry["id"], where), entry["num_frames"], float(shard["fps"])
    if num_frames < 1:
        raise DatasetError(f"{where}: num_frames: expected 1 or more, got {num_frames}")
    table = folder / (POSES_FILE if isinstance(space, Waypoints) else ACTIONS_FILE)
    track = tracks.get(name)
    if track is None:
        raise DatasetError(f"{table}: expected {table.stem} of {name}, got none")
    if isinstance(track, Poses):
        check_spacing(track, num_frames + num_future_poses(fps), fps, f"{table}: {name}")
    elif len(track) != num_frames:
        raise DatasetError(f"{table}: {name}: expected {num_frames} actions, one for each frame, got {len(track)}")
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
        space=space,
        motion=track if isinstance(track, Poses) else None,
        actions=None if isinstance(track, Poses) else track,
        video=video,
        video_sha256=entry["sha256"],
        camera=camera,
        views=views,
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
