"""Loads the scenes that a server offers: folders of context pictures and files of actions, read once at the start."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from decoder.video import to_uint8
from terra.actions import ActionTrack
from terra.config.groups import FolderName, MapPose
from terra.context import load_context
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.prompt import Actions
from terra.rollout import track_actions
from terra.serving.documents import parse_track
from terra.serving.errors import not_found
from terra.serving.model import Model, Pictures
from terra.trajectory import Trajectory
from terra.trajectory.document import read_document
from tokenizer import TokenGrid
from tokenizer.files import read_json
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Settings, checked, expecting

logger = logging.getLogger(__name__)

SCENE = "scene.json"
"""A file of a scene's folder that says more about the scene; no file of actions."""


class _SceneFile(Settings):
    """The content of a scene.json: the adapter that the scene is for, and where its first frame is on the map."""

    adapter: Annotated[FolderName, expecting("a name of letters, digits, '.', '_' and '-'")] | None = None
    map_pose: MapPose | None = None


@dataclass(eq=False)
class Scene:
    """Context frames, and the actions that start with them.

    Attributes:
        id: name of the scene's folder.
        pictures: the context frames, in the model's size.
        documents: the parsed JSON of the files of actions, which are trajectories where the model is driven.
        tracks: their actions; each is long enough for the context.
        start: an action for each context frame, as a live session's context is taken to have them: those of the file
            `straight`, else of the first by name; None without a file.
        adapter: name of the adapter that rollouts of the scene are made with, unless their request names a model.
        map_pose: where the first frame is in the axes of the server's map; None where that is not known.
        tokens: tokens of the context frames, set at the first request for them.
    """

    id: str
    pictures: Pictures
    documents: Mapping[str, dict[str, Any]]
    tracks: Mapping[str, Trajectory | ActionTrack]
    start: Actions | None
    adapter: str | None = None
    map_pose: tuple[float, float, float] | None = None
    tokens: TokenGrid | None = field(default=None)


class Scenes:
    """All scenes of a server by id, with the tokens of their context frames."""

    def __init__(self, scenes: Mapping[str, Scene], model: Model) -> None:
        self.all = scenes
        self._model = model
        self._encoding = asyncio.Lock()

    def find(self, scene_id: str) -> Scene:
        """The scene of an id. Raises ApiError (404)."""
        if scene_id not in self.all:
            raise not_found("scene", self.all)
        return self.all[scene_id]

    async def tokens(self, scene: Scene) -> TokenGrid:
        """The tokens of a scene's context frames."""
        async with self._encoding:
            if scene.tokens is None:
                scene.tokens = await self._model.encode(scene.pictures)
            return scene.tokens


def load_scenes(
    folder: Path | None,
    *,
    num_context: int,
    image_size: tuple[int, int],
    spec: EngineSpec,
    adapters: Mapping[str, Path] | None = None,
    limits: Limits = LIMITS,
) -> dict[str, Scene]:
    """Read all scenes of a folder by name, and those in the folders `contexts` of adapters, called ADAPTER-NAME.

    Hidden folders are left out, and a scene whose scene.json names an adapter that is not there, with a line in the
    log. Without a folder there are no scenes, and rollouts start from uploads alone.

    Args:
        folder: a folder a scene.
        num_context: context frames of a scene.
        image_size: the model's (height, width).
        spec: the model's frame rate and action space.
        adapters: the folders of the adapters by name.
        limits: bounds on what is read.

    Raises:
        ContextError: too few pictures, or pictures that can't be read or have another shape.
        ActionError: actions that can't be read, or that are too short for the context and a frame after it.
        ConfigError: no folder, no scene in it, a wrong scene.json, or two scenes of one name.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ConfigError(f"scenes={folder}: expected a folder, got none")
    paths = _folders(folder)
    if not paths:
        raise ConfigError(f"scenes={folder}: expected folders of pictures, got none")
    adapters = adapters or {}
    found = {path.name: (path, _scene_file(path)) for path in paths}
    for adapter, each in adapters.items():
        for path in _folders(each / "contexts"):
            name = f"{adapter}-{path.name}"
            if name in found:
                raise ConfigError(f"{path}: expected no other scene {name}, got {found[name][0]}")
            found[name] = (path, _scene_file(path).replace(adapter=adapter))
    scenes = {}
    for name, (path, said) in found.items():
        if said.adapter is not None and said.adapter not in adapters:
            logger.warning("%s: left out: the scene is for the adapter %s, which is not served", path, said.adapter)
        else:
            scenes[name] = _load_scene(name, path, num_context, image_size, spec, said, limits)
    return scenes


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without hidden ones; none if it does not exist."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]


def _scene_file(folder: Path) -> _SceneFile:
    """What a scene's scene.json says; nothing without the file. Raises ConfigError."""
    path = folder / SCENE
    return checked(_SceneFile, read_json(path, ConfigError), str(path)) if path.exists() else _SceneFile()


def _load_scene(
    name: str,
    folder: Path,
    num_context: int,
    image_size: tuple[int, int],
    spec: EngineSpec,
    said: _SceneFile,
    limits: Limits,
) -> Scene:
    frames = load_context(
        folder, num_frames=num_context, image_size=image_size, fps=spec.fps, limits=limits, views=spec.views
    )
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != SCENE]
    documents = {path.stem: read_document(path, limits) for path in paths}
    tracks, actions = {}, {}
    for path in paths:
        tracks[path.stem] = parse_track(documents[path.stem], spec.space, str(path), limits)
        # The first frame that is made needs the action of the last one given.
        actions[path.stem], _ = track_actions(tracks[path.stem], num_context + 1, spec)
    start = actions.get("straight", next(iter(actions.values()), None))
    return Scene(name, to_uint8(frames), documents, tracks, start, said.adapter, said.map_pose)
