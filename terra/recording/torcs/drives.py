"""Whole drives on a track without graphics: the recorded car among others, over hills."""

import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from terra.dataset.poses import NUM_FUTURE_POSES, Poses
from terra.recording.cars import CAR_SHAPES
from terra.recording.driving import MIDDLE_AHEAD, WHEELBASE
from terra.recording.torcs.behaviour import LANES, TrackBehaviour
from terra.recording.torcs.driving import TrackDriver, TrackTraffic
from terra.recording.torcs.road import Road
from terra.recording.town import CAR_COLORS
from terra.recording.traffic import STEP_SECONDS

# Metres of road to a moving car, drawn for each drive; one drive in four has the road to itself.
LEAST_METRES_PER_CAR, MOST_METRES_PER_CAR = 60.0, 240.0
ALONE = 0.25
STANDING_START = 0.15


@dataclass(frozen=True, eq=False)
class TrackDrive:
    """`poses` of all frames and 30 more; `speed` is that over the plan, as `x` and `y` change.

    For each frame `cars` has the others' [x, y, z, heading, pitch, braking (0 or 1)]; `models` and `colors` say how
    each looks. `events` are (frame, what) in order.
    """

    poses: Poses
    cars: Float[np.ndarray, "frames cars 6"]
    models: Int[np.ndarray, " cars"]
    colors: Int[np.ndarray, " cars"]
    events: tuple[tuple[int, str], ...]


def track_seed(track: str) -> int:
    """A track's number for random draws, the same everywhere."""
    return zlib.crc32(track.encode())


def simulate_track_drive(road: Road, track: str, episode: int, num_frames: int) -> TrackDrive:
    """Drive number `episode` of a track: varied behaviour from a random start."""
    rngs = [np.random.default_rng([track_seed(track), 1, episode, stream]) for stream in range(3)]
    place, lane = float(rngs[0].uniform(0.0, road.length)), LANES[int(rngs[0].random() < 0.35)]
    speed = 0.0 if rngs[0].random() < STANDING_START else float(rngs[0].uniform(3.0, 18.0))
    num_cars = _num_cars(road, rngs[2])
    traffic = TrackTraffic(road, num_cars, rngs[2], place)
    models, colors = rngs[2].integers(len(CAR_SHAPES), size=num_cars), rngs[2].integers(len(CAR_COLORS), size=num_cars)
    behaviour = TrackBehaviour(rngs[1])
    driver = TrackDriver(road, behaviour, place, lane, speed)
    poses, cars = [], []
    for index in range(num_frames + NUM_FUTURE_POSES):
        z, pitch = ground_under(road, np.array([driver.place]), np.array([driver.offset]))
        poses.append((index * STEP_SECONDS, driver.x, driver.y, z[0], driver.heading, pitch[0], driver.speed))
        if index < num_frames:
            cars.append(_places(road, traffic))
        middle, occupied, own_speed = driver.place + MIDDLE_AHEAD, driver.occupied, driver.speed
        driver.step(index, traffic)
        traffic.step(middle, occupied, own_speed)
    events = sorted((frame, what) for frame, what in driver.events + behaviour.events if frame < num_frames)
    return TrackDrive(Poses(*np.array(poses).T.copy()), np.stack(cars), models, colors, tuple(events))


def ground_under(
    road: Road, places: Float[np.ndarray, " cars"], offsets: Float[np.ndarray, " cars"]
) -> tuple[Float[np.ndarray, " cars"], Float[np.ndarray, " cars"]]:
    """The ground's heights (m) at the rear axles of cars, and the cars' pitches (rad, up positive) on both axles."""
    rear, front = road.ground_at(places, offsets), road.ground_at(places + WHEELBASE, offsets)
    return rear, np.arctan2(front - rear, WHEELBASE)


def _num_cars(road: Road, rng: np.random.Generator) -> int:
    metres = float(rng.uniform(LEAST_METRES_PER_CAR, MOST_METRES_PER_CAR))
    return 0 if rng.random() < ALONE else int(road.length / metres)


def _places(road: Road, traffic: TrackTraffic) -> Float[np.ndarray, "cars 6"]:
    """[x, y, z, heading, pitch, braking] of the other cars' middles."""
    rear, pitch = ground_under(road, traffic.place - WHEELBASE / 2, traffic.offset)
    x, y, heading = road.poses_at(traffic.place, traffic.offset).T
    return np.stack([x, y, rear + WHEELBASE / 2 * np.tan(pitch), heading, pitch, traffic.braking], axis=1)
