"""A procedural town as a scene source."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import UInt8

from decoder.camera import Camera
from terra.recording.drives import COUNTERFACTUAL_MANEUVERS, TownDrive, simulate_counterfactual, simulate_drive
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.recording.renderer import Renderer
from terra.recording.weather import WEATHERS, Ground, WeatherName, draw_weather


class TownSource:
    """The town of a seed, rendered by `renderer`, which several towns may use in turn.

    `weather` is that of all its drives; None draws one for each drive, of which none has snow or rain. `revisit` and
    `traffic`: see `terra.recording.drives.simulate_drive`.
    """

    source = "town"
    maneuvers = COUNTERFACTUAL_MANEUVERS

    def __init__(
        self,
        seed: int,
        renderer: Renderer,
        weather: WeatherName | None = None,
        *,
        revisit: float = 0.0,
        traffic: bool = True,
    ) -> None:
        self.place = f"{seed:06d}"
        self._seed, self._renderer, self._weather = seed, renderer, weather
        self._graph = LaneGraph(plan_town(seed))
        self._revisit, self._traffic = revisit, traffic

    def simulate(self, episode: int, num_frames: int) -> TownDrive:
        """Simulate drive number `episode` of the town."""
        return simulate_drive(self._graph, episode, num_frames, revisit=self._revisit, traffic=self._traffic)

    def simulate_counterfactual(self, group: int, maneuver: str, num_frames: int, num_context: int) -> TownDrive:
        """Simulate one future of start number `group`; raise ValueError for a maneuver that towns don't have."""
        return simulate_counterfactual(self._graph, group, maneuver, num_frames, num_context)

    def weather(self, episode: int) -> str:
        """The weather of drive or start `episode`."""
        return self._weather or draw_weather(self._seed, episode)

    def render(self, drive: TownDrive, weather: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """Render the frames of a drive in a weather whose ground is the renderer's."""
        for index in range(drive.num_frames):
            self._renderer.load(self._graph.town)
            yield self._renderer.render(WEATHERS[weather], drive.moment(index))


def town_source(
    seed: int,
    size: tuple[int, int],
    camera: Camera,
    device_index: int = 0,
    weather: WeatherName | None = None,
    *,
    revisit: float = 0.0,
    traffic: bool = True,
) -> TownSource:
    """Open the town of `seed`, seen by `camera` in frames of `size` (height, width), on EGL device `device_index`.

    `weather`, `revisit` and `traffic`: see `TownSource`.

    Raises:
        ConfigError: EGL can't give a context.
    """
    ground = WEATHERS[weather].ground if weather else "dry"
    renderer = _renderer(size, camera, device_index, ground)  # pyright: ignore[reportArgumentType]
    return TownSource(seed, renderer, weather, revisit=revisit, traffic=traffic)


@lru_cache(maxsize=1)
def _renderer(size: tuple[int, int], camera: Camera, device_index: int, ground: Ground) -> Renderer:
    """The renderer, one per process, because opening a context is slow."""
    return Renderer(size, camera, device_index, ground)
