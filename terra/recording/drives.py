"""Whole drives without graphics: the recorded car among traffic, and several futures of one start."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from terra.recording.behaviour import RandomBehaviour, ScriptedBehaviour
from terra.recording.driving import FRONT_AHEAD, MIDDLE_AHEAD, Driver, OpenJunctions
from terra.recording.lanes import MANEUVERS, LaneGraph
from terra.recording.traffic import STEP_SECONDS, Occupant, Traffic

FPS = 10.0
# Poses that a drive has beyond its last frame, so that every frame knows its next 3 seconds.
NUM_FUTURE_POSES = 30
# One moving car for so many metres of lane.
METRES_PER_CAR = 110.0
COUNTERFACTUAL_MANEUVERS = (*MANEUVERS, "stop")
# Metres between the front bumper and the stop line when the futures of one start part.
DECISION_DISTANCE = 8.0


@dataclass(frozen=True)
class Poses:
    """One pose each 0.1 s: `time` (s), `x`, `y` (m), `heading` (rad, counter-clockwise from +x), `speed` (m/s)."""

    time: Float[np.ndarray, " poses"]
    x: Float[np.ndarray, " poses"]
    y: Float[np.ndarray, " poses"]
    heading: Float[np.ndarray, " poses"]
    speed: Float[np.ndarray, " poses"]


@dataclass(frozen=True)
class Drive:
    """`poses` of all frames and 30 more; for each frame the other cars' [x, y, heading, braking (0 or 1)].

    `models` and `colors` say how each car looks; `events` are (frame, what) in order.
    """

    poses: Poses
    cars: Float[np.ndarray, "frames cars 4"]
    models: Int[np.ndarray, " cars"]
    colors: Int[np.ndarray, " cars"]
    events: tuple[tuple[int, str], ...]


def simulate_drive(graph: LaneGraph, episode: int, num_frames: int) -> Drive:
    """Drive number `episode` of a town: varied behaviour from a random start, among traffic that minds the car."""
    rngs = [np.random.default_rng([graph.town.seed, 1, episode, stream]) for stream in range(3)]
    lane = int(rngs[0].integers(graph.num_road_lanes))
    position = float(rngs[0].uniform(4.0, 0.4 * graph.lengths[lane]))
    behaviour = RandomBehaviour(rngs[1])
    driver = Driver(graph, behaviour, lane, position, float(rngs[0].uniform(3.0, 9.0)))
    traffic = Traffic(graph, _num_cars(graph), rngs[2], clear=driver.occupants())
    recorder = _Recorder(num_frames)
    for index in range(num_frames + NUM_FUTURE_POSES):
        recorder.note(index, driver, traffic)
        occupants = driver.occupants()
        driver.step(index, traffic, traffic)
        traffic.step(occupants)
    return recorder.drive(traffic, driver.events + behaviour.events)


def simulate_counterfactual(graph: LaneGraph, group: int, maneuver: str, num_frames: int, num_context: int) -> Drive:
    """One future of start number `group` of a town: the car approaches a junction, then takes `maneuver`.

    The poses of the first `num_context` frames, and all other cars in all frames, are equal for every maneuver. For
    that the other cars don't see this one; the junctions about it are closed to them, so that they don't meet it.

    Raises:
        ValueError: `maneuver` is not one of left, straight, right, stop.
    """
    if maneuver not in COUNTERFACTUAL_MANEUVERS:
        raise ValueError(f"expected a maneuver of {COUNTERFACTUAL_MANEUVERS}, got {maneuver = }")
    rngs = [np.random.default_rng([graph.town.seed, 2, group, stream]) for stream in range(2)]
    speed = float(rngs[0].uniform(4.5, 6.5))
    run_up = num_context * STEP_SECONDS * speed + DECISION_DISTANCE + FRONT_AHEAD
    lane = int(rngs[0].choice(_approaches(graph, run_up)))
    position = float(graph.lengths[lane]) - run_up
    driver = Driver(graph, ScriptedBehaviour(maneuver, num_context, speed), lane, position, speed)
    clear = [Occupant(lane, float(at), 0.0) for at in np.arange(MIDDLE_AHEAD, graph.lengths[lane], 15.0)]
    node = graph.lanes[lane].node
    closed = [node] + [
        edge.end if edge.start == node else edge.start for edge in graph.town.edges if node in (edge.start, edge.end)
    ]
    traffic = Traffic(graph, _num_cars(graph), rngs[1], closed=closed, clear=clear)
    recorder = _Recorder(num_frames)
    for index in range(num_frames + NUM_FUTURE_POSES):
        recorder.note(index, driver, traffic)
        driver.step(index, traffic, OpenJunctions())
        traffic.step()
    return recorder.drive(traffic, driver.events)


def _num_cars(graph: LaneGraph) -> int:
    return round(float(graph.lengths[: graph.num_road_lanes].sum()) / METRES_PER_CAR)


def _approaches(graph: LaneGraph, run_up: float) -> list[int]:
    """Road lanes long enough for the run-up from which a car may go left, straight and right."""
    return [
        lane
        for lane, turns in graph.turns.items()
        if len(turns) == len(MANEUVERS) and graph.lengths[lane] > run_up + 2.0
    ]


class _Recorder:
    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._poses: list[tuple[float, float, float, float, float]] = []
        self._cars: list[Float[np.ndarray, "cars 4"]] = []

    def note(self, index: int, driver: Driver, traffic: Traffic) -> None:
        self._poses.append((index / FPS, driver.x, driver.y, driver.heading, driver.speed))
        if index < self._num_frames:
            self._cars.append(np.concatenate([traffic.poses(), traffic.braking[:, None]], axis=1))

    def drive(self, traffic: Traffic, events: list[tuple[int, str]]) -> Drive:
        kept = sorted((frame, what) for frame, what in events if frame < self._num_frames)
        poses = Poses(*np.array(self._poses).T.copy())
        return Drive(poses, np.stack(self._cars), traffic.models, traffic.colors, tuple(kept))
