"""The map of a server: tokens, made at the first request for them, and poses, seen from where a rollout begins."""

import asyncio
from collections.abc import Sequence

from terra.place_map import MapPictures
from terra.recall import PlaceMap
from terra.serving.model import Model
from tokenizer import TokenGrid


class Place:
    """The frames of a place that sessions and jobs can remember.

    Args:
        pictures: the map's frames, in the model's size, and their poses.
        model: encodes the frames.
    """

    def __init__(self, pictures: MapPictures, model: Model) -> None:
        self.pictures, self._model = pictures, model
        self._tokens: TokenGrid | None = None
        self._encoding = asyncio.Lock()

    async def seen_from(self, pose: Sequence[float]) -> PlaceMap:
        """The map in the axes of a rollout that begins at `pose` of the map, [x, y, heading] in m and rad."""
        poses = self.pictures.seen_from(pose)
        async with self._encoding:
            if self._tokens is None:
                self._tokens = (await self._model.pipeline.encode_map(self.pictures.pixels, poses)).tokens
        return PlaceMap(self._tokens, poses)
