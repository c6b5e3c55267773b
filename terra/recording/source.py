"""The interface of a scene source: a place, such as a town, that simulates and renders drives."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import UInt8

from terra.dataset.poses import Poses


class Drive(Protocol):
    """One simulated drive; a source's own type of drive also holds the data for its rendering."""

    @property
    def poses(self) -> Poses:
        """The car's poses at all frames and for 3 s after the last frame."""
        ...

    @property
    def events(self) -> tuple[tuple[int, str], ...]:
        """The car's maneuvers as (frame, event), in order of the frames."""
        ...


AnyDrive = TypeVar("AnyDrive", bound=Drive)


class SceneSource(Protocol[AnyDrive]):
    """One place to drive in. On one machine, equal places and numbers give equal drives and frames, byte for byte."""

    @property
    def source(self) -> str:
        """The kind of the place, such as "town"."""
        ...

    @property
    def place(self) -> str:
        """The name of the place among those of its kind, such as "000012"."""
        ...

    @property
    def maneuvers(self) -> tuple[str, ...]:
        """The futures that `simulate_counterfactual` knows; () if none."""
        ...

    def simulate(self, episode: int, num_frames: int) -> AnyDrive:
        """Simulate drive number `episode` of this place."""
        ...

    def simulate_counterfactual(self, group: int, maneuver: str, num_frames: int, num_context: int) -> AnyDrive:
        """Simulate one future of start number `group`; its first `num_context` frames are equal for every maneuver.

        Raises:
            ValueError: `maneuver` is not one of `maneuvers`.
        """
        ...

    def weather(self, episode: int) -> str:
        """The weather of a drive, which depends on place and episode alone."""
        ...

    def render(self, drive: AnyDrive, weather: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """Render the frames of a drive, in order."""
        ...
