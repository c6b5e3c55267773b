"""A prepared track as a place to record in."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from decoder.camera import Camera
from terra.recording.torcs.assets import read_road, read_scene
from terra.recording.torcs.drives import TrackDrive, simulate_track_drive, track_seed
from terra.recording.weather import WEATHERS, draw_weather

if TYPE_CHECKING:
    from terra.recording.torcs.renderer import TrackRenderer


class TrackSource:
    """The prepared track in `folder`, drawn by `renderer`, which several tracks may share one after the other.

    Raises:
        DatasetError: no prepared track is there, or it is damaged.
    """

    source = "torcs"
    # Roads without junctions offer no futures to choose from.
    maneuvers: tuple[str, ...] = ()

    def __init__(self, folder: Path, renderer: "TrackRenderer") -> None:
        self.place = folder.name
        self._folder, self._renderer = folder, renderer
        self._road = read_road(folder)

    def simulate(self, episode: int, num_frames: int) -> TrackDrive:
        """Drive number `episode` of the track."""
        return simulate_track_drive(self._road, self.place, episode, num_frames)

    def simulate_counterfactual(self, group: int, maneuver: str, num_frames: int, num_context: int) -> TrackDrive:
        """Tracks have no junctions: always ValueError."""
        raise ValueError(f"expected no maneuver on a track, got {maneuver = }")

    def weather(self, episode: int) -> str:
        """The weather of drive `episode`."""
        return draw_weather(track_seed(self.place), episode)

    def render(self, drive: TrackDrive, weather: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """The frames of a drive; `weather` is a name of `WEATHERS`."""
        for index in range(len(drive.cars)):
            # In between, another track may have been drawn.
            if self._renderer.loaded != self._folder:
                self._renderer.load(self._folder, *read_scene(self._folder))
            yield self._renderer.render(WEATHERS[weather], drive, index)


def torcs_source(track: str, assets: Path, size: tuple[int, int], camera: Camera, device_index: int = 0) -> TrackSource:
    """The track of that name in `assets`, as `scripts/torcs_prepare.py` leaves it.

    It is seen by `camera` in frames of `size` (height, width), drawn on EGL device `device_index`.

    Raises:
        ConfigError: EGL can't give a context, or moderngl is not installed.
        DatasetError: no prepared track is there, or it is damaged.
    """
    return TrackSource(assets / track, _renderer(size, camera, device_index))


@lru_cache(maxsize=1)
def _renderer(size: tuple[int, int], camera: Camera, device_index: int) -> "TrackRenderer":
    """One a process: contexts are costly to open."""
    # Only now: reading which tracks there are needs no moderngl.
    from terra.recording.torcs.renderer import TrackRenderer

    return TrackRenderer(size, camera, device_index)
