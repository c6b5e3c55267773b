"""What a world says of itself on the page: its file, the one kept with Terra, and what the routes tell."""

import json
import shutil
import zipfile
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="needs terra's extra serve")
from serving_fake import CHOICE, DRIVING, KEYS, PLANE, fake

from terra.actions import ActionSpace, Keys
from terra.config.files import DEMO
from terra.config.groups import CheckpointSettings
from terra.errors import ConfigError
from terra.serving.about import SHIPPED_WORLDS, About, Subject, general_line, load_about
from tokenizer.files import read_json
from tokenizer.settings import checked

SUBJECT = {"name": "The disc", "color": [65, 105, 225], "tolerance": 70, "pixels": 8, "frames": 5}


def model(folder: Path) -> CheckpointSettings:
    return CheckpointSettings(pretrained=str(folder), subfolder="world_model")


def test_a_worlds_own_file_goes_before_the_one_kept_with_terra(tmp_path: Path) -> None:
    kept = load_about(model(tmp_path), "pusht")
    assert kept.title == "PushT"
    (tmp_path / "page.json").write_text('{"line": "Push."}')
    assert load_about(model(tmp_path), "pusht") == About(line="Push.")
    inside = CheckpointSettings(pretrained=str(tmp_path / "world_model"))
    assert load_about(inside, "pusht") == About(line="Push.")
    assert load_about(model(tmp_path / "none"), "mine") == About()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ('{"lines": "x"}', "lines: no such setting; did you mean line?"),
        ('{"line": ""}', "line: expected a line of 1 to 200 characters"),
        (json.dumps({"subject": SUBJECT | {"color": [65, 105, 300]}}), r"subject.color"),
        (json.dumps({"subject": SUBJECT | {"frames": 0}}), "subject.frames: expected a whole number of at least 1"),
        (json.dumps({"subject": {"name": "x"}}), "subject.color"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "page.json").write_text(text)
    with pytest.raises(ConfigError, match=f"page.json.*{message}"):
        load_about(model(tmp_path), "mine")


@pytest.mark.parametrize("path", [DEMO / "page.json", *SHIPPED_WORLDS.glob("*.json")], ids=lambda path: path.stem)
def test_each_scene_that_ships_has_its_line(path: Path) -> None:
    about = checked(About, read_json(path, ConfigError), str(path))
    archive = path.with_suffix(".zip")
    if archive.is_file():
        with zipfile.ZipFile(archive) as file:
            names = {name.split("/")[1] for name in file.namelist() if name.startswith("contexts/")}
    else:
        names = {each.name for each in (DEMO / "contexts").iterdir()}
        names |= {f"{each.parent.parent.name}-{each.name}" for each in DEMO.glob("adapters/*/contexts/*")}
    assert set(about.scenes) == names
    assert about.title
    assert about.line


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (DRIVING, "Drive: steer and change the speed."),
        (KEYS, "Play with keys, several at once: forward, back, left, right, fire."),
        (CHOICE, "Play one action at a time: noop, up, right, left, down and more."),
        (PLANE, "Play by moving dx, dy."),
        (Keys(names=["jump"]), "Play with keys, several at once: jump."),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_the_line_of_a_world_that_says_nothing(space: ActionSpace, line: str) -> None:
    assert general_line(space) == line
    assert About().line_for(space) == line
    assert About(line="Look.").line_for(space) == "Look."


def test_the_routes_tell_it(tmp_path: Path) -> None:
    about = About(title="Rooms", scenes={"room": "Look."}, subject=checked(Subject, SUBJECT), downward=("dy",))
    serving = fake(tmp_path, PLANE, about=about)
    try:
        (world,) = httpx.get(f"{serving.url}/v1/worlds").json()["data"]
        assert world["title"] == "Rooms"
        assert world["line"] == "Play by moving dx, dy."
        assert (world["kind"], world["subject"], world["downward"]) == ("vector", SUBJECT, ["dy"])
        scenes = httpx.get(f"{serving.url}/v1/scenes").json()["data"]
        assert {each["id"]: each.get("line") for each in scenes} == {"room": "Look.", "yard": None}
        (card,) = httpx.get(f"{serving.url}/v1/models").json()["data"]
        assert card["neutral"] == {"dx": 0, "dy": 0}
    finally:
        serving.stop()


def test_the_disc_of_pusht_is_seen_in_its_scenes(tmp_path: Path) -> None:
    """With what ships, each context picture has more pixels of the disc than the bound, with room to spare."""
    subject = checked(About, read_json(SHIPPED_WORLDS / "pusht.json", ConfigError)).subject
    assert subject is not None
    shutil.unpack_archive(SHIPPED_WORLDS / "pusht.zip", tmp_path)
    pictures = list(tmp_path.glob("contexts/*/*.png"))
    assert len(pictures) == 12
    for path in pictures:
        away = np.asarray(Image.open(path).convert("RGB"), float) - np.array(subject.color)
        assert (np.linalg.norm(away, axis=-1) <= subject.tolerance).sum() > 2 * subject.pixels, path
