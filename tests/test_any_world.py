"""Worlds of vectors, keys and choices go from recordings with actions to videos, without a line about them in Terra."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from chromium import CHROMIUM, launched
from entry import read_settings
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from serving_fake import Serving
from tiny_bags import EPOCH, coded, compressed, packed, twist, write_mcap
from tiny_rollouts import read_lines, run as run_batch
from tiny_serving import wait_until

from decoder.video import VideoWriter, probe_video, to_uint8
from terra.actions import Choice, Keys, TableSpace, Vector, save_actions
from terra.config.files import register_resolvers
from terra.context import load_context
from terra.dataset import read_frames, read_split
from terra.dataset.importing.command import run as import_recordings
from terra.dataset.inspect import run as inspect
from terra.errors import ActionError, ConfigError, DatasetError
from terra.evaluation.estimator_training import run as train_estimator
from terra.evaluation.evaluate import run as evaluate
from terra.generate import run as generate
from terra.replay import run as replay
from terra.serving.client import Client
from terra.serving.run import check, load
from terra.training.tokenize import run as tokenize
from terra.training.tokenizer import run as train_tokenizer
from terra.training.world_model import run as train
from terra.world_model import load_config

pytestmark = pytest.mark.slow

ARM = Vector(
    names=[f"joint_{index}" for index in range(12)],
    units=["rad"] * 12,
    low=[-1.5] * 12,
    high=[1.0 + index for index in range(12)],
)
GAME = Keys(names=["forward", "back", "left", "right", "fire"])
PAD = Choice(names=[f"move_{index}" for index in range(18)])
NUM_FRAMES, FPS, SIZE = 16, 5.0, (32, 48)
SMALL = [
    *("tokenizer.ch=32", "tokenizer.ch_mult=[1,1,1,1,2]", "tokenizer.num_res_blocks=1", "tokenizer.dim=6"),
    *("perceptual.weight=0", "batch_size=4", "schedule=steps", "max_seconds=null", "max_steps=3", "workers=0"),
    *("evaluation_frames=16", "ema_decay=0.5", "warmup_steps=1"),
]
ESTIMATOR = [
    *("estimator.width=8", "estimator.reach=1", "estimator.features=8", "estimator.image_size=[32,48]", "window=5"),
    *("batch_size=2", "schedule=steps", "max_seconds=null", "max_steps=3", "warmup_steps=1", "ema_decay=0.5"),
    "evaluation_windows=2",
]
EVALUATION = [
    *("num_clips=2", "num_frames=7", "num_context=2", "drift_clips=0", "pictures=1", "workers=0"),
    *("resamples=20", "frechet_resamples=2"),
]
MODEL = [
    *("world_model.hidden_size=32", "world_model.intermediate_size=64", "world_model.num_hidden_layers=1"),
    *("world_model.num_attention_heads=1", "world_model.num_key_value_heads=1", "window=5", "batch_size=2"),
    *("schedule=steps", "max_seconds=null", "max_steps=3", "warmup_steps=1", "ema_decay=0.5", "preview_frames=0"),
    "evaluation_windows=2",
]


def some_values(space: TableSpace, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    if isinstance(space, Vector):
        return random.uniform(space.low, space.high, (NUM_FRAMES, len(space.names)))
    if isinstance(space, Keys):
        return random.integers(0, 2, (NUM_FRAMES, len(space.names))).astype(float)
    return random.integers(0, len(space.names), (NUM_FRAMES, 1)).astype(float)


def write_recordings(folder: Path, space: TableSpace) -> Path:
    """Two videos and a folder of pictures, each with its actions."""
    folder.mkdir()
    for number, name in enumerate(("a", "b", "c")):
        frames = np.random.default_rng(number).integers(0, 256, (NUM_FRAMES, *SIZE, 3), dtype=np.uint8)
        if name == "c":
            (folder / name).mkdir()
            for index, frame in enumerate(frames):
                Image.fromarray(frame).save(folder / name / f"{index}.png")
        else:
            with VideoWriter(folder / f"{name}.mp4", FPS, size=(SIZE[1], SIZE[0]), crf=8) as writer:
                writer.extend(frames)
        save_actions(folder / f"{name}.json", space, FPS, some_values(space, number))
    return folder


def import_all(folder: Path, output: Path, space: TableSpace, *more: str) -> int:
    declared = (
        json.dumps(space.model_dump(mode="json")).replace('"', "").replace(" ", "").replace("units:[,", "units:['',")
    )
    given = [f"input={folder}", f"output={output}", f"action_space={declared}", "kind=video_actions", "picture_fps=5"]
    given += [f"fps={FPS:g}", f"image_size=[{SIZE[0]},{SIZE[1]}]", "held_out=[b]", "workers=0", *more]
    return import_recordings(read_settings("import", given))


def check_serving(folder: Path, space: TableSpace, parts: list[str], actions: Path, video: Path) -> None:
    """A job and a live session make the video that `terra generate` has made, and the page plays the world."""
    made, scene = load_file(video / "tokens.safetensors"), folder / "scenes" / "b"
    scene.mkdir(parents=True)
    frames = to_uint8(load_context(actions.with_suffix(".mp4"), num_frames=2, image_size=SIZE, fps=FPS))
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(scene / f"{index}.png")
    shutil.copy(actions, scene)
    given = [*parts, f"scenes={folder}/scenes", f"data={folder}/data", "num_context=2"]
    settings = read_settings("serve", [*given, "jobs.default_frames=9", "device=cpu", "dtype=float32"])
    serving = Serving(lambda: (load(check(settings)), settings))
    try:
        with Client(serving.url) as client:
            assert client.models()[0]["action_space"] == space.model_dump(mode="json")
            job = client.wait(client.create_video(scene="b", actions_name="b")["id"], every=0.05)
            client.download(job["id"], folder / "job.safetensors", "tokens")
            with client.open(scene="b") as play:
                for values in some_values(space, 1)[1:8]:
                    play.step(action=space.to_json(values))
                (session,) = serving.service.sessions.values()
                tokens = np.stack([moment.tokens for moment in session.rollout.moments])
        job_made = load_file(folder / "job.safetensors")
        assert all(job_made[name].equal(made[name]) for name in ("tokens", "actions"))
        np.testing.assert_array_equal(tokens, made["tokens"].numpy())
        if CHROMIUM is not None:
            play_on_the_page(serving, space)
    finally:
        serving.stop()


def play_on_the_page(serving: Serving, space: TableSpace) -> None:
    key, held = {
        "vector": ("ArrowRight", lambda action: action["joint_0"] == 1.0),
        "keys": ("w", lambda action: action == ["forward"]),
        "choice": ("3", lambda action: action == "move_3"),
    }[space.kind]

    def last() -> object:
        (session,) = serving.service.sessions.values()
        action = session.rollout.last.action
        return action is not None and held(space.to_json(space.values(action[None])[0]))

    wait_until(lambda: not serving.service.sessions)
    with launched() as browser:
        page = browser.new_page()
        page.goto(f"{serving.url}/#scene=b")
        page.wait_for_selector("#stage[data-state=waiting]")
        page.keyboard.down(key)
        wait_until(lambda: bool(last()), seconds=60)
        page.keyboard.up(key)
        wait_until(lambda: not last(), seconds=60)


@pytest.mark.parametrize("space", [ARM, GAME, PAD], ids=["12 numbers", "5 keys", "18 choices"])
def test_from_recordings_to_videos(tmp_path, space):
    register_resolvers()
    recordings, data = write_recordings(tmp_path / "recordings", space), tmp_path / "data"
    assert import_all(recordings, data, space) == 0
    episodes = read_split(data, "train").episodes
    assert [episode.place for episode in episodes] == ["a", "c"]
    for episode, seed in zip(episodes, (0, 2), strict=True):
        assert episode.space == space
        np.testing.assert_allclose(episode.actions, some_values(space, seed))
        assert read_frames(episode).shape == (NUM_FRAMES, *SIZE, 3)
    assert (
        inspect(read_settings("inspect", [f"data={data}", f"output={tmp_path / 'look'}", "verify=true", "workers=0"]))
        == 0
    )
    assert (tmp_path / "look" / "actions.png").is_file()
    assert space.names[0] in (data / "README.md").read_text()

    trained = tmp_path / "trained"
    train_tokenizer(read_settings("train_tokenizer", [*SMALL, f"data={data}", f"output={trained}/t", "device=cpu"]))
    tokenize(
        read_settings(
            "tokenize", [f"data={data}", f"checkpoint={trained}/t/tokenizer", f"output={tmp_path}/tokens", "workers=0"]
        )
    )
    train(read_settings("train", [*MODEL, f"data={tmp_path}/tokens", f"output={trained}/w", "device=cpu"]))
    model = trained / "w" / "world_model"
    assert load_config(model).space == space

    parts = [f"tokenizer.pretrained={trained}/t/tokenizer", f"world_model.pretrained={model}", "engine=hf", "overlap=2"]
    context, actions = recordings / "b.mp4", recordings / "b.json"
    given = [*parts, f"context={context}", "num_context=2", "num_frames=9", "device=cpu", "dtype=float32"]
    video = generate(
        read_settings("generate", [*given, f"actions={actions}", f"output={tmp_path}/one"]), Console(quiet=True)
    )
    made = load_file(video / "tokens.safetensors")
    np.testing.assert_allclose(made["actions"], space.rows(some_values(space, 1))[:8], atol=1e-6)
    assert probe_video(video / "overlay.mp4").num_frames == 9
    assert replay(read_settings("replay", [f"folder={video}"]), Console(quiet=True)) == 0

    line = {"id": "one", "context": str(context), "actions": str(actions), "num_frames": 9, "num_context": 2, "seed": 0}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    batch = [*parts, f"manifest={tmp_path}/manifest.jsonl", f"output={tmp_path}/batch", "device=cpu", "dtype=float32"]
    assert run_batch(batch) == 0
    assert read_lines(tmp_path / "batch" / "index.jsonl")[0]["status"] == "done"
    again = load_file(tmp_path / "batch" / "rollouts" / "one" / "tokens.safetensors")
    assert made["tokens"].equal(again["tokens"])

    train_estimator(
        read_settings("train_estimator", [*ESTIMATOR, f"data={data}", f"output={trained}/e", "device=cpu", "workers=0"])
    )
    given_too = [*parts, f"data={data}", f"estimator={trained}/e/estimator", f"output={tmp_path}/evaluation"]
    evaluate(read_settings("evaluate", [*given_too, *EVALUATION, "device=cpu", "dtype=float32"]), Console(quiet=True))
    found = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    read_back = {"vector": "MAE-joint_0", "keys": "exact-keys", "choice": "choice-accuracy"}[space.kind]
    assert found["measures"]["rollouts"][read_back]["generated"]["count"] == 2
    assert found["listening"]["cost"]["count"] == 2
    check_serving(tmp_path / "serving", space, parts, actions, video)
    with pytest.raises(ConfigError, match=r"actions: expected the file of the actions, \w+ of .*, got trajectory=$"):
        generate(read_settings("generate", [*given, f"trajectory={actions}", f"output={tmp_path}/two"]))
    other = write_recordings(tmp_path / "other", Keys(names=["up"])) / "b.json"
    with pytest.raises(ActionError, match=r"expected actions of the model's .*, got keys of up"):
        generate(read_settings("generate", [*given, f"actions={other}", f"output={tmp_path}/two"]))
    assert not (tmp_path / "two").exists()
    with pytest.raises(DatasetError, match=r"expected actions of \w+ of .*, as there, got keys of up"):
        import_all(tmp_path / "other", data, Keys(names=["up"]), "name=other")
    assert import_all(tmp_path / "other", tmp_path / "other_data", Keys(names=["up"])) == 0
    given_other = [*parts, *EVALUATION, f"data={tmp_path}/other_data", f"output={tmp_path}/three", "device=cpu"]
    message = r"expected actions of \w+ of .*, as the world model takes them, got .* of up$"
    with pytest.raises(ConfigError, match=message):
        evaluate(read_settings("evaluate", given_other), Console(quiet=True))
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line | {"id": "two", "actions": str(other)}) + "\n")
    assert run_batch([*batch[:-3], f"output={tmp_path}/batch_of_other", *batch[-2:]]) != 0
    (told,) = read_lines(tmp_path / "batch_of_other" / "index.jsonl")
    assert told["status"] == "failed"
    assert "expected actions of the model's" in told["reason"]


def test_from_a_bag_to_a_video(tmp_path):
    register_resolvers()
    for number, name in enumerate(("a", "b")):
        messages = []
        for tick in range(NUM_FRAMES):
            time = EPOCH + tick * 200_000_000
            messages.append(("/camera", time, compressed(time, packed(coded(tick)))))
            messages.append(("/cmd_vel", time, twist(tick / 10, number - tick / 10)))
        write_mcap(tmp_path / "bags" / f"{name}.mcap", messages)
    given = [
        f"input={tmp_path}/bags",
        f"output={tmp_path}/data",
        "kind=mcap",
        "held_out=[b]",
        "workers=0",
        f"fps={FPS}",
    ]
    given += ["workers=0", "bags.action=[/cmd_vel.linear.x,/cmd_vel.angular.z]", f"image_size=[{SIZE[0]},{SIZE[1]}]"]
    assert import_recordings(read_settings("import", given)) == 0
    trained = tmp_path / "trained"
    data = f"data={tmp_path}/data"
    train_tokenizer(read_settings("train_tokenizer", [*SMALL, data, f"output={trained}/t", "device=cpu"]))
    given = [data, f"checkpoint={trained}/t/tokenizer", f"output={tmp_path}/tokens", "workers=0"]
    tokenize(read_settings("tokenize", given))
    train(read_settings("train", [*MODEL, f"data={tmp_path}/tokens", f"output={trained}/w", "device=cpu"]))
    space = load_config(trained / "w" / "world_model").space
    assert space.names == ("cmd_vel.linear.x", "cmd_vel.angular.z")
    assert space.low == (0.0, -1.5)
    (tmp_path / "left.csv").write_text("time_s,cmd_vel.linear.x,cmd_vel.angular.z\n0,0.5,0.25\n")
    (context,) = (tmp_path / "data" / "held_out").glob("*/*.mp4")
    given = [f"tokenizer.pretrained={trained}/t/tokenizer", f"world_model.pretrained={trained}/w/world_model"]
    given += ["engine=hf", "overlap=2", f"context={context}", "num_context=2", "num_frames=9", "device=cpu"]
    given += ["dtype=float32", f"actions={tmp_path}/left.csv", f"output={tmp_path}/video"]
    video = generate(read_settings("generate", given), Console(quiet=True))
    made = load_file(video / "tokens.safetensors")
    np.testing.assert_allclose(made["actions"], space.rows(np.array([[0.5, 0.25]] * 8)), atol=1e-6)
    assert probe_video(video / "overlay.mp4").num_frames == 9
