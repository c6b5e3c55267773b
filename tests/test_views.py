"""Several cameras in one picture: the layout, the key `views` of every file, and what is made of each view."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from entry import read_settings
from hypothesis import given, strategies as st
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from tiny_worlds import KEYS, SIZE, make_models

from decoder.video import VideoWriter, read_video, write_video
from terra.actions import save_actions
from terra.config.files import register_resolvers
from terra.context import read_context
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError, ConfigError, ContextError, DatasetError
from terra.generate import run as generate
from terra.generate_settings import check_inputs
from terra.model_facts import ModelFacts
from terra.pairing import check_pairing
from terra.reconstruction import Reconstruction
from terra.replay import run as replay
from terra.views import Views
from terra.world_model import load_config

NAMES = ("front", "wrist", "left", "right")
SIZES = st.tuples(*[st.integers(1, 12).map(lambda count: 16 * count)] * 2)


@given(st.integers(1, 4), SIZES, st.floats(0.3, 3.5))
def test_tiles_are_what_was_tiled(count, size, aspect):
    views = Views.tiled(NAMES[:count], size, aspect)
    random = np.random.default_rng(0)
    pictures = {name: random.integers(1, 256, (2, *views.tile_size(name), 3), dtype=np.uint8) for name in NAMES[:count]}
    whole = views.tile(pictures)
    assert whole.shape == (2, *size, 3)
    assert {name: part.tolist() for name, part in views.split(whole).items()} == {
        name: picture.tolist() for name, picture in pictures.items()
    }
    # What no camera shows is black, and nothing else is: three of four tiles.
    assert (whole > 0).mean() == pytest.approx(0.75 if count == 3 else 1.0)
    assert len({views.tile_size(name) for name in views.names}) == 1
    assert Views.read({"views": json.loads(json.dumps(views.describe()))}, "a") == views
    enlarged = whole.repeat(2, axis=1).repeat(2, axis=2)
    for name, part in views.split(enlarged).items():
        np.testing.assert_array_equal(part[:, ::2, ::2], pictures[name])


@pytest.mark.parametrize(
    ("size", "aspect", "tiles"),
    [
        ((144, 256), 4 / 3, (144, 128)),
        ((144, 256), 16 / 9, (144, 128)),  # 8:9 or 32:9: as near, side by side
        ((256, 256), 4 / 3, (128, 256)),
        ((256, 256), 1 / 2, (256, 128)),
        ((256, 128), 4 / 3, (128, 128)),
    ],
)
def test_two_views_keep_near_to_the_cameras_aspect(size, aspect, tiles):
    assert Views.tiled(NAMES[:2], size, aspect).tile_size("front") == tiles


@pytest.mark.parametrize(
    ("names", "size", "message"),
    [
        (NAMES, (136, 256), r"image_size: expected a multiple of 16 to be halved for views, got \[136, 256\]"),
        (("a", "a"), (32, 32), "views: expected 1 to 4 different names of cameras, got a, a"),
        ((), (32, 32), "views: expected 1 to 4 different names of cameras, got none"),
        ((*NAMES, "top"), (32, 32), "views: expected 1 to 4 different names of cameras"),
        (("../a", "b"), (32, 32), r"views: expected a name of letters, digits, '_' and '-', got '\.\./a'"),
    ],
)
def test_what_can_not_be_tiled_is_one_line(names, size, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Views.tiled(names, size, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": [[0, 0, 18, 16], [16, 0, 32, 16]]}, r"boxes: expected parts that do not overlap, got front \[0, 0"),
        ({"boxes": [[0, 0, 16, 16], [16, 0, 34, 16]]}, "boxes: expected a part of 32 x 16 pixels for wrist"),
        ({"boxes": [[0, 0, 16, 16], [20, 0, 20, 16]]}, "boxes: expected a part of 32 x 16 pixels for wrist"),
        ({"boxes": [[0, 0, 16, 16]]}, "boxes: expected one for each of front, wrist, got 1"),
        ({"boxes": [[0, 0, 15, 16], [16, 0, 32, 16]]}, r"boxes\[0\]: expected \[left, top, right, bottom\], even"),
        ({"names": ["front"]}, "boxes: expected one for each of front, got 2"),
        ({"more": 1}, "expected image_size, names, boxes, got 'more'"),
    ],
)
def test_views_of_a_file_are_checked(change, message):
    known = Views.tiled(NAMES[:2], (16, 32)).describe()
    with pytest.raises(DatasetError, match=f"^dataset.json: views: {message}"):
        Views.read({"views": known | change}, "dataset.json", DatasetError)


def test_edges_within_a_token_are_said(caplog):
    Views.tiled(NAMES[:2], (144, 256)).say_cut_patches("data")
    assert not caplog.messages
    Views.tiled(NAMES, (144, 256)).say_cut_patches("data")
    (message,) = caplog.messages
    assert message.startswith("data: expected views that meet at a multiple of 16 pixels, got 72:")


VIEWS = Views.tiled(("front", "wrist"), SIZE)


def picture(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, *pictures: np.ndarray) -> Path:
    """A picture, or a folder of them."""
    if path.suffix:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures[0]).save(path)
        return path
    for index, each in enumerate(pictures):
        save(path / f"{index}.png", each)
    return path


def load(source, num_frames: int = 1, views: Views | None = VIEWS) -> np.ndarray:
    return read_context(source, num_frames=num_frames, image_size=SIZE, fps=10.0, views=views)


def test_a_context_is_whole_pictures_or_those_of_each_view(tmp_path):
    height, width = VIEWS.tile_size("front")
    front, wrist = ([picture(10 * view + index, height, width) for index in range(2)] for view in (0, 1))
    whole = VIEWS.tile({"front": np.stack(front), "wrist": np.stack(wrist)})
    np.testing.assert_array_equal(load(save(tmp_path / "whole", *whole), 2), whole)
    by_view = {"front": save(tmp_path / "both/front", *front), "wrist": save(tmp_path / "both/wrist", *wrist)}
    np.testing.assert_array_equal(load(by_view, 2), whole)
    np.testing.assert_array_equal(load(tmp_path / "both", 2), whole)
    np.testing.assert_array_equal(load([tmp_path / "both"], 2), whole)
    save(tmp_path / "one/front.png", front[0])
    save(tmp_path / "one/wrist.PNG", wrist[0])
    save(tmp_path / "one/other.png", wrist[1])
    np.testing.assert_array_equal(load(tmp_path / "one"), whole[:1])
    # A world of one camera has no views, whatever the files are called.
    save(tmp_path / "single/front.png", whole[0])
    np.testing.assert_array_equal(load(tmp_path / "single", views=None), whole[:1])


def test_each_view_is_cropped_to_its_part_and_taken_at_the_models_rate(tmp_path):
    height, width = VIEWS.tile_size("front")
    for name, fps, step in (("front", 20, 5), ("wrist", 10, 10)):
        with VideoWriter(tmp_path / f"{name}.mp4", fps, size=(4 * width, 2 * height), crf=8) as writer:
            for index in range(8):
                frame = np.full((2 * height, 4 * width, 3), 255, np.uint8)
                frame[:, width : 3 * width] = 40 + step * index  # what is left of the picture's sides is not seen
                writer.append(frame)
    parts = VIEWS.split(load(tmp_path, 3))
    for name in VIEWS.names:
        np.testing.assert_allclose(parts[name].mean(axis=(1, 2, 3)), [40, 50, 60], atol=3)


@pytest.mark.parametrize(
    ("files", "views", "message"),
    [
        (["front.png"], VIEWS, "expected one folder, picture or video of the view wrist, got none"),
        (["front.png", "wrist.png", "wrist.jpg"], VIEWS, "of the view wrist, got wrist.jpg and wrist.png"),
        ({"front": "front.png"}, VIEWS, "context: expected one source for each of front, wrist, got those of front$"),
        ({"front": "a", "left": "b"}, VIEWS, "one source for each of front, wrist, got those of front, left$"),
        ({"front": "a", "wrist": "b"}, None, "context: expected one source, got those of front, wrist$"),
    ],
)
def test_a_wrong_view_of_a_context_is_one_line(tmp_path, files, views, message):
    for name in ["front.png", "wrist.png"] if isinstance(files, dict) else files:
        save(tmp_path / name, picture(0, 32, 24))
    source = {name: tmp_path / file for name, file in files.items()} if isinstance(files, dict) else tmp_path
    with pytest.raises(ContextError, match=message):
        load(source, views=views)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A tiny world of two cameras with random weights, and the settings that name it."""
    folder = tmp_path_factory.mktemp("world")
    return folder, make_models(folder, KEYS, views=VIEWS.describe())


def test_a_world_model_knows_its_views(world, tmp_path):
    folder, _ = world
    config = load_config(folder / "world_model")
    assert config.camera_views == EngineSpec.of(config).views == VIEWS
    assert ModelFacts.read(folder / "tokenizer", folder / "world_model").views == VIEWS
    check_pairing(folder / "tokenizer", EngineSpec.of(config))
    make_models(tmp_path, KEYS)
    assert "views" not in json.loads((tmp_path / "world_model" / "config.json").read_text())
    assert load_config(tmp_path / "world_model").camera_views is None
    make_models(tmp_path, KEYS, views=Views.tiled(VIEWS.names, (48, 32)).describe())
    with pytest.raises(CheckpointError, match=r"expects pictures of \(48, 32\) for its views, got \(32, 48\)$"):
        check_pairing(tmp_path / "tokenizer", EngineSpec.of(load_config(tmp_path / "world_model")))
    config = json.loads((tmp_path / "world_model" / "config.json").read_text())
    config["views"]["boxes"][0] = [0, 0, 64, 64]
    (tmp_path / "world_model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"views: boxes: expected a part of 32 x 48 pixels for front"):
        load_config(tmp_path / "world_model")


def test_a_rollout_has_a_video_of_each_view(world, tmp_path):
    register_resolvers()
    _, parts = world
    fronts, wrists = ([picture(10 * view + index, 32, 24) for index in range(2)] for view in (0, 1))
    by_view = {"front": save(tmp_path / "both/front", *fronts), "wrist": save(tmp_path / "both/wrist", *wrists)}
    whole = save(tmp_path / "whole", *VIEWS.tile({"front": np.stack(fronts), "wrist": np.stack(wrists)}))
    values = np.random.default_rng(0).integers(0, 2, (8, 2)).astype(float)
    save_actions(tmp_path / "actions.json", KEYS, 10.0, values)
    given = [*parts, "engine=hf", "overlap=2", f"actions={tmp_path}/actions.json", "num_context=2", "num_frames=6"]

    def made(output: str, context: str) -> Path:
        settings = read_settings("generate", [*given, f"context={context}", f"output={tmp_path}/{output}", "png=true"])
        check_inputs(settings)
        return generate(settings, Console(quiet=True))

    named = "{" + ",".join(f"{name}:{path}" for name, path in by_view.items()) + "}"
    videos = [made("a", str(whole)), made("b", str(tmp_path / "both")), made("c", named)]
    tokens = [load_file(video / "tokens.safetensors")["tokens"] for video in videos]
    assert tokens[0].equal(tokens[1])
    assert tokens[0].equal(tokens[2])
    for video in videos:
        record = json.loads((video / "rollout.json").read_text())
        assert Views.read(record, "record") == VIEWS
        assert {"video_front.mp4", "video_wrist.mp4"} <= record["files"].keys()
        frames = np.stack([np.asarray(Image.open(path)) for path in sorted((video / "frames").iterdir())])
        for name, part in VIEWS.split(frames).items():
            write_video(part, tmp_path / "part.mp4", 10.0)
            np.testing.assert_array_equal(read_video(video / f"video_{name}.mp4"), read_video(tmp_path / "part.mp4"))
        console = Console(record=True, quiet=False, width=300)
        assert replay(read_settings("replay", [f"folder={video}"]), console) == 0
        assert "not here" not in console.export_text()
    assert json.loads((videos[2] / "rollout.json").read_text())["inputs"]["context"] == {
        "front": "../both/front",
        "wrist": "../both/wrist",
    }
    # The files of each view that have moved are found by the folder that holds them, and told by their content.
    (tmp_path / "both").rename(tmp_path / "moved")
    settings = read_settings("replay", [f"folder={videos[2]}", f"context={tmp_path}/moved"])
    assert replay(settings, Console(quiet=True)) == 0
    save(tmp_path / "moved/wrist/1.png", fronts[0])
    with pytest.raises(ConfigError, match="expected the content that the rollout was made from"):
        replay(settings, Console(quiet=True))


def test_each_view_has_its_own_psnr():
    truth = -torch.ones(3, 3, *SIZE)
    decoded = truth.clone()
    decoded[..., VIEWS.areas()["wrist"][1]] += 2 * 51 / 255  # a fifth of the range: -20 log10(0.2)
    found = Reconstruction.of(decoded, truth, 30.0, VIEWS)
    assert found.by_view == {"front": 100.0, "wrist": pytest.approx(13.98, abs=0.01)}
    assert found.line.endswith("(front 100.0, wrist 14.0; held-out frames: 30.0 dB)")
    enlarged = Reconstruction.of(decoded.repeat_interleave(2, -1).repeat_interleave(2, -2), truth, 30.0, VIEWS)
    assert enlarged.by_view == found.by_view
    assert Reconstruction.of(decoded, truth, 30.0).describe().keys() == {"psnr", "expected"}
