"""Simulation of whole drives, without graphics: the recorded car among traffic, and several futures of one start."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from terra.dataset.poses import NUM_FUTURE_POSES, Poses
from terra.recording.behavior import RandomBehavior, ScriptedBehavior
from terra.recording.driving import FRONT_AHEAD, MIDDLE_AHEAD, Driver, OpenJunctions
from terra.recording.lanes import MANEUVERS, LaneGraph
from terra.recording.pedestrians import MAX_PEOPLE, Pedestrians, Walkways
from terra.recording.revisits import REVISITS, Course, RevisitDriver, plan_course
from terra.recording.traffic import STEP_SECONDS, Occupant, Traffic

FPS = 10.0
METERS_PER_CAR = 140.0  # m of lane per moving car
COUNTERFACTUAL_MANEUVERS = (*MANEUVERS, "stop")
# Meters between the front bumper and the stop line when the futures of one start part.
DECISION_DISTANCE = 8.0
_FASTEST = 13.0  # m/s, no revisit is faster


@dataclass(frozen=True, eq=False)
class Moment:
    """The moving parts of one frame.

    Attributes:
        pose: x, y (m) and heading (rad) of the recorded car.
        cars: [x, y, heading, braking (0 or 1)] of each other car.
        models, colors: each car's index of a model and of a color.
        pedestrians: [x, y, heading, walk phase in [0, 1)] of each pedestrian.
        clothes: each pedestrian's index of a color.
        raised: whether a pedestrian stands on a sidewalk, which is higher than the road.
        time: seconds since the drive's first frame.
        speed: the recorded car's, m/s.
        wind: the wind's velocity over the ground, m/s to the east and north.
    """

    pose: tuple[float, float, float]
    cars: Float[np.ndarray, "cars 4"]
    models: Int[np.ndarray, " cars"]
    colors: Int[np.ndarray, " cars"]
    pedestrians: Float[np.ndarray, "pedestrians 4"]
    clothes: Int[np.ndarray, " pedestrians"]
    raised: Bool[np.ndarray, " pedestrians"]
    time: float = 0.0
    speed: float = 0.0
    wind: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class TownDrive:
    """A simulated drive in a town.

    Attributes:
        poses: the recorded car's poses at all frames and at 30 instants after the last frame.
        cars, models, colors, pedestrians, clothes, raised: as in `Moment`, for all frames.
        events: (frame, event) in order.
        wind: as in `Moment`, the same throughout the drive.
    """

    poses: Poses
    cars: Float[np.ndarray, "frames cars 4"]
    models: Int[np.ndarray, " cars"]
    colors: Int[np.ndarray, " cars"]
    pedestrians: Float[np.ndarray, "frames pedestrians 4"]
    clothes: Int[np.ndarray, " pedestrians"]
    raised: Bool[np.ndarray, "frames pedestrians"]
    events: tuple[tuple[int, str], ...]
    wind: tuple[float, float]

    @property
    def num_frames(self) -> int:
        """Number of frames to render."""
        return len(self.cars)

    def moment(self, index: int) -> Moment:
        """The moving parts of frame `index`."""
        poses = self.poses
        pose = (float(poses.x[index]), float(poses.y[index]), float(poses.heading[index]))
        cars = (self.cars[index], self.models, self.colors)
        people = (self.pedestrians[index], self.clothes, self.raised[index])
        return Moment(pose, *cars, *people, float(poses.time[index]), float(poses.speed[index]), self.wind)


@lru_cache(maxsize=4)
def _walkways(graph: LaneGraph) -> Walkways:
    """The walkways of a town, cached because all its drives share them."""
    return Walkways(graph)


def simulate_drive(
    graph: LaneGraph, episode: int, num_frames: int, *, revisit: float = 0.0, traffic: bool = True
) -> TownDrive:
    """Simulate drive number `episode` of a town: varied behavior from a random start, among traffic that yields.

    Args:
        graph: the town's lanes.
        episode: number of the drive, from 0.
        num_frames: frames to render.
        revisit: probability that the drive is one of `REVISITS` instead, which comes back to what it has seen. Drives
            2k and 2k + 1 of these have the same junction in their middle.
        traffic: whether there are other cars and pedestrians.
    """
    if np.random.default_rng([graph.town.seed, 1, episode, 5]).random() < revisit:
        return _simulate_revisit(graph, episode, num_frames, traffic)
    rngs = [np.random.default_rng([graph.town.seed, 1, episode, stream]) for stream in range(4)]
    lane = int(rngs[0].integers(graph.num_road_lanes))
    position = float(rngs[0].uniform(4.0, 0.4 * graph.lengths[lane]))
    behavior = RandomBehavior(rngs[1])
    speed = 0.0 if behavior.starts_at_rest else float(rngs[0].uniform(3.0, 9.0))
    driver = Driver(graph, behavior, lane, position, speed)
    pedestrians = Pedestrians(_walkways(graph), rngs[3], most=MAX_PEOPLE if traffic else 0)
    cars = Traffic(graph, _num_cars(graph) if traffic else 0, rngs[2], clear=driver.occupants(), crossings=pedestrians)
    recorder = _Recorder(num_frames)
    for index in range(num_frames + NUM_FUTURE_POSES):
        recorder.note(index, driver, cars, pedestrians)
        occupants = driver.occupants()
        driver.step(index, cars, cars)
        cars.step(occupants)
        pedestrians.step(cars.taken())
    wind = _draw_wind(np.random.default_rng([graph.town.seed, 1, episode, 4]))
    return recorder.drive(cars, pedestrians, driver.events + behavior.events, wind)


def _simulate_revisit(graph: LaneGraph, episode: int, num_frames: int, traffic: bool) -> TownDrive:
    """Simulate a drive that comes back; nobody enters its junctions, so that it need not yield."""
    rngs = [np.random.default_rng([graph.town.seed, 3, episode, stream]) for stream in range(4)]
    shared = np.random.default_rng([graph.town.seed, 3, episode // 2, 4])
    node = (int(shared.integers(1, len(graph.town.xs) - 1)), int(shared.integers(1, len(graph.town.ys) - 1)))
    kind = REVISITS[int(rngs[0].integers(len(REVISITS)))]
    course = plan_course(graph, kind, node, rngs[0], meters=_FASTEST * (num_frames + NUM_FUTURE_POSES) / FPS)
    driver = RevisitDriver(course, kind, rngs[0])
    pedestrians = Pedestrians(_walkways(graph), rngs[1], closed=course.nodes, most=MAX_PEOPLE if traffic else 0)
    cars = Traffic(
        graph,
        _num_cars(graph) if traffic else 0,
        rngs[2],
        closed=course.nodes,
        clear=_along(graph, course),
        crossings=pedestrians,
    )
    recorder = _Recorder(num_frames)
    for index in range(num_frames + NUM_FUTURE_POSES):
        recorder.note(index, driver, cars, pedestrians)
        driver.step(index)
        cars.step()
        pedestrians.step(cars.taken())
    return recorder.drive(cars, pedestrians, driver.events, _draw_wind(rngs[3]))


def _along(graph: LaneGraph, course: Course) -> list[Occupant]:
    """Places on all lanes of a course, so near each other that no car starts between them."""
    spots = [(lane, np.arange(MIDDLE_AHEAD, graph.lengths[lane], 15.0)) for lane in sorted(course.lanes)]
    return [Occupant(lane, float(at), 0.0) for lane, places in spots for at in places]


def simulate_counterfactual(
    graph: LaneGraph, group: int, maneuver: str, num_frames: int, num_context: int
) -> TownDrive:
    """Simulate one future of start number `group`: the car approaches a junction, then takes `maneuver`.

    The poses of the first `num_context` frames, and all other cars and pedestrians in all frames, are equal for every
    maneuver. Therefore the other cars and the pedestrians do not react to this car; the junctions around it are closed
    to the cars, and their crosswalks to the pedestrians, so that none meets it.

    Raises:
        ValueError: `maneuver` is not one of left, straight, right, stop.
    """
    if maneuver not in COUNTERFACTUAL_MANEUVERS:
        raise ValueError(f"expected a maneuver of {COUNTERFACTUAL_MANEUVERS}, got {maneuver = }")
    rngs = [np.random.default_rng([graph.town.seed, 2, group, stream]) for stream in range(3)]
    speed = float(rngs[0].uniform(4.5, 6.5))
    run_up = num_context * STEP_SECONDS * speed + DECISION_DISTANCE + FRONT_AHEAD
    lane = int(rngs[0].choice(_approaches(graph, run_up)))
    position = float(graph.lengths[lane]) - run_up
    driver = Driver(graph, ScriptedBehavior(maneuver, num_context, speed), lane, position, speed)
    clear = [Occupant(lane, float(at), 0.0) for at in np.arange(MIDDLE_AHEAD, graph.lengths[lane], 15.0)]
    node = graph.lanes[lane].node
    closed = [node] + [
        edge.end if edge.start == node else edge.start for edge in graph.town.edges if node in (edge.start, edge.end)
    ]
    pedestrians = Pedestrians(_walkways(graph), rngs[2], closed=closed)
    traffic = Traffic(graph, _num_cars(graph), rngs[1], closed=closed, clear=clear, crossings=pedestrians)
    recorder = _Recorder(num_frames)
    for index in range(num_frames + NUM_FUTURE_POSES):
        recorder.note(index, driver, traffic, pedestrians)
        driver.step(index, traffic, OpenJunctions())
        traffic.step()
        pedestrians.step(traffic.taken())
    wind = _draw_wind(np.random.default_rng([graph.town.seed, 2, group, 3]))
    return recorder.drive(traffic, pedestrians, driver.events, wind)


def _draw_wind(rng: np.random.Generator) -> tuple[float, float]:
    """A breeze from anywhere, at most 3 m/s."""
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0.3, 3.0)
    return float(speed * np.cos(angle)), float(speed * np.sin(angle))


def _num_cars(graph: LaneGraph) -> int:
    return round(float(graph.lengths[: graph.num_road_lanes].sum()) / METERS_PER_CAR)


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
        self._poses: list[tuple[float, ...]] = []
        self._cars: list[Float[np.ndarray, "cars 4"]] = []

    def note(self, index: int, driver: Driver | RevisitDriver, traffic: Traffic, pedestrians: Pedestrians) -> None:
        x, y, heading = driver.pose
        self._poses.append((index / FPS, x, y, 0.0, heading, 0.0, driver.speed))
        if index < self._num_frames:
            self._cars.append(np.concatenate([traffic.poses(), traffic.braking[:, None]], axis=1))
            pedestrians.note()

    def drive(
        self,
        traffic: Traffic,
        pedestrians: Pedestrians,
        events: list[tuple[int, str]],
        wind: tuple[float, float],
    ) -> TownDrive:
        kept = sorted((frame, what) for frame, what in events if frame < self._num_frames)
        poses = Poses(*np.array(self._poses).T.copy())
        walks, raised = pedestrians.poses()
        cars = (np.stack(self._cars), traffic.models, traffic.colors)
        return TownDrive(poses, *cars, walks, pedestrians.clothes, raised, tuple(kept), wind)
