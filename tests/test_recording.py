import importlib.util
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from decoder.camera import Camera, project
from decoder.video import VideoWriter, read_video
from terra.errors import ConfigError, DatasetError
from terra.recording import list_episodes, load_episode
from terra.recording.dataset import count_episodes, create_dataset, file_sha256, write_json, write_poses
from terra.recording.drives import (
    COUNTERFACTUAL_MANEUVERS,
    NUM_FUTURE_POSES,
    Drive,
    Poses,
    simulate_counterfactual,
    simulate_drive,
)
from terra.recording.driving import MIDDLE_AHEAD
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.recording.scene import build_scene, visible_cells
from terra.recording.town import AVENUE, LANE_WIDTH, Edge
from terra.recording.traffic import CAR_LENGTH, CAR_WIDTH, MAX_ACCELERATION, Traffic, follow
from terra.recording.weather import WEATHER_SHARES, WEATHERS
from terra.trajectory import Trajectory, load_trajectory

CAMERA = Camera(fov_degrees=75.0, height_metres=1.4, pitch_radians=-0.03)
SIZE = (72, 128)
NUM_CONTEXT = 6


@pytest.fixture(scope="module")
def graph() -> LaneGraph:
    return LaneGraph(plan_town(1))


@pytest.fixture(scope="module", params=[(1, 0), (2, 1), (7, 0), (11, 1)], ids=str)
def drive(request: pytest.FixtureRequest) -> tuple[LaneGraph, Drive]:
    town, episode = request.param
    graph = LaneGraph(plan_town(town))
    return graph, simulate_drive(graph, episode, 260)


@pytest.fixture(scope="module")
def futures(graph: LaneGraph) -> dict[str, Drive]:
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


def test_poses_move_along_their_headings_by_their_speeds(drive: tuple[LaneGraph, Drive]) -> None:
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


def test_every_frame_has_its_whole_future_path(drive: tuple[LaneGraph, Drive]) -> None:
    poses = drive[1].poses
    assert len(poses.time) == len(drive[1].cars) + NUM_FUTURE_POSES
    trajectory = Trajectory.from_poses(poses.time, np.stack([poses.x, poses.y], 1), poses.heading, fps=10.0)
    assert trajectory.num_frames >= len(drive[1].cars)


def test_the_car_keeps_to_the_right_of_the_centre_line(drive: tuple[LaneGraph, Drive]) -> None:
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


def test_no_cars_ever_overlap(drive: tuple[LaneGraph, Drive]) -> None:
    assert _overlaps(drive[1]) == []


def test_drives_are_varied() -> None:
    drives = [simulate_drive(LaneGraph(plan_town(seed)), 0, 200) for seed in range(12)]
    events = {what for drive in drives for _, what in drive.events}
    assert events >= {"left", "right", "straight", "stop", "hard_brake"}
    assert any(what.startswith("swerve") for what in events)
    assert any(what.startswith("lane_change") for what in events)


def test_equal_seeds_drive_equally(graph: LaneGraph) -> None:
    first, second = (simulate_drive(LaneGraph(plan_town(1)), 3, 60) for _ in range(2))
    other = simulate_drive(graph, 4, 60)
    for name, values in asdict(first.poses).items():
        np.testing.assert_array_equal(values, getattr(second.poses, name))
    np.testing.assert_array_equal(first.cars, second.cars)
    assert not np.array_equal(first.poses.x, other.poses.x)


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


def test_futures_share_their_context_and_all_other_cars(futures: dict[str, Drive]) -> None:
    first = futures["left"]
    for future in futures.values():
        for name, values in asdict(first.poses).items():
            np.testing.assert_array_equal(values[:NUM_CONTEXT], getattr(future.poses, name)[:NUM_CONTEXT])
        np.testing.assert_array_equal(first.cars, future.cars)
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


def test_weather_shares_cover_every_weather() -> None:
    assert WEATHER_SHARES.keys() == WEATHERS.keys()
    assert sum(WEATHER_SHARES.values()) == pytest.approx(1)


# The dataset on disk


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    create_dataset(tmp_path, (16, 32), CAMERA, seed=0)
    for name in ("train_000000_00", "held_out_900000_00"):
        folder = tmp_path / "episodes" / name
        folder.mkdir()
        with VideoWriter(folder / "video.mp4", fps=10.0, size=(32, 16)) as writer:
            for k in range(4):
                writer.append(np.full((16, 32, 3), 40 * k, np.uint8))
        time = np.arange(4 + NUM_FUTURE_POSES) / 10
        write_poses(folder / "poses.npz", Poses(time, 5 * time, 0 * time, 0 * time, 0 * time + 5))
        facts = {"id": name, "split": name.rsplit("_", 2)[0], "town_seed": 0, "weather": "day", "num_frames": 4}
        facts |= {"fps": 10.0, "image_size": [16, 32], "events": [[2, "left"]]}
        facts["sha256"] = {file: file_sha256(folder / file) for file in ("video.mp4", "poses.npz")}
        write_json(folder / "episode.json", facts)
    return tmp_path


def test_an_episode_comes_back_as_it_was_written(dataset: Path) -> None:
    assert count_episodes(dataset) == 2
    assert [path.name for path in list_episodes(dataset)] == ["held_out_900000_00", "train_000000_00"]
    (folder,) = list_episodes(dataset, "train")
    episode = load_episode(folder)
    assert (episode.id, episode.split, episode.num_frames, episode.fps) == ("train_000000_00", "train", 4, 10.0)
    assert (episode.image_size, episode.events, episode.maneuver) == ((16, 32), ((2, "left"),), None)
    np.testing.assert_array_equal(episode.poses.x, 5 * np.arange(34) / 10)
    assert len(read_video(episode.video)) == 4
    assert not list(dataset.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["video.mp4", "poses.npz"])
def test_a_damaged_file_is_detected(dataset: Path, name: str) -> None:
    path = list_episodes(dataset, "train")[0] / name
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DatasetError, match=f"{name}: expected the file with SHA-256"):
        load_episode(path.parent)
    path.unlink()
    with pytest.raises(DatasetError, match=f"{name}: expected a file"):
        load_episode(path.parent)


def test_facts_that_do_not_fit_are_refused(dataset: Path) -> None:
    folder = list_episodes(dataset, "train")[0]
    path = folder / "episode.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"num_frames": 5}))
    with pytest.raises(DatasetError, match="time: expected 35 finite float64 numbers"):
        load_episode(folder)
    path.write_text(json.dumps({key: value for key, value in facts.items() if key != "weather"}))
    with pytest.raises(DatasetError, match="weather: expected"):
        load_episode(folder)
    path.write_text("{")
    with pytest.raises(DatasetError, match="expected JSON"):
        load_episode(folder)


def test_missing_datasets_and_splits_are_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"split validation, got \['train', 'held_out'\]"):
        list_episodes(dataset, "validation")
    with pytest.raises(DatasetError, match=r"dataset.json: expected a file"):
        list_episodes(tmp_path / "nowhere")
    write_json(dataset / "dataset.json", {"format": "terra-driving", "version": 2})
    with pytest.raises(DatasetError, match="expected terra-driving version 1, got terra-driving 2"):
        list_episodes(dataset)


def test_a_dataset_of_other_frames_is_not_added_to(dataset: Path) -> None:
    create_dataset(dataset, (16, 32), CAMERA, seed=7)
    with pytest.raises(DatasetError, match="image_size"):
        create_dataset(dataset, (32, 32), CAMERA, seed=0)
    with pytest.raises(DatasetError, match="camera"):
        create_dataset(dataset, (16, 32), replace(CAMERA, fov_degrees=60.0), seed=0)


# Rendering


def _settings(output: Path, **changes: object):
    from terra.recording.record import RecordSettings

    values = {"split": "train", "towns": 1, "episodes_per_town": 2, "frames_per_episode": 8, "image_size": SIZE}
    return RecordSettings(**(values | {"output": output, "camera": CAMERA, "workers": 1, "seed": 0} | changes))


@pytest.fixture(scope="module")
def renderer(graph: LaneGraph):
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    from terra.recording.renderer import Renderer

    try:
        renderer = Renderer(SIZE, CAMERA)
    except ConfigError as error:
        pytest.skip(f"no OpenGL here: {error}")
    renderer.load(graph.town)
    return renderer


def test_frames_are_reproducible_and_the_road_is_grey(renderer, graph: LaneGraph) -> None:
    from terra.recording.record import render_drive
    from terra.recording.renderer import Renderer

    drive = simulate_drive(graph, 0, 3)
    frames = np.stack(list(render_drive(renderer, drive, "day")))
    again = Renderer(SIZE, CAMERA)
    again.load(graph.town)
    np.testing.assert_array_equal(frames, np.stack(list(render_drive(again, drive, "day"))))
    assert frames.shape == (3, *SIZE, 3)
    road = frames[:, -14:-10, 40:60].reshape(-1, 3).astype(int)
    assert np.ptp(np.median(road, axis=0)) < 20
    assert 50 < np.median(road) < 150
    sky = frames[:, :4].reshape(-1, 3).astype(int).mean(axis=0)
    assert sky[2] > sky[0]
    night = next(render_drive(renderer, drive, "night"))
    assert night.mean() < 0.6 * frames[0].mean()


def test_a_car_is_drawn_where_the_camera_projects_it(renderer, graph: LaneGraph) -> None:
    x, y, heading = graph.poses(np.array([0]), np.array([20.0]))[0]
    nobody, someone = np.zeros(0, int), np.zeros(1, int)
    empty = renderer.render(WEATHERS["day"], (x, y, heading), np.zeros((0, 4)), nobody, nobody)
    for ahead, left in ((10.0, 0.0), (12.0, 3.0), (15.0, -3.0)):
        place = x + ahead * math.cos(heading) - left * math.sin(heading)
        car = [place, y + ahead * math.sin(heading) + left * math.cos(heading), heading, 0.0]
        full = renderer.render(WEATHERS["day"], (x, y, heading), np.array([car]), someone, someone)
        changed = np.abs(full.astype(int) - empty).max(axis=-1) > 40
        rows, columns = np.nonzero(changed)
        rear = project(np.array([[ahead - 2.2, left]]), CAMERA, SIZE[::-1])[0]
        assert abs(columns.mean() - rear[0]) < 5
        assert abs(rows.max() - rear[1]) < 4


def test_recording_resumes_and_repeats_itself_exactly(renderer, tmp_path: Path) -> None:
    from terra.recording.record import record_drives

    settings = _settings(tmp_path / "town")
    assert record_drives(settings) == 2
    folders = list_episodes(settings.output, "train")
    assert [path.name for path in folders] == ["train_000000_00", "train_000000_01"]
    for folder in folders:
        episode = load_episode(folder)
        assert read_video(episode.video).shape == (8, *SIZE, 3)
        assert len(episode.poses.time) == 38
    before = {path: path.read_bytes() for path in settings.output.rglob("*") if path.is_file()}
    stamps = {path: path.stat().st_mtime_ns for path in before if path.parent.name.endswith("_00")}
    (folders[1] / "episode.json").unlink()
    (folders[1] / "video.mp4").write_bytes(b"cut off")
    assert record_drives(settings) == 1
    assert record_drives(settings) == 0
    assert {path: path.read_bytes() for path in settings.output.rglob("*") if path.is_file()} == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_recorded_futures_share_their_context_frames(renderer, tmp_path: Path) -> None:
    from terra.recording.record import record_counterfactuals

    settings = _settings(tmp_path / "futures", episodes_per_town=1, split="held_out")
    assert record_counterfactuals(settings, num_context=3, maneuvers=("left", "stop")) == 2
    left, stop = (load_episode(path) for path in list_episodes(settings.output, "held_out"))
    assert (left.maneuver, stop.maneuver, left.group) == ("left", "stop", stop.group)
    assert left.weather == stop.weather
    for name in ("frame_0000.png", "frame_0002.png"):
        one, other = (episode.video.parent / "context" / name for episode in (left, stop))
        assert one.read_bytes() == other.read_bytes()
    assert not (left.video.parent / "context" / "frame_0003.png").exists()
    trajectory = load_trajectory(left.video.parent / "trajectory.json")
    assert trajectory.num_frames >= 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "test"}, "split: expected one of"),
        ({"towns": 0}, "towns: expected a whole number"),
        ({"workers": 1.5}, "workers: expected a whole number"),
        ({"image_size": (143, 256)}, "image_size: expected even"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_bad_settings_are_refused(renderer, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settings(tmp_path, **changes)


def test_the_script_and_its_configuration_agree(renderer, tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    from terra.config_files import config_dir

    path = Path(__file__).resolve().parent.parent / "scripts" / "driving_record.py"
    spec = importlib.util.spec_from_file_location("driving_record", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    overrides = [f"output={tmp_path / 'town'}", "towns=1", "episodes_per_town=1", "frames_per_episode=3"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("record", [*overrides, "image_size=[36,64]"])
        films = compose("record", [*overrides, "kind=films"])
    with pytest.raises(ConfigError, match="kind: expected drives or counterfactuals, got 'films'"):
        script.record(films)
    script.record(config)
    assert load_episode(list_episodes(tmp_path / "town")[0]).image_size == (36, 64)


def _overlaps(drive: Drive) -> list[tuple[int, int, int]]:
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
