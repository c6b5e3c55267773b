"""`terra inspect data=FOLDER`: what is in a folder, what an import would keep, and the command that imports it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from entry import compose, read_settings
from hypothesis import given, strategies as st
from missing import run_without
from omegaconf import OmegaConf
from PIL import Image
from tiny_bags import EPOCH, coded, compressed, joints, packed, twist, write_mcap
from tiny_driving import write_driving
from tiny_sources import (
    write_gps,
    write_kitti,
    write_lerobot,
    write_nuscenes,
    write_pictures,
    write_table,
    write_tub,
    write_video,
    write_video_poses,
)
from tiny_tubs import START, drive as tubs_drive, write_old_tub, write_tub as write_plan

import terra.dataset.importing.survey as looking
from terra.actions import parse_space
from terra.dataset import read_split
from terra.dataset.importing.command import run as import_recordings
from terra.dataset.importing.kinds import open_source
from terra.dataset.importing.proposal import command_line, propose_fps, propose_held_out, propose_size
from terra.dataset.importing.recognize import recognize
from terra.dataset.importing.recognize.lerobot import L2D
from terra.dataset.importing.settings import SourceSettings
from terra.dataset.importing.survey import once_each, survey
from terra.dataset.inspect import run
from terra.errors import ConfigError, DatasetError, TerraError

MULTIPLE = 16


def inspect(folder: Path, *more: str) -> int:
    settings = read_settings("inspect", ["data=x", f"output={folder.parent / 'look'}", *more])
    return run(settings.replace(data=folder))


def shell_words(command: str) -> list[str]:
    """The words of a command as a POSIX shell has them: it drops a backslash with the end of the line."""
    return shlex.split(command.replace("\\\n", ""))


def write_actions(
    folder: Path, columns: dict, *, pictures: bool = False, names=("monday", "sunday"), fps: float = 10.0
) -> Path:
    for name in names:
        if pictures:
            write_pictures(folder / name, 30)
        else:
            write_video(folder / f"{name}.mp4", 30)
        write_table(folder / f"{name}.csv", columns, fps)
    return folder


def write_npz(folder: Path) -> Path:
    for name in ("monday", "sunday"):
        write_video(folder / f"{name}.mp4", 30)
        np.savez(folder / f"{name}.npz", time_s=np.arange(30) / 10, steering=np.linspace(-0.25, 0.5, 30))
    return folder


def write_bags(folder: Path) -> Path:
    """Two bags of 3 s with two cameras, joints and commands."""
    for name in ("monday", "sunday"):
        messages = []
        for index in range(30):
            at = EPOCH + index * 100_000_000
            messages += [(topic, at, compressed(at, packed(coded(index)))) for topic in ("/front", "/rear")]
            messages += [("/joints", at, joints(at, ["elbow"], [0.5])), ("/cmd_vel", at, twist(0.1 * index, -0.5))]
        write_mcap(folder / f"{name}.mcap", messages)
    return folder


def write_sessions(folder: Path) -> Path:
    """A tub of two sessions of 50 records, of which ten of the first are deleted."""
    records = [*tubs_drive(50), *tubs_drive(50, "26-05-02_1", first=50, start=START + 86_400_000)]
    return write_plan(folder, records, deleted=range(20, 30))


def write_cameras(folder: Path) -> Path:
    """Two drives of two cameras."""
    for name in ("monday", "sunday"):
        write_table(folder / f"{name}.csv", KEYS)
        for view in ("front", "wrist"):
            write_video(folder / f"{name}.{view}.mp4", 30)
    return folder


def write_json_keys(folder: Path) -> Path:
    for name in ("monday", "sunday"):
        write_video(folder / f"{name}.mp4", 30)
        actions = [["fire"] if index % 3 == 0 else ["left", "fire"] for index in range(30)]
        document = {"format": "terra-actions", "version": 1, "fps": 10, "actions": actions}
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


KEYS, CHOICES = {"forward": [1] * 30, "left": [0, 1] * 15}, {"action": ["noop", "jump"] * 15}
NUMBERS = {"steering": np.linspace(-0.123456, 0.3, 30), "speed": np.linspace(0, 12.345, 30)}

# name -> (writer, kind, words of the title, drives, frames of the import, words of the command)
SOURCES: dict[str, tuple[Callable[[Path], Path], str, str, int, int, tuple[str, ...]]] = {
    "poses": (write_video_poses, "video_poses", "2 videos with poses (JSON)", 2, 60, ("held_out=[sunday]",)),
    "gpx": (write_gps, "gpx", "2 videos with GPS tracks (GPX)", 2, 160, ("fps=10", "held_out=[sunday]")),
    "fixes": (lambda folder: write_gps(folder, as_csv=True), "gpx", "GPS tracks (CSV)", 2, 160, ("fps=10",)),
    "kitti": (write_kitti, "kitti", "KITTI odometry", 2, 60, ("held_out=[01]",)),
    "nuscenes": (write_nuscenes, "nuscenes", "nuScenes, v1.0-mini", 2, 60, ("held_out=[log-2]",)),
    "tub": (write_tub, "donkeycar", "donkeycar tub, version 2", 1, 40, ("fps=20",)),
    "long_tub": (
        lambda folder: write_tub(folder, 300, step_ms=3),
        "donkeycar",
        "donkeycar tub, version 2",
        1,
        300,
        ("picture_fps=20", "sections=10", "held_out=[long_tub_09]"),
    ),
    "old_tub": (
        lambda folder: write_old_tub(folder, tubs_drive(40, None)),
        "donkeycar",
        "donkeycar tub, version 1",
        1,
        40,
        ("fps=20",),
    ),
    "sessions": (
        lambda folder: write_sessions(folder),
        "donkeycar",
        "donkeycar tub, version 2",
        2,
        90,
        ("held_out=[sessions_26-05-02_1]", "fps=20"),
    ),
    "lerobot_2.0": (
        lambda folder: write_lerobot(folder, "v2.0"),
        "lerobot",
        "LeRobot dataset, version 2.0",
        2,
        60,
        ("lerobot.video=observation.images.top", "lerobot.action=action"),
    ),
    "lerobot_2.1": (write_lerobot, "lerobot", "version 2.1", 2, 60, ("lerobot=actions", "held_out=[episode_000001]")),
    "lerobot_3.0": (
        lambda folder: write_lerobot(folder, "v3.0", statistics=False, num_episodes=3, splits={"val": "0:1"}),
        "lerobot",
        "version 3.0",
        3,
        90,
        ("held_out=[val]", "low:[-0.081,-0.883],high:[1,1]"),
    ),
    "keys": (
        lambda folder: write_actions(folder, KEYS),
        "video_actions",
        "2 videos with actions (CSV)",
        2,
        60,
        ("action_space={kind:keys,names:[forward,left]}",),
    ),
    "choices, it's": (
        lambda folder: write_actions(folder, CHOICES),
        "video_actions",
        "2 videos with actions (CSV)",
        2,
        60,
        ("action_space={kind:choice,names:[jump,noop]}", "output=data/choices_it_s"),
    ),
    "several": (
        write_cameras,
        "video_actions",
        "2 videos of each of 2 cameras with actions (CSV)",
        2,
        60,
        ("views=[front,wrist]", "image_size=[48,128]", "{kind:keys,names:[forward,left]}"),
    ),
    "numbers": (
        lambda folder: write_actions(folder, NUMBERS, pictures=True, fps=20.0),
        "video_actions",
        "2 folders of pictures with actions (CSV)",
        2,
        60,
        ("picture_fps=20", "fps=20", 'units:["",""],low:[-0.124,0],high:[0.3,12.4]}'),
    ),
    "arrays": (write_npz, "video_actions", "2 videos with actions (NPZ)", 2, 60, ("low:[-0.25],high:[0.5]",)),
    "bags": (
        write_bags,
        "mcap",
        "2 bags (MCAP)",
        2,
        60,
        ("bags.video=[/front]", "bags.action=[/cmd_vel.linear.x,/cmd_vel.angular.z]", "held_out=[sunday]"),
    ),
    "json_keys": (write_json_keys, "video_actions", "actions (JSON)", 2, 60, ("{kind:keys,names:[fire,left]}",)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_folder_is_recognized_and_its_printed_command_imports_it(name, tmp_path, monkeypatch, capsys):
    writer, kind, title, num_drives, num_frames, words = SOURCES[name]
    monkeypatch.chdir(tmp_path)
    folder = writer(tmp_path / name)
    assert inspect(folder) == 0
    said, _, command = capsys.readouterr().out.partition("\nto import it:\n")
    lines = said.splitlines()
    assert re.fullmatch(rf"found +.*{re.escape(title)}.* \(kind={kind}\)", lines[0])
    assert lines[1] == f"in         {folder}"
    assert f"drives     {num_drives} drive" in said
    assert re.search(rf" keeps {num_frames} of [\d,]+ frames of {num_drives} drives?: ", said)
    assert "0 doubts; pictures in" in said
    command = command[command.index("terra import") :]
    program, subcommand, *arguments = shell_words(command)
    assert (program, subcommand, arguments[0]) == ("terra", "import", f"kind={kind}")
    for word in words:
        assert any(word in argument for argument in arguments), (word, arguments)
    assert import_recordings(read_settings("import", [*arguments, "workers=0"])) == 0
    (dataset,) = (tmp_path / "data").iterdir()
    splits = {path.name: read_split(dataset, path.name).episodes for path in dataset.iterdir() if path.is_dir()}
    assert sum(episode.num_frames for episodes in splits.values() for episode in episodes) == num_frames
    # Something is held out wherever there is more than one drive, and where a lone one was cut.
    held_out = any("held_out=" in argument for argument in arguments)
    assert held_out == (name not in ("tub", "old_tub"))
    assert splits.keys() == ({"train", "held_out"} if held_out else {"train"})
    size = next(argument for argument in arguments if argument.startswith("image_size="))
    assert all(int(side) % MULTIPLE == 0 for side in re.findall(r"\d+", size))
    # What was imported is recognized, too.
    assert recognize(dataset).kind == "dataset"


def test_the_command_is_quoted_for_a_shell(tmp_path, capsys):
    folder = write_actions(tmp_path / "a $HOME 'b' \\' (c)", CHOICES)
    assert inspect(folder) == 0
    command = capsys.readouterr().out.partition("\nto import it:\n")[2]
    shell = f'terra() {{ {shlex.quote(sys.executable)} -m terra "$@"; }}\n{command} workers=0'
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
    (dataset,) = (tmp_path / "data").iterdir()
    assert len(read_split(dataset, "train").episodes) == 1


def test_terras_own_dataset_is_recognized_and_verified(tmp_path, capsys):
    dataset = write_driving(tmp_path / "town")
    assert inspect(dataset, "verify=true", "workers=0") == 0
    found = capsys.readouterr().out
    assert inspect(dataset, "kind=dataset", "verify=true", "workers=0") == 0
    assert capsys.readouterr().out == found
    assert "10 frames a second of 32x16 from town" in found
    assert "to import it" not in found
    with pytest.raises(
        DatasetError, match=r"expected a whole source, got a part of Terra's own dataset: give data=.*town"
    ):
        inspect(dataset / "train")
    with pytest.raises(ConfigError, match="verify: expected kind=dataset, got kind=kitti"):
        inspect(write_kitti(tmp_path / "kitti"), "verify=true")


def test_what_was_chosen_is_told_beside_what_could_be(tmp_path, capsys):
    cameras = ("observation.images.top", "observation.images.wrist", "observation.images.side")
    features = {"action.delta": ["a", "b"], "action": ["pan", "grip"], "observation.state": ["x", "y", "yaw"]}
    folder = write_lerobot(tmp_path / "arm", cameras=cameras, features=features)
    assert inspect(folder) == 0
    said = capsys.readouterr().out
    assert "# other cameras: lerobot.video=observation.images.wrist | observation.images.side" in said
    assert "# other actions: lerobot.action=action.delta" in said
    assert "# driving? lerobot=state takes the path instead" in said
    assert "           observation.images.side, 64 x 48, 10 frames a second, not taken" in said
    assert re.search(r"\n +pan +-0\.0805 to 1\n", said)
    assert "up to four in one picture: lerobot.video=[observation.images.top,observation.images.wrist]" in said
    both = "lerobot.video=[observation.images.wrist,observation.images.top]"
    assert inspect(folder, "lerobot=actions", "lerobot.action=action", both) == 0
    said = capsys.readouterr().out.replace(" \\\n   ", "")
    assert both in said
    assert re.search(r"\n +observation\.images\.side, 64 x 48, 10 frames a second, not taken\ndrives", said)
    assert said.count("not taken") == 1
    assert '"image_size=[48,128]"' in said
    # A user's own choice stays.
    own = ("lerobot=actions", "lerobot.video=observation.images.side", "lerobot.action=action.delta")
    assert inspect(folder, *own) == 0
    said = capsys.readouterr().out
    assert "lerobot.video=observation.images.side lerobot.action=action.delta" in said.replace(" \\\n   ", "")
    assert re.search(r"\n +a +-0\.0805 to 1\n", said)


def test_driving_without_actions_is_proposed_by_its_names(tmp_path, capsys):
    features = {"observation.state": ["pos_x", "pos_y", "yaw", "v"]}
    folder = write_lerobot(tmp_path / "car", features=features, length=60)
    found = recognize(folder)
    assert found.driving
    assert found.settings["lerobot"] | {} == {
        "video": "observation.images.top",
        "x": "observation.state[pos_x]",
        "y": "observation.state[pos_y]",
        "position_unit": "m",
        "heading": "observation.state[yaw]",
        "heading_unit": "rad",
        "heading_from": "x_ccw",
        "speed": None,
        "speed_unit": "m/s",
    }
    assert inspect(folder) == 2  # sines are no driving
    said = capsys.readouterr().out
    doubts = [line for line in said.splitlines() if line.startswith("doubt: ")]
    assert len(doubts) == len(set(doubts)) == 2
    assert all(line.endswith("(so in 1 more: episode_000001)") for line in doubts)
    assert dict(compose("import", ["kind=lerobot", "input=a", "output=b", "lerobot=l2d"]).lerobot) == L2D


def write_part(folder: Path, what: str) -> Path:
    """A folder that can't be imported."""
    folder.mkdir()
    match what:
        case "archive":
            (folder / "tub.tar.gz").write_bytes(b"x")
        case "zip":
            (folder / "a.zip").write_bytes(b"x")
        case "hdf5":
            (folder / "demo.hdf5").write_bytes(b"x")
        case "rlds":
            (folder / "train.tfrecord-00000-of-00002").write_bytes(b"x")
        case "zarr":
            (folder / "replay.zarr").mkdir()
        case "video":
            write_video(folder / "a.mp4", 3)
        case "names":
            write_video(folder / "a.mp4", 3)
            write_table(folder / "actions.csv", {"go": [1, 0]})
        case "pictures":
            write_pictures(folder, 3)
        case "folders":
            write_pictures(folder / "monday", 3)
        case "time":
            write_video(folder / "a.mp4", 3)
            (folder / "a.csv").write_text("timestamp,gas\n0,1\n")
        case "place":
            write_video(folder / "a.mp4", 3)
            (folder / "a.csv").write_text("time,latitude,longitude\n0,48,11\n")
        case "text":
            write_video(folder / "a.mp4", 3)
            write_table(folder / "a.csv", {"gear": ["up", "down"]})
        case "unnamed":
            write_video(folder / "a.mp4", 3)
            write_table(folder / "a.csv", {"speed (m/s)": [1.5, 2]})
        case "paths":
            write_video(folder / "a.mp4", 3)
            (folder / "a.json").write_text(json.dumps({"format": "terra-trajectory", "frame": "ego"}))
        case "kitti":
            (folder / "sequences" / "00" / "image_2").mkdir(parents=True)
        case "lerobot_1":
            (folder / "meta").mkdir()
            (folder / "meta" / "info.json").write_text('{"codebase_version": "v1.6", "features": {}}')
        case "damaged":
            (folder / "meta").mkdir()
            (folder / "meta" / "info.json").write_text('{"codebase_version": "v2.1", "features')
        case "several":
            write_tub(folder / "sub" / "a", 3)
            write_kitti(folder / "kitti", ["00"], 3)
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("archive", r"got 1 archive \(tub\.tar\.gz\): unpack it first, for example: mkdir -p .*/tub && tar -xf .* -C "),
        ("zip", r"got 1 archive \(a\.zip\): unpack it first, for example: unzip .*a\.zip -d .*/a$"),
        ("hdf5", r"got HDF5 files, as robomimic and ALOHA have them \(demo\.hdf5\), not read: convert it to LeRobot"),
        ("rlds", r"got TFRecord files, as RLDS and Waymo have them \(train\.tfrecord-00000-of-00002\), not read"),
        ("zarr", r"got zarr arrays \(replay\.zarr\), not read"),
        ("video", r"got 1 video \(a\.mp4\) without tables: each needs a table of its name beside it: NAME\.csv"),
        (
            "names",
            r"got 1 video \(a\.mp4\) and 1 table \(actions\.csv\) of different names: call a video's table a\.csv$",
        ),
        (
            "pictures",
            r"got 3 pictures \(000\.jpg, 001\.jpg and 1 more\) alone: an import takes the folder above, with a t",
        ),
        ("folders", r"got 1 folder of pictures \(monday\) without tables"),
        ("time", r"a\.csv: expected a column time_s \(seconds\), got 'timestamp': rename it, if it is seconds"),
        (
            "place",
            r"a\.csv: expected the columns time, lat and lon of a GPS track, got latitude, longitude: rename them",
        ),
        ("text", r"a\.csv: expected numbers in each column, or time_s and action alone .*, got text in gear"),
        ("unnamed", r"a\.csv: columns: expected names such as steering \(a letter, .*\), got 'speed \(m/s\)'"),
        ("paths", r"a\.json: frame: expected 'world', got 'ego'"),
        (
            "kitti",
            r"expected KITTI odometry with poses/NN\.txt, got sequences 00 alone: unpack data_odometry_poses\.zip",
        ),
        ("lerobot_1", r"info\.json: expected LeRobot 2\.x or 3\.x, got version 1\.6: convert it with LeRobot's own"),
        ("damaged", r"info\.json: line 1, column \d+: expected JSON, got"),
        ("several", r"expected one source, got 2: .*kitti/ \(KITTI odometry\), .*sub/ \(1 donkeycar tub, version 2\)"),
        ("empty", r"expected recordings that can be imported, got an empty folder$"),
    ],
)
def test_what_cannot_be_imported_is_told_with_what_to_do(what, message, tmp_path):
    with pytest.raises(TerraError, match=message):
        inspect(write_part(tmp_path / "given", what))
    assert not (tmp_path / "look").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("poses/sunday.mp4", r"got a video with sunday\.json beside it: give their folder, data=.*poses$"),
        ("lone.mp4", r"got a video: give a folder that has a table of its name beside it"),
        ("poses/sunday.json", r"got a table: give its folder, with a video of its name beside it"),
        ("tub.tgz", r"got an archive: unpack it first, for example: mkdir -p .*/tub && tar -xf "),
        ("demo.h5", r"got an HDF5 file, which is not read: convert it"),
        ("notes.txt", r"got a file: give the folder of the recordings, perhaps data="),
    ],
)
def test_a_file_in_place_of_its_folder(name, message, tmp_path):
    write_video_poses(tmp_path / "poses", ["sunday"])
    if not (tmp_path / name).exists():
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DatasetError, match=message):
        inspect(tmp_path / name)


def test_one_folder_deeper_or_higher(tmp_path, capsys):
    write_kitti(tmp_path / "above" / "dataset")
    assert inspect(tmp_path / "above") == 0
    said = capsys.readouterr().out
    assert (
        f"in         {tmp_path / 'above' / 'dataset'}\n           one folder deeper than {tmp_path / 'above'}" in said
    )
    assert f"input={tmp_path / 'above' / 'dataset'} " in said.replace(" \\\n   ", "")
    with pytest.raises(DatasetError, match=r"got a part of KITTI odometry: give data=.*above/dataset$"):
        inspect(tmp_path / "above" / "dataset" / "sequences" / "00" / "image_2")


def test_the_same_problem_is_told_once(tmp_path, capsys):
    names = [f"drive_{number}" for number in range(6)]
    folder = write_actions(tmp_path / "game", KEYS, names=names)
    for name in names[:4]:
        path = folder / f"{name}.mp4"
        path.write_bytes(path.read_bytes()[:-500])
    assert inspect(folder) == 2
    said = capsys.readouterr().out
    (doubt,) = [line for line in said.splitlines() if line.startswith("doubt: ")]
    assert "drive_0.mp4: " in doubt
    assert doubt.endswith("(so in 3 more: drive_1, drive_2, drive_3)")
    assert "1 doubts; pictures in" in said
    assert "drives     2 of 6 drives can be read: drive_0, drive_1, drive_2 and 3 more\n" in said
    assert "\n           60 frames, 5.8 s\n" in said
    assert "keeps 60 of 60 frames of 2 drives" in said
    for name in names[4:]:
        (folder / f"{name}.mp4").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"expected a drive that can be read, got 6 damaged: .* \(so in 3 more: "):
        inspect(folder)


def test_lines_that_differ_in_drive_and_numbers_alone_are_one():
    problems = [(name, f"/data/{name}.csv: row {row}: expected 3, got {row}.5") for row, name in enumerate("abcde")]
    other = ("b", "/data/b.csv: expected a column")
    assert once_each([*problems, other]) == [
        "/data/a.csv: row 0: expected 3, got 0.5 (so in 4 more: b, c, d and 1 more)",
        "/data/b.csv: expected a column",
    ]


def test_of_many_drives_a_spread_sample_is_looked_at(tmp_path, capsys, monkeypatch):
    folder = write_actions(tmp_path / "many", KEYS, names=[f"drive_{number:02d}" for number in range(16)])
    settings = read_settings("inspect", [f"data={folder}", f"output={tmp_path / 'look'}"])
    found = recognize(folder)
    source = open_source(found.kind, folder, SourceSettings(**found.settings))
    assert survey(source, 0.0).num_tried == 1  # the first drive is opened, however little time there is
    monkeypatch.setattr(looking, "_MOST_NUMBERS", 4 * 90 - 1)  # of 30 times and 60 actions each
    assert [drive.name for drive in survey(source, 60.0).drives] == ["drive_00", "drive_04", "drive_08", "drive_12"]
    assert run(settings) == 0
    said = capsys.readouterr().out
    assert "           120 frames, 11.6 s in 4 of them, evenly spread: there was no more time (max_seconds=)" in said
    # All tables are read for the action space, whatever is opened.
    assert "action_space={kind:keys,names:[forward,left]}" in said
    assert "held_out=[drive_14,drive_15]" in said


def test_gaps_and_rates_that_vary_are_told(tmp_path, capsys):
    folder = write_tub(tmp_path / "tub", 100)
    lines = (folder / "catalog_0.catalog").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records[60:]:
        record["_timestamp_ms"] += 700
    (folder / "catalog_0.catalog").write_text("\n".join(map(json.dumps, records)) + "\n")
    inspect(folder)
    said = capsys.readouterr().out
    assert "gaps       1 in 1 drive, the longest 0.75 s in tub" in said
    assert re.search(r"rate +20 frames a second in the mean, even", said)
    for number, record in enumerate(records):
        record["_timestamp_ms"] = 1000 + 50 * number + 30 * (number % 2)
    (folder / "catalog_0.catalog").write_text("\n".join(map(json.dumps, records)) + "\n")
    inspect(folder)
    assert "variable in 1 of 1 drives" in capsys.readouterr().out


def test_a_break_is_no_gap_and_what_is_left_out_is_told(tmp_path, capsys):
    assert inspect(write_sessions(tmp_path / "tub")) == 0
    said = capsys.readouterr().out
    assert "\ngaps       none\n" in said
    assert "\nbreaks     1 by deleted records\n" in said
    assert "\n           leaves out 10: deleted records\n" in said
    assert "\n           cuts these into 3 stretches without interruption\n" in said


def test_a_drive_that_an_import_would_refuse_is_a_doubt(tmp_path, capsys):
    folder = write_video_poses(tmp_path / "road", ["long", "short"])
    lines = json.loads((folder / "short.json").read_text())
    (folder / "short.json").write_text(json.dumps({**lines, "poses": lines["poses"][:20]}))
    assert inspect(folder) == 2
    said = capsys.readouterr().out
    assert "at 10 frames a second keeps 30 of 60 frames of 1 drive: 3.0 s" in said
    assert "fails for 1 drive: see the doubts" in said
    assert re.search(r"\ndoubt: .*short\.json: expected frames with 3 s of poses after them", said)


def test_cameras_that_are_not_taken_are_told(tmp_path, capsys):
    inspect(write_kitti(tmp_path / "kitti"))
    assert (
        "\ncameras    image_2, 64 x 48, left, color\n           image_3, right, color, not taken\n"
        in capsys.readouterr().out
    )
    inspect(write_bags(tmp_path / "bags"))
    said = capsys.readouterr().out
    kind = "10 pictures a second, sensor_msgs/CompressedImage"
    assert f"\ncameras    /front, 64 x 32, {kind}\n           /rear, 64 x 32, {kind}, not taken\n" in said


def test_pictures_without_a_rate_are_given_a_guess_that_is_told(tmp_path):
    folder = write_actions(tmp_path / "in", {"gas": [0.5] * 12}, pictures=True)
    found = recognize(folder)
    assert found.settings["picture_fps"] == 10
    assert any(line.startswith("picture_fps: nothing tells how many pictures") for line in found.comments)


def test_pictures_of_what_was_found(tmp_path):
    inspect(write_actions(tmp_path / "game", KEYS))
    assert {path.name for path in (tmp_path / "look").iterdir()} == {"contact_sheet.png", "actions.png"}
    with Image.open(tmp_path / "look" / "contact_sheet.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape[1] >= 2 * 192
    inspect(write_kitti(tmp_path / "road"))
    assert (tmp_path / "look" / "paths.png").is_file()


def test_bags_without_their_extra(tmp_path):
    write_bags(tmp_path / "in")
    given = ["terra", "inspect", f"data={tmp_path / 'in'}", f"output={tmp_path / 'look'}"]
    code, said = run_without("mcap", f"import sys; sys.argv = {given!r}; from terra.cli import main; main()", tmp_path)
    assert code == 2
    (line,) = said
    assert line.startswith(f"error: {tmp_path / 'in'}: MCAP bags: kind=mcap needs the package mcap: pip install ")


def damages(path: Path) -> list[bytes]:
    """What may stand in a file instead of what should."""
    content = path.read_bytes()
    found = [
        b"",
        b"{}",
        b"[]",
        b"5",
        b"\xff\xfe\x00",
        b'{"a": {"b": []}}',
        b"\n\n",
        b",,,\n1,2,3\n",
        content[: len(content) // 2],
    ]
    if path.suffix == ".json" and content.startswith(b"{"):
        document = json.loads(content)
        for key in document:
            found += [json.dumps({**document, key: value}).encode() for value in (None, -1, "x", [], {"a": [None]})]
            found.append(json.dumps({name: each for name, each in document.items() if name != key}).encode())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["poses", "fixes", "kitti", "nuscenes", "tub", "lerobot_2.1", "lerobot_3.0", "arrays", "bags"]
)
def test_damage_is_told_in_one_line(name, tmp_path):
    folder = SOURCES[name][0](tmp_path / "whole")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".jpg", ".png")]
    # One file of each kind and depth: those of one kind are read alike.
    chosen = {path.suffix + str(len(path.relative_to(folder).parts)): path for path in reversed(files)}
    told = 0
    for path in chosen.values():
        for number, damage in enumerate(damages(path)):
            # A folder of its own, because sources keep what they have read of a folder.
            other = shutil.copytree(folder, tmp_path / f"{path.name}_{number}" / "in")
            (other / path.relative_to(folder)).write_bytes(damage)
            try:
                told += inspect(other, "max_seconds=1") == 2
            except TerraError as error:
                assert "\n" not in str(error)  # noqa: PT017
                told += 1
            shutil.rmtree(other)
    assert told > len(chosen)


# What is proposed


@given(height=st.integers(16, 3000), width=st.integers(16, 4000))
def test_a_proposed_size_is_of_the_pictures_aspect(height, width):
    rows, columns = propose_size((height, width))
    assert rows % MULTIPLE == columns % MULTIPLE == 0
    assert rows <= height
    assert columns <= width
    ratio = columns / rows / (width / height)
    if 0.25 < width / height < 4 and min(height, width) > 128:
        assert 0.85 < ratio < 1.15  # little is cropped
        assert 15_000 < rows * columns < 80_000


@given(rates=st.lists(st.floats(1.0, 120.0), min_size=1, max_size=5), driving=st.booleans())
def test_a_proposed_rate_is_one_that_all_drives_have(rates, driving):
    fps = propose_fps(rates, driving=driving)
    assert 1 <= fps <= (10 if driving else 30)
    assert fps <= max(1.05 * min(rates), 1)
    if min(rates) >= 10 and driving:
        assert fps == 10


def test_rates_of_cameras_are_rounded():
    assert [propose_fps([rate], driving=False) for rate in (29.97, 59.94, 24.9, 50.0, 9.64, 14.3)] == [
        *(30.0, 30.0, 25.0, 25.0, 10.0, 14.0)
    ]


@given(count=st.integers(1, 4000))
def test_about_a_tenth_is_held_out_and_some_is_left(count):
    from fnmatch import fnmatchcase

    drives = [f"episode_{index:06d}" for index in range(count)]
    patterns = propose_held_out(drives, {})
    held_out = [name for name in drives if any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert len(patterns) <= 12
    if count == 1:
        assert not held_out
    else:
        assert held_out == drives[-len(held_out) :]
        assert 1 <= len(held_out) < count
        assert count / 10 - 0.5 <= len(held_out) <= 2 * max(1, round(count / 10))


def test_recordings_are_held_out_whole_and_declared_splits_first():
    recordings = {"log-a": ("s1", "s2"), "log-b": ("s3",), "log-c": ("s4",)}
    drives = ("s1", "s2", "s3", "s4")
    assert propose_held_out(drives, recordings) == ["log-c"]
    assert propose_held_out(drives, {"test": ("s1",)}, declared=("val", "test")) == ["test"]


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n\x1c\x1d\x1e\x85\u2028\u2029\v\f"), min_size=1)
)
def test_any_name_survives_shell_and_hydra(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (_, _, word) = shell_words(command_line({"input": text}))
    value = OverridesParser.create().parse_override(word).value()
    assert str(OmegaConf.create({"value": value}).value) == text


def test_a_declared_space_is_taken_as_it_is(tmp_path):
    space = {"kind": "vector", "names": ["pan"], "units": ["rad"], "low": [-3.0], "high": [3.0]}
    write_video(tmp_path / "in" / "a.mp4", 30)
    actions = [{"pan": 0.01 * index} for index in range(30)]
    document = {"format": "terra-actions", "version": 1, "space": space, "fps": 10, "actions": actions}
    (tmp_path / "in" / "a.json").write_text(json.dumps(document))
    found = recognize(tmp_path / "in")
    assert parse_space(found.settings["action_space"], "") == parse_space(space, "")
    assert found.comments == ()
