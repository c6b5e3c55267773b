import importlib
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiny_torcs import CORNER, LAYOUT, MOVE, STRAIGHT, WIDTH, ground, model, save_package

from decoder.camera import Camera
from terra.errors import ConfigError, DatasetError
from terra.recording.driving import MIDDLE_AHEAD, WHEELBASE
from terra.recording.torcs import HELD_OUT_TRACKS, torcs_source, track_names
from terra.recording.torcs.ac3d import read_model
from terra.recording.torcs.assets import read_road, read_scene
from terra.recording.torcs.batches import sort_batches
from terra.recording.torcs.drives import TrackDrive, simulate_track_drive
from terra.recording.torcs.fitting import fit_road, height_of
from terra.recording.torcs.layout import trace
from terra.recording.torcs.preparing import TRACKS, pack_track, prepare_tracks
from terra.recording.torcs.road import LATERAL_ACCELERATION, Road
from terra.recording.traffic import CAR_LENGTH, CAR_WIDTH
from terra.recording.weather import WEATHERS

NUM_FRAMES = 150
SIZE = (36, 64)
CAMERA = Camera(fov_degrees=75.0, height_metres=1.4, pitch_radians=-0.03, x_forward_metres=1.5)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    save_package(root)
    return root


@pytest.fixture(scope="module")
def assets(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("assets")
    game = package / "usr/share/games/torcs"
    for name in ("aalborg", "forza"):
        pack_track(game / "tracks/road/aalborg", game / "data/textures", output / name)
    return output


@pytest.fixture(scope="module")
def road(assets: Path) -> Road:
    return read_road(assets / "aalborg")


@pytest.fixture(scope="module", params=range(6))
def drive(road: Road, request: pytest.FixtureRequest) -> TrackDrive:
    return simulate_track_drive(road, "aalborg", request.param, NUM_FRAMES)


def test_the_road_is_where_the_model_has_it(road: Road) -> None:
    assert road.length == pytest.approx(4 * 90 + 2 * math.pi * 30, abs=0.2)
    expected = trace(LAYOUT)[:-1, :2] + MOVE
    np.testing.assert_allclose(road.line[:, :2], expected, atol=0.2)
    for place in np.linspace(0, road.length, 50):
        for offset in (-4.0, 0.0, 3.0):
            x, y, _ = road.at(float(place), offset)
            assert road.ground_at(np.array([place]), np.array([offset]))[0] == pytest.approx(ground(x, y), abs=0.05)


def test_a_road_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.acc").write_text(model())
    parts = read_model(tmp_path / "m.acc")
    with pytest.raises(DatasetError, match=r"track: expected a road whose ends meet, got 42\.4 m"):
        fit_road(trace(LAYOUT[:-1]), WIDTH, parts, "track")
    with pytest.raises(DatasetError, match="misfit"):
        fit_road(trace((STRAIGHT, STRAIGHT, CORNER, CORNER) * 2), WIDTH, parts, "track")
    with pytest.raises(DatasetError, match="expected objects named TKMN"):
        fit_road(trace(LAYOUT), WIDTH, [part for part in parts if part.name.startswith("OBJ")], "track")


@given(x=st.floats(-20, 20), y=st.floats(-20, 20))
def test_heights_are_those_of_the_highest_triangle(x: float, y: float) -> None:
    low = np.array([[[-9, -9, 0], [9, -9, 1], [0, 9, 2]]], float)
    layers = np.concatenate([low + np.array([0, 0, up]) for up in (0, 5, -3)])
    found = height_of(np.array([[x, y]]), layers)[0]
    weights = np.linalg.solve(np.vstack([low[0, :, :2].T, np.ones(3)]), [x, y, 1.0])
    if abs(weights).min() > 0.01:
        inside = (weights > 0).all()
        assert found == pytest.approx(weights @ [5, 6, 7]) if inside else np.isnan(found)


@given(place=st.floats(-2000, 2000), offset=st.floats(-5, 5), laps=st.integers(-3, 3))
def test_a_lap_on_is_the_same_place_one_turn_on(road: Road, place: float, offset: float, laps: int) -> None:
    x, y, heading = road.at(place, offset)
    assert road.at(place + laps * road.length, offset) == pytest.approx((x, y, heading + laps * 2 * math.pi), abs=1e-6)
    middle = road.at(place)
    assert math.hypot(x - middle[0], y - middle[1]) == pytest.approx(abs(offset), abs=1e-9)


def test_bends_are_entered_slowly_enough(road: Road) -> None:
    in_bend = road.allowed_speeds(np.array([90 + 15 * math.pi / 2]))[0]
    assert in_bend == pytest.approx(math.sqrt(LATERAL_ACCELERATION * 30), rel=0.05)
    before = road.allowed_speeds(np.linspace(10, 85, 30))
    assert (np.diff(before) < 0).all()
    assert (before > in_bend).all()


def test_poses_are_exact(road: Road, drive: TrackDrive) -> None:
    poses = drive.poses
    assert len(poses.time) == NUM_FRAMES + 30
    np.testing.assert_allclose(poses.time, np.arange(NUM_FRAMES + 30) / 10)
    moved = np.hypot(np.diff(poses.x), np.diff(poses.y))
    np.testing.assert_allclose(moved, (poses.speed[:-1] + poses.speed[1:]) / 20, atol=2e-3)
    direction = np.arctan2(np.diff(poses.y), np.diff(poses.x)) - (poses.heading[:-1] + poses.heading[1:]) / 2
    assert np.abs(np.sin(direction[moved > 0.05])).max() < 0.01
    for x, y, z, heading, pitch in zip(poses.x, poses.y, poses.z, poses.heading, poses.pitch, strict=True):
        assert z == pytest.approx(ground(x, y), abs=0.06)
        ahead = ground(x + WHEELBASE * math.cos(heading), y + WHEELBASE * math.sin(heading))
        assert pitch == pytest.approx((ahead - ground(x, y)) / WHEELBASE, abs=0.02)


def test_cars_stay_on_the_road_and_apart(road: Road, drive: TrackDrive) -> None:
    poses, cars = drive.poses, drive.cars
    away = np.hypot(road.line[:, 0] - poses.x[:, None], road.line[:, 1] - poses.y[:, None]).min(axis=1)
    assert away.max() < WIDTH / 2
    for index in range(0, NUM_FRAMES, 3):
        heading = poses.heading[index]
        middle = np.array([poses.x[index], poses.y[index]]) + MIDDLE_AHEAD * np.array(
            [math.cos(heading), math.sin(heading)]
        )
        offsets = cars[index, :, :2] - middle
        ahead = np.abs(offsets @ [math.cos(heading), math.sin(heading)])
        aside = np.abs(offsets @ [-math.sin(heading), math.cos(heading)])
        assert ((ahead > CAR_LENGTH) | (aside > CAR_WIDTH)).all()


def test_drives_depend_on_track_and_number_alone(road: Road) -> None:
    first, again = (simulate_track_drive(road, "aalborg", 1, 40) for _ in range(2))
    assert all(np.array_equal(getattr(first.poses, k), getattr(again.poses, k)) for k in ("x", "y", "z", "pitch"))
    assert np.array_equal(first.cars, again.cars)
    assert first.events == again.events
    for other in (simulate_track_drive(road, "aalborg", 2, 40), simulate_track_drive(road, "forza", 1, 40)):
        assert not np.array_equal(first.poses.x, other.poses.x)


def test_driving_is_varied_and_labelled(road: Road) -> None:
    drives = [simulate_track_drive(road, "aalborg", episode, 300) for episode in range(12)]
    events = [what for drive in drives for _, what in drive.events]
    assert {"swerve_left", "swerve_right", "hard_brake", "stop", "start"} <= set(events)
    assert {"lane_change_left", "lane_change_right"} <= set(events)
    for drive in drives:
        frames = [frame for frame, _ in drive.events]
        assert frames == sorted(frames)
        assert all(0 <= frame < 300 for frame in frames)
        halts = [what for _, what in drive.events if what in ("stop", "start")]
        assert all(a != b for a, b in pairwise(halts)), "stops and starts take turns"
        for frame, what in drive.events:
            if what == "hard_brake":
                assert drive.poses.speed[frame + 5] < drive.poses.speed[frame] - 0.4
    assert any(drive.cars.shape[1] == 0 for drive in drives)
    assert any(drive.cars.shape[1] > 3 for drive in drives)


def test_tracks_are_split_by_name(assets: Path, tmp_path: Path) -> None:
    assert track_names(assets) == {"train": ("forza",), "held_out": ("aalborg",)}
    assert set(HELD_OUT_TRACKS) <= {name for names in TRACKS.values() for name in names}
    with pytest.raises(DatasetError, match="expected prepared tracks, got none"):
        track_names(tmp_path)


def test_batches_hold_every_triangle_once(assets: Path) -> None:
    geometry, looks = read_scene(assets / "aalborg")
    batches = sort_batches(geometry, looks)
    assert sorted(map(tuple, batches.indices.reshape(-1, 3))) == sorted(map(tuple, geometry.triangles))
    order = np.argsort(batches.firsts)
    np.testing.assert_array_equal(batches.firsts[order], np.cumsum(batches.counts[order]) - batches.counts[order])
    for k, (first, count) in enumerate(zip(batches.firsts, batches.counts, strict=True)):
        rows = batches.vertices[batches.indices[first : first + count]]
        assert np.hypot(*(rows[:, :2] - batches.centers[k]).T).max() <= batches.radii[k] + 1e-3
        assert rows[:, 10].max() < len(batches.arrays[batches.sizes[k]])
    # Looking away from all of it.
    assert len(batches.visible((MOVE[0] + 2000, MOVE[1], 0.0, 1.3), 5000.0)) == 0


def test_damaged_assets_are_refused(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"track\.json: expected a prepared track"):
        read_road(tmp_path / "aalborg")
    folder = shutil.copytree(assets / "aalborg", tmp_path / "aalborg")
    facts = json.loads((folder / "track.json").read_text())
    (folder / "textures/000.webp").write_bytes(b"RIFF")
    with pytest.raises(DatasetError, match=r"000\.webp: expected a picture"):
        read_scene(folder)
    (folder / "track.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(DatasetError, match=r"track\.safetensors: expected a track's arrays"):
        read_road(folder)
    (folder / "track.json").write_text(json.dumps(facts | {"version": 0}))
    with pytest.raises(DatasetError, match="version 1, got another format"):
        read_road(folder)


def test_the_package_is_unpacked_and_packed(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, output, deb = tmp_path / "tools", tmp_path / "torcs", tmp_path / "torcs-data.deb"
    tools.mkdir()
    deb.touch()
    dpkg = tools / "dpkg"
    dpkg.write_text(f'#!/bin/sh\ncp -r "{package}" "$3"\n')
    dpkg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    prepare_tracks(output, deb, ["aalborg"])
    assert (output / "COPYRIGHT").read_text() == "Free-Art-License"
    assert "GNU GPL" in (output / "LICENCE").read_text()
    assert "G\u00fcnther" in (output / "aalborg/readme.txt").read_text(encoding="utf-8")
    assert {path.name for path in output.iterdir()} == {"COPYRIGHT", "LICENCE", "aalborg"}
    # What is there is kept: nothing is unpacked.
    dpkg.write_text("#!/bin/sh\nexit 3\n")
    prepare_tracks(output, deb, ["aalborg"])
    with pytest.raises(ConfigError, match=r"expected dpkg to unpack .* got exit code 3: no message"):
        prepare_tracks(output, deb, ["forza"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"expected apt-get .* got none on the PATH"):
        prepare_tracks(output, None, ["forza"])
    with pytest.raises(ConfigError, match=r"got \['monza'\]"):
        prepare_tracks(output, deb, ["monza"])


@given(pitch=st.floats(-0.3, 0.3), heading=st.floats(-7, 7), forward=st.floats(-1, 3), height=st.floats(1.0, 2.5))
def test_a_cameras_mount_turns_with_the_car(pitch: float, heading: float, forward: float, height: float) -> None:
    canvas = importlib.import_module("terra.recording.canvas")
    tilted = importlib.import_module("terra.recording.torcs.renderer").tilted
    camera = tilted(Camera(75.0, height, -0.03, forward), pitch)
    ahead = np.array([math.cos(heading) * math.cos(pitch), math.sin(heading) * math.cos(pitch), math.sin(pitch)])
    up = np.array([-math.cos(heading) * math.sin(pitch), -math.sin(heading) * math.sin(pitch), math.cos(pitch)])
    place = canvas.camera_place(camera, 0.0, 0.0, heading)
    np.testing.assert_allclose(place, forward * ahead + height * up, atol=1e-9)
    np.testing.assert_allclose(
        canvas.camera_axes(camera, heading)[2], math.cos(-0.03) * ahead + math.sin(-0.03) * up, atol=1e-9
    )


def test_frames_are_equal_whenever_all_else_is(assets: Path) -> None:
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    try:
        source = torcs_source("aalborg", assets, SIZE, CAMERA)
    except ConfigError as error:
        pytest.skip(f"no OpenGL here: {error}")
    assert (source.source, source.place, source.maneuvers) == ("torcs", "aalborg", ())
    assert {source.weather(episode) for episode in range(60)} == set(WEATHERS)
    drive = source.simulate(3, 6)
    frames = {weather: np.stack(list(source.render(drive, weather))) for weather in WEATHERS}
    assert all(stack.shape == (6, *SIZE, 3) and stack.dtype == np.uint8 for stack in frames.values())
    # Another track in between, on the same context.
    list(torcs_source("forza", assets, SIZE, CAMERA).render(drive, "day"))
    again = torcs_source("aalborg", assets, SIZE, CAMERA)
    for weather, stack in frames.items():
        assert np.array_equal(stack, np.stack(list(again.render(again.simulate(3, 6), weather))))
        others = [other for name, other in frames.items() if name != weather]
        assert all(np.abs(stack.astype(float) - other).mean() > 2 for other in others)
    # By day: the road is grey, the sky above it is blue.
    bottom, top = frames["day"][0, -3:, 28:36].mean(axis=(0, 1)), frames["day"][0, :3].mean(axis=(0, 1))
    assert np.ptp(bottom) < 25
    assert top[2] > top[0] + 25
    with pytest.raises(ValueError, match="maneuver = 'left'"):
        source.simulate_counterfactual(0, "left", 10, 5)
