"""Facts about a tokenizer and its world model from their config.json files and headers; needs no torch."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from terra.actions import ActionSpace
from terra.actions.space import read_space
from terra.errors import CheckpointError
from terra.memory import MemoryRule
from terra.views import Views
from terra.world_model.values import WorldModelValues
from tokenizer.checkpoint import CONFIG_NAME, read_config, read_layout, weight_files
from tokenizer.config import LFQTokenizerConfig


@dataclass(frozen=True)
class ModelFacts:
    """What a model's files tell before a weight is read.

    Attributes:
        image_size: (height, width) of the frames, in pixels.
        fps: frames a second.
        space: what the actions mean.
        max_frames: frames that a window of the world model holds.
        memory: how memory frames are chosen; None for a model without memory.
        views: the cameras whose pictures share each frame; None for one camera.
    """

    image_size: tuple[int, int]
    fps: float
    space: ActionSpace
    max_frames: int
    memory: MemoryRule | None
    views: Views | None

    @classmethod
    def read(cls, tokenizer: Path, world_model: Path) -> Self:
        """Read the config.json in the folders of a tokenizer and of a world model.

        Whether the weights fit is not looked at, see `terra.world_model.load_config`.

        Raises:
            CheckpointError: a file that is missing or damaged, or a value out of its bounds.
        """
        image_size = LFQTokenizerConfig.load(tokenizer / CONFIG_NAME).image_size
        where = world_model / CONFIG_NAME
        try:
            values = WorldModelValues(**WorldModelValues.read(read_config(where)))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        said = {"waypoint_times": values.waypoint_times, "action_space": values.action_space}
        space = read_space(said, str(where), CheckpointError)
        return cls(image_size, values.fps, space, values.num_temporal_embeddings, values.memory, values.views)


def count_weights(folder: Path) -> tuple[int, int]:
    """The parameters of a checkpoint, and the bytes of its weight files. Raises CheckpointError."""
    layout = read_layout(folder)
    return sum(prod(shape) for shape in layout.values()), sum(path.stat().st_size for path in weight_files(folder))
