"""Scenes that the server offers: folders of context pictures with trajectories beside them, read once at the start."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoder.video import to_uint8
from terra.context import load_context
from terra.errors import ConfigError, TrajectoryError
from terra.prompt import Actions
from terra.serving.errors import not_found
from terra.serving.model import Model, Pictures
from terra.trajectory import Trajectory
from terra.trajectory.document import parse_document
from tokenizer import TokenGrid

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Scene:
    """Context frames, and the trajectories that start with them."""

    id: str
    pictures: Pictures
    documents: Mapping[str, dict[str, Any]]
    trajectories: Mapping[str, Trajectory]
    tokens: TokenGrid | None = field(default=None)

    @property
    def usual(self) -> Trajectory | None:
        """The trajectory that a live session's context is taken to have: the straight one, else the first by name."""
        return self.trajectories.get("straight") or next(iter(self.trajectories.values()), None)


class Scenes:
    """All scenes of a folder.

    Raises:
        ContextError, TrajectoryError: a scene that can't be read.
        ConfigError: no folder, or no scene in it.
    """

    def __init__(self, folder: Path, model: Model, num_context: int) -> None:
        self._model = model
        self._encoding = asyncio.Lock()
        if not folder.is_dir():
            raise ConfigError(f"scenes={folder}: expected a folder, got none")
        self.all = {path.name: self._load(path, num_context) for path in sorted(folder.iterdir()) if path.is_dir()}
        if not self.all:
            raise ConfigError(f"scenes={folder}: expected folders of pictures, got none")

    def find(self, scene_id: str) -> Scene:
        """Raises ApiError (404)."""
        if scene_id not in self.all:
            raise not_found("scene")
        return self.all[scene_id]

    async def tokens(self, scene: Scene) -> TokenGrid:
        """The tokens of its context frames."""
        async with self._encoding:
            if scene.tokens is None:
                scene.tokens = await self._model.encode(scene.pictures)
            return scene.tokens

    def actions(self, scene: Scene) -> tuple[Actions, float] | None:
        """The usual actions between its context frames, and the speed (m/s) after them; None without a trajectory."""
        trajectory, spec = scene.usual, self._model.spec
        if trajectory is None:
            return None
        num = len(scene.pictures)
        made = trajectory.resample(spec.fps).actions(num, spec.waypoint_times)
        return torch.from_numpy(made[:-1]), float(np.hypot(*made[-1, 0, :2]) / made[-1, 0, 2])

    def _load(self, folder: Path, num_context: int) -> Scene:
        load = partial(load_context, folder, image_size=self._model.image_size, fps=self._model.spec.fps)
        documents: dict[str, dict[str, Any]] = {}
        trajectories: dict[str, Trajectory] = {}
        for path in sorted(folder.glob("*.json")):
            try:
                documents[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise TrajectoryError(f"{path}: expected JSON, got: {error}") from None
            trajectories[path.stem] = parse_document(documents[path.stem], str(path))
            trajectories[path.stem].require(num_context + 1)
        return Scene(folder.name, to_uint8(load(num_frames=num_context)), documents, trajectories)
