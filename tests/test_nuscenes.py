import json
import math
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings
from hypothesis import given, settings, strategies as st
from PIL import Image
from tiny_driving import drive_poses

from terra.dataset import read_frames, read_split
from terra.dataset.importing import ImportSettings, Mount, NuScenesSource, import_drives
from terra.dataset.importing.command import run
from terra.dataset.importing.nuscenes_tables import read_table
from terra.dataset.inspect import inspect_source
from terra.errors import DatasetError

PICTURE = (36, 64)
LOGS = {"scene-0001": "log-a", "scene-0002": "log-a", "scene-0003": "log-b"}
SPEED, TURNING = 6.0, 0.1
FPS = 12.0


def scene_times(number: int, seconds: float = 6.0) -> np.ndarray:
    """Microseconds, about 12 a second as the camera has them: never quite regular."""
    jitter = np.random.default_rng(number).uniform(-0.01, 0.01, int(seconds * FPS))
    return (
        1_530_000_000_000_000
        + number * 40_000_000
        + np.round((np.arange(len(jitter)) / FPS + jitter) * 1e6).astype(int)
    )


def write_nuscenes(root: Path, version: str = "v1.0-mini") -> Path:
    """Three scenes of two logs: left turns on the map, with a lidar whose rows are none of ours."""
    tables = {name: [] for name in ("scene", "log", "sample", "sensor", "calibrated_sensor", "sample_data", "ego_pose")}
    tables["log"] = [{"token": f"t-{log}", "logfile": log, "location": "somewhere"} for log in ("log-a", "log-b")]
    for channel in ("CAM_FRONT", "LIDAR_TOP"):
        tables["sensor"].append({"token": f"s-{channel}", "channel": channel})
        matrix = [[50.0, 0, 33.0], [0, 50.0, 17.0], [0, 0, 1]] if channel == "CAM_FRONT" else []
        tables["calibrated_sensor"].append(
            {"token": f"c-{channel}", "sensor_token": f"s-{channel}", "camera_intrinsic": matrix}
        )
    for number, (scene, log) in enumerate(LOGS.items()):
        tables["scene"].append({"token": f"t-{scene}", "name": scene, "log_token": f"t-{log}"})
        times = scene_times(number)
        for index, time in enumerate(times):
            if index % 6 == 0:
                tables["sample"].append({"token": f"{scene}-{index}", "scene_token": f"t-{scene}"})
            seconds = (time - times[0]) / 1e6
            heading = 1.0 + TURNING * seconds
            radius = SPEED / TURNING
            place = [600 + radius * math.sin(heading), 1600 - radius * math.cos(heading), 0.0]
            folder = "samples" if index % 6 == 0 else "sweeps"
            for channel in ("CAM_FRONT", "LIDAR_TOP"):
                name = f"{folder}/{channel}/{scene}-{index:03d}.jpg"
                row = {"token": f"{channel}-{scene}-{index}", "sample_token": f"{scene}-{index - index % 6}"}
                row |= {"calibrated_sensor_token": f"c-{channel}", "timestamp": int(time), "filename": name}
                pose = {"token": f"pose-{row['token']}", "timestamp": int(time), "translation": place}
                pose["rotation"] = [math.cos(heading / 2), 0.0, 0.0, math.sin(heading / 2)]
                tables["sample_data"].append(row | {"ego_pose_token": pose["token"], "is_key_frame": index % 6 == 0})
                tables["ego_pose"].append(pose)
            path = root / folder / "CAM_FRONT" / f"{scene}-{index:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((*PICTURE, 3), 20 + 3 * index, np.uint8)).save(path, quality=95)
    # The order of rows means nothing.
    tables["sample_data"].reverse()
    (root / version).mkdir()
    for name, rows in tables.items():
        (root / version / f"{name}.json").write_text(json.dumps(rows, indent=0))
    return root


def change(root: Path, table: str, index: int, **values) -> None:
    path = root / "v1.0-mini" / f"{table}.json"
    rows = json.loads(path.read_text())
    rows[index] |= values
    path.write_text(json.dumps(rows))


def settings_for(root: Path, output: Path, **changes) -> ImportSettings:
    values = {"source": NuScenesSource(root), "name": "nuscenes", "output": output, "fps": 10.0, "image_size": (18, 32)}
    values |= {"frames_per_episode": 300, "drives": None, "held_out": (), "mount": Mount()}
    return ImportSettings(**(values | changes))


def test_a_scene_has_the_poses_of_its_frames(tmp_path):
    source = NuScenesSource(write_nuscenes(tmp_path))
    assert source.list_drives() == tuple(LOGS)
    assert source.recordings == {"log-a": ("scene-0001", "scene-0002"), "log-b": ("scene-0003",)}
    drive = source.open_drive("scene-0002")
    expected = (scene_times(1) - scene_times(1)[0]) / 1e6
    np.testing.assert_allclose(drive.frame_times, expected, atol=1e-9)
    np.testing.assert_allclose(drive.poses.heading, 1.0 + TURNING * expected, atol=1e-9)
    np.testing.assert_allclose(drive.poses.speed[1:-1], SPEED, rtol=1e-3)
    shades = [frame.mean() for frame in drive.frames()]
    np.testing.assert_allclose(shades, 20 + 3 * np.arange(len(expected)), atol=2)
    inspection = inspect_source(source)
    assert inspection.doubts == ()
    assert any(line.startswith("           216 frames, ") for line in inspection.lines)


def test_headings_and_pitches_are_those_of_the_quaternions(tmp_path):
    root = write_nuscenes(tmp_path)
    rows = json.loads((root / "v1.0-mini" / "ego_pose.json").read_text())
    yaw, pitch = 2.0, 0.1
    # Turned by the pitch about y (left; nose down is positive there), then by the yaw about z.
    around = np.array([math.cos(-pitch / 2), 0, math.sin(-pitch / 2), 0])
    w, z = math.cos(yaw / 2), math.sin(yaw / 2)
    rotation = [w * around[0], -z * around[2], w * around[2], z * around[0]]
    for index, row in enumerate(rows):
        rows[index] = row | {"rotation": rotation}
    (root / "v1.0-mini" / "ego_pose.json").write_text(json.dumps(rows))
    poses = NuScenesSource(root).open_drive("scene-0001").poses
    np.testing.assert_allclose(poses.heading, yaw, atol=1e-9)
    np.testing.assert_allclose(poses.pitch, pitch, atol=1e-9)


def test_scenes_become_episodes_split_by_log(tmp_path, caplog):
    root = write_nuscenes(tmp_path / "in")
    mount = Mount(height_meters=1.51, x_forward_meters=1.7)
    chosen = settings_for(root, tmp_path / "out", held_out=("log-a",), mount=mount)
    outcome = import_drives(chosen, workers=0)
    assert (outcome.num_done, outcome.failed) == (3, [])
    held_out, train = (read_split(tmp_path / "out", split).episodes for split in ("held_out", "train"))
    assert [episode.place for episode in held_out] == ["scene-0001", "scene-0002"]
    assert [episode.id for episode in train] == ["nuscenes_scene-0003_000"]
    episode = held_out[0]
    # Frames at 10 a second are the nearest of those at 12, the poses those of the instants between.
    expected = drive_poses(episode.num_frames, turning=TURNING, speed=SPEED)
    turned = episode.poses.heading - episode.poses.heading[0]
    np.testing.assert_allclose(turned, expected.heading, atol=1e-6)
    steps = np.hypot(np.diff(episode.poses.x), np.diff(episode.poses.y))
    np.testing.assert_allclose(steps, SPEED / 10, rtol=2e-3)
    shades = (read_frames(episode).mean(axis=(1, 2, 3)) - 20) / 3
    times = (scene_times(0) - scene_times(0)[0]) / 1e6
    nearest = [int(np.argmin(abs(times - instant))) for instant in np.arange(episode.num_frames) / 10]
    np.testing.assert_allclose(shades, nearest, atol=1)
    assert episode.camera is not None
    assert episode.camera.fov_degrees == pytest.approx(math.degrees(2 * math.atan(32 / 50)))
    assert "share places" not in caplog.text
    import_drives(settings_for(root, tmp_path / "other", held_out=("scene-0001",), drives=("log-a",)), workers=0)
    assert "log-a: some of its drives are held out" in caplog.text


def test_one_of_several_folders_of_tables_is_named(tmp_path):
    root = write_nuscenes(tmp_path)
    (root / "v1.0-trainval").mkdir()
    for name in ("scene", "log"):
        (root / "v1.0-trainval" / f"{name}.json").write_text("[]")
    with pytest.raises(DatasetError, match=r"got 2: name one \(v1.0-mini, v1.0-trainval\)"):
        NuScenesSource(root).list_drives()
    with pytest.raises(DatasetError, match="expected scenes, got an empty table"):
        NuScenesSource(root / "v1.0-trainval").list_drives()
    assert NuScenesSource(root / "v1.0-mini").open_drive("scene-0003").name == "scene-0003"
    with pytest.raises(DatasetError, match=r"expected nuScenes with one folder of tables .* got none"):
        NuScenesSource(root / "samples").list_drives()


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("sample_data", {"timestamp": "soon"}, r"data\.json: row 0: timestamp: expected a whole number, got 'soon'"),
        ("sample_data", {"sample_token": "gone"}, r"sample\.json: expected a row with the token 'gone', got none"),
        ("sample_data", {"ego_pose_token": "gone"}, r"ego_pose\.json: expected a row with the token 'gone'"),
        ("ego_pose", {"rotation": [1, 1, 0, 0]}, r"row 0: rotation: expected a unit quaternion .*, got \[1, 1, 0, 0\]"),
        ("ego_pose", {"translation": [1, 2, float("nan")]}, r"translation: expected 3 numbers"),
        ("ego_pose", {"token": "pose-CAM_FRONT-scene-0001-1"}, r"row 2: token: expected one of its own"),
        ("calibrated_sensor", {"camera_intrinsic": [[1]]}, "expected a 3x3 matrix"),
        ("calibrated_sensor", {"camera_intrinsic": []}, r"c-CAM_FRONT: camera_intrinsic: expected a camera with sq"),
        ("scene", {"log_token": None}, r"scene\.json: row 0: log_token: expected text, got None"),
        ("scene", {"name": "../up"}, "expected a name of letters, digits"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path, table, values, message):
    root = write_nuscenes(tmp_path)
    # Rows of sample_data stand in reverse, the camera's after the lidar's.
    index = 1 if table == "sample_data" and "timestamp" not in values else 0
    change(root, table, index, **values)
    with pytest.raises(DatasetError, match=message) as caught:
        NuScenesSource(root).open_drive("scene-0003")
    assert "\n" not in str(caught.value)


def test_bad_frames_are_left_out_and_the_scene_stays(tmp_path, caplog):
    root = write_nuscenes(tmp_path)
    times, drive = scene_times(2), NuScenesSource(root).open_drive("scene-0003")
    pictures = {each: root / ("samples" if each % 6 == 0 else "sweeps") / "CAM_FRONT" for each in range(len(times))}
    pictures = {each: folder / f"scene-0003-{each:03d}.jpg" for each, folder in pictures.items()}
    pictures[12].unlink()
    pictures[20].write_bytes(b"")
    pictures[33].write_bytes(pictures[33].read_bytes()[:-60])
    found = NuScenesSource(root).open_drive("scene-0003")
    kept = [each for each in range(len(times)) if each not in (12, 20, 33)]
    np.testing.assert_array_equal(found.frame_times, (times[kept] - times[0]) / 1e6)
    shades = [frame.mean() for frame in found.frames()]
    np.testing.assert_allclose(shades, 20 + 3 * np.array(kept), atol=2)
    assert found.left_out == {"damaged pictures": 3}
    np.testing.assert_array_equal(found.poses.x, drive.poses.x)
    assert f"{pictures[12]}: left out (and 2 more): No such file or directory" in caplog.text
    assert found.breaks == ()
    for picture in pictures.values():
        picture.unlink(missing_ok=True)
    with pytest.raises(DatasetError, match=r"expected pictures that can be read, got .*-000\.jpg: No such file"):
        NuScenesSource(root).open_drive("scene-0003")


def test_of_two_frames_at_one_time_one_is_left_out(tmp_path):
    root = write_nuscenes(tmp_path)
    rows = json.loads((root / "v1.0-mini" / "sample_data.json").read_text())
    (first, second) = [row for row in rows if "CAM_FRONT-scene-0001" in row["token"]][:2]
    change(root, "sample_data", rows.index(first), timestamp=second["timestamp"])
    drive = NuScenesSource(root).open_drive("scene-0001")
    assert drive.left_out == {"frames at the time of the one before": 1}
    assert len(list(drive.frames())) == len(drive.frame_times) == len(scene_times(0)) - 1
    assert (np.diff(drive.poses.time) > 0).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a list of rows, got ''"),
        ('{"token": "a"}', "expected a list of rows"),
        ('[{"token": "a", "channel": "b"}', r"expected ',' or '\]' after row 0: was the file cut off"),
        ('[{"token": "a", "chan', "row 0: expected JSON"),
        ('[{"token": "a", "channel": "b"}, 5]', "row 1: expected an object, got 5"),
        ('[{"token": "a"}]', "row 0: channel: expected text, got nothing"),
        (b'["\xff"]', "expected UTF-8 text"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path, content, message):
    path = tmp_path / "sensor.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=message):
        read_table(tmp_path, "sensor")
    path.unlink()
    with pytest.raises(DatasetError, match=r"sensor\.json: expected a table of nuScenes, got: No such file"):
        read_table(tmp_path, "sensor")


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.text(max_size=30), st.text(max_size=90)), max_size=40, unique_by=lambda row: row[0]),
    indent=st.none() | st.integers(0, 4),
    ascii_only=st.booleans(),
)
def test_any_table_is_read_as_json_reads_it(tmp_path_factory, rows, indent, ascii_only):
    folder = tmp_path_factory.mktemp("tables")
    table = [{"token": token, "channel": channel, "more": [{}]} for token, channel in rows]
    text = json.dumps(table, indent=indent, ensure_ascii=ascii_only)
    (folder / "sensor.json").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # So small that rows are cut where chunks end.
        patch.setattr("terra.dataset.importing.nuscenes_tables._CHUNK", 700)
        patch.setattr("terra.dataset.importing.nuscenes_tables._LONGEST_ROW", 690)
        found = read_table(folder, "sensor").rows
    assert found == {token: {"token": token, "channel": channel} for token, channel in rows}


def test_the_script_imports_nuscenes(tmp_path):
    root = write_nuscenes(tmp_path / "in")
    names = [f"input={root}", f"output={tmp_path / 'out'}", "held_out=[log-b]", "workers=0", "image_size=[18,32]"]
    run(read_settings("import", ["kind=nuscenes", *names]))
    assert [episode.place for episode in read_split(tmp_path / "out", "held_out").episodes] == ["scene-0003"]
