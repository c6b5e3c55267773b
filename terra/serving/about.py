"""What a world says of itself on the page: its title, a line on what one does there, and what may be lost from view."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from terra.actions import ActionSpace, Choice, Keys, Waypoints
from terra.config.groups import CheckpointSettings
from terra.errors import ConfigError
from terra.locations import PACKAGE
from tokenizer.files import read_json
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, Positive, Settings, checked, expecting

ABOUT = "page.json"
"""A file of a world's folder, beside tokenizer/ and world_model/."""

SHIPPED_WORLDS = PACKAGE / "worlds"
"""The folder with a NAME.json, in place of a page.json, for each world that ships as an archive NAME.zip."""

_MOST_NAMES = 5  # of a vector or of keys, in the line of a world that has none of its own

_Line = Annotated[str, Field(min_length=1, max_length=200), expecting("a line of 1 to 200 characters")]
_Level = Annotated[int, Field(ge=0, le=255)]


class Subject(Settings):
    """What a player moves, where a model may lose it: the page counts the pixels of its color.

    Attributes:
        name: what the page calls it, such as "the disc".
        color: red, green and blue, 0 to 255.
        tolerance: greatest Euclidean distance of a pixel's color from `color`.
        pixels: number of such pixels, in a picture of the model's size, below which the subject is not seen.
        frames: number of frames in a row without it after which the page says that it is lost.
    """

    name: _Line
    color: Annotated[tuple[_Level, _Level, _Level], Field(strict=False), expecting("[red, green, blue], 0 to 255")]
    tolerance: Positive
    pixels: Count
    frames: Count


class About(Settings):
    """The content of a page.json.

    Attributes:
        title: the world's name for people; None: made of its id.
        line: what one does there; None: made of the action space.
        scenes: what one does in a scene, by the scene's id.
        subject: what may be lost from view; None for nothing.
        downward: the numbers of a vector that are positive where something moves down in the picture.
    """

    title: _Line | None = None
    line: _Line | None = None
    scenes: dict[str, _Line] = Field(default_factory=dict)
    subject: Subject | None = None
    downward: Annotated[tuple[_Line, ...], Field(strict=False), expecting("a list of names")] = ()

    def line_for(self, space: ActionSpace) -> str:
        """The world's line; without one of its own a general one, for its actions."""
        return self.line or general_line(space)


def load_about(world_model: CheckpointSettings, name: str, limits: Limits = LIMITS) -> About:
    """Read the page.json of a world's folder; without one, of a world that ships with Terra, the one kept with Terra.

    Args:
        world_model: names the world's folder, or a folder in it.
        name: the world's name.
        limits: bounds on the file.

    Raises:
        ConfigError: a file that is no page.json.
    """
    folder = Path(str(world_model.pretrained))
    own = (folder if world_model.subfolder else folder.parent) / ABOUT
    for path in (own, SHIPPED_WORLDS / f"{name}.json"):
        if path.is_file():
            return checked(About, read_json(path, ConfigError, limits=limits), str(path))
    return About()


def general_line(space: ActionSpace) -> str:
    """What one does in a world of that action space."""
    if isinstance(space, Waypoints):
        return "Drive: steer and change the speed."
    names = ", ".join(space.names[:_MOST_NAMES]) + (" and more" if len(space.names) > _MOST_NAMES else "")
    if isinstance(space, Keys):
        return f"Play with keys, several at once: {names}."
    if isinstance(space, Choice):
        return f"Play one action at a time: {names}."
    return f"Play by moving {names}."
