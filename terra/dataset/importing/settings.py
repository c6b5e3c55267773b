"""The settings that a source is opened with, which `terra import` and `terra inspect` share."""

from typing import Annotated, Any

from pydantic import Field

from terra.dataset.importing.bags import Bags
from terra.views import ViewNames
from tokenizer.settings import Positive, Settings


class Gps(Settings):
    """The clock and the noise of GPS tracks: `offset_seconds` from the first fix to the video's first frame."""

    offset_seconds: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0
    sigma_meters: Annotated[float, Field(ge=0.01, le=50)] = 2.0


class SourceSettings(Settings):
    """What a source's own files do not tell.

    Attributes:
        lerobot: the columns of a LeRobot dataset, see `LeRobotColumns`; with `action` those of `LeRobotActions`.
        action_space: what the actions of video_actions, LeRobot datasets and bags mean, see `terra.actions.space`.
        picture_fps: pictures a second, where files don't tell: of folders of pictures, and of donkeycar.
        sections: into how many drives each session of a donkeycar tub is cut.
        gps: the clock and the noise of a GPS track, see `GpxSource`.
        bags: topics, fields and clock of bags.
        views: the names of several cameras of video_actions, the main one first.
    """

    lerobot: dict[str, Any] | None = None
    action_space: dict[str, Any] | None = None
    picture_fps: Positive | None = None
    sections: Annotated[int, Field(ge=1, le=1000)] = 1
    gps: Gps = Gps()
    bags: Bags = Bags()
    views: ViewNames | None = None


UNSET = SourceSettings()
"""What holds where nothing was said."""
