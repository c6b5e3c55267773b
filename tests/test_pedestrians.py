import math

import numpy as np
import pytest

from terra.recording.drives import TownDrive, simulate_counterfactual, simulate_drive
from terra.recording.driving import MIDDLE_AHEAD
from terra.recording.figures import SWINGS, build_figure
from terra.recording.lanes import LaneGraph
from terra.recording.pedestrians import CLOTHES, MAX_PEOPLE, WALKING_SPEEDS, Pedestrians, Walkways
from terra.recording.planning import plan_town
from terra.recording.traffic import CAR_LENGTH, CAR_WIDTH

pytestmark = pytest.mark.slow

SEEDS = (0, 3, 8)


@pytest.fixture(scope="module")
def graphs() -> dict[int, LaneGraph]:
    return {seed: LaneGraph(plan_town(seed)) for seed in SEEDS}


@pytest.fixture(scope="module")
def drives(graphs: dict[int, LaneGraph]) -> dict[int, TownDrive]:
    return {seed: simulate_drive(graph, 0, 900) for seed, graph in graphs.items()}


def _distance_to_cars(drive: TownDrive) -> float:
    """The least distance (m) from a pedestrian to a car's rectangle, the recorded car's included, in any frame."""
    poses, frames = drive.poses, drive.num_frames
    x, y, heading = (values[:frames, None] for values in (poses.x, poses.y, poses.heading))
    own = np.stack([x + MIDDLE_AHEAD * np.cos(heading), y + MIDDLE_AHEAD * np.sin(heading), heading], axis=-1)
    least = math.inf
    for cars, people in zip(np.concatenate([drive.cars[..., :3], own], axis=1), drive.pedestrians, strict=True):
        dx, dy = people[:, None, 0] - cars[:, 0], people[:, None, 1] - cars[:, 1]
        ahead = np.abs(dx * np.cos(cars[:, 2]) + dy * np.sin(cars[:, 2])) - CAR_LENGTH / 2
        aside = np.abs(-dx * np.sin(cars[:, 2]) + dy * np.cos(cars[:, 2])) - CAR_WIDTH / 2
        least = min(least, float(np.hypot(np.maximum(ahead, 0), np.maximum(aside, 0)).min()))
    return least


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_ever_hit(drives: dict[int, TownDrive], seed: int) -> None:
    assert _distance_to_cars(drives[seed]) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_people_walk_where_they_look_and_never_jump(drives: dict[int, TownDrive], seed: int) -> None:
    people = drives[seed].pedestrians
    assert 0 < people.shape[1] <= MAX_PEOPLE
    moved = np.hypot(*np.moveaxis(np.diff(people[..., :2], axis=0), -1, 0))
    # A step that turns a corner, or is on the inner side of a bend, differs from the pace.
    assert moved.max() < 0.1 * WALKING_SPEEDS[1] * 1.6
    pace = np.median(moved, axis=0)
    assert (pace > 0.1 * WALKING_SPEEDS[0] * 0.8).all()
    walking = moved > 0.05
    directions = np.arctan2(np.diff(people[..., 1], axis=0), np.diff(people[..., 0], axis=0))
    off = np.abs(np.angle(np.exp(1j * (directions - people[:-1, :, 2]))))
    assert (off[walking] < 0.35).mean() > 0.97
    assert (people[..., 3] >= 0).all()
    assert (people[..., 3] < 1).all()
    assert (people[1:, :, 3][moved == 0] == 0.25).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_people_are_on_sidewalks_or_cross_at_crosswalks(
    graphs: dict[int, LaneGraph], drives: dict[int, TownDrive], seed: int
) -> None:
    drive, walkways = drives[seed], Walkways(graphs[seed])
    where = drive.pedestrians[..., 0] + 1j * drive.pedestrians[..., 1]
    on_road = where[~drive.raised]
    assert len(on_road) > 300, "some cross"
    middles = np.array([crosswalk.middle for crosswalk in walkways.crosswalks])
    nearest = [walkways.crosswalks[k] for k in np.abs(on_road[:, None] - middles).argmin(axis=1)]
    for point, crosswalk in zip(on_road, nearest, strict=True):
        offset = (point - crosswalk.middle) / crosswalk.across
        assert abs(offset.real) <= crosswalk.half
        assert abs(offset.imag) < 1.4, "on the stripes"
    for edge in graphs[seed].town.edges:
        along = np.linspace(edge.start_reach + 4, edge.length - edge.end_reach - 4, 60)
        centers, _ = edge.at(along)
        away = np.abs(where[::50, :, None] - centers @ np.array([1, 1j])).min(axis=-1)
        assert (away[drive.raised[::50]] > edge.kind.half_width).all()


def test_people_wait_for_cars_and_cars_for_them(graphs: dict[int, LaneGraph]) -> None:
    graph = graphs[0]
    walkways = Walkways(graph)
    turns = [turn for turn, crossings in enumerate(walkways.turn_crossings) if crossings]
    people = Pedestrians(walkways, np.random.default_rng(0))
    people.note()
    for _ in range(600):
        people.step(turns)
        people.note()
    assert any(people.blocks(turn) for turn in turns), "they ask to cross"
    _, raised = people.poses()
    assert raised.all(), "nobody steps in front of a car that is admitted"
    for _ in range(60):
        people.step([])
        people.note()
    assert not people.poses()[1].all()


def test_nobody_crosses_where_futures_part(graphs: dict[int, LaneGraph]) -> None:
    graph = graphs[3]
    drives = [simulate_counterfactual(graph, 1, maneuver, 200, 6) for maneuver in ("left", "right", "stop")]
    for drive in drives[1:]:
        np.testing.assert_array_equal(drive.pedestrians, drives[0].pedestrians)
        np.testing.assert_array_equal(drive.clothes, drives[0].clothes)
    left = drives[0]
    entered = next(frame for frame, what in left.events if what == "left")
    own = np.array([left.poses.x[entered], left.poses.y[entered]])
    distances = np.hypot(*np.moveaxis(left.pedestrians[..., :2] - own, -1, 0))
    assert (distances[~left.raised] > 40).all()
    for drive in drives:
        assert _distance_to_cars(drive) > 1.0


def test_figures_stand_on_their_ground_and_step_in_turn() -> None:
    for phase in range(len(SWINGS)):
        vertices = build_figure(phase, 0.14)
        assert vertices[:, 2].min() == pytest.approx(0.14)
        assert 1.6 < np.ptp(vertices[:, 2]) < 1.9
    feet = [build_figure(phase, 0.0) for phase in (0, 2)]
    left = [mesh[(mesh[:, 2] < 0.05) & (mesh[:, 1] > 0), 0].mean() for mesh in feet]
    assert left[0] > 0.2 > -0.2 > left[1]
    assert all(0.2 < channel < 0.75 for color in CLOTHES for channel in color)
