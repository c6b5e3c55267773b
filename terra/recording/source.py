"""What a recording needs of a place to drive in: a town, or anything else that simulates and renders."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import UInt8

from terra.dataset.poses import Poses


class Drive(Protocol):
    """One simulated drive. A source's own drives also hold what it needs to render them.

    `poses` are those of all frames and 3 s more; `events` are (frame, what) in order of the frames.
    """

    @property
    def poses(self) -> Poses:
        """The camera's motion."""
        ...

    @property
    def events(self) -> tuple[tuple[int, str], ...]:
        """What the car did, by frame."""
        ...


AnyDrive = TypeVar("AnyDrive", bound=Drive)


class SceneSource(Protocol[AnyDrive]):
    """One place to drive in. All it gives is byte for byte the same whenever place and numbers are, on one machine.

    `source` ("town") and `place` ("000012") name the place; `maneuvers` are the futures that a
    counterfactual set may ask for, () if none.
    """

    @property
    def source(self) -> str:
        """The kind of place."""
        ...

    @property
    def place(self) -> str:
        """Its name among those of its kind."""
        ...

    @property
    def maneuvers(self) -> tuple[str, ...]:
        """The futures that a counterfactual set may ask for."""
        ...

    def simulate(self, episode: int, num_frames: int) -> AnyDrive:
        """Drive number `episode` of this place."""
        ...

    def simulate_counterfactual(self, group: int, maneuver: str, num_frames: int, num_context: int) -> AnyDrive:
        """One future of start number `group`: its first `num_context` frames are equal for every maneuver.

        Raises:
            ValueError: `maneuver` is not one of `maneuvers`.
        """
        ...

    def weather(self, episode: int) -> str:
        """The weather of a drive, by a rule from place and episode."""
        ...

    def render(self, drive: AnyDrive, weather: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """The frames of a drive, in order."""
        ...
