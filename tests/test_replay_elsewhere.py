"""A rollout's folder that travels: another home, another folder, another checkout, and the same tokens there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entry import read_settings
from rich.console import Console
from tiny_adapter import save_adapter
from tiny_refiner import tiny_refiner
from tiny_rollouts import Batch, texts, told

import terra
from terra.config.files import register_resolvers
from terra.errors import ConfigError
from terra.generate import run as generate
from terra.locations import PACKAGE, location, places_of, with_locations
from terra.rollout_record import read_record

pytestmark = pytest.mark.slow

ROOT = Path(terra.__file__).parent.parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """The home where rollouts are made."""
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("TERRA_WORLDS", raising=False)
    return home


@pytest.fixture
def other_home(tmp_path: Path) -> Path:
    """The home where rollouts are made again."""
    home = tmp_path / "mnt" / "users" / "bob"
    home.mkdir(parents=True)
    return home


@pytest.fixture
def batch(home: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    """Contexts, a trajectory, and models in the home."""
    for name, folder in (("world_model", tiny_model), ("tokenizer", tiny_tokenizer)):
        shutil.copytree(folder, home / "models/mine" / name)
    return Batch(home, home / "models/mine/world_model", home / "models/mine/tokenizer")


def make(batch: Batch, output: Path, **changes: Any) -> Path:
    settings = {
        "context": batch.folder / "c0",
        "trajectory": batch.folder / "drive.json",
        "model": "folder",
        "model.path": batch.model.parent,
        "engine": "hf",
        "overlap": 2,
        "num_frames": 10,
        "output": output,
    } | changes
    register_resolvers()
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return generate(read_settings("generate", given), Console(quiet=True))


def check_record(folder: Path, home: Path) -> dict[str, Any]:
    record = read_record(folder)
    for text in texts(record):
        assert not Path(text).is_absolute(), text
        for path in (str(home), home.name, str(ROOT), str(folder.parent)):
            assert path not in text, text
    return record


def terra_at(checkout: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `terra` of a checkout, in a home of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TERRA_WORLDS"}
    environment |= {"HOME": str(home), "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, "-m", "terra", *arguments],
        **{"env": environment, "cwd": home, "capture_output": True, "text": True, "timeout": 240, "check": False},
    )


def copy_checkout(to: Path, *left_out: str) -> Path:
    for name in ("terra", "tokenizer", "decoder", "conf"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", *left_out))
    return to


class TestOfOnesOwnFiles:
    def test_made_again_in_another_home_by_another_checkout(self, batch, home, other_home, tmp_path):
        made = make(batch, home / "outputs/first", adapter=save_adapter(home / "night", batch.model, seed=1))
        assert check_record(made, home)["inputs"]["context"] == ["../../c0"]
        there = Path(shutil.copytree(made, other_home / "received"))
        for name in ("c0", "drive.json"):
            shutil.move(home / name, there / name)
        shutil.move(home / "models/mine", other_home / "weights")
        shutil.move(home / "night", other_home / "night")
        shutil.rmtree(home)
        checkout = copy_checkout(tmp_path / "checkout", "*.safetensors", "*.gif", "*.zip")
        given = [f"folder={there}", "model.path=weights", "adapter=night"]
        done = terra_at(checkout, other_home, "replay", *given)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\ntokens     the same\n" in done.stdout
        shutil.move(there / "c0", other_home / "frames")
        done = terra_at(checkout, other_home, "replay", *given)
        assert (done.returncode, done.stderr) == (0, "")
        assert "context: ../../c0 is not here: taken from tokens.safetensors\n" in done.stdout
        done = terra_at(checkout, other_home, "replay", *given, "context=gone/*.png")
        assert done.returncode == 2
        assert re.fullmatch(r"error: context: expected it at .*, found none: give context=PATH\n", done.stderr)
        done = terra_at(checkout, other_home, "replay", *given, "context=frames/*.png")
        assert done.returncode == 0
        assert "is not here" not in done.stdout

    def test_a_tree_that_moves_as_a_whole_needs_no_setting(self, batch, home, other_home, monkeypatch):
        make(batch, home / "outputs/first")
        batch.write(
            batch.line(0),
            batch.line(1, context=str(home / "c1")),
            batch.line(2, trajectory=str(home / "drive.json")),
        )
        assert batch.run() == 0
        for name in ("r0", "r1", "r2"):
            record = check_record(batch.output / "rollouts" / name, home)
            assert record["batch"]["manifest"] == "../../../manifest.jsonl"
            assert record["batch"]["request"]["trajectory"] == "drive.json"
        assert batch.run() == 0
        assert len(batch.log()) == 3  # nothing is made twice
        shutil.move(home, other_home / "tree")
        monkeypatch.setenv("HOME", str(other_home))
        for name in ("outputs/first", "out/rollouts/r0", "out/rollouts/r1", "out/rollouts/r2"):
            assert told(other_home / "tree" / name)[0] == 0

    def test_a_part_that_users_wrote_may_have_paths(self, batch, home):
        batch.write(batch.line(0))
        given = {"decoder._target_": "tiny_rollouts.own_decoder", "+decoder.notes": home / "notes.txt"}
        for _ in range(2):  # which are the same in the second run
            assert batch.run(**given) == 0
        assert check_record(batch.output / "rollouts/r0", home)["decoder"]["notes"] == "../../../notes.txt"
        assert len(batch.log()) == 1
        with pytest.raises(ConfigError, match=r"decoder: expected one of framewise, refiner, got 'tiny_rollouts.own_"):
            told(batch.output / "rollouts/r0")

    def test_files_beyond_the_home_are_named_alone(self, batch, home, tmp_path):
        made = make(batch, tmp_path / "disk/first")
        record = check_record(made, home)
        assert record["inputs"] | {"sample_id": 0} == {
            **record["inputs"],
            "context": ["c0"],
            "trajectory": "drive.json",
            "sample_id": 0,
        }
        assert record["checkpoints"]["tokenizer"]["folder"] == "mine"
        with pytest.raises(ConfigError, match=r"^tokenizer: expected it at .*: give model.path=DIR"):
            told(made)
        code, said = told(made, **{"model.path": batch.model.parent})
        assert code == 0
        assert said.count("is not here: taken from tokens.safetensors") == 2
        given = {"model.path": batch.model.parent, "context": home / "c0", "trajectory": home / "drive.json"}
        assert told(made, **given)[0] == 0


@pytest.fixture
def made(batch: Batch, home: Path) -> Path:
    return make(batch, home / "outputs/first")


def test_other_content_is_refused_by_its_hash(made, batch, home, tiny_model):
    expected = "expected the content that the rollout was made from"
    with pytest.raises(ConfigError, match=rf"^context .*/c1: {expected} \(\w{{12}}\), got another \(\w{{12}}\)$"):
        told(made, context=home / "c1")
    drive = home / "other.json"
    drive.write_text((home / "drive.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=rf"^trajectory .*/other.json: {expected}"):
        told(made, trajectory=drive)
    shutil.copytree(batch.model.parent, home / "others")
    weights = home / "others/tokenizer/config.json"
    weights.write_text(weights.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"^tokenizer .*/others/tokenizer: expected the weights \w{12} of"):
        told(made, **{"model.path": home / "others"})
    with pytest.raises(ConfigError, match=r"^actions: expected|^trajectory: expected the file of the actions"):
        told(made, actions=drive)
    with pytest.raises(ConfigError, match=r"^adapter=.*night: expected none"):
        told(made, adapter=save_adapter(home / "night", tiny_model, seed=1))
    with pytest.raises(ConfigError, match=r"^map=.*map.csv: expected none"):
        told(made, map=home / "map.csv")
    with pytest.raises(ConfigError, match=r"^decoder.pretrained: expected none"):
        told(made, **{"decoder.pretrained": home})
    assert told(made)[0] == 0


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers.*")
def test_a_refiner_is_known_by_its_weights(batch, home):
    tiny_refiner().save_pretrained(home / "refiner")
    tiny_refiner(seed=1).save_pretrained(home / "another")
    made = make(batch, home / "outputs/first", decoder="refiner", **{"decoder.pretrained": home / "refiner"})
    assert check_record(made, home)["decoder"]["checkpoint"]["folder"] == "../../refiner"
    assert told(made)[0] == 0
    (home / "refiner").rename(home / "moved")
    with pytest.raises(ConfigError, match=r"^decoder: expected it at .*/refiner or .*: give decoder.pretrained=DIR$"):
        told(made)
    code, text = told(made, **{"decoder.pretrained": home / "moved"})
    assert (code, text.splitlines()[1]) == (0, "pixels     the same")
    with pytest.raises(ConfigError, match=r"^decoder .*/another: expected the weights \w{12} of the rollout"):
        told(made, **{"decoder.pretrained": home / "another"})


def test_worlds_are_known_by_name_and_their_contexts_by_place(batch, home, other_home, monkeypatch):
    worlds = home / ".cache/terra/worlds"
    shutil.copytree(batch.model.parent, worlds / "doom")
    shutil.copytree(home / "c0", worlds / "doom/contexts/hall")
    given = {"model": "doom", "model.path": None, "context": worlds / "doom/contexts/hall"}
    made = make(batch, home / "outputs/first", **given)
    record = check_record(made, home)
    assert [each["model"] for each in record["checkpoints"].values()] == ["doom", "doom"]
    assert record["inputs"]["context"] == ["worlds:doom/contexts/hall"]
    there = Path(shutil.copytree(made, other_home / "received"))
    shutil.copy(home / "drive.json", there)
    monkeypatch.setenv("HOME", str(other_home))
    monkeypatch.setattr("terra.worlds.places.archives_at_hand", dict)  # a clone unpacks its own doom
    with pytest.raises(ConfigError, match=r"^model=doom: no folder .*: unpack its archive.*, or give model.path="):
        told(there)
    shutil.copytree(worlds, other_home / "unpacked")
    monkeypatch.setenv("TERRA_WORLDS", str(other_home / "unpacked"))
    assert told(there)[0] == 0


def test_the_shipped_model_adapter_and_context_are_found_in_another_checkout(home, other_home, tmp_path):
    demo, output = ROOT / "terra/demo", home / "outputs/snow"
    arguments = ["experiment=demo", "num_frames=5", f"adapter={demo}/adapters/snow", f"output={output}"]
    done = terra_at(ROOT, home, "generate", *arguments)
    assert done.returncode == 0, done.stderr
    record = check_record(output, home)
    assert [each["model"] for each in record["checkpoints"].values()] == ["demo", "demo"]
    assert record["adapter"]["shipped"] == "snow"
    there = shutil.move(output, other_home / "received")
    shutil.rmtree(home)
    done = terra_at(copy_checkout(tmp_path / "checkout"), other_home, "replay", f"folder={there}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ntokens     the same\npixels     the same\n" in done.stdout


class TestLocations:
    @pytest.mark.parametrize(
        ("path", "folder", "expected"),
        [
            ("home/alice/data/c0", "home/alice/out/r", "../../data/c0"),
            ("home/alice/data/*.png", "home/alice/out/r", "../../data/*.png"),
            ("home/alice/data/c0", "disk/out/r", "c0"),
            ("disk/data/c0", "home/alice/out/r", "c0"),
            ("disk/data/c0", "disk/out/r", "../../data/c0"),
            (".cache/terra/worlds/doom/tokenizer", "home/alice/out/r", "tokenizer"),
            ("home/alice/.cache/terra/worlds/doom/tokenizer", "disk/out/r", "worlds:doom/tokenizer"),
        ],
    )
    def test_lead_through_no_home(self, home, tmp_path, path, folder, expected):
        (tmp_path / folder).mkdir(parents=True)
        assert location(tmp_path / path, tmp_path / folder) == expected

    def test_of_the_package_are_found_again(self, home):
        path = PACKAGE / "demo/contexts/day"
        assert location(path, home) == "terra:demo/contexts/day"
        assert places_of("terra:demo/contexts/day", home)[0] == path

    def test_of_strangers_stay_where_files_may_be(self, home):
        for text in ("/etc/passwd", "terra:/etc/passwd", "terra:../../etc/passwd", "worlds:../passwd"):
            assert places_of(text, home) == [home / "passwd"]

    def test_stand_for_absolute_paths_alone(self, home):
        value = {"a": [str(home / "x"), "y/z", 3, None], "b": {"c": True}}
        assert with_locations(value, home) == {"a": ["x", "y/z", 3, None], "b": {"c": True}}
