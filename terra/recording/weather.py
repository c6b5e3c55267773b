"""The kinds of weather, as the values of light, air and ground that the renderer needs."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Color = tuple[float, float, float]
WeatherName = Literal["day", "overcast", "fog", "dusk", "night", "snow", "rain"]
Ground = Literal["dry", "snow", "wet"]


@dataclass(frozen=True)
class Fall:
    """The flakes or drops that fall through the air.

    `number` of them are in each cube of `terra.recording.falling.BOX` meters, `width` (m) wide. They fall at `speed`
    (m/s), a quarter more or less, drift with `gust` times the drive's wind, and sway by `sway` (m).
    """

    number: int
    width: float
    speed: float
    gust: float
    sway: float
    color: Color
    opacity: float


@dataclass(frozen=True)
class Weather:
    """Light and air of one kind of weather; colors are linear light.

    `sun` is the direction to the sun, `fog_density` the share of light lost per meter, `clouds` (0 to 1) the cloud
    cover, and `lamps` (0 to 1) the strength of street lamps, windows and headlights.
    `ground` is what lies on roads, roofs and meadows, `fall` what falls.
    """

    sun: tuple[float, float, float]
    sun_color: Color
    sky_light: Color
    ground_light: Color
    horizon: Color
    zenith: Color
    fog_density: float
    clouds: float
    cloud_color: Color
    lamps: float
    ground: Ground = "dry"
    fall: Fall | None = None


WEATHERS: dict[str, Weather] = {
    "day": Weather(
        sun=(0.45, 0.35, 0.82),
        sun_color=(1.02, 0.94, 0.80),
        sky_light=(0.48, 0.53, 0.62),
        ground_light=(0.34, 0.33, 0.30),
        horizon=(0.70, 0.78, 0.85),
        zenith=(0.22, 0.38, 0.64),
        fog_density=0.0015,
        clouds=0.45,
        cloud_color=(0.95, 0.95, 0.95),
        lamps=0.0,
    ),
    "overcast": Weather(
        sun=(0.2, 0.3, 0.93),
        sun_color=(0.28, 0.28, 0.28),
        sky_light=(0.66, 0.68, 0.72),
        ground_light=(0.40, 0.40, 0.40),
        horizon=(0.60, 0.63, 0.66),
        zenith=(0.42, 0.46, 0.51),
        fog_density=0.0022,
        clouds=0.85,
        cloud_color=(0.60, 0.62, 0.65),
        lamps=0.0,
    ),
    "fog": Weather(
        sun=(0.2, 0.3, 0.93),
        sun_color=(0.18, 0.18, 0.17),
        sky_light=(0.68, 0.69, 0.71),
        ground_light=(0.45, 0.45, 0.45),
        horizon=(0.62, 0.64, 0.66),
        zenith=(0.60, 0.62, 0.64),
        fog_density=0.016,
        clouds=0.0,
        cloud_color=(0.6, 0.6, 0.6),
        lamps=0.15,
    ),
    "dusk": Weather(
        sun=(-0.86, 0.38, 0.30),
        sun_color=(0.80, 0.50, 0.32),
        sky_light=(0.34, 0.32, 0.38),
        ground_light=(0.20, 0.16, 0.17),
        horizon=(0.70, 0.46, 0.33),
        zenith=(0.15, 0.17, 0.32),
        fog_density=0.0022,
        clouds=0.5,
        cloud_color=(0.60, 0.30, 0.28),
        lamps=0.55,
    ),
    "night": Weather(
        sun=(0.3, -0.4, 0.85),
        sun_color=(0.045, 0.055, 0.08),
        sky_light=(0.085, 0.092, 0.125),
        ground_light=(0.035, 0.035, 0.045),
        horizon=(0.035, 0.042, 0.075),
        zenith=(0.006, 0.009, 0.025),
        fog_density=0.004,
        clouds=0.3,
        cloud_color=(0.035, 0.038, 0.055),
        lamps=1.0,
    ),
    "snow": Weather(
        sun=(0.2, 0.3, 0.93),
        sun_color=(0.14, 0.14, 0.14),
        sky_light=(0.71, 0.74, 0.79),
        ground_light=(0.56, 0.57, 0.60),
        horizon=(0.63, 0.66, 0.69),
        zenith=(0.50, 0.53, 0.57),
        fog_density=0.009,
        clouds=0.0,
        cloud_color=(0.6, 0.6, 0.6),
        lamps=0.12,
        ground="snow",
        fall=Fall(number=6000, width=0.035, speed=1.3, gust=1.0, sway=0.12, color=(0.95, 0.96, 0.98), opacity=0.9),
    ),
    "rain": Weather(
        sun=(0.2, 0.3, 0.93),
        sun_color=(0.10, 0.10, 0.10),
        sky_light=(0.46, 0.49, 0.54),
        ground_light=(0.26, 0.27, 0.29),
        horizon=(0.42, 0.45, 0.49),
        zenith=(0.28, 0.31, 0.35),
        fog_density=0.005,
        clouds=0.7,
        cloud_color=(0.34, 0.36, 0.40),
        lamps=0.35,
        ground="wet",
        fall=Fall(number=6000, width=0.02, speed=8.0, gust=1.5, sway=0.0, color=(0.84, 0.87, 0.90), opacity=0.8),
    ),
}
# Share of drives with each kind of weather, where none is chosen; snow and rain are looks to be chosen.
WEATHER_SHARES: dict[str, float] = {"day": 0.4, "overcast": 0.2, "fog": 0.1, "dusk": 0.15, "night": 0.15}


def draw_weather(town_seed: int, number: int) -> str:
    """The weather of drive or start `number` of a town."""
    names, shares = list(WEATHER_SHARES), list(WEATHER_SHARES.values())
    return str(np.random.default_rng([town_seed, 3, number]).choice(names, p=shares))
