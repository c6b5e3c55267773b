"""Two cameras from recordings to videos of each, by the commands that a user gives."""

import json
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings
from rich.console import Console
from safetensors.torch import load_file
from tiny_rollouts import read_lines, run as run_batch

from decoder.video import VideoWriter, probe_video
from terra.actions import Keys, save_actions
from terra.config.files import register_resolvers
from terra.context import load_context
from terra.dataset.importing.command import run as import_recordings
from terra.dataset.tokens import load_tokens
from terra.errors import ConfigError
from terra.evaluation.evaluate import run as evaluate
from terra.generate import run as generate
from terra.training.tokenize import run as tokenize
from terra.training.tokenizer import run as train_tokenizer
from terra.training.world_model import run as train
from terra.views import Views
from terra.world_model import load_config

pytestmark = pytest.mark.slow

GAME, NUM_FRAMES, FPS = Keys(names=["left", "right"]), 16, 5.0
VIEWS = Views.tiled(("front", "wrist"), (32, 64), 1.0)
TOKENIZER = [
    *("tokenizer.ch=32", "tokenizer.ch_mult=[1,1,1,1,2]", "tokenizer.num_res_blocks=1", "tokenizer.dim=6"),
    *("perceptual.weight=0", "batch_size=4", "schedule=steps", "max_seconds=null", "max_steps=2", "workers=0"),
    *("evaluation_frames=8", "ema_decay=0.5", "warmup_steps=1", "device=cpu"),
]
MODEL = [
    *("world_model.hidden_size=32", "world_model.intermediate_size=64", "world_model.num_hidden_layers=1"),
    *("world_model.num_attention_heads=1", "world_model.num_key_value_heads=1", "window=5", "batch_size=2"),
    *("schedule=steps", "max_seconds=null", "max_steps=2", "warmup_steps=1", "ema_decay=0.5", "preview_frames=0"),
    *("evaluation_windows=2", "device=cpu"),
]
EVALUATION = [
    *("num_clips=2", "num_frames=7", "num_context=2", "drift_clips=0", "pictures=1", "workers=0", "estimator=null"),
    *("resamples=20", "frechet_resamples=2", "device=cpu", "dtype=float32"),
]


def write_recordings(folder: Path) -> None:
    """The cameras have other rates and shapes: only their middle is seen."""
    folder.mkdir()
    for number, name in enumerate("abc"):
        random = np.random.default_rng(number)
        for view, fps, size in (("front", 10.0, (48, 64)), ("wrist", 5.0, (64, 48))):
            with VideoWriter(folder / f"{name}.{view}.mp4", fps, size=size[::-1], crf=8) as writer:
                writer.extend(random.integers(0, 256, (round(NUM_FRAMES * fps / FPS), *size, 3), dtype=np.uint8))
        save_actions(folder / f"{name}.json", GAME, FPS, random.integers(0, 2, (NUM_FRAMES, 2)).astype(float))


def test_two_cameras_from_recordings_to_videos(tmp_path, caplog):
    register_resolvers()
    recordings, data, trained = tmp_path / "recordings", tmp_path / "data", tmp_path / "trained"
    write_recordings(recordings)
    given = ["kind=video_actions", f"input={recordings}", f"output={data}", "views=[front,wrist]", "workers=0"]
    given += ["action_space={kind:keys,names:[left,right]}", f"fps={FPS:g}", "image_size=[32,64]", "held_out=[b]"]
    assert import_recordings(read_settings("import", given)) == 0
    assert Views.read(json.loads((data / "dataset.json").read_text()), "dataset.json") == VIEWS

    train_tokenizer(read_settings("train_tokenizer", [*TOKENIZER, f"data={data}", f"output={trained}/t"]))
    given = [f"data={data}", f"checkpoint={trained}/t/tokenizer", f"output={tmp_path}/tokens", "workers=0"]
    tokenize(read_settings("tokenize", given))
    assert load_tokens(tmp_path / "tokens" / "train").views == VIEWS
    train(read_settings("train", [*MODEL, f"data={tmp_path}/tokens", f"output={trained}/w"]))
    model = trained / "w" / "world_model"
    assert load_config(model).camera_views == VIEWS
    # A model of one camera that is trained further on these tokens gets their views.
    bare = json.loads((model / "config.json").read_text())
    (trained / "one").mkdir()
    for path in model.iterdir():
        (trained / "one" / path.name).write_bytes(path.read_bytes())
    (trained / "one" / "config.json").write_text(json.dumps({k: v for k, v in bare.items() if k != "views"}))
    more = [*MODEL[5:], f"data={tmp_path}/tokens", f"output={trained}/more", f"init_from={trained}/one"]
    train(read_settings("train", more))
    assert load_config(trained / "more" / "world_model").camera_views == VIEWS

    parts = [f"tokenizer.pretrained={trained}/t/tokenizer", f"world_model.pretrained={model}", "engine=hf", "overlap=2"]
    parts += ["device=cpu", "dtype=float32"]
    by_view = "{front:" + str(recordings / "b.front.mp4") + ",wrist:" + str(recordings / "b.wrist.mp4") + "}"
    given = [*parts, f"actions={recordings}/b.json", "num_context=2", "num_frames=8"]
    video = generate(read_settings("generate", [*given, f"context={by_view}", f"output={tmp_path}/one"]), Console())
    record = json.loads((video / "rollout.json").read_text())
    assert Views.read(record, "rollout.json") == VIEWS
    assert record["reconstruction"]["by_view"].keys() == {"front", "wrist"}
    for name, width in (("video", 64), ("video_front", 32), ("video_wrist", 32)):
        info = probe_video(video / f"{name}.mp4")
        assert (info.width, info.height, info.num_frames) == (width, 32, 8)
    # What the import made of the recording is the same context.
    (stored,) = data.glob("held_out/*/*.mp4")
    frames = load_context(stored, num_frames=2, image_size=(32, 64), fps=FPS, views=VIEWS)
    split = {name: str(recordings / f"b.{name}.mp4") for name in VIEWS.names}
    again = load_context(split, num_frames=2, image_size=(32, 64), fps=FPS, views=VIEWS)
    assert (frames - again).abs().mean() < 0.1

    scene = tmp_path / "scene"
    for view, path in split.items():
        scene.mkdir(exist_ok=True)
        (scene / f"{view}.mp4").write_bytes(Path(path).read_bytes())
    line = {"id": "one", "context": str(scene), "actions": str(recordings / "b.json"), "num_frames": 8}
    (tmp_path / "manifest.jsonl").write_text(json.dumps({**line, "num_context": 2, "seed": 0}) + "\n")
    assert run_batch([*parts, f"manifest={tmp_path}/manifest.jsonl", f"output={tmp_path}/batch"]) == 0
    assert read_lines(tmp_path / "batch" / "index.jsonl")[0]["status"] == "done"
    rollout = tmp_path / "batch" / "rollouts" / "one"
    tokens = [load_file(folder / "tokens.safetensors")["tokens"] for folder in (video, rollout)]
    assert tokens[0].equal(tokens[1])
    assert (rollout / "video_wrist.mp4").is_file()

    console = Console(record=True, width=200)
    evaluate(read_settings("evaluate", [*parts[:4], *EVALUATION, f"data={data}", f"output={tmp_path}/e"]), console)
    measures = json.loads((tmp_path / "e" / "metrics.json").read_text())["measures"]["rollouts"]
    assert measures["psnr-front"]["re-encoded"]["count"] == measures["psnr-wrist"]["generated"]["count"] == 2
    assert "psnr-wrist" in console.export_text()
    other = json.loads((data / "dataset.json").read_text())
    other["views"]["names"] = ["wrist", "front"]
    (data / "dataset.json").write_text(json.dumps(other))
    for shard in data.glob("*/*/shard.json"):
        shard.write_text(json.dumps(json.loads(shard.read_text()) | {"views": other["views"]}))
    with pytest.raises(ConfigError, match="expected pictures of front and wrist, the world model's views, got wrist"):
        evaluate(read_settings("evaluate", [*parts[:4], *EVALUATION, f"data={data}", f"output={tmp_path}/f"]))
