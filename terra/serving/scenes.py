"""Loads the scenes that a server offers: folders of context pictures and files of actions, read once at the start."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoder.video import to_uint8
from terra.actions import ActionTrack
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
        tokens: tokens of the context frames, set at the first request for them.
    """

    id: str
    pictures: Pictures
    documents: Mapping[str, dict[str, Any]]
    tracks: Mapping[str, Trajectory | ActionTrack]
    start: Actions | None
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
            raise not_found("scene")
        return self.all[scene_id]

    async def tokens(self, scene: Scene) -> TokenGrid:
        """The tokens of a scene's context frames."""
        async with self._encoding:
            if scene.tokens is None:
                scene.tokens = await self._model.encode(scene.pictures)
            return scene.tokens


def load_scenes(
    folder: Path | None, *, num_context: int, image_size: tuple[int, int], spec: EngineSpec
) -> dict[str, Scene]:
    """Read all scenes of a folder, by name; hidden folders are left out. `image_size` is the model's (height, width).

    Without a folder there are no scenes, and rollouts start from uploads alone.

    Raises:
        ContextError: too few pictures, or pictures that can't be read or have another shape.
        ActionError: actions that can't be read, or that are too short for the context and a frame after it.
        ConfigError: no folder, or no scene in it.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ConfigError(f"scenes={folder}: expected a folder, got none")
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not paths:
        raise ConfigError(f"scenes={folder}: expected folders of pictures, got none")
    return {path.name: _load_scene(path, num_context, image_size, spec) for path in paths}


def _load_scene(folder: Path, num_context: int, image_size: tuple[int, int], spec: EngineSpec) -> Scene:
    frames = load_context(folder, num_frames=num_context, image_size=image_size, fps=spec.fps)
    paths = sorted(folder.glob("*.json"))
    documents = {path.stem: read_document(path) for path in paths}
    tracks, actions = {}, {}
    for path in paths:
        tracks[path.stem] = parse_track(documents[path.stem], spec.space, str(path))
        # The first frame that is made needs the action of the last one given.
        actions[path.stem], _ = track_actions(tracks[path.stem], num_context + 1, spec)
    start = actions.get("straight", next(iter(actions.values()), None))
    return Scene(folder.name, to_uint8(frames), documents, tracks, start)
