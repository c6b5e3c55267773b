"""The import of several cameras: each tile shows what its camera saw at the instant, or the drive is cut there."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import lerobot_data
import numpy as np
import pytest
from coded_pictures import coded, number_in
from entry import read_settings
from lerobot_data import CAMERA, read_episodes, write_dataset, write_episodes, write_video
from PIL import Image

from decoder.video import VideoWriter
from terra.actions import ActionTrack, Vector
from terra.dataset import read_frames, read_split
from terra.dataset.importing.command import run
from terra.dataset.importing.run import ImportSettings, Mount, import_drives
from terra.dataset.importing.source import Footage, SourceDrive
from terra.dataset.inspect import inspect_dataset
from terra.errors import ConfigError, DatasetError
from terra.views import Views

TIME = Vector(names=("t",), units=("s",), low=(0.0,), high=(100.0,))
SIZE, TILE = (64, 128), (64, 64)


@dataclass(frozen=True)
class Cameras:
    """A source of one drive of 4 s: an action tells its time, a picture its number."""

    times: Mapping[str, np.ndarray] = field(default_factory=dict)
    shape: tuple[int, int] = (80, 80)
    space = TIME
    declared: Mapping[str, str | None] = field(default_factory=dict)
    recordings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def views(self) -> tuple[str, ...]:
        return tuple(self.times)

    def list_drives(self) -> tuple[str, ...]:
        return ("a",)

    def open_drive(self, name: str) -> SourceDrive:
        def footage(times: np.ndarray) -> Footage:
            return Footage(times, lambda: (coded(number, *self.shape) for number in range(len(times))))

        first, *others = [footage(times) for times in self.times.values()]
        at = np.arange(0, 4, 0.05)
        return SourceDrive(
            name,
            ActionTrack(TIME, at, at[:, None], name),
            first.times,
            first.frames,
            None,
            "a.csv",
            others=dict(zip(self.views[1:], others, strict=True)),
        )


def settings_for(source, output: Path, **changes) -> ImportSettings:
    values = {"source": source, "name": "test", "output": output, "fps": 10.0, "image_size": SIZE, "held_out": ()}
    values |= {"frames_per_episode": 300, "drives": None, "mount": Mount(), "min_frames": 4}
    return ImportSettings(**(values | changes))


def tiles(output: Path) -> list[dict[str, list[int]]]:
    """The number in each view's pictures of each episode."""
    found = []
    for episode in read_split(output, "train").episodes:
        assert episode.views is not None
        parts = episode.views.split(read_frames(episode))
        found.append({name: [number_in(picture) for picture in part] for name, part in parts.items()})
    return found


def losses(output: Path) -> dict:
    (path,) = output.glob("train/*/shard.json")
    return json.loads(path.read_text())["losses"]


def test_each_tile_is_within_half_a_frame_of_its_instant(tmp_path):
    front, wrist = np.arange(120) / 30, 0.36 + np.arange(49) / 15  # to 3.56 s
    source = Cameras({"front": front, "wrist": wrist})
    outcome = import_drives(settings_for(source, tmp_path), workers=0)
    assert not outcome.failed
    (numbers,) = tiles(tmp_path)
    instants = front[numbers["front"]]
    np.testing.assert_allclose(np.diff(instants), 0.1)
    assert instants[0] == pytest.approx(0.4)  # the first with a frame of both
    assert instants[-1] == pytest.approx(3.5)
    offsets = wrist[numbers["wrist"]] - instants
    assert np.abs(offsets).max() <= 0.5 / 15 + 1e-9
    assert losses(tmp_path)["moved_seconds"] == pytest.approx(np.abs(offsets).max(), abs=1e-6)
    assert losses(tmp_path)["left_out"]["without a frame of wrist"] == 8
    facts = json.loads((tmp_path / "dataset.json").read_text())
    assert facts["views"] == Views.tiled(("front", "wrist"), SIZE, 1.0).describe()
    assert "views: front 64x64 at 0,0, wrist 64x64 at 64,0" in inspect_dataset(tmp_path).lines
    assert "front 64x64 at 0,0" in (tmp_path / "README.md").read_text()


def test_a_drive_is_cut_where_a_camera_has_a_gap(tmp_path):
    front, wrist = np.arange(120) / 30, np.arange(60) / 15
    wrist = wrist[(wrist < 1.45) | (wrist > 2.25)]
    import_drives(settings_for(Cameras({"front": front, "wrist": wrist}), tmp_path), workers=0)
    numbers = tiles(tmp_path)
    spans = [(front[each["front"][0]], front[each["front"][-1]]) for each in numbers]
    np.testing.assert_allclose(spans, [(0, 1.4), (2.3, 3.9)])
    for each in numbers:
        assert np.abs(wrist[each["wrist"]] - front[each["front"]]).max() <= 0.5 / 15 + 1e-9
    actions = [episode.actions[:, 0] for episode in read_split(tmp_path, "train").episodes]
    for each, values in zip(numbers, actions, strict=True):
        assert np.abs(values - front[each["front"]]).max() <= 0.1
    assert losses(tmp_path)["left_out"] == {"without a frame of wrist": 8}
    assert losses(tmp_path)["parts"] == 2


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"wrist": 5 + np.arange(60) / 15}, "expected instants that all cameras have seen, got the first 0.0 to 4.0 s"),
        ({"wrist": np.arange(20) / 5}, "a.csv: wrist: expected fps of at most its frames' rate, 5.00, got 10"),
        ({"wrist": np.array([0, 0.1, 0.2, 3, 3.1])}, "expected 4 or more frames .* of any camera, got at most 3"),
    ],
)
def test_cameras_that_do_not_go_together_are_one_line(tmp_path, caplog, times, message):
    source = Cameras({"front": np.arange(120) / 30, **times})
    outcome = import_drives(settings_for(source, tmp_path), workers=0)
    assert len(outcome.failed) == 1
    assert re.search(message, caplog.text)


def test_one_camera_is_imported_as_before(tmp_path):
    front = np.arange(120) / 30
    import_drives(settings_for(Cameras({"front": front}), tmp_path / "one"), workers=0)
    assert "views" not in json.loads((tmp_path / "one" / "dataset.json").read_text())
    both = Cameras({"front": front, "wrist": front})
    import_drives(settings_for(both, tmp_path / "both"), workers=0)
    (one,), (two,) = (read_split(tmp_path / name, "train").episodes for name in ("one", "both"))
    np.testing.assert_array_equal(one.actions, two.actions)
    assert one.views is None
    message = "expected pictures of one camera, as there, got front and wrist"
    with pytest.raises(DatasetError, match=message):
        import_drives(settings_for(both, tmp_path / "one"), workers=0)
    with pytest.raises(ConfigError, match=r"crop: expected none with several cameras \(front, wrist\), got 1:1"):
        import_drives(settings_for(both, tmp_path / "cropped", crop="1:1"), workers=0)


def test_a_layout_stays_as_it_is(tmp_path):
    front = np.arange(120) / 30
    wide = Cameras({"front": front, "wrist": front}, shape=(40, 160))
    changes = {"image_size": (64, 64)}
    import_drives(settings_for(wide, tmp_path, **changes), workers=0)
    above = json.loads((tmp_path / "dataset.json").read_text())["views"]["boxes"]
    assert above == [[0, 0, 64, 32], [0, 32, 64, 64]]
    tall = Cameras({"front": front, "wrist": front}, shape=(160, 40))
    import_drives(settings_for(tall, tmp_path, name="other", **changes), workers=0)
    assert json.loads((tmp_path / "dataset.json").read_text())["views"]["boxes"] == above
    shard = next(tmp_path.glob("train/other_*/shard.json"))
    facts = json.loads(shard.read_text())
    facts["views"]["boxes"].reverse()
    shard.write_text(json.dumps(facts))
    (damage,) = read_split(tmp_path, "train").damaged
    assert f"{shard}: views: expected" in damage


def write_recording(folder: Path, name: str, views: Mapping[str, float]) -> None:
    """A video or pictures of each view at its rate, and actions."""
    folder.mkdir(exist_ok=True)
    for view, rate in views.items():
        frames = [coded(number, 80, 80) for number in range(int(4 * rate))]
        if view == "top":
            (folder / f"{name}.top").mkdir()
            for index, frame in enumerate(frames):
                Image.fromarray(frame).save(folder / f"{name}.top" / f"{index}.png")
            continue
        with VideoWriter(folder / f"{name}.{view}.mp4", rate, size=(80, 80), crf=8) as writer:
            writer.extend(np.stack(frames))
    rows = "".join(f"{t:.4f},{t:.4f}\n" for t in np.arange(0, 4, 0.05))
    (folder / f"{name}.csv").write_text("time_s,t\n" + rows)


def import_videos(folder: Path, output: Path, *more: str) -> int:
    given = [f"input={folder}", f"output={output}", "kind=video_actions", "fps=10", "image_size=[64,128]", "workers=0"]
    return run(
        read_settings("import", [*given, "action_space={kind:vector,names:[t],units:[s],low:[0],high:[9]}", *more])
    )


def test_videos_of_several_cameras(tmp_path, caplog):
    write_recording(tmp_path / "in", "a", {"front": 30, "wrist": 15})
    write_recording(tmp_path / "in", "b", {"front": 30})
    assert import_videos(tmp_path / "in", tmp_path / "out", "views=[front,wrist]") == 0
    (numbers,) = tiles(tmp_path / "out")
    assert numbers["front"] == [3 * index for index in range(len(numbers["front"]))]
    assert len(numbers["front"]) == 40
    assert np.abs(np.array(numbers["wrist"]) / 15 - np.array(numbers["front"]) / 30).max() <= 0.5 / 15 + 1e-9
    assert "left out: expected a video or folder b.wrist, got none" in caplog.text
    with pytest.raises(DatasetError, match=r"in: expected NAME.* beside NAME\.left and NAME\.wrist"):
        import_videos(tmp_path / "in", tmp_path / "other", "views=[left,wrist]")
    with pytest.raises(DatasetError, match="expected pictures of front and wrist, as there, got wrist and front"):
        import_videos(tmp_path / "in", tmp_path / "out", "views=[wrist,front]")


def test_four_cameras_of_videos_and_pictures(tmp_path):
    write_recording(tmp_path / "in", "a", {"front": 10, "wrist": 20, "top": 10})
    more = ("views=[front,wrist,top]", "picture_fps=10", "image_size=[64,64]")
    assert import_videos(tmp_path / "in", tmp_path / "out", *more) == 0
    (numbers,) = tiles(tmp_path / "out")
    assert numbers["front"] == numbers["top"] == list(range(40))
    assert numbers["wrist"] == list(range(0, 80, 2))


def test_views_are_of_video_actions(tmp_path):
    with pytest.raises(ConfigError, match=r"views: expected none with kind=kitti, got \['front', 'wrist'\]"):
        run(read_settings("import", [f"input={tmp_path}", f"output={tmp_path}/o", "kind=kitti", "views=[front,wrist]"]))
    with pytest.raises(ConfigError, match="views: expected 1 to 4 different names of cameras, got a, a"):
        read_settings("import", [f"input={tmp_path}", f"output={tmp_path}/o", "kind=kitti", "views=[a,a]"])


def add_camera(root: Path, camera: str, rows: tuple[int, ...]) -> None:
    """Add a camera to a LeRobot dataset, whose pictures have the numbers of the first one's and 5 more."""
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"][camera] = info["features"][CAMERA]
    (root / "meta" / "info.json").write_text(json.dumps(info))
    shown = [[lerobot_data.coded(100 * each + row + 5) for row in range(count)] for each, count in enumerate(rows)]
    if info["codebase_version"].startswith("v3"):
        episodes = read_episodes(root)
        for episode in episodes:
            episode |= {
                name.replace(CAMERA, camera): value for name, value in episode.items() if name.startswith("videos/")
            }
        write_episodes(root, episodes)
        shown = [[frame for episode in shown for frame in episode]]
    for number, frames in enumerate(shown):
        place = {"episode_chunk": 0, "episode_index": number, "chunk_index": 0, "file_index": 0}
        write_video(root / info["video_path"].format(video_key=camera, **place), frames, 10.0)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_cameras_of_lerobot(tmp_path, version):
    rows, wrist = (12, 9, 14), "observation.images.wrist"
    add_camera(write_dataset(tmp_path / "in", rows, version=version), wrist, rows)
    given = [f"input={tmp_path}/in", f"output={tmp_path}/out", "kind=lerobot", "lerobot=actions", "image_size=[32,96]"]
    given += [f"lerobot.video=[{CAMERA},{wrist}]", "lerobot.action=action", "fps=10", "workers=0"]
    assert run(read_settings("import", given)) == 0
    episodes = read_split(tmp_path / "out", "train").episodes
    assert [episode.num_frames for episode in episodes] == list(rows)
    for index, episode in enumerate(episodes):
        parts = episode.views.split(read_frames(episode))
        numbers = [100 * index + row for row in range(rows[index])]
        assert lerobot_data.numbers_in(parts["front"]) == numbers
        assert lerobot_data.numbers_in(parts["wrist"]) == [number + 5 for number in numbers]
        assert episode.actions[:, 0].tolist() == numbers
    with pytest.raises(ConfigError, match=r"lerobot\.video: expected names of features, got \(\)"):
        run(read_settings("import", [*given, "lerobot.video=[]"]))
    with pytest.raises(DatasetError, match=r"expected observation\.images\.top among the features with pictures"):
        run(read_settings("import", [*given, f"lerobot.video=[{CAMERA},observation.images.top]"]))
