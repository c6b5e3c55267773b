import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings
from tiny_driving import CAMERA, SIZE, drive_frames, drive_poses

from decoder.camera import Camera
from terra.dataset import Poses, read_frames, read_split
from terra.dataset.verify import verify_dataset
from terra.errors import ConfigError, DatasetError, TerraError
from terra.recording import record as recording
from terra.recording.devices import _chosen, _Device, egl_devices
from terra.recording.record import RecordSettings, parse_maneuvers, record, seeded_places
from terra.recording.run import run


@dataclass(frozen=True)
class FakeDrive:
    poses: Poses
    events: tuple[tuple[int, str], ...]
    shift: int
    num_context: int


class FakeSource:
    """A place whose pictures need no OpenGL."""

    source, maneuvers = "town", ("left", "stop")

    def __init__(self, place: str):
        self.place = place

    def simulate(self, episode: int, num_frames: int) -> FakeDrive:
        if self.place == "000002":
            raise DatasetError("000002: no road there")
        return FakeDrive(drive_poses(num_frames), ((1, "left"),), int(self.place) + episode, 0)

    def simulate_counterfactual(self, group: int, maneuver: str, num_frames: int, num_context: int) -> FakeDrive:
        turning = 0.2 if maneuver == "left" else 0.0
        return FakeDrive(drive_poses(num_frames, turning=turning), (), 1 + self.maneuvers.index(maneuver), num_context)

    def weather(self, episode: int) -> str:
        return ("day", "fog")[episode % 2]

    def render(self, drive: FakeDrive, weather: str):
        count = len(drive.poses.time) - 30
        yield from drive_frames(drive.num_context)
        yield from drive_frames(count - drive.num_context, drive.shift)


@pytest.fixture
def fake(monkeypatch):
    opened = []

    def open_on(settings, place, device):
        opened.append((place, device))
        return FakeSource(place)

    monkeypatch.setattr(recording, "_open_on", open_on)
    return opened


def settings_for(output: Path, **changes) -> RecordSettings:
    values = {"split": "train", "source": "town", "places": ("000000", "000001"), "episodes_per_place": 2}
    values |= {"frames_per_episode": 5, "image_size": SIZE, "camera": CAMERA}
    return RecordSettings(**(values | {"output": output} | changes))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_recording_goes_on_where_it_was_and_changes_no_byte(fake, tmp_path):
    whole, parts = (settings_for(tmp_path / name) for name in ("whole", "parts"))
    assert record(whole, workers=0).num_done == 2
    assert record(parts.replace(places=("000001",)), workers=0).num_done == 1
    assert record(parts, workers=0).num_done == 1
    assert record(parts, workers=0).num_done == 0
    assert contents(whole.output) == contents(parts.output)
    assert [place for place, _ in fake] == ["000000", "000001", "000001", "000000"]
    episodes = read_split(whole.output, "train").episodes
    assert [(e.id, e.weather) for e in episodes[:2]] == [("town_000000_00", "day"), ("town_000000_01", "fog")]
    assert verify_dataset(whole.output) == ()
    with pytest.raises(DatasetError, match="expected a shard made by"):
        record(whole.replace(episodes_per_place=3), workers=0)


def test_a_chosen_weather_is_part_of_the_recipe(fake, tmp_path):
    mixed, snow = settings_for(tmp_path / "mixed"), settings_for(tmp_path / "snow", weather="snow")
    record(mixed, workers=0)
    record(snow, workers=0)
    recipes = [
        json.loads((each.output / "train" / "town_000000" / "shard.json").read_text())["recipe"]
        for each in (mixed, snow)
    ]
    assert "weather" not in recipes[0]  # so that the datasets recorded before go on
    assert recipes[1] == {**recipes[0], "weather": "snow"}
    assert record(snow, workers=0).num_done == 0
    for there, other in ((snow, "rain"), (snow, None), (mixed, "snow"), (mixed, "day")):
        with pytest.raises(DatasetError, match=r"expected a shard made by .*, got one by"):
            record(there.replace(weather=other), workers=0)


def test_revisits_are_part_of_the_recipe_where_there_are_some(fake, tmp_path):
    plain = settings_for(tmp_path)
    record(plain, workers=0)
    for other in ({"revisit": 0.5}, {"traffic": False}):
        with pytest.raises(DatasetError, match="expected a shard made by"):
            record(plain.replace(**other), workers=0)
        with pytest.raises(ConfigError, match="expected drives with revisit or traffic=false, got counterfactuals"):
            settings_for(tmp_path, maneuvers=("left",), num_context=2, **other)


def test_the_camera_is_kept_with_the_frames(fake, tmp_path):
    truck = read_settings("record", [f"output={tmp_path}", "camera=truck"]).camera
    assert truck == Camera(fov_degrees=60.0, height_meters=2.6, pitch_radians=-0.12)
    record(settings_for(tmp_path, camera=truck), workers=0)
    assert {episode.camera for episode in read_split(tmp_path, "train").episodes} == {truck}
    with pytest.raises(DatasetError, match="expected a shard made by"):
        record(settings_for(tmp_path), workers=0)


def test_a_failed_place_is_noted_and_the_rest_goes_on(fake, tmp_path):
    settings = settings_for(tmp_path, places=("000000", "000002", "000004"))
    outcome = record(settings, workers=0)
    assert (outcome.num_done, outcome.failed) == (2, ["000002: no road there"])
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["town_000000", "town_000004"]


def test_futures_lie_beside_drives_of_the_same_place(fake, tmp_path):
    settings = settings_for(tmp_path, split="held_out", places=("900000",))
    record(settings, workers=0)
    record(settings.replace(maneuvers=("left", "stop"), num_context=3), workers=0)
    episodes = read_split(tmp_path, "held_out").episodes
    futures = [episode for episode in episodes if episode.group is not None]
    assert len(episodes) == 2 + 4
    assert [(e.id, e.group, e.maneuver) for e in futures[:2]] == [
        ("town_900000_futures_00_left", "town_900000_futures_00", "left"),
        ("town_900000_futures_00_stop", "town_900000_futures_00", "stop"),
    ]
    assert futures[0].num_context == 3
    assert verify_dataset(tmp_path) == ()
    with pytest.raises(DatasetError, match="expected town_900000 in train only"):
        record(settings.replace(split="train"), workers=0)


def test_a_maneuver_that_the_place_has_not_fails_there(fake, tmp_path):
    outcome = record(settings_for(tmp_path, maneuvers=("right",), num_context=2), workers=0)
    assert all("expected maneuvers of ('left', 'stop'), got ('right',)" in line for line in outcome.failed)
    assert outcome.num_done == 0


def test_a_device_that_fails_gives_way_to_the_first(tmp_path, monkeypatch, caplog):
    def open_on(settings, place, device):
        if device == 3:
            raise ConfigError("no context on 3")
        return FakeSource(place)

    monkeypatch.setattr(recording, "_open_on", open_on)
    monkeypatch.setattr(recording, "egl_devices", lambda: (1, 3))
    settings = settings_for(tmp_path)
    assert isinstance(recording._open_source(settings, "000000", 0), FakeSource)
    assert not caplog.records
    assert isinstance(recording._open_source(settings, "000000", 1), FakeSource)
    assert "EGL device 3 can't be used, taking 1: no context on 3" in caplog.text
    monkeypatch.setattr(recording, "egl_devices", lambda: (3,))
    with pytest.raises(ConfigError, match="no context on 3"):
        recording._open_source(settings, "000000", 4)


def test_there_is_always_a_device_to_try():
    devices = egl_devices()
    assert devices
    assert len(set(devices)) == len(devices)


def test_rendering_keeps_to_the_gpus_that_cuda_may_use():
    def gpus(*visible: bool) -> list[_Device]:
        return [_Device(frozenset({"EGL_NV_device_cuda", "EGL_EXT_device_drm"}), each) for each in visible]

    mesa = [_Device(frozenset({"EGL_EXT_device_drm"}), False), _Device(frozenset({"EGL_MESA_device_software"}), False)]
    assert _chosen([*gpus(True, True), *mesa]) == (0, 1)
    assert _chosen([*mesa, *gpus(False, True, False, True)]) == (3, 5)
    assert _chosen([*gpus(False, False), *mesa]) == (0, 1)  # CUDA_VISIBLE_DEVICES is empty
    assert _chosen(mesa) == (0,)
    assert _chosen(mesa[1:]) == (0,)
    assert _chosen([]) == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "test"}, "split: expected train or held_out"),
        ({"source": "film"}, "source: expected town, got"),
        (
            {"weather": "hail"},
            "weather: expected one of day, overcast, fog, dusk, night, snow, rain or null, got 'hail'",
        ),
        ({"places": ()}, "places: expected one or more"),
        ({"places": ("000001", "000001")}, "places: expected one or more, each once"),
        ({"episodes_per_place": 0}, "episodes_per_place: expected a whole number"),
        ({"frames_per_episode": 1.5}, "frames_per_episode: expected a whole number"),
        ({"image_size": (143, 256)}, "image_size: expected even"),
        ({"maneuvers": ("left",), "num_context": 5}, "num_context: expected a whole number from 1 to 4, got 5"),
        ({"maneuvers": ("back",), "num_context": 2}, "maneuvers: expected some of"),
        ({"image_size": (16.0, 32.0)}, "image_size: expected even"),
        ({"maneuvers": ("left",), "num_context": "3"}, "num_context: expected a whole number, got '3'"),
    ],
)
def test_bad_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings_for(tmp_path, **changes)


def test_splits_never_share_a_town():
    assert seeded_places("train", 0, 2) == ("000000", "000001")
    assert seeded_places("held_out", 5, 1) == ("900005",)
    for changes in (("test", 0, 1), ("train", -1, 1), ("train", 450_000, 1), ("train", 0, 0)):
        with pytest.raises(ConfigError):
            seeded_places(*changes)
    assert parse_maneuvers("drives", ("left",), 3) == ((), 0)
    with pytest.raises(ConfigError, match=r"maneuvers: expected some of left, .*, got none"):
        parse_maneuvers("counterfactuals", (), 3)
    wrong = {
        "weather=hail": "weather: expected one of day, overcast, fog, dusk, night, snow, rain or null, got 'hail'",
        "kind=films": "kind: expected drives or counterfactuals, got 'films'",
        "maneuvers=left": r"maneuvers: expected a list such as \[a,b\], got 'left'",
        "maneuvers=[left,left]": "maneuvers: expected each once, got left, left",
        "maneuvers=null": r"maneuvers: expected a list such as \[a,b\], got None",
        "workers=-1": "workers: expected a whole number from 0 to 1024, got -1",
        "max_seconds=0": "max_seconds: expected a number of at least 1 or null, got 0",
    }
    for override, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_settings("record", ["output=out", override])


# Processes and the script


STOPPED = """
import signal, sys, time
from pathlib import Path
from terra.dataset.workers import run_jobs

def work(job, worker, advance):
    folder = Path(sys.argv[1])
    try:
        (folder / f"begun_{job}").touch()
        time.sleep(60)
    finally:
        (folder / f"ended_{job}").touch()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    try:
        run_jobs(range(4), work, workers=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_is_under_way_cleanly(tmp_path, sent):
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("begun_*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(sent)
        assert process.wait(timeout=90) == 130
    finally:
        process.kill()
    assert sorted(path.name for path in tmp_path.glob("*_*")) == ["begun_0", "begun_1", "ended_0", "ended_1"]


@pytest.mark.slow
def test_drives_are_the_same_in_any_weather_and_only_the_pictures_differ(tmp_path):
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    from terra.recording.canvas import open_context

    try:
        open_context().release()
    except TerraError as error:
        pytest.skip(f"no OpenGL here: {error}")
    overrides = ["towns=1", "episodes_per_place=2", "frames_per_episode=3", "image_size=[36,64]", "workers=0"]
    for name, weather in (("mixed", "null"), ("day", "day"), ("snow", "snow"), ("again", "snow")):
        run(read_settings("record", [*overrides, f"output={tmp_path / name}", f"weather={weather}"]))
    mixed, day, snow = (read_split(tmp_path / name, "train").episodes for name in ("mixed", "day", "snow"))
    assert [[each.weather for each in episodes] for episodes in (mixed, day, snow)] == [
        ["night", "day"],
        ["day", "day"],
        ["snow", "snow"],
    ]
    shards = [tmp_path / name / "train" / "town_000000" for name in ("mixed", "day", "snow")]
    poses, videos = (
        [(shard / name).read_bytes() for shard in shards] for name in ("poses.parquet", "town_000000_01.mp4")
    )
    assert poses[0] == poses[1] == poses[2]
    assert videos[0] == videos[1] != videos[2]
    assert contents(tmp_path / "snow") == contents(tmp_path / "again")


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte_of_a_town(tmp_path):
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    from terra.recording.canvas import open_context

    try:
        open_context().release()
    except TerraError as error:
        pytest.skip(f"no OpenGL here: {error}")
    overrides = ["towns=2", "episodes_per_place=1", "frames_per_episode=3", "image_size=[36,64]"]
    for name, workers in (("one", 0), ("two", 2)):
        run(read_settings("record", [*overrides, f"output={tmp_path / name}", f"workers={workers}"]))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    episode = read_split(tmp_path / "one", "train").episodes[0]
    assert np.ptp(read_frames(episode)) > 50
    assert json.loads((tmp_path / "one" / "dataset.json").read_text())["image_size"] == [36, 64]


def test_the_command_says_what_failed(fake, tmp_path):
    for wrong, message in (
        ("image_size=[16]", "image_size: expected even height and width from 16 to 4096"),
        ("max_seconds=soon", "max_seconds: expected a number"),
        ("workers=-1", "workers: expected a whole number from 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(read_settings("record", [f"output={tmp_path / 'none'}", wrong]))
    assert not (tmp_path / "none").exists()
    config = read_settings(
        "record", [f"output={tmp_path}", "towns=3", "frames_per_episode=3", "image_size=[16,32]", "workers=0"]
    )
    assert run(config) == 2
    assert len(read_split(tmp_path, "train").episodes) == 8
