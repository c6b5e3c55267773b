"""`terra-generate` from its command line: what it writes, and every way in which its input can be wrong."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entry import load_script
from PIL import Image
from safetensors.numpy import load_file
from tiny import COLS, ROWS
from tiny_adapter import save_adapter

import terra
from decoder.video import probe_video, read_video, write_video
from terra.cli import main
from terra.engine.hf import HFSession
from terra.errors import EngineError
from terra.reconstruction import write_expected
from terra.rollout_record import VERSION
from terra.trajectory import save_poses
from tokenizer.lineage import tokens_sha256

HEIGHT, WIDTH = 4 * ROWS, 4 * COLS


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(3):
        pixels = random.integers(0, 256, (HEIGHT * 2, WIDTH * 2, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def trajectory(tmp_path: Path) -> Path:
    path = tmp_path / "drive.json"
    times = np.arange(0, 8, 0.1)
    save_poses(path, times, np.stack([5 * times, 0 * times], 1), 0 * times, 10.0)
    return path


@pytest.fixture
def works(tmp_path, context, trajectory, tiny_model, tiny_tokenizer) -> dict[str, Any]:
    """Settings with which terra-generate works."""
    return {
        "context": context,
        "trajectory": trajectory,
        "tokenizer.pretrained": tiny_tokenizer,
        "world_model.pretrained": tiny_model,
        "engine": "hf",
        "overlap": 2,
        "num_frames": 12,
        "output": tmp_path / "out",
    }


@pytest.fixture
def command(works, monkeypatch):
    """Runs terra-generate with settings on top of those that work; gives the output folder."""

    def run(*overrides: str) -> Path:
        settings = works | dict(override.split("=", 1) for override in overrides)
        monkeypatch.setattr(sys, "argv", ["terra-generate", *(f"{key}={value}" for key, value in settings.items())])
        main()
        return Path(str(settings["output"]))

    return run


@pytest.fixture
def refused(command, capsys, tmp_path):
    """Expects one line on stderr, exit code 2, and nothing written."""

    def run(*overrides: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as exit_info:
            command(*overrides)
        assert exit_info.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def test_from_python_it_is_the_same_video(command, works, tmp_path):
    output = command("seed=3")
    for part, folder in (
        ("tokenizer", works["tokenizer.pretrained"]),
        ("world_model", works["world_model.pretrained"]),
    ):
        shutil.copytree(folder, tmp_path / "model" / part)
    with terra.Pipeline.from_pretrained(tmp_path / "model", engine="hf", overlap=2) as pipeline:
        request = pipeline.load_request(works["context"], works["trajectory"], num_frames=12, seed=3)
        (rollout,) = pipeline.generate([request], progress=True)
        with pytest.raises(terra.TerraError, match=r"drive\.json: covers .*num_frames=200"):
            pipeline.load_request(works["context"], works["trajectory"], num_frames=200)
    rollout.save(tmp_path / "python.mp4")
    assert np.array_equal(rollout.tokens.numpy(), load_file(output / "tokens.safetensors")["tokens"])
    assert (tmp_path / "python.mp4").read_bytes() == (output / "video.mp4").read_bytes()


@pytest.mark.parametrize("model", ["demo", "folder"])
def test_without_a_context_the_model_s_scenes_are_named(model, works, tmp_path, monkeypatch, capsys):
    mine = tmp_path / "mine"
    for part in ("tokenizer", "world_model"):
        shutil.copytree(works[f"{part}.pretrained"], mine / part)
    for scenes in [terra.DEMO / "contexts"] if model == "demo" else [None, mine / "contexts"]:
        if scenes is not None:
            scenes.mkdir(exist_ok=True)
        path = [f"model.path={mine}"] if model == "folder" else []
        monkeypatch.setattr(sys, "argv", ["terra-generate", f"model={model}", *path])
        with pytest.raises(SystemExit):
            main()
        hint = "" if scenes is None else f"; the model's scenes are in {scenes}"
        wanted = "error: context: expected a value, got nothing: context=... is needed"
        assert capsys.readouterr().err == f"{wanted}{hint}\n"


def test_off_a_terminal_each_stage_is_a_line(command, capsys):
    command()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "loading the model"
    assert re.fullmatch(r"decoding: 100 %, 9 of 9 frames, 12 of 12 decoded, \S+ a second", said[-2])
    assert said[-1] == "writing video.gif and overlay.mp4"


def test_writes_everything(command):
    output = command("png=true")
    names = {"video.mp4", "video.gif", "overlay.mp4", "tokens.safetensors", "rollout.json", "frames"}
    assert {path.name for path in output.iterdir()} == names
    info = probe_video(output / "video.mp4")
    assert (info.num_frames, info.fps, info.width, info.height) == (12, 10.0, WIDTH, HEIGHT)
    assert len(read_video(output / "overlay.mp4")) == 12
    pictures = np.stack([np.asarray(Image.open(path)) for path in sorted((output / "frames").iterdir())])
    write_video(pictures, output / "again.mp4", 10.0)
    assert len(pictures) == 12
    assert (output / "again.mp4").read_bytes() == (output / "video.mp4").read_bytes()
    saved = load_file(output / "tokens.safetensors")
    assert saved["tokens"].shape == (12, ROWS, COLS)
    assert saved["actions"].shape == (11, 6, 3)
    record = json.loads((output / "rollout.json").read_text())
    assert record["seed"] == 0
    assert [len(each["sha256"]) for each in record["checkpoints"].values()] == [64, 64]
    assert record["engine"] == {"name": "hf", "dtype": "float32", "device": "cpu"}
    assert record["windows"] == [
        {"start": 0, "num_given": 3, "num_frames": 8},
        {"start": 6, "num_given": 2, "num_frames": 6},
    ]
    assert record["sampling"] == {"temperature": 0.9, "top_k": 0, "top_p": 1.0}
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert 0 < record["reconstruction"]["psnr"] < 100
    assert record["reconstruction"]["expected"] is None


def test_context_far_below_the_held_out_frames_is_warned_of(command, capsys, tiny_tokenizer, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tiny_tokenizer, tokenizer)
    write_expected(tokenizer, 90.0)
    output = command("engine=persistence", f"tokenizer.pretrained={tokenizer}")
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING: ")]
    assert len(warnings) == 1
    assert "(held-out frames: 90.0 dB)" in warnings[0]
    assert json.loads((output / "rollout.json").read_text())["reconstruction"]["expected"] == 90.0


def tokens(folder: Path) -> np.ndarray:
    return load_file(folder / "tokens.safetensors")["tokens"]


@pytest.mark.slow
def test_same_seed_same_tokens_after_a_restart(command, tmp_path):
    first = tokens(command())
    assert np.array_equal(first, tokens(command(f"output={tmp_path / 'again'}")))
    assert not np.array_equal(first, tokens(command(f"output={tmp_path / 'other'}", "seed=1")))


def test_persistence_repeats_the_last_context_frame(command):
    made = tokens(command("engine=persistence"))
    assert (made[3:] == made[2]).all()


@pytest.mark.slow
def test_overwrite_replaces(command):
    first = tokens(command())
    assert not np.array_equal(first, tokens(command("overwrite=true", "seed=3")))


@pytest.mark.parametrize("changes", [{}, {"version": None}, {"version": 2}])
def test_overwrite_replaces_results_of_other_versions(command, changes):
    output = command("engine=persistence", "png=true")
    path = output / "rollout.json"
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))
    command("engine=persistence", "overwrite=true")
    assert json.loads(path.read_text())["version"] == VERSION
    assert not (output / "frames").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("frames/thesis.txt", "x", "overwrite=true replaces an earlier result alone .*, got frames/thesis.txt"),
        ("video.mp4", "x", "expected the rollout.json of a rollout, got: No such file"),
        ("video.mp4/thesis.txt", "x", "overwrite=true replaces an earlier result alone .*, got video.mp4"),
        ("rollout.json", '{"format": "theirs"}', "expected format 'terra-rollout', got 'theirs'"),
        ("rollout.json", "[]", "expected a JSON object"),
    ],
)
def test_overwrite_leaves_what_is_the_users(refused, tmp_path, name, content, message):
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_text(content)
    assert re.search(message, refused("overwrite=true"))
    assert mine.read_text() == content


@pytest.mark.parametrize("output", ["adapter", "adapter/decoder", "adapter/out", "decoder", "decoder/out"])
def test_an_adapter_and_its_decoder_are_inputs(refused, tmp_path, tiny_model, tiny_tokenizer, output):
    adapter = save_adapter(tmp_path / "adapter", tiny_model, seed=1)
    shutil.copytree(tiny_tokenizer, tmp_path / "decoder")
    config = json.loads((tiny_tokenizer / "config.json").read_text())
    config["same_tokens_as"] = tokens_sha256(tiny_tokenizer)
    (tmp_path / "decoder/config.json").write_text(json.dumps(config))
    (adapter / "decoder").symlink_to(tmp_path / "decoder")
    line = refused(f"adapter={adapter}", f"output={tmp_path / output}", "overwrite=true")
    assert line.startswith(f"error: output={tmp_path / output}: ")


@pytest.mark.slow
def test_a_failure_on_the_way_leaves_what_was_there(command, tmp_path, monkeypatch, capsys):
    first = tokens(command())
    run = HFSession.run

    async def breaks(self, actions):
        async for frame in run(self, actions):
            yield frame
            raise EngineError("out of memory")

    monkeypatch.setattr(HFSession, "run", breaks)
    with pytest.raises(SystemExit) as exit_info:
        command("overwrite=true", "seed=3")
    assert exit_info.value.code == 2
    assert "out of memory" in capsys.readouterr().err
    assert np.array_equal(first, tokens(tmp_path / "out"))
    assert not list(tmp_path.glob(".out.*"))


@pytest.mark.slow
def test_what_is_put_into_the_old_result_meanwhile_stays(command, tmp_path, monkeypatch, capsys):
    command()
    run = HFSession.run

    async def meanwhile(self, actions):
        async for frame in run(self, actions):
            yield frame
        (tmp_path / "out/thesis.txt").write_text("x")

    monkeypatch.setattr(HFSession, "run", meanwhile)
    with pytest.raises(SystemExit) as exit_info:
        command("overwrite=true", "seed=3")
    assert exit_info.value.code == 2
    assert "got thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "out/thesis.txt").read_text() == "x"


@pytest.mark.slow
def test_what_pixels_add_is_told(works, tmp_path, monkeypatch, capsys):
    settings = (f"{key}={value}" for key, value in works.items())
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", "2", "--output", str(tmp_path / "told.json"), *settings])
    with pytest.raises(SystemExit) as exit_info:
        load_script("pixels_overhead").main()
    assert not exit_info.value.code
    told = json.loads((tmp_path / "told.json").read_text())
    assert [len(seconds) for seconds in told["seconds"].values()] == [2, 2]
    assert told["added"] == pytest.approx(told["video"] / told["tokens"] - 1)
    assert told["ok"] is None
    assert "from pictures to an MP4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_over_seeds_makes_a_folder_each(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command("seed=0,1")  # without -m a list of seeds is no seed
    swept = [argument for argument in sys.argv if not argument.startswith(("output=", "hydra"))]
    monkeypatch.setattr(sys, "argv", [swept[0], "-m", *swept[1:]])
    main()
    assert sorted(path.name[-6:] for path in (tmp_path / "outputs").iterdir()) == ["_seed0", "_seed1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=warp"], "engine=warp: no such choice; there are auto, graph, hf, jacobi, persistence, vllm"),
        (["color=red"], "color: no such setting"),
        (["camera=null"], "Config group override must be a string or a list. Got NoneType"),
        (["engine.speed=9"], "engine.speed: no such setting"),
        (["engine.dtype=int3"], "dtype: expected one of float32, bfloat16, float16, got 'int3'"),
        (["engine=vllm", "engine.dtype=int3"], "dtype: expected one of float32"),
        (["engine.device=warp"], "device: expected cpu or cuda, got 'warp'"),
        (["tokenizer.device=warp"], "device: expected cpu or cuda, got 'warp'"),
        (
            ["tokenizer=terra_ema", "world_model=terra_v2"],
            "one choice sets tokenizer and world model together: model=terra_v2",
        ),
        (["world_model=terra_v1"], "one choice sets tokenizer and world model together: model=terra_v1"),
        (["num_frames=2.0"], "num_frames: expected a whole number of at least 1, got 2.0"),
        (["num_frames=true"], "num_frames: expected a whole number of at least 1, got True"),
        (["seed='3'"], "seed: expected a whole number from 0 to 2**63 - 1, got '3'"),
        (["png=1"], "png: expected true or false, got 1"),
        (["engine=jacobi", "engine.drafts=2.5"], "engine.drafts: expected a whole number, got 2.5"),
        (["device=1"], "device: expected text or null, got 1"),
        (["camera.fov_degrees=200"], "camera.fov_degrees: expected a number above 0 and below 180, got 200"),
        (["sampling.top_k=true"], "sampling.top_k: expected a whole number, got True"),
        (["device=warp"], "device: expected cpu or cuda, got 'warp'"),
        (["output=null"], "output: expected a path, got null"),
        (["overwrite=maybe"], "overwrite: expected true or false, got 'maybe'"),
        (["png=2"], "png: expected true or false, got 2"),
        (["+engine.speed=9"], "engine.speed: no such setting"),
        (["+sampling.heat=9"], "sampling.heat: no such setting"),
        (["num_frames=many"], "num_frames: expected a whole number of at least 1, got 'many'"),
        (["num_frames=3"], "num_frames: expected more than num_context=3, got 3"),
        (["num_context=8"], "num_context: expected 1 to 7"),
        (["overlap=8"], "overlap: expected 1 to 7"),
        (["seed=-1"], "seed: expected a whole number from 0 to 2**63 - 1, got -1"),
        (["sampling.temperature=-1"], "temperature: expected 0 to 100, got -1"),
        (["sampling.top_p=hot"], "sampling.top_p: expected a number, got 'hot'"),
        (["camera.fov_degrees=0"], "fov_degrees"),
        (["num_frames=200"], "num_frames=200 needs 199"),
        (["context=null"], "context: expected a folder, a glob or a video, or {view:source,...}, got null"),
        (["context=/no/such/folder"], "/no/such/folder"),
        (["trajectory=/no/such/file.json"], "/no/such/file.json"),
        (["trajectory=null"], "trajectory: expected the file of the actions, waypoints at 0.45, 0.95"),
        (["tokenizer.pretrained=/no/such/tokenizer"], "/no/such/tokenizer"),
        (["world_model.pretrained=/no/such/model"], "/no/such/model"),
        (["num_context=4"], "expected 4 or more PNG or JPEG pictures, got 3"),
    ],
)
def test_bad_settings_are_one_line(refused, overrides, message):
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    ("name", "pixels", "message"),
    [
        ("9.png", b"not a picture", "9.png"),
        ("1.png", np.zeros((HEIGHT, WIDTH), np.uint8), "1.png"),
        ("1.png", np.zeros((HEIGHT, WIDTH * 3, 3), np.uint8), "1.png"),
    ],
)
def test_bad_pictures_are_one_line(refused, context, name, pixels, message):
    if isinstance(pixels, bytes):
        (context / "0.png").write_bytes(pixels)
        message = "0.png"
    else:
        Image.fromarray(pixels).save(context / name)
    assert message in refused()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,x_m,y_m,heading_rad\n0,0,0,0\n", "fps"),
        ("# fps: 10\ntime,x_m,y_m,heading_rad\n0,0,0,0\n", "time"),
        ("# fps: 10\ntime_s,x_m,y_m,heading_rad\n0,0,0,0\n0.1,nan,0,0\n", "line 4"),
        ("# fps: 10\ntime_s,x_m,y_m,heading_rad\n0,0,0,0\n0.1,1,0,0\n0.05,2,0,0\n", "line 5"),
        ("# fps: 10\ntime_s,x_m,y_m,heading_rad\n0,0,0,0\n0.1,100,0,0\n", "line 4"),
    ],
)
def test_bad_trajectories_are_one_line(refused, tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    line = refused(f"trajectory={path}")
    assert "bad.csv" in line
    assert message in line


def test_existing_output_is_refused(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert "exists already: choose another, or overwrite=true" in refused()
    assert "overwrite=true replaces an earlier result alone" in refused("overwrite=true")
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_full_disk_is_refused_before_any_work(refused, monkeypatch):
    monkeypatch.setattr("terra.output.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert "free on the disk, got 1 MiB" in refused()


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_corrupt_weights_are_refused(refused, tiny_model, tmp_path):
    broken = copied(tiny_model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(f"world_model.pretrained={broken}")


def test_mismatched_config_is_refused(refused, tiny_model, tmp_path):
    broken = copied(tiny_model, tmp_path / "broken")
    content = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}))
    line = refused(f"world_model.pretrained={broken}")
    assert "layers.2" in line


def test_other_tokenizer_than_trained_with_is_refused(refused, tiny_model, tmp_path):
    other = copied(tiny_model, tmp_path / "other")
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | {"tokenizer_sha256": "0" * 64}))
    assert "was trained with tokenizer 000000000000, got" in refused(f"world_model.pretrained={other}")


@pytest.mark.slow
def test_missing_extra_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("terra.engine.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    line = refused("engine=vllm")
    assert "needs the package vllm" in line
    assert "terra-world-model[cpu]" in line


def test_no_weights_load_before_the_input_is_right(refused, monkeypatch):
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("terra.engine.hf.load_world_model", loaded)
    monkeypatch.setattr("tokenizer.LFQTokenizer.from_pretrained", loaded)
    refused("context=/no/such/folder")
    refused("trajectory=/no/such/file.json")
    refused("num_frames=200")
    refused("engine.dtype=int3")
    refused("engine.device=warp")
