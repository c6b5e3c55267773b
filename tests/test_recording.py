import math
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from decoder.camera import Camera, project
from terra.dataset.poses import NUM_FUTURE_POSES
from terra.errors import ConfigError
from terra.recording.drives import (
    COUNTERFACTUAL_MANEUVERS,
    Moment,
    TownDrive,
    simulate_counterfactual,
    simulate_drive,
)
from terra.recording.driving import MIDDLE_AHEAD
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.recording.revisits import BLOCK, CIRCLE, OUT_AND_BACK, REVISITS, RevisitDriver, plan_course
from terra.recording.scene import build_scene, visible_cells
from terra.recording.town import AVENUE, LANE_WIDTH, Edge
from terra.recording.traffic import CAR_LENGTH, CAR_WIDTH, MAX_ACCELERATION, Traffic, follow
from terra.recording.weather import WEATHER_SHARES, WEATHERS, Ground, draw_weather
from terra.trajectory import Trajectory

CAMERA = Camera(fov_degrees=75.0, height_meters=1.4, pitch_radians=-0.03)
TRUCK = Camera(fov_degrees=60.0, height_meters=2.6, pitch_radians=-0.12)
SIZE = (72, 128)
NUM_CONTEXT = 6


@pytest.fixture(scope="module")
def graph() -> LaneGraph:
    return LaneGraph(plan_town(1))


@pytest.fixture(scope="module", params=[(1, 0), (2, 1), (7, 0), (11, 1)], ids=str)
def drive(request: pytest.FixtureRequest) -> tuple[LaneGraph, TownDrive]:
    town, episode = request.param
    graph = LaneGraph(plan_town(town))
    return graph, simulate_drive(graph, episode, 260)


@pytest.fixture(scope="module")
def futures(graph: LaneGraph) -> dict[str, TownDrive]:
    return {m: simulate_counterfactual(graph, 0, m, 80, NUM_CONTEXT) for m in COUNTERFACTUAL_MANEUVERS}


# The plan and its lanes


def test_equal_seeds_plan_equal_towns() -> None:
    assert plan_town(5) == plan_town(5)
    assert plan_town(5) != plan_town(6)


def test_a_town_too_small_to_turn_in_is_refused() -> None:
    with pytest.raises(ValueError, match="num_lines = 3"):
        plan_town(0, num_lines=3)


@given(bow=st.floats(-8, 8), along=st.floats(0, 120), lateral=st.floats(-7, 7), axis=st.sampled_from([0, 1]))
def test_lateral_offsets_are_distances_to_the_left(bow: float, along: float, lateral: float, axis: int) -> None:
    edge = Edge((0, 0), (1, 0), (10.0, 20.0), axis, 120.0, bow, AVENUE, 12.0, 12.0)
    (center,), (heading,) = edge.at(np.array([along]))
    (point,), _ = edge.at(np.array([along]), lateral)
    np.testing.assert_allclose(point - center, lateral * np.array([-math.sin(heading), math.cos(heading)]), atol=1e-9)


def test_turns_join_the_lanes_that_they_connect(graph: LaneGraph) -> None:
    for lane, turns in graph.turns.items():
        assert turns, "every lane leads on"
        for turn in turns:
            path, into = graph.path(turn), graph.path(graph.lanes[turn].exit)
            np.testing.assert_allclose(path[0], graph.path(lane)[-1], atol=1e-6)
            np.testing.assert_allclose(path[-1], into[0], atol=1e-6)
            ends = graph.poses(np.array([turn, turn]), np.array([0.0, graph.lengths[turn]]))
            wanted = {"left": 90, "straight": 0, "right": -90}[graph.lanes[turn].maneuver]
            assert math.degrees(ends[1, 2] - ends[0, 2]) == pytest.approx(wanted, abs=4)


def test_crossing_turns_conflict_and_parallel_ones_do_not(graph: LaneGraph) -> None:
    assert (graph.conflicts == graph.conflicts.T).all()
    turns = range(graph.num_road_lanes, len(graph.lanes))
    straight = [k for k in turns if graph.lanes[k].maneuver == "straight"]
    for a in straight:
        for b in straight:
            if a < b and graph.lanes[a].node == graph.lanes[b].node:
                one, other = graph.path(a), graph.path(b)
                crossing = abs(np.dot(one[-1] - one[0], other[-1] - other[0])) < 1e-6
                assert graph.conflicts[a, b] == crossing


# Driving


def test_poses_move_along_their_headings_by_their_speeds(drive: tuple[LaneGraph, TownDrive]) -> None:
    poses = drive[1].poses
    np.testing.assert_allclose(np.diff(poses.time), 0.1)
    moved = np.stack([np.diff(poses.x), np.diff(poses.y)])
    distance = np.hypot(*moved)
    np.testing.assert_allclose(distance, (poses.speed[1:] + poses.speed[:-1]) * 0.05, atol=2e-3)
    middle = (poses.heading[1:] + poses.heading[:-1]) / 2
    sideways = np.abs(-moved[0] * np.sin(middle) + moved[1] * np.cos(middle))
    assert sideways.max() < 5e-3
    assert np.abs(np.diff(poses.heading)).max() < 0.2
    assert poses.speed.min() >= 0
    assert poses.speed.max() < 14.5
    assert np.abs(np.diff(poses.speed)).max() <= 0.8 + 1e-9


def test_every_frame_has_its_whole_future_path(drive: tuple[LaneGraph, TownDrive]) -> None:
    poses = drive[1].poses
    assert len(poses.time) == len(drive[1].cars) + NUM_FUTURE_POSES
    trajectory = Trajectory.from_poses(poses.time, np.stack([poses.x, poses.y], 1), poses.heading, fps=10.0)
    assert trajectory.num_frames >= len(drive[1].cars)


def test_the_car_keeps_to_the_right_of_the_center_line(drive: tuple[LaneGraph, TownDrive]) -> None:
    graph, poses = drive[0], drive[1].poses
    checked = 0
    for edge in graph.town.edges:
        along = np.linspace(edge.start_reach + 5, edge.length - edge.end_reach - 5, 400)
        centers, headings = edge.at(along)
        offsets = np.stack([poses.x, poses.y], 1)[:, None] - centers
        nearest = np.argmin((offsets**2).sum(-1), axis=1)
        offset = offsets[np.arange(len(nearest)), nearest]
        on_road = (np.hypot(*offset.T) < edge.kind.half_width) & (nearest > 0) & (nearest < 399)
        turned = headings[nearest] - poses.heading
        lateral = -offset[:, 0] * np.sin(headings[nearest]) + offset[:, 1] * np.cos(headings[nearest])
        left = lateral * np.sign(np.cos(turned))
        assert (left[on_road] < -0.6).all()
        assert (left[on_road] > -edge.kind.lanes * LANE_WIDTH + 0.3).all()
        checked += int(on_road.sum())
    assert checked > 60


def test_no_cars_ever_overlap(drive: tuple[LaneGraph, TownDrive]) -> None:
    assert _overlaps(drive[1]) == []


@pytest.mark.slow
def test_drives_are_varied() -> None:
    drives = [simulate_drive(LaneGraph(plan_town(seed)), 0, 200) for seed in range(12)]
    events = {what for drive in drives for _, what in drive.events}
    assert events >= {"left", "right", "straight", "stop", "start", "hard_brake"}
    assert any(what.startswith("swerve") for what in events)
    assert any(what.startswith("lane_change") for what in events)
    turns = [sum(what == turn for drive in drives for _, what in drive.events) for turn in ("left", "right")]
    assert sum(turns) > sum(what == "straight" for drive in drives for _, what in drive.events)
    assert 0 < sum(drive.poses.speed[0] == 0 for drive in drives) < len(drives) / 2


@pytest.mark.slow
def test_stops_and_starts_alternate_and_say_what_the_speed_does() -> None:
    checked = 0
    for seed in range(6):
        drive = simulate_drive(LaneGraph(plan_town(seed)), 1, 300)
        changes = [(frame, what) for frame, what in drive.events if what in ("stop", "start")]
        standing = drive.poses.speed[0] < 0.1
        for frame, what in changes:
            assert what == ("start" if standing else "stop")
            speeds = drive.poses.speed[frame : frame + 2]
            assert speeds[1] > speeds[0] if what == "start" else speeds[1] < 0.1
            standing = not standing
        checked += len(changes)
    assert checked > 5


def test_equal_seeds_drive_equally(graph: LaneGraph) -> None:
    first, second = (simulate_drive(LaneGraph(plan_town(1)), 3, 60) for _ in range(2))
    other = simulate_drive(graph, 4, 60)
    for name, values in asdict(first.poses).items():
        np.testing.assert_array_equal(values, getattr(second.poses, name))
    np.testing.assert_array_equal(first.cars, second.cars)
    np.testing.assert_array_equal(first.pedestrians, second.pedestrians)
    assert not np.array_equal(first.poses.x, other.poses.x)


def test_without_revisits_drives_stay_the_same(graph: LaneGraph) -> None:
    first, second = simulate_drive(graph, 3, 60), simulate_drive(graph, 3, 60, revisit=0.0)
    alone = simulate_drive(graph, 3, 60, traffic=False)
    np.testing.assert_array_equal(first.poses.x, second.poses.x)
    np.testing.assert_array_equal(first.cars, second.cars)
    assert alone.cars.shape == alone.pedestrians.shape == (60, 0, 4)
    assert alone.poses.x[0] == first.poses.x[0]


@pytest.mark.parametrize(("kind", "seconds"), [(CIRCLE, 25), (OUT_AND_BACK, 30), (BLOCK, 60)])
def test_a_revisit_comes_back_on_asphalt_and_by_possible_steering(graph: LaneGraph, kind: str, seconds: int) -> None:
    for number in range(4):
        rng = np.random.default_rng(number)
        course = plan_course(graph, kind, (2, 2), rng, meters=13.0 * seconds)
        driver, poses = RevisitDriver(course, kind, rng), []
        for index in range(10 * seconds):
            poses.append((*driver.pose, driver.speed))
            driver.step(index)
        x, y, heading, speed = np.array(poses).T
        moved, turned = np.hypot(np.diff(x), np.diff(y)), np.abs(np.diff(heading))
        assert (turned <= moved / 3.9 + 1e-9).all(), "no car turns in less than its steering allows"
        assert (np.abs(np.diff(speed)) <= 0.51).all()
        assert _meters_off_the_road(graph, x, y).max() < 0.5
        away = np.hypot(x[:, None] - x, y[:, None] - y)
        later = np.triu(np.ones_like(away, bool), 50)  # 5 s and more
        assert (away[later & (np.abs(heading[:, None] - heading) > np.pi / 2)] < 4.0).any(), "it comes back"
        events = [what for _, what in driver.events]
        assert events[0] == kind
        assert len(events) > 1


def _meters_off_the_road(graph: LaneGraph, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far each point lies from the asphalt, near junctions with rounded kerbs; 0 on it."""
    town = graph.town
    away = np.full(len(x), np.inf)
    for lane in range(len(graph.lanes)):
        points = graph.path(lane)
        gaps = np.hypot(x[:, None] - points[:, 0], y[:, None] - points[:, 1]).min(axis=1)
        away = np.minimum(away, gaps - LANE_WIDTH / 2)
    for column, row in product(town.xs, town.ys):
        away = np.minimum(away, np.hypot(x - column, y - row) - 7.3)
    return np.maximum(away, 0.0)


def test_revisits_are_drawn_by_seed_and_nobody_drives_through_them() -> None:
    graph = LaneGraph(plan_town(2))
    drives = [simulate_drive(graph, episode, 100, revisit=0.5) for episode in range(8)]
    kinds = [drive.events[0][1] if drive.events else "" for drive in drives]
    assert 0 < sum(kind in REVISITS for kind in kinds) < len(kinds)
    for episode, (kind, drive) in enumerate(zip(kinds, drives, strict=True)):
        whole = simulate_drive(graph, episode, 100, revisit=1.0)
        assert whole.events[0][1] in REVISITS
        if kind in REVISITS:
            np.testing.assert_array_equal(whole.poses.x, drive.poses.x)
            heading = drive.poses.heading[:100]
            middle = np.stack([drive.poses.x[:100], drive.poses.y[:100]], axis=1)
            middle += MIDDLE_AHEAD * np.stack([np.cos(heading), np.sin(heading)], axis=1)
            gaps = np.linalg.norm(drive.cars[:, :, :2] - middle[:, None], axis=-1)
            assert gaps.min() > CAR_WIDTH + 0.5


@given(
    speed=st.floats(0, 14),
    wanted=st.floats(1, 14),
    gap=st.floats(-1, 200),
    lead_speed=st.floats(0, 14),
)
def test_following_never_speeds_up_into_the_car_ahead(
    speed: float, wanted: float, gap: float, lead_speed: float
) -> None:
    (value,) = follow(*(np.array([v]) for v in (speed, wanted, gap, lead_speed)))
    assert value <= MAX_ACCELERATION
    if gap < 2.5 and speed >= lead_speed:
        assert value <= 0


def test_no_car_enters_a_closed_junction(graph: LaneGraph) -> None:
    closed = [(2, 2), (3, 3)]
    traffic = Traffic(graph, 60, np.random.default_rng(0), closed=closed)
    for _ in range(200):
        traffic.step()
        on_turn = traffic.lane[traffic.lane >= graph.num_road_lanes]
        assert all(graph.lanes[turn].node not in closed for turn in on_turn)


# Several futures of one start


def test_futures_share_their_context_and_all_other_cars(futures: dict[str, TownDrive]) -> None:
    first = futures["left"]
    for future in futures.values():
        for name, values in asdict(first.poses).items():
            np.testing.assert_array_equal(values[:NUM_CONTEXT], getattr(future.poses, name)[:NUM_CONTEXT])
        np.testing.assert_array_equal(first.cars, future.cars)
        np.testing.assert_array_equal(first.pedestrians, future.pedestrians)
    apart = futures["left"].poses.heading[-1] - futures["right"].poses.heading[-1]
    assert math.degrees(apart) == pytest.approx(180, abs=15)


@pytest.mark.parametrize("town", [1, 4, 900_000])
def test_maneuvers_turn_as_they_are_called(town: int) -> None:
    graph = LaneGraph(plan_town(town))
    for maneuver, degrees in (("left", 90), ("straight", 0), ("right", -90), ("stop", 0)):
        drive = simulate_counterfactual(graph, 1, maneuver, 80, NUM_CONTEXT)
        entered = [frame for frame, what in drive.events if what == maneuver]
        assert len(entered) == 1
        before, after = drive.poses.heading[entered[0] - 3], drive.poses.heading[-1]
        if maneuver == "stop":
            assert drive.poses.speed[-1] == 0
            assert not {"left", "straight", "right"} & {what for _, what in drive.events}
        # The road after a turn may be bowed.
        assert math.degrees(after - before) == pytest.approx(degrees, abs=20)
        assert _overlaps(drive) == []


def test_an_unknown_maneuver_is_refused(graph: LaneGraph) -> None:
    with pytest.raises(ValueError, match="maneuver = 'back'"):
        simulate_counterfactual(graph, 0, "back", 20, 5)


# The scene


def test_cells_hold_every_triangle_and_hide_only_what_is_out_of_view(graph: LaneGraph) -> None:
    scene = build_scene(graph.town)
    mesh = scene.solid
    assert mesh.counts.sum() == len(mesh.vertices)
    x, y, heading, fov = graph.town.xs[2], graph.town.ys[2] + 20, math.pi / 2, math.radians(75)
    seen = set(visible_cells(mesh, (x, y, heading, fov), 3000.0).tolist())
    assert 0 < len(seen) < len(mesh.counts)
    for cell in set(range(len(mesh.counts))) - seen:
        points = mesh.vertices[mesh.firsts[cell] : mesh.firsts[cell] + mesh.counts[cell], :2] - [x, y]
        ahead = points @ [math.cos(heading), math.sin(heading)]
        aside = np.abs(points @ [-math.sin(heading), math.cos(heading)])
        assert not ((ahead > 0) & (aside < ahead * math.tan(fov / 2))).any()


def test_no_weather_of_the_mix_needs_more_than_a_dry_town() -> None:
    assert WEATHER_SHARES.keys() == {name for name, weather in WEATHERS.items() if weather.ground == "dry"}
    assert all((weather.fall is None) == (weather.ground == "dry") for weather in WEATHERS.values())
    assert sum(WEATHER_SHARES.values()) == pytest.approx(1)


def test_the_mix_stays_as_published_datasets_have_it() -> None:
    mix = ["night", "day", "night", "day", "overcast", "day"]
    assert [draw_weather(0, number) for number in range(6)] == mix


# Rendering


@pytest.fixture(scope="module")
def renderer(graph: LaneGraph):
    return renderer_of(graph)


def renderer_of(graph: LaneGraph, camera: Camera = CAMERA, ground: Ground = "dry"):
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    from terra.recording.renderer import Renderer

    try:
        renderer = Renderer(SIZE, camera, ground=ground)
    except ConfigError as error:
        pytest.skip(f"no OpenGL here: {error}")
    renderer.load(graph.town)
    return renderer


@pytest.mark.slow
def test_frames_are_reproducible_and_the_road_is_gray(renderer, graph: LaneGraph) -> None:
    from terra.recording.renderer import Renderer

    drive = simulate_drive(graph, 0, 3)
    frames = np.stack([renderer.render(WEATHERS["day"], drive.moment(k)) for k in range(3)])
    again = Renderer(SIZE, CAMERA)
    again.load(graph.town)
    for k, frame in enumerate(frames):
        np.testing.assert_array_equal(frame, again.render(WEATHERS["day"], drive.moment(k)))
    assert frames.shape == (3, *SIZE, 3)
    road = frames[:, -14:-10, 40:60].reshape(-1, 3).astype(int)
    assert np.ptp(np.median(road, axis=0)) < 20
    assert 50 < np.median(road) < 150
    sky = frames[:, :4].reshape(-1, 3).astype(int).mean(axis=0)
    assert sky[2] > sky[0]
    night = renderer.render(WEATHERS["night"], drive.moment(0))
    assert night.mean() < 0.6 * frames[0].mean()


def test_snow_lies_on_the_ground_and_leaves_walls_their_color(renderer, graph: LaneGraph) -> None:
    drive = simulate_drive(graph, 0, 3)
    snowy = renderer_of(graph, ground="snow")
    frames = [snowy.render(WEATHERS["snow"], drive.moment(k)) for k in range(3)]
    again = renderer_of(graph, ground="snow")
    for k, frame in enumerate(frames):
        np.testing.assert_array_equal(frame, again.render(WEATHERS["snow"], drive.moment(k)))
    dry = renderer.render(WEATHERS["overcast"], drive.moment(0)).astype(int)
    lower = slice(SIZE[0] // 2 + 8, None)  # the ground
    assert frames[0][lower].mean() > dry[lower].mean() + 30
    with pytest.raises(ValueError, match="expected weather with snow ground, got dry"):
        snowy.render(WEATHERS["day"], drive.moment(0))
    # Four meters before a wall, looking at it: the upper part of the picture is wall.
    building = graph.town.buildings[0]
    away, heading = building.depth / 2 + 4, building.heading + math.pi / 2
    at = (building.center[0] - away * math.cos(heading), building.center[1] - away * math.sin(heading), heading)
    walls = [
        there.render(WEATHERS[weather], replace(drive.moment(0), pose=at))[: SIZE[0] // 3]
        for there, weather in ((snowy, "snow"), (renderer, "overcast"))
    ]
    snow_wall, dry_wall = (np.median(wall.reshape(-1, 3), axis=0) for wall in walls)
    assert np.abs(snow_wall - dry_wall).max() < 25


@pytest.mark.parametrize(("weather", "ground"), [("snow", "snow"), ("rain", "wet")])
def test_what_falls_moves_with_time_and_speed_alone(graph: LaneGraph, weather: str, ground: Ground) -> None:
    there, moment = renderer_of(graph, ground=ground), simulate_drive(graph, 0, 1).moment(0)
    still = WEATHERS[weather]
    empty = there.render(replace(still, fall=None), moment).astype(int)
    standing = replace(moment, speed=0.0)
    first, same, later, faster = (
        there.render(still, each).astype(int)
        for each in (standing, standing, replace(standing, time=0.1), replace(moment, speed=12.0))
    )
    np.testing.assert_array_equal(first, same)
    seen = [np.abs(frame - empty).max(axis=-1) > 8 for frame in (first, later, faster)]
    assert all(0.002 < share.mean() < 0.3 for share in seen)
    assert not np.array_equal(first, later)
    assert not np.array_equal(first, faster)


@pytest.mark.parametrize("camera", [CAMERA, TRUCK], ids=["car", "truck"])
@pytest.mark.parametrize("what", ["car", "person"])
def test_who_is_there_is_drawn_where_the_camera_projects_it(graph: LaneGraph, what: str, camera: Camera) -> None:
    renderer = renderer_of(graph, camera)
    x, y, heading = pose = tuple(graph.poses(np.array([0]), np.array([20.0]))[0].tolist())
    none, one = np.zeros(0, int), np.zeros(1, int)
    for ahead, left in ((10.0, 0.0), (12.0, 3.0), (15.0, -3.0)):
        place = x + ahead * math.cos(heading) - left * math.sin(heading)
        there = np.array([[place, y + ahead * math.sin(heading) + left * math.cos(heading), heading, 0.0]])
        nobody = (np.zeros((0, 4)), none)
        if what == "car":
            shown, nearest = Moment(pose, there, one, one, *nobody, np.zeros(0, bool)), ahead - 2.2
        else:
            shown, nearest = Moment(pose, *nobody, none, there, one, np.zeros(1, bool)), ahead
        empty = renderer.render(WEATHERS["day"], Moment(pose, *nobody, none, *nobody, np.zeros(0, bool)))
        full = renderer.render(WEATHERS["day"], shown)
        rows, columns = np.nonzero(np.abs(full.astype(int) - empty).max(axis=-1) > 15)
        foot = project(np.array([[nearest, left]]), camera, (SIZE[1], SIZE[0]))[0]
        assert abs(columns.mean() - foot[0]) < 5
        assert abs(rows.max() - foot[1]) < 4


def _overlaps(drive: TownDrive) -> list[tuple[int, int, int]]:
    """(frame, car, car) of bodies that intersect, by the separating axis theorem; the last car is the recorded one."""
    found = []
    for frame, cars in enumerate(drive.cars):
        heading = drive.poses.heading[frame]
        middle = np.array([math.cos(heading), math.sin(heading)]) * MIDDLE_AHEAD
        own = [drive.poses.x[frame] + middle[0], drive.poses.y[frame] + middle[1], heading]
        x, y, turn = np.concatenate([cars[:, :3], [own]]).T
        one, other = np.triu_indices(len(x), 1)
        near = np.hypot(x[one] - x[other], y[one] - y[other]) < math.hypot(CAR_LENGTH, CAR_WIDTH)
        for a, b in zip(one[near], other[near], strict=True):
            corners = [_corners(x[k], y[k], turn[k]) for k in (a, b)]
            axes = [turn[k] + quarter for k in (a, b) for quarter in (0, math.pi / 2)]
            spans = [[c @ [math.cos(axis), math.sin(axis)] for c in corners] for axis in axes]
            if all(p.max() > q.min() and q.max() > p.min() for p, q in spans):
                found.append((frame, int(a), int(b)))
    return found


def _corners(x: float, y: float, heading: float) -> np.ndarray:
    ahead, left = np.array([math.cos(heading), math.sin(heading)]), np.array([-math.sin(heading), math.cos(heading)])
    signs = ((1, 1), (1, -1), (-1, -1), (-1, 1))
    return np.array([[x, y] + a * CAR_LENGTH / 2 * ahead + b * CAR_WIDTH / 2 * left for a, b in signs])
