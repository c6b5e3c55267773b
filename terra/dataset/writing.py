"""Writing a dataset to disk: a shard is written under a hidden name and renamed when it is complete."""

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import UInt8

from decoder.camera import Camera
from decoder.video import VideoWriter, write_png_sequence
from terra.actions import ActionSpace, Waypoints, describe_space, require_table, save_actions
from terra.actions.space import Values
from terra.dataset.format import (
    ACTIONS_FILE,
    AXES,
    CAMERA_FILE,
    CRF,
    DATASET_FILE,
    FRAME,
    POSES_FILE,
    SHARD_FILE,
    SPLITS,
    STATE_FILE,
    UNITS,
    UNKNOWN_WEATHER,
    check_name,
    dataset_space,
    dataset_views,
    format_of,
    list_shards,
    num_future_poses,
    read_dataset,
    shard_format_of,
    shard_name,
)
from terra.dataset.poses import Poses
from terra.dataset.tables import State, check_spacing, write_actions, write_camera, write_poses, write_state
from terra.errors import DatasetError, OutputError
from terra.trajectory import save_poses
from terra.views import Views, title_of
from tokenizer.files import file_sha256, make_folder, read_json, write_json

logger = logging.getLogger(__name__)


def create_dataset(
    folder: Path,
    fps: float,
    image_size: tuple[int, int],
    source: str,
    notice: str = "",
    space: ActionSpace | None = None,
    views: Views | None = None,
) -> None:
    """Write dataset.json, or add `source` to an existing one.

    Args:
        folder: folder of the dataset.
        fps: frames per second.
        image_size: (height, width) in pixels, both even.
        source: name of the frames' source.
        notice: the license terms of the source's frames.
        space: what the actions mean; None for driving, whose actions are made of poses.
        views: the cameras in the picture; None for one.

    Raises:
        DatasetError: the existing dataset has frames of another rate or size, other views, or actions of another space.
        OutputError: the folder can't be written.
    """
    space = space or Waypoints()
    name, version = format_of(space)
    facts: dict[str, Any] = {"format": name, "version": version, "fps": fps, "image_size": list(image_size)}
    if isinstance(space, Waypoints):
        facts |= {"frame": FRAME, "axes": AXES, "units": UNITS}
    else:
        facts |= describe_space(space)
    if views is not None:
        facts["views"] = views.describe()
    facts["sources"] = [check_name(source, "source")]
    facts["notices"] = {source: notice} if notice else {}
    # A dataset.json without any shard is overwritten, because nothing depends on it yet.
    if (folder / DATASET_FILE).exists() and any(list_shards(folder, split) for split in SPLITS):
        present = read_dataset(folder)
        if dataset_space(present, folder / DATASET_FILE) != space:
            there = dataset_space(present, folder / DATASET_FILE).title
            got = space.title if space.title != there else "other units, ranges or names (action_space= declares them)"
            raise DatasetError(f"{folder / DATASET_FILE}: expected actions of {there}, as there, got {got}")
        if (there := dataset_views(present, folder / DATASET_FILE)) != views:
            expected, got = (title_of(each) for each in (there, views))
            if expected == got:
                expected, got = (each and each.sizes for each in (there, views))
            raise DatasetError(f"{folder / DATASET_FILE}: expected pictures of {expected}, as there, got {got}")
        for name in facts.keys() - {"sources", "notices", "action_space", "views"}:
            if present.get(name) != facts[name]:
                expected = f"{name} {present.get(name)} as in the episodes there"
                raise DatasetError(f"{folder / DATASET_FILE}: expected {expected}, got {facts[name]}")
        facts["sources"] = sorted({*present["sources"], source})
        facts["notices"] = present["notices"] | facts["notices"]
        if facts == present:
            return
    write_json(folder / DATASET_FILE, facts)


class ShardWriter:
    """Writes one shard as a context manager; the shard appears if and only if the block ends without an exception."""

    def __init__(
        self,
        folder: Path,
        *,
        split: str,
        source: str,
        place: str,
        fps: float,
        image_size: tuple[int, int],
        camera: Camera | None,
        futures: bool = False,
        recipe: Mapping[str, Any] | None = None,
        space: ActionSpace | None = None,
        preset: str = "medium",
        views: Views | None = None,
        losses: Mapping[str, Any] | None = None,
        planes: bool = False,
    ) -> None:
        """Check the names; nothing is written yet.

        Args:
            folder: folder of the dataset, made by `create_dataset`.
            split: "train" or "held_out".
            source: name of the frames' source.
            place: the town or drive.
            fps: frames per second.
            image_size: (height, width) in pixels, both even.
            camera: the camera of all frames, or None if it is unknown.
            futures: whether groups of episodes share a start.
            recipe: the settings that make the shard, as JSON; `is_complete` compares them.
            space: what the actions mean; None for driving.
            preset: x264's, see `decoder.video.VideoWriter`.
            views: the cameras in the picture, those of the dataset; None for one.
            losses: what an import kept of its source, and what it didn't, as JSON for shard.json.
            planes: whether frames come as planes of YUV instead of RGB, see `decoder.frames.stream_planes`.

        Raises:
            DatasetError: an unknown split, or a name with characters that are not allowed.
        """
        if split not in SPLITS:
            raise DatasetError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        check_name(source, "source")
        check_name(place, "place")
        self.folder = folder / split / shard_name(source, place, futures=futures)
        self._unfinished = self.folder.with_name(f".{self.folder.name}.tmp")
        self._fps, self._image_size, self._camera = fps, image_size, camera
        self._space = space or Waypoints()
        self._encoding: dict[str, Any] = {"crf": CRF, "preset": preset, "threads": 1, "planes": planes}
        kind, version = shard_format_of(self._space)
        self._facts = {"format": kind, "version": version, "split": split, "source": source, "place": place}
        if views is not None:
            self._facts["views"] = views.describe()
        self._recipe = dict(recipe or {})
        self._losses = {} if losses is None else {"losses": dict(losses)}
        self._episodes: list[dict[str, Any]] = []
        self._poses: dict[str, Poses] = {}
        self._actions: dict[str, Values] = {}
        self._states: dict[str, State] = {}
        self._context: tuple[str, np.ndarray] | None = None  # the last group's name and shared frames

    @property
    def name_prefix(self) -> str:
        """The prefix of the episodes' ids that makes them unique in the dataset: the shard's name."""
        return self.folder.name

    def is_complete(self) -> bool:
        """Whether the shard exists already and was made by the same recipe.

        Raises:
            DatasetError: the shard has another recipe or no shard.json, or its place is in the other split.
        """
        for split in SPLITS:
            other = self.folder.parent.parent / split / self.folder.name
            if other != self.folder and other.exists():
                raise DatasetError(f"{other}: expected {self.folder.name} in {self._facts['split']} only, got it here")
        if not self.folder.exists():
            return False
        recipe = read_json(self.folder / SHARD_FILE, DatasetError, "a whole shard, or no folder").get("recipe")
        if recipe != self._recipe:
            there = recipe if isinstance(recipe, dict) else {}
            differing = [
                name for name in sorted(there.keys() | self._recipe) if there.get(name) != self._recipe.get(name)
            ]
            wanted, got = ({name: of[name] for name in differing if name in of} for of in (self._recipe, there))
            raise DatasetError(f"{self.folder}: expected a shard made by {wanted}, got one by {got}")
        return True

    def __enter__(self) -> "ShardWriter":
        make_folder(self.folder.parent)
        if self._unfinished.exists():
            # A killed process left these files; no other process writes this shard.
            shutil.rmtree(self._unfinished)
        make_folder(self._unfinished)
        self._episodes, self._poses, self._actions, self._states, self._context = [], {}, {}, {}, None
        return self

    def add(
        self,
        name: str,
        frames: Iterable[UInt8[np.ndarray, "height width 3"]],
        track: Poses | Values | Callable[[], Values],
        *,
        state: Callable[[], State] | None = None,
        events: Iterable[tuple[int, str]] = (),
        weather: str = UNKNOWN_WEATHER,
        group: str | None = None,
        maneuver: str | None = None,
        num_context: int = 0,
    ) -> int:
        """Write one episode, frame by frame, and return the number of frames.

        Args:
            name: id of the episode.
            frames: RGB in [0, 255], consumed one by one.
            track: driving: the poses at the frames and for 3 s after the last frame; other worlds: the values of the
                action space at each frame, of which the last one leads nowhere, or a function that is called for them
                when all frames are written.
            state: a function that is called then for what the source tells of its state at each frame, by name.
            events: (frame, event), in order.
            weather: the source's word for the weather.
            group: name of the start that several futures share; its shared frames are stored lossless.
            maneuver: name of this future in its group.
            num_context: number of first frames that all futures of the group share.

        Raises:
            DatasetError: a repeated name, frames that don't fit the track, or shared frames that differ.
            OutputError: the files can't be written.
        """
        if check_name(name, "episode") in self._poses.keys() | self._actions.keys():
            raise DatasetError(f"{self.folder}: expected each episode once, got {name} twice")
        video = self._unfinished / f"{name}.mp4"
        height, width = self._image_size
        num_frames, context = 0, []
        # One thread, because shards are written in parallel, and so that the bytes don't depend on the number of cores.
        with VideoWriter(video, fps=self._fps, size=(width, height), **self._encoding) as writer:
            for frame in frames:
                writer.append(frame)
                if num_frames < num_context:
                    context.append(frame.copy())
                num_frames += 1
        where = f"{self.folder.name}: {name}"
        track = track() if callable(track) else track
        self._keep(name, track, num_frames, where)
        if state is not None:
            self._states[name] = state()
        if group is not None:
            self._write_context(name, check_name(group, "group"), np.stack(context), track)
        entry = {"id": name, "weather": weather, "num_frames": num_frames, "events": [list(event) for event in events]}
        entry |= {"group": group, "maneuver": maneuver, "num_context": num_context}
        self._episodes.append(entry | {"sha256": file_sha256(video, DatasetError)})
        return num_frames

    def _keep(self, name: str, track: Poses | Values, num_frames: int, where: str) -> None:
        if isinstance(track, Poses):
            check_spacing(track, num_frames + num_future_poses(self._fps), self._fps, where)
            self._poses[name] = track
            return
        space = require_table(self._space, where)
        if track.shape != (num_frames, len(space.columns)):
            expected = f"{num_frames} actions of {len(space.columns)} numbers"
            raise DatasetError(f"{where}: expected {expected}, got shape {track.shape}")
        for row, problem in enumerate(map(space.problem, track)):
            if problem is not None:
                raise DatasetError(f"{where}: frame {row}: {problem}")
        self._actions[name] = track

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _write_context(
        self, name: str, group: str, context: UInt8[np.ndarray, "frames height width 3"], track: Poses | Values
    ) -> None:
        folder = self._unfinished / group
        if not folder.exists():
            write_png_sequence(context, folder)
            self._context = (group, context)
        elif self._context is None or self._context[0] != group or not np.array_equal(self._context[1], context):
            raise DatasetError(f"{self.folder.name}: {name}: expected the context frames of all futures of {group}")
        path = self._unfinished / f"{name}.json"
        if isinstance(track, Poses):
            positions = np.column_stack([track.x, track.y])
            save_poses(path, track.time, positions, track.heading, self._fps)
        else:
            save_actions(path, require_table(self._space, name), self._fps, track)

    def _finish(self) -> None:
        if not self._episodes:
            raise DatasetError(f"{self.folder}: expected at least one episode, got none")
        if isinstance(self._space, Waypoints):
            write_poses(self._unfinished / POSES_FILE, self._poses)
        else:
            write_actions(self._unfinished / ACTIONS_FILE, self._space, self._actions)
        if self._states:
            write_state(self._unfinished / STATE_FILE, self._states)
        write_camera(self._unfinished / CAMERA_FILE, self._camera, self._image_size, self._fps)
        others = sorted(path for path in self._unfinished.rglob("*") if path.is_file() and path.suffix != ".mp4")
        hashes = {path.relative_to(self._unfinished).as_posix(): file_sha256(path, DatasetError) for path in others}
        facts = self._facts | {"fps": self._fps, "image_size": list(self._image_size), "recipe": self._recipe}
        facts |= self._losses
        write_json(self._unfinished / SHARD_FILE, facts | {"sha256": hashes, "episodes": self._episodes})
        try:
            self._unfinished.rename(self.folder)
        except OSError as error:
            raise OutputError(f"{self.folder}: expected a new shard, got: {error.strerror}") from error
